"""Many Trainers in one process: each one's process groups end once it is gone."""

from typing import Any

import psutil
import pytest
from center_tasks import line
from ranks import run

FITS = 8


def count_files(kind: str, options: dict[str, Any]) -> list[int]:
    """Open files of this process after each fit."""
    counts = []
    for _ in range(FITS):
        line(kind, epochs=1, **options)
        counts.append(psutil.Process().num_fds())
    return counts


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("node", {"every_n_steps": 2}), ("async", {"moving_rate": 0.3, "tau": 1, "center": "thread"})],
)
def test_a_new_trainer_takes_the_place_of_the_last(kind: str, options: dict[str, Any]) -> None:
    for counts in run(count_files, 2, kind, options, nodes=[1, 1]):
        assert max(counts[2:]) <= counts[1] + 3, counts  # a fit of its own takes about 30
