"""Other exchanges of mixed jobs: metrics, gathered tensors, saves in the background, lost and joining ranks."""

import os
import shutil
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from growing import LATE, WaitsForOthers, grow
from lightning.pytorch.callbacks import EMAWeightAveraging
from mixed_tasks import OnOwnDevice, Row, devices_in, same, values
from ranks import attempt, run
from tasks import FAST, EvaluatedNet, Killed, Net, Save, dataset
from torch.utils.data import DataLoader

from lightning_hetero import Averager, Own, StepContext, strategy_for
from lightning_hetero.callbacks.resumable import ResumableCheckpoint

DDP, NODE = Row("hetero_ddp"), Row("hetero_node", {"every_n_steps": 3})


def given(library: str, *ranks: int) -> Any:
    """The device on some ranks."""
    return lambda rank: {"FAKE_LIBRARY": library} if rank in ranks else {}


def trainer_of(row: Row, kind: str, **options: Any) -> pl.Trainer:
    on = {"accelerator": kind, "devices": "auto" if kind == "fake" else 1}
    settings = {**FAST, "enable_checkpointing": "callbacks" in options, **on, **options}
    return pl.Trainer(strategy=row.strategy(), num_nodes=len(row.nodes), **settings)


# -- what users' models send ---------------------------------------------------------------------------------


class Measuring(EvaluatedNet):
    """Uses what Lightning gives to modules for talking to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanMetric()
        self.gathered: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        own = self.net(batch[0])
        everyone = self.all_gather(own, sync_grads=True).flatten(0, 1)
        assert everyone.device.type == self.device.type
        return torch.nn.functional.mse_loss(own, batch[1]) + 0.01 * everyone.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.error(self.loss(batch), batch[0].shape[0])
        self.log("error", self.error)


def measured(row: Row) -> dict[str, Any]:
    module, trainer = Measuring(), trainer_of(row, fake_device.load_if_given(), max_epochs=2, gradient_clip_val=0.5)
    trainer.fit(module, DataLoader(dataset(24), batch_size=3), DataLoader(dataset(13), batch_size=3))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, DataLoader(dataset(13), batch_size=3))
    return {"metrics": metrics, "final": values(module), "predicted": sorted(i for batch in predicted for i in batch)}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("row", [DDP, NODE], ids=lambda row: row.name)
def test_metrics_and_gathered_tensors(device: str, row: Row) -> None:
    one, other = run(measured, 2, row, nodes=[1, 1], env_of=given(device, 0), timeout=120)
    assert same(one["final"], other["final"])
    assert one["metrics"] == other["metrics"]
    assert one["metrics"]["error"] == pytest.approx(one["metrics"]["val"])
    assert sorted(one["predicted"] + other["predicted"]) == list(range(13))


# -- other ways to save --------------------------------------------------------------------------------------


def kept(folder: str, steps: int) -> torch.Tensor:
    warnings.filterwarnings("ignore", "Replicas have not met between step")
    kind, module = fake_device.load_if_given(), Net()
    callbacks = [ResumableCheckpoint(folder, every_n_steps=5), EMAWeightAveraging(decay=0.5), OnOwnDevice()]
    trainer = trainer_of(NODE, kind, max_steps=steps, max_epochs=-1, callbacks=callbacks)
    trainer.fit(module, DataLoader(dataset(48), batch_size=4))
    return values(module)


@pytest.mark.long
def test_saves_in_the_background_and_averages_of_weights(device: str, tmp_path: Path) -> None:
    folder, copy = tmp_path / "there", tmp_path / "here"
    first = run(kept, 2, str(folder), 7, nodes=[1, 1], env_of=given(device, 0), timeout=120)
    assert same(*first)
    shutil.copytree(folder, copy)
    there = run(kept, 2, str(folder), 12, nodes=[1, 1], env_of=given(device, 1), timeout=120)
    here = run(kept, 2, str(copy), 12, nodes=[1, 1], env_of=given(device, 0), timeout=120)
    assert same(*there)
    assert (there[0] - first[0]).abs().max() > 0
    assert (there[0] - here[0]).abs().max() <= 1e-9
    files = [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("*.pt")]
    assert len(files) >= 8
    assert {device for file in files for device in devices_in(file)} == {"cpu"}


# -- a user's own averager -------------------------------------------------------------------------------------


@dataclass
class Remembering(Averager):
    """Keeps tensors where the model is, and goes on with them."""

    memory = Own(lambda averager: [torch.zeros_like(value) for value in averager.replica.pack()])

    def due(self, context: StepContext) -> bool:
        return context.step % 2 == 0

    def after_step(self, context: StepContext) -> None:
        for memory, value in zip(self.memory, self.replica.pack(), strict=True):
            memory.mul_(0.5).add_(value, alpha=0.5)
        if self.due(context):
            self.replica.move_towards(self.memory, 0.1)
            self.meet(context)


def remembered(path: str, resume: bool) -> torch.Tensor:
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
    kind, module = fake_device.load_if_given(), Net()
    strategy = strategy_for(Remembering, "hetero_remembering")(balance=[2.0, 1.0], replica="rank")
    options = {**FAST, "accelerator": kind, "devices": "auto" if kind == "fake" else 1}
    trainer = pl.Trainer(strategy=strategy, num_nodes=2, max_epochs=2, callbacks=[Save(path, 4, False)], **options)
    loader = DataLoader(dataset(24), batch_size=4, shuffle=True)
    trainer.fit(module, loader, ckpt_path=path if resume else None)
    return values(module)


@pytest.mark.long
def test_an_averager_gets_its_tensors_where_it_keeps_them(device: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole = run(remembered, 2, path, False, nodes=[1, 1], env_of=given(device, 0), timeout=120)
    resumed = run(remembered, 2, path, True, nodes=[1, 1], env_of=given(device, 1), timeout=120)
    assert same(*whole)
    assert same(*resumed)
    assert (whole[0] - resumed[0]).abs().max() <= 1e-12


# -- ranks that are lost -------------------------------------------------------------------------------------


def survived(row: Row, lost: int) -> tuple[torch.Tensor, str, int]:
    kind, module = fake_device.load_if_given(), Net(optimizer="adamw")
    trainer = trainer_of(row, kind, max_epochs=2, callbacks=[Killed(lost, 5), OnOwnDevice()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a rank was lost
        trainer.fit(module, DataLoader(dataset(48), batch_size=4, shuffle=True))
    return values(module), trainer.strategy.root_device.type, trainer.world_size


SURVIVING = {"on_peer_loss": "continue", "timeout": 60}
ROWS = [
    Row("hetero_ddp", SURVIVING, nodes=(1, 1, 1)),
    Row("hetero_node", {"every_n_steps": 3, **SURVIVING}, nodes=(1, 1, 1)),
    Row("hetero_easgd", {"moving_rate": 0.2, "tau": 2, **SURVIVING}, nodes=(1, 1, 1)),
    Row("hetero_gossip", {"every_n_steps": 2, "deadline": 15, **SURVIVING}, nodes=(1, 1, 1)),
]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_ranks_go_on_when_one_is_lost(device: str, row: Row, lost: int) -> None:
    """One of the ranks that remain has the device. If rank 0 is lost, a rank on a CPU takes over its duties."""
    outcomes = attempt(
        survived, 3, row, lost, nodes=[1, 1, 1], env_of=given(device, 0, 1) if lost else given(device, 0, 2)
    )
    assert outcomes[lost].exitcode == -signal.SIGKILL
    rest = [outcome.value for rank, outcome in enumerate(outcomes) if rank != lost]
    assert all(rest), "\n".join(outcome.trace for outcome in outcomes)
    assert [kind != "cpu" for _, kind, _ in rest] == [lost == 2, True]
    assert [world for *_, world in rest] == [2, 2]
    assert same(rest[0][0], rest[1][0])


# -- ranks that join -----------------------------------------------------------------------------------------


def joined(name: str, options: dict[str, Any], file: str, library: str, late_has_device: bool) -> tuple[Any, ...]:
    late = bool(os.environ.get(LATE))
    kind = fake_device.load(library) if late == late_has_device else "cpu"
    until = time.monotonic() + 60
    while late and not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.02)
    module = Net(optimizer="adamw")
    callbacks = [OnOwnDevice(), *([] if late else [WaitsForOthers(1)])]
    row = Row(name, {"join_file": file, **SURVIVING, **options}, nodes=(1,), balance="auto")
    trainer = trainer_of(row, kind, max_epochs=3, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(dataset(48), batch_size=4, shuffle=True))
    return values(module), trainer.world_size, trainer.strategy.root_device.type


@pytest.mark.long
@pytest.mark.parametrize("late_has_device", [True, False])
@pytest.mark.parametrize(("name", "options"), [("hetero_ddp", {}), ("hetero_node", {"every_n_steps": 2})])
def test_a_rank_joins_with_another_device(
    device: str, tmp_path: Path, name: str, options: dict[str, Any], late_has_device: bool
) -> None:
    outcomes = grow(1, 1, joined, name, options, str(tmp_path / "job"), device, late_has_device, timeout=120)
    assert all(outcome.value for outcome in outcomes), "\n".join(outcome.trace for outcome in outcomes)
    (one, world, kind), (other, *there) = (outcome.value for outcome in outcomes)
    assert [world, there[0]] == [2, 2]
    assert [kind != "cpu", there[1] != "cpu"] == [not late_has_device, late_has_device]
    assert same(one, other)


def test_the_device_is_where_it_was_given(device: str) -> None:
    kinds = run(fake_device.load_if_given, 3, env_of=given(device, 1))
    assert [kind != "cpu" for kind in kinds] == [False, True, False]
