"""Report of `make test-upstream` on the outcomes of Lightning's tests. The tests themselves need a checkout of it."""

import json
import sys
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parent / "upstream"
sys.path.insert(0, str(UPSTREAM))

from expected import EXPECTED, EXPECTED_EVERYWHERE  # noqa: E402
from results import Result, alone, differing, read, table, unexplained  # noqa: E402

PASSED, FAILED, SKIPPED = (Result(outcome) for outcome in ("passed", "failed", "skipped"))


def test_a_difference_needs_a_reason_and_a_reason_a_difference():
    stock = {"a": PASSED, "b": PASSED, "c": FAILED, "d": SKIPPED}
    ours = {"a": PASSED, "b": FAILED, "c": PASSED, "d": SKIPPED}
    assert differing(stock, ours) == ["b", "c"]
    assert unexplained(stock, ours, {"b": "why", "c": "why"}) == []
    assert unexplained(stock, ours, {"c": "why"}) == ["b: passed with stock, failed with ours"]
    assert unexplained(stock, ours, {"a": "why", "b": "why", "c": "why", "e": "why"}) == [
        "a: on the list of expected differences, but passed with both",
        "e: on the list of expected differences, but there is no such test",
    ]


def test_one_side_that_lacks_a_test_differs():
    assert unexplained({"a": PASSED}, {}, {}) == ["a: passed with stock, not there with ours"]


def test_a_test_without_a_result_did_not_end(tmp_path):
    lines = [
        {"collected": ["tests/tests_pytorch/x.py::a", "tests/tests_pytorch/x.py::b"]},
        {"test": "tests/tests_pytorch/x.py::a", "outcome": "passed", "why": "", "ddp": True, "seconds": 1.0},
    ]
    (tmp_path / "results").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "results") == {
        "x.py::a": Result("passed", ddp=True),
        "x.py::b": Result("did not end"),
    }
    assert read(tmp_path / "none") == {}


def test_only_tests_that_ask_for_nothing_but_a_process_get_one():
    results = {
        "a": Result("skipped", "Skipped: Requires: [Standalone execution]"),
        "b": Result("skipped", "Skipped: Requires: [GPUs>=2 + Standalone execution]"),
    }
    assert alone(results) == ["a"]


def test_numbers_by_folder():
    stock = {"x/t.py::a": Result("passed", ddp=True), "x/t.py::b": SKIPPED, "y/t.py::c": PASSED}
    ours = {"x/t.py::a": Result("did not end", ddp=True), "x/t.py::b": SKIPPED, "y/t.py::c": FAILED}
    assert table(["x", "y"], stock, ours).splitlines()[2:] == [
        "| `x` | 2 | 1 | 1, 0, 1 | 0, 1, 1 |",
        "| `y` | 1 | 0 | 1, 0, 0 | 0, 1, 0 |",
        "| all | 3 | 1 | 2, 0, 1 | 0, 2, 1 |",
    ]


@pytest.mark.parametrize("listed", [EXPECTED, EXPECTED_EVERYWHERE])
def test_every_expected_difference_has_a_reason(listed):
    for test, reason in listed.items():
        assert ".py::" in test
        assert reason.strip()
