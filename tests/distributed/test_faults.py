"""One rank of three is killed or raises an error: the others go on, under every strategy."""

import signal
from pathlib import Path

import pytest
from faults import DIED, FAILED, STRATEGIES, Strike, strike, went_on


@pytest.mark.long(after=1)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_killed_rank(tmp_path: Path, name: str, rank: int) -> None:
    outcomes = strike(tmp_path, name, [Strike(rank, 5, "killed")])
    assert outcomes[rank].exitcode == -signal.SIGKILL
    went_on(outcomes, {rank: DIED})


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_error_of_one_rank(tmp_path: Path, name: str) -> None:
    rank = (len(name) + 1) % 3
    outcomes = strike(tmp_path, name, [Strike(rank, 5, "raises")])
    assert repr(outcomes[rank].error) == "ValueError('struck')"
    went_on(outcomes, {rank: FAILED})
