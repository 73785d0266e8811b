"""Faults that end a fit: several lost ranks, too few that remain, errors on all ranks; the end is clean."""

import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import DIED, FAILED, STEPS, Fault, fit, fit_with_faults, went_on
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.errors import MembershipLostError, NotFiniteError
from lightning_hetero.strategies.recovery import PeerRecovery

FEW = ["ddp", "node", "easgd", "gossip"]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", FEW)
def test_two_ranks_that_are_killed_at_once(tmp_path: Path, name: str) -> None:
    faults = [Fault(0, 5, "killed"), Fault(3, 5, "killed")]
    went_on(fit_with_faults(tmp_path, name, faults, world=5, settings={"max_steps": 8}), {0: DIED, 3: DIED}, steps=8)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["ddp", "daso", "easgd_async", "gossip_push_sum"])
def test_one_after_another_until_one_is_left(tmp_path: Path, name: str) -> None:
    faults = [Fault(0, 2, "killed"), Fault(1, 5, "raises"), Fault(3, 10, "killed")]
    outcomes = fit_with_faults(tmp_path, name, faults, world=4, settings={"max_steps": 14, "max_epochs": 9})
    [last] = went_on(outcomes, {0: DIED, 1: FAILED, 3: DIED}, steps=14)
    assert [list(loss.lost) for loss in last.losses] == [[0], [1], [3]]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("name", ["ddp", "diloco", "gossip_async"])
def test_a_rank_that_the_others_wait_for_in_their_first_meetings(tmp_path: Path, name: str, step: int) -> None:
    went_on(fit_with_faults(tmp_path, name, [Fault(1, step, "killed")]), {1: DIED})


@pytest.mark.parametrize("name", FEW)
def test_fewer_than_the_user_wants(tmp_path: Path, name: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(1, 5, "killed")], min_replicas=3)
    messages = []
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, MembershipLostError), outcomes[rank].trace
        messages.append(str(outcomes[rank].error))
        assert f"rank 1 {DIED}" in messages[-1]
        assert "failed first" not in messages[-1]  # the message already names the missing rank, and the reason
    # The rank that learns of it last may see that the other has ended, too.
    what = "ranks" if name == "ddp" else "replicas"
    too_few = [f"Rank {rank} cannot go on: only 2 {what} remain, and at least 3 are required" for rank in (0, 2)]
    assert too_few[0] in messages[0]
    assert too_few[1] in messages[1] or f"only 1 of 3 {what} remain without rank 0" in messages[1]


def test_no_majority_is_left(tmp_path: Path) -> None:
    outcomes = fit_with_faults(tmp_path, "node", [Fault(0, 5, "killed"), Fault(1, 5, "killed")])
    assert isinstance(outcomes[2].error, MembershipLostError), outcomes[2].trace
    assert "only 1 of 3 replicas remain without rank 0" in str(outcomes[2].error)
    assert f"Missing: rank 0 {DIED}; rank 1 {DIED}" in str(outcomes[2].error)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("name", "rank"), [("node", 4), ("daso", 0), ("diloco", 1), ("easgd", 2), ("gossip", 3)])
def test_a_replica_that_loses_one_of_its_ranks_leaves(tmp_path: Path, name: str, rank: int) -> None:
    nodes, other = [2, 2, 2], rank ^ 1
    options = {"nodes": nodes, "replica": "node", "settings": {"max_steps": 8}}
    outcomes = fit_with_faults(tmp_path, name, [Fault(rank, 5, "killed")], world=6, **options)
    assert isinstance(outcomes[other].error, MembershipLostError), outcomes[other].trace
    assert f"it lost rank {rank} of its replica" in str(outcomes[other].error)
    went_on(outcomes, {rank: DIED, other: f"lost rank {rank} of its replica"}, steps=8)


@pytest.mark.parametrize("name", ["ddp", "node", "daso"])
def test_a_value_that_is_not_finite_ends_all(tmp_path: Path, name: str) -> None:
    for outcome in fit_with_faults(tmp_path, name, [Fault(1, 5, "nan")]):
        assert isinstance(outcome.error, NotFiniteError), outcome.trace
        assert "rank 1" in str(outcome.error)


def _slow_to_hear(*args: Any, **kwargs: Any) -> Any:
    """Fit in which messages between replicas are late for all but rank 1, or lost if connections are cut."""
    gather, noticed, lost = ReplicaLinks.gather, PeerRecovery._on_change, Event()

    def late(links: ReplicaLinks, own: Any) -> list[Any]:
        everyone = gather(links, own)
        failed = any(isinstance(one, tuple) and one[1] is not None for one in everyone)
        if failed and os.environ["RANK"] != "1" and lost.wait(1.0):
            raise dist.DistNetworkError("Connection closed by peer")
        return everyone

    def notice(survival: PeerRecovery) -> None:
        lost.set()
        noticed(survival)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaLinks, "gather", late)
        patch.setattr(PeerRecovery, "_on_change", notice)
        return fit(*args, **kwargs)


def test_an_error_of_all_ranks_ends_those_too_that_hear_of_it_late(tmp_path: Path) -> None:
    for outcome in fit_with_faults(tmp_path, "node", [Fault(1, 5, "nan")], run=_slow_to_hear):
        assert isinstance(outcome.error, NotFiniteError), outcome.trace


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["gossip", "gossip_push_sum"])
def test_where_replicas_meet_in_pairs_the_others_go_on_without_it(tmp_path: Path, name: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(1, 5, "nan")])
    assert isinstance(outcomes[1].error, NotFiniteError), outcomes[1].trace
    went_on(outcomes, {1: "failed with NotFiniteError"})


@pytest.mark.parametrize("name", ["ddp", "node", "daso"])
def test_a_value_that_is_not_finite_is_left_out_and_nobody_is_lost(tmp_path: Path, name: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(1, 5, "nan"), Fault(2, 9, "killed")], on_nan="skip")
    went_on(outcomes, {2: DIED})


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", [*FEW, "easgd_async", "gossip_async"])
def test_sigterm_ends_all_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    callbacks = [ModelCheckpoint(tmp_path / "saved", save_top_k=0, save_last=True)]
    settings = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 40}
    outcomes = fit_with_faults(tmp_path, name, [Fault(1, 5, "terminated")], settings=settings)
    assert all(isinstance(outcome.error, SIGTERMException) for outcome in outcomes), [o.trace for o in outcomes]
    files = [file for file in os.listdir(tmp_path / "saved") if not file.endswith(".shards")]
    assert files[0].startswith("last")
    assert files[0].endswith(".ckpt")
    assert 5 <= torch.load(tmp_path / "saved" / files[0], weights_only=True)["global_step"] < 40 * STEPS // 2
