"""A rank freezes: the others go on without it, and it finds that out if it thaws."""

import re
import signal
from pathlib import Path

import pytest
import torch
from faults import DIED, GRACE, SILENT, Fault, fit_with_faults, read_mark, went_on

from lightning_hetero.errors import MembershipLostError


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["ddp", "node", "easgd_async", "gossip_async"])
def test_a_rank_that_freezes_for_ever(tmp_path: Path, name: str) -> None:
    rank = len(name) % 3
    outcomes = fit_with_faults(tmp_path, name, [Fault(rank, 5, "frozen")])
    assert outcomes[rank].exitcode == -signal.SIGKILL
    for record in went_on(outcomes, {rank: SILENT}):
        if name == "ddp":  # the others wait within the step until it is known to be lost
            assert record.losses[0].seconds > 0.6 * GRACE


@pytest.mark.clock
@pytest.mark.parametrize("how", ["frozen", "killed"])
@pytest.mark.parametrize("name", ["ddp", "gossip_async"])
def test_the_others_say_so_in_time(tmp_path: Path, name: str, how: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(1, 5, how)])
    _, frozen_at = read_mark(str(tmp_path), "fault-1")
    limit = 1.0 + (GRACE if how == "frozen" else 0.0)
    for record in went_on(outcomes, {1: SILENT if how == "frozen" else DIED}):
        assert record.messages[0][0] - frozen_at < limit


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["ddp", "daso", "easgd", "gossip"])
def test_a_rank_that_thaws_finds_that_the_others_went_on(tmp_path: Path, name: str) -> None:
    rank = len(name) % 2
    outcomes = fit_with_faults(tmp_path, name, [Fault(rank, 5, "thawed")])
    assert isinstance(outcomes[rank].error, MembershipLostError), outcomes[rank].trace
    message = str(outcomes[rank].error)
    assert re.match(rf"Rank {rank} cannot go on: it has been left out since view \d: it {SILENT}", message)
    went_on(outcomes, {rank: SILENT})


@pytest.mark.parametrize("name", ["ddp", "node"])
def test_a_freeze_shorter_than_grace_changes_nothing(tmp_path: Path, name: str) -> None:
    records = []
    for folder, faults in (("plain", []), ("paused", [Fault(len(name) % 2, 5, "paused")])):
        (tmp_path / folder).mkdir()
        records.append(went_on(fit_with_faults(tmp_path / folder, name, faults, grace=10.0, balance="off"), {}))
    folder = str(tmp_path / "paused")
    assert read_mark(folder, "ended-0")[1] > read_mark(folder, f"fault-{len(name) % 2}")[1] + 1
    assert torch.equal(records[0][0].weights, records[1][0].weights)
