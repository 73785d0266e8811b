"""A rank freezes: the others go on without it, and it finds that out if it thaws."""

import re
import signal
from pathlib import Path

import pytest
from faults import SILENT, Strike, strike, went_on

from lightning_hetero.errors import MembershipLostError


@pytest.mark.parametrize("name", ["ddp", "node", "easgd_async", "gossip_async"])
def test_a_rank_that_freezes_for_ever(tmp_path: Path, name: str) -> None:
    rank = len(name) % 3
    outcomes = strike(tmp_path, name, [Strike(rank, 5, "frozen")])
    assert outcomes[rank].exitcode == -signal.SIGKILL
    went_on(outcomes, {rank: SILENT})


@pytest.mark.parametrize("name", ["ddp", "daso", "easgd", "gossip"])
def test_a_rank_that_thaws_finds_that_the_others_went_on(tmp_path: Path, name: str) -> None:
    rank = len(name) % 2
    outcomes = strike(tmp_path, name, [Strike(rank, 5, "thawed")])
    assert isinstance(outcomes[rank].error, MembershipLostError), outcomes[rank].trace
    said = str(outcomes[rank].error)
    assert re.match(rf"Rank {rank} cannot go on: it has been left out since view \d: it {SILENT}", said)
    went_on(outcomes, {rank: SILENT})
