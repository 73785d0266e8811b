"""The files of replicas' own states: replaced, removed and linked together with their checkpoint."""

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsspec import filesystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from ranks import attempt, run
from saved import replicas_of, shards_of
from tasks import FAST
from test_saving import Noting
from test_shards import APART, SAVED, At, _fit, _home

from lightning_hetero.checkpoint.shards import shard_folder
from lightning_hetero.errors import CheckpointError

# -- several saves --------------------------------------------------------------------------------------------


def _twice(folder: str) -> Any:
    """Saves twice under SLURM's name, and keeps a copy of what rank 0 wrote first."""

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint("hpc_ckpt_1.ckpt")
        if trainer.global_rank == 0 and trainer.global_step == 4:
            shutil.copy("hpc_ckpt_1.ckpt", "old.ckpt")

    os.chdir(folder)
    return _fit(None, At(save, 4, SAVED))


def _resume(folder: str, path: str) -> Any:
    os.chdir(folder)
    return _fit(path)


def test_a_newer_save_replaces_the_older_one_and_never_mixes_with_it(tmp_path: Path) -> None:
    whole = run(_twice, 2, str(tmp_path), nodes=APART)
    path, folder = tmp_path / "hpc_ckpt_1.ckpt", tmp_path / "hpc-1.ckpt.shards"
    save = torch.load(path, weights_only=True)["lightning_hetero"]["replicas"]["save"]
    assert sorted(os.listdir(folder)) == [f"replica-{i}-{save}.pt" for i in (0, 1)]
    folder.rename(tmp_path / "old.ckpt.shards")
    first, second = run(_resume, 2, str(tmp_path), "old.ckpt", nodes=APART)
    assert "does not find its replica's own state" in first["messages"][0]
    assert torch.equal(first["began"], second["began"])
    (tmp_path / "old.ckpt.shards").rename(folder)
    for one, other in zip(whole, run(_resume, 2, str(tmp_path), path.name, nodes=APART), strict=True):
        assert torch.equal(other["weights"], one["weights"])
        assert other["messages"] == []


class Full(TorchCheckpointIO):
    """A disk that is full at the second file of a name."""

    def __init__(self, name: str) -> None:
        self.name, self.files = name, 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.files += Path(path).name.startswith(self.name)
        if self.files == 2:
            raise OSError(f"no room for {path}")
        super().save_checkpoint(checkpoint, path, storage_options)


def _full(folder: str, name: str) -> None:
    os.chdir(folder)
    save = At(lambda trainer: trainer.save_checkpoint("saved.ckpt"), 4, SAVED)
    _fit(None, save, plugins=[Full(name)])


@pytest.mark.parametrize(("name", "rank"), [("replica-1-", 1), ("saved.ckpt", 0)])
def test_a_part_that_cannot_be_written_leaves_the_old_checkpoint_whole(tmp_path: Path, name: str, rank: int) -> None:
    outcomes = attempt(_full, 2, str(tmp_path), name, nodes=APART)
    assert str(outcomes[rank].error).startswith("no room for saved.ckpt"), outcomes[rank].trace
    other = outcomes[1 - rank]
    assert isinstance(other.error, CheckpointError), other.trace
    assert str(other.error).startswith(f"rank {rank} could not save: no room for saved.ckpt")
    assert torch.load(tmp_path / "saved.ckpt", weights_only=True)["global_step"] == 4
    assert {state["windows"] for state in replicas_of(tmp_path / "saved.ckpt")} == {4}
    assert len(os.listdir(tmp_path / "saved.ckpt.shards")) == 2  # nothing is left of the new one


def _removes(folder: str) -> Any:
    def call(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(f"{trainer.global_step}.ckpt")
        trainer.strategy.remove_checkpoint(f"{trainer.global_step - 3}.ckpt")  # as ModelCheckpoint does

    _home(folder)
    _fit(None, At(call, 4, 7, 10))
    return sorted(str(path) for path in Path().rglob("*"))


def test_a_checkpoint_that_is_removed_takes_its_shards_along_on_every_host(tmp_path: Path) -> None:
    first, second = run(_removes, 2, str(tmp_path), nodes=APART)
    names = [shard.name for shard in shards_of(tmp_path / "0" / "10.ckpt")]
    assert first == ["10.ckpt", "10.ckpt.shards", f"10.ckpt.shards/{names[0]}"]
    assert second == ["10.ckpt.shards", f"10.ckpt.shards/{names[1]}"]


def _linked(folder: str) -> Any:
    os.chdir(folder)
    options = {"every_n_train_steps": 3, "save_top_k": 1, "filename": "{step}", "save_last": "link"}
    whole = _fit(None, ModelCheckpoint("kept", **options), enable_checkpointing=True, max_steps=11)
    link = os.readlink("kept/last.ckpt"), sorted(os.listdir("kept"))
    again = _fit("last", ModelCheckpoint("kept", **options), enable_checkpointing=True, max_steps=11)
    return link, whole, again


def test_model_checkpoint_deletes_shards_and_links_to_the_last(tmp_path: Path) -> None:
    for link, whole, again in run(_linked, 2, str(tmp_path), nodes=APART):
        assert link == ("step=9.ckpt", ["last.ckpt", "step=9.ckpt", "step=9.ckpt.shards"])
        assert torch.equal(again["weights"], whole["weights"])
        assert not torch.equal(again["began"], whole["began"])
        assert again["messages"] == []


def test_lightning_takes_no_shards_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    (tmp_path / "last.ckpt").touch()
    for path in ("hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt", "last.ckpt", "last-v1.ckpt"):  # some without their checkpoints
        os.makedirs(shard_folder(tmp_path / path))
    keep = ModelCheckpoint(tmp_path, save_last=True)
    options = {**FAST, "enable_checkpointing": True, "callbacks": [keep], "default_root_dir": tmp_path}
    trainer = pl.Trainer(devices=1, **options)
    connector = trainer._checkpoint_connector
    assert connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert connector.hpc_save_path(tmp_path) == str(tmp_path / "hpc_ckpt_2.ckpt")
    assert keep._find_last_checkpoints(trainer) == {str(tmp_path / "last.ckpt")}


# -- plugins and remote paths ---------------------------------------------------------------------------------


def _plugins(folder: str) -> Any:
    found = []
    for name, plugin in (("own", Noting()), ("background", AsyncCheckpointIO(Noting()))):
        path = f"{folder}/{name}.ckpt"

        def save(trainer: pl.Trainer, path: str = path) -> None:
            trainer.save_checkpoint(path)
            if trainer.global_step == SAVED:
                trainer.save_checkpoint("memory://there/saved.ckpt")

        whole = _fit(None, At(save, 4, SAVED), plugins=[plugin])
        again = _fit(path, plugins=[type(plugin)()])
        found.append((getattr(plugin, "checkpoint_io", plugin).names, whole["weights"], again["weights"]))
    return found, filesystem("memory").find("/there")


def test_shards_go_through_the_users_plugin_and_to_remote_paths(tmp_path: Path) -> None:
    for rank, (found, remote) in enumerate(run(_plugins, 2, str(tmp_path), nodes=APART)):
        for (names, whole, again), name in zip(found, ("own", "background"), strict=True):
            assert torch.equal(whole, again)
            replica = f"replica-{rank}-"
            kinds = ["shard" if text.startswith(replica) else text for text in names]
            one = ["shard", f"{name}.ckpt"] if rank == 0 else ["shard"]
            there = ["shard", "saved.ckpt"] if rank == 0 else ["shard"]
            assert kinds == one + one + there
        assert len([path for path in remote if f"/there/saved.ckpt.shards/replica-{rank}-" in path]) >= 1
        assert ("/there/saved.ckpt" in remote) == (rank == 0)
    assert len(os.listdir(tmp_path / "own.ckpt.shards")) == 2
    # Files are written later: the shards of the save before stay until they are no longer needed.
    assert len(os.listdir(tmp_path / "background.ckpt.shards")) == 4
