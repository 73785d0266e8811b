"""Lightning's tests that end otherwise with `HeteroDDPStrategy`, and why that is as it should be.

A test that is here and no longer differs fails `make test-upstream`, as does one that differs and is not here.
"""

_BY_REASON: dict[str, tuple[str, ...]] = {}

_BY_REASON_EVERYWHERE: dict[str, tuple[str, ...]] = {}

#: The reason, by test.
EXPECTED = {test: reason for reason, tests in _BY_REASON.items() for test in tests}
#: Further ones where `ddp` runs on one device, too.
EXPECTED_EVERYWHERE = {test: reason for reason, tests in _BY_REASON_EVERYWHERE.items() for test in tests}
