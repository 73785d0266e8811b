"""Checkpoints of sharded models that resume by themselves: killed, cut off, in the background, on other ranks."""

import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run
from tasks import Dropping
from test_sharded_models import Sharded
from test_start_again import Killed, train
from test_start_again_launched import Fills

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy
from lightning_hetero.checkpoint import directory
from lightning_hetero.errors import CheckpointError


class ShardedDropping(Sharded, Dropping):
    pass


#: Nodes, of which each is a replica of DiLoCo.
KINDS: dict[str, tuple[list[int], Any]] = {
    "ddp": ([2], (HeteroDDPStrategy, {})),
    "diloco": ([2, 1], (DiLoCoStrategy, {"tau": 5, "replica": "node"})),
}


def sharded(folder: str, kind: Any, *callbacks: Any, **options: Any) -> dict[str, Any]:
    """A fit in shards, which the same command resumes."""
    strategy = {"balance": "off", **options.pop("strategy", {})}
    found = train(folder, kind, *callbacks, module=ShardedDropping, strategy=strategy, **options)
    dist.barrier()
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize("background", [True, False], ids=["background", "at once"])
@pytest.mark.parametrize("name", KINDS)
def test_killed_again_and_again_it_ends_as_if_never_stopped(name: str, background: bool, tmp_path: Path) -> None:
    (nodes, kind), keeps = KINDS[name], {"background": background}
    world, options = sum(nodes), {"nodes": nodes, "keeps": keeps}
    undisturbed = run(sharded, world, str(tmp_path / "whole"), kind, **options)
    folder, chance = tmp_path / "killed", random.Random(time.time_ns())
    for number in range(5):
        batches = chance.randint(5, 12) if number < 4 else 99  # of 24 steps; the last run is not stopped
        kill = Killed(number % world, batches, chance.uniform(0, 0.04))
        outcomes = attempt(sharded, world, str(folder), kind, kill, **options)
        if all(outcome.value for outcome in outcomes):
            break
        assert any(outcome.exitcode == -signal.SIGKILL for outcome in outcomes), outcomes[0].trace
    assert number, "nobody was killed"
    for outcome, truth in zip(outcomes, undisturbed, strict=True):
        assert torch.equal(outcome.value["weights"], truth["weights"])
        assert outcome.value["seen"] == truth["seen"][len(truth["seen"]) - len(outcome.value["seen"]) :]
        assert outcome.value["step"] == 24
    assert not list(folder.glob("saving-*"))
    assert all(directory.lacking(path) is None for path in folder.glob("*.ckpt"))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-400])


DAMAGE = {
    "shards are cut off": (lambda path: _cut(next(path.glob("__1_*.distcp"))), "__1_0.distcp in it is missing, or was"),
    "shards are missing": (lambda path: next(path.glob("__0_*.distcp")).unlink(), "__0_0.distcp in it is missing"),
    "no index": (lambda path: (path / ".metadata").unlink(), ".metadata in it is missing"),
    "index cut off": (lambda path: _cut(path / ".metadata"), ".metadata in it is missing"),
    "the rest is missing": (lambda path: (path / "meta.pt").unlink(), "meta.pt in it is missing"),
    "the rest is cut off": (lambda path: _cut(path / "meta.pt"), "it was cut off while it was written or copied"),
    "state of a rank": (
        lambda path: next(path.with_name(f"{path.name}.shards").glob("replica-0.1-*")).unlink(),
        "the state of replica(s) 0.1 is missing or cut off",
    ),
}


def passed_over(folder: str, kind: Any, damage: str | None) -> Any:
    keeps = {"background": False}
    first = sharded(folder, kind, max_epochs=2, keeps=keeps)
    if damage and dist.get_rank() == 0:
        DAMAGE[damage][0](Path(folder) / "step=16-complete.ckpt")  # type: ignore[no-untyped-call]
    dist.barrier()
    return first, sharded(folder, kind, keeps=keeps)


@pytest.mark.long(after=2)
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_that_is_not_whole_is_passed_over(damage: str, tmp_path: Path) -> None:
    nodes, kind = KINDS["diloco"]
    whole = run(sharded, 3, str(tmp_path / "whole"), kind, keeps={"background": False}, nodes=nodes)
    results = run(passed_over, 3, str(tmp_path / "damaged"), kind, damage, nodes=nodes)
    for rank, (truth, (first, second)) in enumerate(zip(whole, results, strict=True)):
        assert first["step"] == 16
        assert second["seen"] == truth["seen"][14:]  # from step 14, the one before
        assert torch.equal(second["weights"], truth["weights"])
        assert len(second["messages"]) == (rank == 0)
        assert all(DAMAGE[damage][1] in text and "step=16-complete.ckpt" in text for text in second["messages"])


def counted(folder: str, max_epochs: int) -> Any:
    strategy = {"balance": "off", "global_batch_size": 12}
    found = train(folder, (HeteroDDPStrategy, {}), module=ShardedDropping, strategy=strategy, max_epochs=max_epochs)
    dist.barrier()
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize("sizes", [(4, 3), (3, 4)])
def test_on_other_ranks_it_goes_on_from_the_newest(sizes: tuple[int, int], tmp_path: Path) -> None:
    first = run(counted, sizes[0], str(tmp_path), 2)
    second = run(counted, sizes[1], str(tmp_path), 3)
    assert {one["step"] for one in first} == {16}
    assert {one["step"] for one in second} == {24}
    assert all(torch.equal(one["weights"], second[0]["weights"]) for one in second)
    assert sum(len(one["seen"]) for one in second) == sizes[1] * 8


def filled(folder: str, kind: Any, rank: int, background: bool) -> Any:
    with pytest.raises(CheckpointError) as raised:
        sharded(folder, kind, Fills(rank, folder), every=5, keeps={"background": background})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(raised.value)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("background", [True, False], ids=["background", "at once"])
@pytest.mark.parametrize("rank", [1, 0])
def test_a_full_disk_does_not_lose_the_checkpoint_before(rank: int, background: bool, tmp_path: Path) -> None:
    nodes, kind = KINDS["ddp"]
    whole = run(sharded, 2, str(tmp_path / "whole"), kind, nodes=nodes)
    for message in run(filled, 2, str(tmp_path / "full"), kind, rank, background, nodes=nodes):
        assert "step=15.ckpt could not be saved: " in message
    assert sorted(path.name for path in tmp_path.glob("full/step=*.ckpt")) == ["step=10.ckpt", "step=5.ckpt"]
    for result, truth in zip(run(sharded, 2, str(tmp_path / "full"), kind, nodes=nodes), whole, strict=True):
        assert result["seen"] == truth["seen"][10:]
        assert torch.equal(result["weights"], truth["weights"])


@pytest.mark.long(after=1)
@pytest.mark.parametrize("lost", [0, 3])
def test_those_that_remain_go_on_saving(lost: int, tmp_path: Path) -> None:
    """A replica of two ranks, or of one, is lost while checkpoints are written; later others resume the run."""
    kind, options = KINDS["diloco"][1], {"strategy": {"on_peer_loss": "continue", "timeout": 60}}
    kill = Killed(lost, 9, 0.0)
    outcomes = attempt(sharded, 4, str(tmp_path), kind, kill, nodes=[2, 1, 1], **options)
    ranks = (2, 3) if lost == 0 else (0, 1, 2)
    left = [outcomes[rank].value for rank in ranks]
    assert all(left), outcomes[ranks[0]].trace
    for one in left:
        assert torch.equal(one["weights"], left[0]["weights"])
        names = [name for name in one["files"] if not name.endswith(".shards")]
        assert len(names) == 2, names
        assert sum(name.endswith("-complete.ckpt") for name in names) == 1, names
    again = run(sharded, 2, str(tmp_path), kind, nodes=[1, 1], **options)
    for one in again:
        assert one["seen"] == []
        assert (one["weights"] - left[0]["weights"]).abs().max() < 1e-12
