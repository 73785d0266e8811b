"""In the background a checkpoint is copied at its step, and completed and written while training goes on."""

import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST, Dropping, dataset, parameters
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy, DiLoCoStrategy, EASGDStrategy, HeteroDDPStrategy
from lightning_hetero.callbacks.resumable import ResumableCheckpoint
from lightning_hetero.checkpoint.consensus import BackgroundConsensus
from lightning_hetero.checkpoint.writer import AtomicCheckpointIO, BackgroundWriter

DDP, DILOCO, EASGD = (
    (HeteroDDPStrategy, {}),
    (DiLoCoStrategy, {"tau": 4}),
    (EASGDStrategy, {"tau": 4, "moving_rate": "auto"}),
)
STREAMING = DiLoCoStrategy, {"tau": 6, "fragments": 2, "delay": 2}
DASO = DASOStrategy, {"warmup": 2, "cooldown": 2}
EVERY, STEPS = 3, 16
MEASURED = ("lasted", "payloads")  # seconds


class Waits(pl.Callback):
    """Waits before each checkpoint for the one before, so that none is left out."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        keeps = trainer.checkpoint_callbacks[0]
        while trainer.global_step % EVERY == EVERY - 1 and keeps._session.writer.busy:
            time.sleep(0.01)


class Buffered(Dropping):
    """Has statistics that forward passes change, a tied and a frozen parameter, and Adam's moments."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.norm = torch.nn.BatchNorm1d(8).double()
        self.tied, self.frozen = self.net[0], torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        x, y, *_ = batch
        return super().loss((self.norm(x), y))


class Clamped(Dropping):
    """Writes to its parameters between two steps, past autograd."""

    def on_train_batch_start(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def _writes_late() -> None:
    """Delay background threads until the next steps have changed everything."""
    write = BackgroundWriter._write

    def late(*arguments: Any) -> None:
        time.sleep(0.1)
        write(*arguments)

    BackgroundWriter._write = late  # type: ignore[method-assign]


def fit(folder: str, kind: Any, module: Any, *callbacks: pl.Callback, **options: Any) -> Tensor:
    warnings.filterwarnings("ignore", "Replicas have not met")  # replicas save more often than they meet
    keeps = ResumableCheckpoint(folder, every_n_steps=EVERY, keep=50, background=options.pop("background", True))
    strategy = kind[0](balance=[2.0, 1.0], global_batch_size=12, checkpoint_io=options.pop("io", None), **kind[1])
    settings = {**FAST, "enable_checkpointing": True, "max_steps": STEPS, "callbacks": [*callbacks, Waits(), keeps]}
    trainer = pl.Trainer(strategy=strategy, **settings)
    model = module()
    torch.manual_seed(trainer.global_rank)  # ranks drop out different units
    trainer.fit(model, DataLoader(dataset(132), batch_size=4, shuffle=True), **options)
    return parameters(model)


def _both(folder: str, kind: Any, module: Any, *callbacks: pl.Callback) -> tuple[Tensor, int]:
    """Save at the step, and in the background; returns the number of times that a thread computed the consensus."""
    waits = fit(f"{folder}/waits", kind, module, *callbacks, background=False)
    _writes_late()
    found: list[bool] = []
    find = BackgroundConsensus._find

    def counted(*arguments: Any) -> Any:
        found.append(True)
        return find(*arguments)

    BackgroundConsensus._find = counted  # type: ignore[method-assign]
    assert torch.equal(waits, fit(f"{folder}/background", kind, module, *callbacks))
    return waits, len(found)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one if key not in MEASURED)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or (one != one and other != other)  # NaN


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


KINDS = {"ddp": DDP, "diloco": DILOCO, "easgd": EASGD, "streaming": STREAMING, "daso": DASO}


def _remembers(folder: str) -> None:
    for name, background in (("waits", False), ("background", True)):
        fit(f"{folder}/{name}", (HeteroDDPStrategy, {"wire": "int8"}), Dropping, background=background)


def test_what_gradients_have_left_out_is_in_the_files_too(tmp_path: Path) -> None:
    run(_remembers, 2, str(tmp_path), nodes=[1, 1])
    for step in range(EVERY, STEPS, EVERY):
        waits, other = (_load(tmp_path / how / f"step={step}.ckpt") for how in ("waits", "background"))
        assert waits["lightning_hetero"]["gradients"]
        assert _same(waits["lightning_hetero"]["gradients"], other["lightning_hetero"]["gradients"])


def _are_the_same(folder: Path) -> None:
    for step in range(EVERY, STEPS, EVERY):
        waits, other = (_load(folder / how / f"step={step}.ckpt") for how in ("waits", "background"))
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks"):
            assert _same(waits[key], other[key]), key
        ours = [one["lightning_hetero"] for one in (waits, other)]
        assert ours[0].keys() == ours[1].keys()
        assert _same(ours[0]["random"], ours[1]["random"])
        replicas = [one.get("replicas", {}) for one in ours]
        assert _same(*({**one, "save": ""} for one in replicas))
        for id in replicas[0].get("ids", []):
            shards = [
                _load(folder / how / f"step={step}.ckpt.shards" / f"replica-{id}-{one['save']}.pt")
                for how, one in zip(("waits", "background"), replicas, strict=True)
            ]
            assert _same(*shards), (step, id)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(KINDS[name], id=name, marks=[pytest.mark.long] * (name not in ("ddp", "diloco"))) for name in KINDS],
)
def test_files_are_those_of_a_fit_that_waits(tmp_path: Path, kind: Any) -> None:
    saves = 0 if kind is DDP else STEPS // EVERY  # and when the run is complete all replicas are equal
    for _, found in run(_both, 2, str(tmp_path), kind, Buffered, nodes=[1, 1]):
        assert found == saves
    _are_the_same(tmp_path)


class Looks(pl.Callback):
    """Reads the weights that are saved."""

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["sum"] = sum(float(value.double().sum()) for value in checkpoint["state_dict"].values())


def test_who_looks_at_the_weights_sees_the_consensus(tmp_path: Path) -> None:
    for _, found in run(_both, 2, str(tmp_path), DILOCO, Buffered, Looks(), nodes=[1, 1]):
        assert found == 0
    _are_the_same(tmp_path)
    first = _load(tmp_path / "background" / f"step={EVERY}.ckpt")
    assert first["sum"] == sum(float(value.double().sum()) for value in first["state_dict"].values())


@pytest.mark.parametrize("kind", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_what_is_written_between_two_steps_is_not_in_it(tmp_path: Path, kind: Any) -> None:
    run(_both, 2, str(tmp_path), kind, Clamped, nodes=[1, 1])
    _are_the_same(tmp_path)
    for step in range(EVERY, STEPS, EVERY):
        weights = _load(tmp_path / "background" / f"step={step}.ckpt")["state_dict"]
        assert max(value.abs().max() for value in weights.values()) > 0.2  # the step has moved it since it was clamped


class Broken(AtomicCheckpointIO):
    """A plugin of a rank whose disk is full."""

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        if int(os.environ["RANK"]) == 1:
            raise OSError("no room")
        super().save_checkpoint(*arguments, **options)


def test_all_ranks_end_if_one_cannot_write(tmp_path: Path) -> None:
    first, second = attempt(fit, 2, str(tmp_path), DILOCO, Dropping, io=Broken(), nodes=[1, 1])
    assert "CheckpointError" in first.trace
    assert "rank 1 could not save: no room" in str(first.error)
    assert "no room" in str(second.error)
    assert not list(tmp_path.glob("*.ckpt"))


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == EVERY and trainer.global_rank == 1:
            raise ValueError("of my own")


@pytest.mark.parametrize("kind", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_nobody_waits_for_a_rank_that_has_failed(tmp_path: Path, kind: Any) -> None:
    began = time.monotonic()
    first, second = attempt(fit, 2, str(tmp_path), kind, Dropping, Fails(), nodes=[1, 1])
    assert "of my own" in str(second.error)
    assert "rank 1 failed with ValueError: of my own" in str(first.error)
    assert time.monotonic() - began < 30
