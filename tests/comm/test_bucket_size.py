"""Size of gradient buckets, which follows from the time that they travel."""

import pytest

from lightning_hetero.comm.all_reduce import MEBIBYTE, AllReduceTime

RING = 1.5  # the part of its bytes that an all-reduce of four ranks sends over each link


@pytest.mark.parametrize(
    ("bits_per_s", "latency", "mib"),
    [
        (10e6, 1e-3, 1),
        (200e6, 1e-3, 1),
        (1e9, 1e-3, 1),
        (10e9, 1e-4, 4),  # 8 MB in 10 ms
        (100e9, 1e-4, None),
        (1e9, 0.1, None),  # buckets of a second, as the latency may cost a tenth at most
        (100e6, 0.1, 4),
    ],
)
def test_a_bucket_travels_for_ten_milliseconds_or_ten_times_the_latency(
    bits_per_s: float, latency: float, mib: int | None
) -> None:
    seconds_per_byte = 8 * RING / bits_per_s
    assert AllReduceTime(latency, seconds_per_byte).bucket_mib() == mib
    if mib is not None:
        travels, needed = mib * MEBIBYTE * seconds_per_byte, max(0.01, 10 * latency)
        assert travels <= 1.05 * needed or mib == 1
        assert 2 * travels > needed


def test_a_link_without_a_delay() -> None:
    assert AllReduceTime(0.0, 0.0).bucket_mib() is None
