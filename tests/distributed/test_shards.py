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
from ranks import attempt, run
from saved import shards_of
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import NodeAverageStrategy
from lightning_hetero.errors import CheckpointError, DisagreementError
from lightning_hetero.strategies.table import ENTRIES

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
    """Keeps the weights with which training began."""

    weights: torch.Tensor

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = parameters(pl_module)


def _fit(resume: str | None = None, *callbacks: Any, kind: Any = NodeAverageStrategy, **options: Any) -> dict[str, Any]:
    """Train for twelve steps; replicas meet after every fifth."""
    module, began = Net(), Began()
    settings = {**FAST, "max_steps": 12, "callbacks": [began, *callbacks], **options}
    trainer = pl.Trainer(strategy=kind(5, balance=[2.0, 1.0], global_batch_size=6, timeout=60), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`|Checkpoint directory .* exists")
        trainer.fit(module, DataLoader(dataset(60), batch_size=3, shuffle=True), ckpt_path=resume)
    messages = [str(w.message) for w in caught if "checkpoint" in str(w.message)]
    return {"weights": parameters(module), "began": began.weights, "messages": messages}


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
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Folders of two hosts, and the results of their fits; the common checkpoint has been copied to both."""
    folder = tmp_path_factory.mktemp("apart")
    whole = run(_first, 2, str(folder), nodes=APART)
    shutil.copy(folder / "0" / "mid.ckpt", folder / "1" / "mid.ckpt")
    return folder, whole


@pytest.fixture
def hosts(two_hosts: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """A copy of these folders that a test may damage."""
    shutil.copytree(two_hosts[0], tmp_path / "hosts")
    return tmp_path / "hosts"


def test_each_host_keeps_and_needs_its_own_replica_only(two_hosts: tuple[Path, list[Any]]) -> None:
    folder, whole = two_hosts
    shared = torch.load(folder / "0" / "mid.ckpt", weights_only=True)
    names = [shard.name for shard in shards_of(folder / "0" / "mid.ckpt")]
    for rank in (0, 1):
        assert sorted(os.listdir(folder / str(rank))) == ["mid.ckpt", "mid.ckpt.shards"]
        assert os.listdir(folder / str(rank) / "mid.ckpt.shards") == [names[rank]]
    assert shared["lightning_hetero"]["format"] == 1
    described = {"strategy", "algorithm", "save", "ids", "ranks", "sharded", "buffers"}
    assert shared["lightning_hetero"]["replicas"].keys() == described
    own = [torch.load(folder / str(r) / "mid.ckpt.shards" / names[r], weights_only=True)["state"] for r in (0, 1)]
    mean = torch.cat([value.reshape(-1) for value in shared["state_dict"].values()])
    values = [state["values"][0] for state in own]
    assert not torch.equal(*values)
    torch.testing.assert_close((2 * values[0] + values[1]) / 3, mean, rtol=0, atol=1e-14)
    for rank, (one, other) in enumerate(zip(whole, run(_second, 2, str(folder), nodes=APART), strict=True)):
        assert torch.equal(other["began"], values[rank])
        assert torch.equal(other["weights"], one["weights"])
        assert other["messages"] == []


def test_lightning_alone_goes_on_from_the_consensus(two_hosts: tuple[Path, list[Any]]) -> None:
    path = two_hosts[0] / "0" / "mid.ckpt"
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
    [message] = first["messages"]
    assert message.startswith("Rank 1 does not find its replica's own state")
    assert f"mid.ckpt.shards/{shard.name}" in message
    assert "All replicas start from the checkpoint's weights, with its optimizers' state. What the algorithm" in message
    assert second["messages"] == []


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
        later["lightning_hetero"] = {"format": 2, "planner": "something else"}
        torch.save(later, hosts / str(rank) / "mid.ckpt")
    first, second = run(_second, 2, str(hosts), nodes=APART)
    assert torch.equal(first["began"], second["began"])
    assert len(first["messages"]) == 2
    assert all("its format is 2, this version reads 1" in text for text in first["messages"])


# -- names of strategies --------------------------------------------------------------------------------------


class Renamed(NodeAverageStrategy):
    """The same algorithm by another name."""


def test_a_subclass_by_another_name_goes_on(two_hosts: tuple[Path, list[Any]]) -> None:
    folder, whole = two_hosts
    for one, other in zip(whole, run(_second, 2, str(folder), kind=Renamed, nodes=APART), strict=True):
        assert torch.equal(other["weights"], one["weights"])
        assert other["messages"] == []


def test_every_strategy_has_a_name_of_its_own_in_checkpoints() -> None:
    assert [entry.strategy.saved_as for entry in ENTRIES] == [entry.name for entry in ENTRIES]
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
