"""Each replica's own state lies in a file next to the checkpoint that all share, and comes back to that replica."""

import os
import shutil
import warnings
from collections.abc import Callable
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
from tasks import FAST, Net, dataset, parameters
from test_saving import Noting
from torch.utils.data import DataLoader

from lightning_hetero import NodeAverageStrategy
from lightning_hetero.engine.shards import folder_of
from lightning_hetero.errors import CheckpointError, DisagreementError
from lightning_hetero.strategies.registry import ENTRIES

APART = [1, 1]
SAVED = 7  # between two meetings


class At(pl.Callback):
    """Calls a function after certain steps."""

    def __init__(self, call: Callable[[pl.Trainer], None], *steps: int) -> None:
        self.call, self.steps = call, steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            self.call(trainer)


class Began(pl.Callback):
    """The weights with which training began."""

    weights: torch.Tensor

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = parameters(pl_module)


def _fit(resume: str | None = None, *callbacks: Any, kind: Any = NodeAverageStrategy, **options: Any) -> dict[str, Any]:
    """Twelve steps; replicas meet after every fifth."""
    module, began = Net(), Began()
    settings = {**FAST, "max_steps": 12, "callbacks": [began, *callbacks], **options}
    trainer = pl.Trainer(strategy=kind(5, balance=[2.0, 1.0], global_batch_size=6, timeout=60), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`|Checkpoint directory .* exists")
        trainer.fit(module, DataLoader(dataset(60), batch_size=3, shuffle=True), ckpt_path=resume)
    said = [str(w.message) for w in caught if "checkpoint" in str(w.message)]
    return {"weights": parameters(module), "began": began.weights, "said": said}


def _save(path: str) -> Any:
    return At(lambda trainer: trainer.save_checkpoint(path), SAVED)


# -- hosts without a shared file system: each rank works in a folder of its own --------------------------------


def _home(folder: str) -> None:
    home = Path(folder, os.environ["RANK"])
    home.mkdir(exist_ok=True)
    os.chdir(home)


def _first(folder: str) -> Any:
    _home(folder)
    return _fit(None, _save("mid.ckpt"))


def _second(folder: str, path: str = "mid.ckpt", **options: Any) -> Any:
    _home(folder)
    return _fit(path, **options)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folders of two hosts, and what they did; the checkpoint that all share has been copied to both."""
    folder = tmp_path_factory.mktemp("apart")
    whole = run(_first, 2, str(folder), nodes=APART)
    shutil.copy(folder / "0" / "mid.ckpt", folder / "1" / "mid.ckpt")
    return folder, whole


@pytest.fixture
def hosts(apart: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """A copy of them to spoil."""
    shutil.copytree(apart[0], tmp_path / "hosts")
    return tmp_path / "hosts"


def test_each_host_keeps_and_needs_its_own_replica_only(apart: tuple[Path, list[Any]]) -> None:
    folder, whole = apart
    shared = torch.load(folder / "0" / "mid.ckpt", weights_only=True)
    names = [shard.name for shard in shards_of(folder / "0" / "mid.ckpt")]
    for rank in (0, 1):
        assert sorted(os.listdir(folder / str(rank))) == ["mid.ckpt", "mid.ckpt.shards"]
        assert os.listdir(folder / str(rank) / "mid.ckpt.shards") == [names[rank]]
    assert shared["lightning_hetero"]["format"] == 2
    assert shared["lightning_hetero"]["replicas"].keys() == {
        "strategy",
        "algorithm",
        "save",
        "ids",
        "losses",
        "trainable",
    }
    own = [torch.load(folder / str(r) / "mid.ckpt.shards" / names[r], weights_only=True)["state"] for r in (0, 1)]
    mean = torch.cat([value.reshape(-1) for value in shared["state_dict"].values()])
    values = [state["values"][0] for state in own]
    assert not torch.equal(*values)
    torch.testing.assert_close((2 * values[0] + values[1]) / 3, mean, rtol=0, atol=1e-14)
    for rank, (one, other) in enumerate(zip(whole, run(_second, 2, str(folder), nodes=APART), strict=True)):
        assert torch.equal(other["began"], values[rank])
        assert torch.equal(other["weights"], one["weights"])
        assert other["said"] == []


def test_lightning_alone_goes_on_from_the_consensus(apart: tuple[Path, list[Any]]) -> None:
    path = apart[0] / "0" / "mid.ckpt"
    module, began = Net(), Began()
    trainer = pl.Trainer(devices=1, **{**FAST, "max_steps": 8, "callbacks": [began]})
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    trainer.fit(module, DataLoader(dataset(60), batch_size=6), ckpt_path=path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(began.weights, torch.cat([value.reshape(-1) for value in saved.values()]))
    assert trainer.global_step == 8


def test_without_one_shard_all_replicas_start_alike(hosts: Path) -> None:
    shard = shards_of(hosts / "1" / "mid.ckpt")[1]
    shard.unlink()
    first, second = run(_second, 2, str(hosts), nodes=APART)
    saved = torch.load(hosts / "0" / "mid.ckpt", weights_only=True)["state_dict"]
    for result in (first, second):
        assert torch.equal(result["began"], torch.cat([value.reshape(-1) for value in saved.values()]))
        assert result["weights"].isfinite().all()
    [told] = first["said"]
    assert told.startswith("Rank 1 does not find its replica's own state")
    assert f"mid.ckpt.shards/{shard.name}" in told
    assert told.endswith("All replicas start from the checkpoint's weights, with its optimizers' state.")
    assert second["said"] == []


def test_a_shard_that_was_cut_off_ends_all_ranks(hosts: Path) -> None:
    shard = shards_of(hosts / "1" / "mid.ckpt")[1]
    shard.write_bytes(shard.read_bytes()[:-500])
    first, second = attempt(_second, 2, str(hosts), nodes=APART)
    assert isinstance(second.error, CheckpointError), second.trace
    assert f"{shard.name} is not a whole checkpoint" in str(second.error)
    assert isinstance(first.error, CheckpointError), first.trace
    assert str(first.error).startswith(f"rank 1 could not resume: mid.ckpt.shards/{shard.name} is not a whole")


def test_hosts_with_different_checkpoints_do_not_go_on(hosts: Path) -> None:
    other = torch.load(hosts / "1" / "mid.ckpt", weights_only=True)
    other["lightning_hetero"]["replicas"]["save"] = "0123456789ab"
    torch.save(other, hosts / "1" / "mid.ckpt")
    for outcome in attempt(_second, 2, str(hosts), nodes=APART):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "the ranks differ in the checkpoint to go on from" in str(outcome.error)
        assert "save: rank 0: " in str(outcome.error)


def test_a_later_format_gives_its_weights(hosts: Path) -> None:
    for rank in (0, 1):
        later = torch.load(hosts / str(rank) / "mid.ckpt", weights_only=True)
        later["lightning_hetero"] = {"format": 3, "planner": "something else"}
        torch.save(later, hosts / str(rank) / "mid.ckpt")
    first, second = run(_second, 2, str(hosts), nodes=APART)
    assert torch.equal(first["began"], second["began"])
    assert len(first["said"]) == 2
    assert all("its format is 3, this version reads up to 2" in text for text in first["said"])


# -- names of strategies --------------------------------------------------------------------------------------


class Renamed(NodeAverageStrategy):
    """The same algorithm by another name."""


def test_a_subclass_by_another_name_goes_on(apart: tuple[Path, list[Any]]) -> None:
    folder, whole = apart
    for one, other in zip(whole, run(_second, 2, str(folder), kind=Renamed, nodes=APART), strict=True):
        assert torch.equal(other["weights"], one["weights"])
        assert other["said"] == []


def test_every_strategy_has_a_name_of_its_own_in_checkpoints() -> None:
    assert [entry.strategy.saved_as for entry in ENTRIES] == [entry.name for entry in ENTRIES]
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


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
    assert "does not find its replica's own state" in first["said"][0]
    assert torch.equal(first["began"], second["began"])
    (tmp_path / "old.ckpt.shards").rename(folder)
    for one, other in zip(whole, run(_resume, 2, str(tmp_path), path.name, nodes=APART), strict=True):
        assert torch.equal(other["weights"], one["weights"])
        assert other["said"] == []


class Full(TorchCheckpointIO):
    """A disk that is full when it comes to the second file of a name."""

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
        assert again["said"] == []


def test_lightning_takes_no_shards_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    (tmp_path / "last.ckpt").touch()
    for path in ("hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt", "last.ckpt", "last-v1.ckpt"):  # some without their checkpoints
        os.makedirs(folder_of(tmp_path / path))
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
    # Written later than given: the shards of the save before stay, until they are certainly not needed.
    assert len(os.listdir(tmp_path / "background.ckpt.shards")) == 4
