"""Files of an interrupted save go with the next save that is complete, and no other files do."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults import DIED, Fault, Record, fit, fit_with_faults, went_on
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_hetero.callbacks.checkpoint_folder import RetentionPolicy
from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.checkpoint.shards import Shards
from lightning_hetero.checkpoint.writer import atomic_write


class Slow(pl.Callback):
    """Makes steps longer than saves; writes down the files in a folder when the checkpoint of step 9 is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.3)
        if trainer.global_step == 11 and trainer.is_global_zero:
            until = time.monotonic() + 20
            while not (self.folder / "step=9.ckpt").exists() and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(0.5)
            (self.folder.parent / "seen").write_text("\n".join(sorted(os.listdir(self.folder))))


def _saves(
    folder: str, name: str, faults: list[Fault], options: dict[str, Any], part: str, background: bool = True
) -> Record:
    """Fit with saves after every third step; a rank is killed when it has written half of a file of the second one."""
    write, rank = torch.save, int(os.environ["RANK"])

    def half(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        at = value.get("global_step") if part == "checkpoint" else value.get("state", {}).get("windows")
        if at == 6:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(value, file, *args, **kwargs)

    if rank == faults[0].rank:
        torch.save = half
    saved = Path(folder, "saved")
    again = ResumableCheckpoint(saved, every_n_steps=3, background=background)
    return fit(folder, name, faults, options, callbacks=[again, Slow(saved)], enable_checkpointing=True)


@pytest.mark.parametrize(("rank", "part"), [(2, "shard"), pytest.param(0, "checkpoint", marks=pytest.mark.long)])
def test_the_others_go_on_where_all_wait_for_the_save(tmp_path: Path, rank: int, part: str) -> None:
    settings = {"part": part, "background": False}
    went_on(fit_with_faults(tmp_path, "node", [Fault(rank, -1, "killed")], run=_saves, settings=settings), {rank: DIED})


@pytest.mark.parametrize(
    ("name", "rank", "part"),
    [
        ("node", 2, "shard"),
        ("node", 0, "checkpoint"),
        pytest.param("ddp", 0, "checkpoint", marks=pytest.mark.long),
    ],
)
def test_what_a_loss_has_left_of_a_save_goes_with_the_next_one(tmp_path: Path, name: str, rank: int, part: str) -> None:
    outcomes = fit_with_faults(tmp_path, name, [Fault(rank, -1, "killed")], run=_saves, settings={"part": part})
    went_on(outcomes, {rank: DIED})
    shards = [] if name == "ddp" else [".shards"]

    def files(*names: str) -> list[str]:
        return sorted(f"{one}.ckpt{end}" for one in names for end in ["", *shards])

    # Half of the first rank's own file is left, without its final name.
    halves = [one.name for one in (tmp_path / "saved").glob("saving-*")]
    assert len(halves) == (part == "checkpoint")
    seen = (tmp_path / "seen").read_text().split("\n")
    assert [one for one in seen if one not in halves] == files("step=3", "step=9")
    assert sorted(set(os.listdir(tmp_path / "saved")) - set(halves)) == files("step=15", "step=16-complete")
    for folder in (tmp_path / "saved").glob("*.shards"):
        assert len(list(folder.iterdir())) == 2


def _save(shards: Shards, path: Path, save: str, replicas: tuple[int, ...] = (0, 1)) -> None:
    """Write the files that a save writes before the checkpoint itself."""
    shards.clean = lambda *_: save  # type: ignore[method-assign]  # what ranks agree on
    with shards.saving(TorchCheckpointIO(), path, True, True):
        for replica in replicas:
            shard = Path(f"{path}.shards", f"replica-{replica}-{save}.pt")
            shard.parent.mkdir(parents=True, exist_ok=True)
            shard.touch()


def _strategy(shards: Shards) -> Any:
    io = TorchCheckpointIO()

    def remove(path: str) -> None:
        io.remove_checkpoint(path)
        shards.removed(io, path)

    return SimpleNamespace(_shards=shards, checkpoint_io=io, remove_checkpoint=remove)


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_only_what_the_job_itself_has_left_is_removed(tmp_path: Path) -> None:
    """Files that another job has written, or writes, under the same name stay, and all files unknown to this job."""
    shards, kept = Shards(), RetentionPolicy(2)
    kept.begin(str(tmp_path / "step=1.ckpt"))
    _save(shards, tmp_path / "step=1.ckpt", "aaa")
    folder = tmp_path / "step=1.ckpt.shards"
    for other in ("replica-1-zzz.pt", "saving-replica-0-zzz-123.tmp", "saving-123.tmp", "saving-replica-0-aaa-123.tmp"):
        (folder / other).touch()
    _save(Shards(), tmp_path / "step=7.ckpt", "bbb")  # another job's
    before = _names(tmp_path / "step=7.ckpt.shards")
    older = kept.begin(str(tmp_path / "step=2.ckpt"))
    _save(shards, tmp_path / "step=2.ckpt", "ccc")
    (tmp_path / "step=2.ckpt").touch()
    kept.remove(_strategy(shards), older)
    assert _names(folder) == ["replica-1-zzz.pt", "saving-123.tmp", "saving-replica-0-zzz-123.tmp"]
    assert _names(tmp_path / "step=7.ckpt.shards") == before
    assert _names(tmp_path / "step=2.ckpt.shards") == ["replica-0-ccc.pt", "replica-1-ccc.pt"]
    assert shards._gone == [(str(tmp_path / "step=1.ckpt"), {"aaa"})]  # for hosts with folders of their own


def test_other_hosts_remove_their_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Shards(), Shards()
    for rank, shards in enumerate((first, second)):
        _save(shards, tmp_path / str(rank) / "step=1.ckpt", "aaa", (rank,))
    (tmp_path / "1" / "step=1.ckpt.shards" / "replica-1-zzz.pt").touch()
    first.unfinished(TorchCheckpointIO(), tmp_path / "0" / "step=1.ckpt")
    [gone] = first._gone
    told = gone._replace(path=str(tmp_path / "1" / "step=1.ckpt"))  # in reality the path is the same on both
    monkeypatch.setattr("lightning_hetero.checkpoint.shards.value_of_rank", lambda own, rank: ("bbb", [told]))
    assert Shards.clean(second, TorchCheckpointIO(), True) == "bbb"
    assert _names(tmp_path) == ["0", "1", "1/step=1.ckpt.shards", "1/step=1.ckpt.shards/replica-1-zzz.pt"]


def test_interrupted_saves_do_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    """The checkpoints that they would have replaced go with the next complete one."""
    kept, strategy = RetentionPolicy(2, [str(tmp_path / "step=0.ckpt")]), _strategy(Shards())
    (tmp_path / "step=0.ckpt").touch()
    left = []
    for step in range(1, 9):
        path = tmp_path / f"step={step}.ckpt"
        older = kept.begin(str(path))
        if step in (3, 4, 7):  # interrupted
            continue
        path.touch()
        kept.remove(strategy, older)
        if step != 5:  # the record that other ranks have, too
            kept.complete(str(path))
        left.append([int(one.stem[5:]) for one in sorted(tmp_path.iterdir())])
    assert left == [[0, 1], [1, 2], [2, 5], [5, 6], [6, 8]]
    assert len(kept.begin("more")) == 3  # it does not grow


def test_what_was_passed_over_at_the_start_goes_first(tmp_path: Path) -> None:
    """It is the oldest of the checkpoints among which the run has chosen."""
    for name in ("step=8.ckpt", "step=4.ckpt", "step=5.ckpt"):
        (tmp_path / name).touch()
    kept = RetentionPolicy(2, [str(tmp_path / "step=8.ckpt"), str(tmp_path / "step=4.ckpt")])
    kept.remove(_strategy(Shards()), kept.begin(str(tmp_path / "step=5.ckpt")))
    assert _names(tmp_path) == ["step=4.ckpt", "step=5.ckpt"]


def test_one_checkpoint_may_be_kept(tmp_path: Path) -> None:
    kept, strategy = RetentionPolicy(1), _strategy(Shards())
    for step in range(3):
        path = tmp_path / f"step={step}.ckpt"
        older = kept.begin(str(path))
        path.touch()
        kept.remove(strategy, older)
        kept.complete(str(path))
        assert _names(tmp_path) == [path.name]


def test_a_shard_that_is_being_written_bears_its_save(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "replica-3-abc.pt"):
        [half] = _names(tmp_path)
    assert half.startswith("saving-replica-3-abc-")
    assert half.endswith(".tmp")
    with atomic_write(tmp_path / "last.ckpt"):  # Lightning would take it for a checkpoint
        assert not any("last" in name for name in _names(tmp_path) if name.endswith(".tmp"))
