"""In the background a checkpoint is noted at its step, copied until the next one changes it, and written meanwhile."""

import os
import time
import warnings
from collections.abc import Callable
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
from lightning_hetero.callbacks import ResumableCheckpoint
from lightning_hetero.strategies import copies
from lightning_hetero.strategies.apart import Apart
from lightning_hetero.strategies.checkpoint_io import AtomicCheckpointIO

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
    """Lets no checkpoint be left out: before each one, the one before is complete."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        keeps = trainer.checkpoint_callbacks[0]
        while trainer.global_step % EVERY == EVERY - 1 and keeps._beside.files.busy:
            time.sleep(0.01)


class Buffered(Dropping):
    """With statistics that forward passes change, a tied and a frozen parameter, and Adam's moments."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.norm = torch.nn.BatchNorm1d(8).double()
        self.tied, self.frozen = self.net[0], torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        x, y, *_ = batch
        return super().loss((self.norm(x), y))


class Clamped(Dropping):
    """Writes to its parameters between two steps, past autograd."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def _only_before_the_step(self: copies.Copies) -> None:
    while self._left:
        time.sleep(0.001)
    time.sleep(0.01)
    self.finish()


def _some_at_once(self: copies.Copies) -> None:
    for _ in range(5):
        with self._copying:
            self._take(self._left)
    _only_before_the_step(self)


def fit(folder: str, kind: Any, module: Any, *callbacks: pl.Callback, **options: Any) -> Tensor:
    warnings.filterwarnings("ignore", "Replicas have not met")  # saved more often than they meet
    keeps = ResumableCheckpoint(folder, every_n_steps=EVERY, keep=50, background=options.pop("background", True))
    strategy = kind[0](balance=[2.0, 1.0], global_batch_size=12, checkpoint_io=options.pop("io", None), **kind[1])
    settings = {**FAST, "enable_checkpointing": True, "max_steps": STEPS, "callbacks": [*callbacks, Waits(), keeps]}
    trainer = pl.Trainer(strategy=strategy, **settings)
    model = module()
    torch.manual_seed(trainer.global_rank)  # each rank drops out other units
    trainer.fit(model, DataLoader(dataset(132), batch_size=4, shuffle=True), **options)
    return parameters(model)


def _both(folder: str, kind: Any, module: Any, work: Callable | None) -> Tensor:
    waits = fit(f"{folder}/waits", kind, module, background=False)
    if work is not None:
        copies.PIECE, copies.Copies.work = 7, work
    noted: list[bool] = []
    save = Apart.save

    def counted(*arguments: Any) -> Any:
        noted.append(True)
        return save(*arguments)

    Apart.save = counted
    assert torch.equal(waits, fit(f"{folder}/apart", kind, module))
    assert len(noted) == STEPS // EVERY  # this is what has been tested
    return waits


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


@pytest.mark.parametrize("work", [None, _only_before_the_step, _some_at_once], ids=["thread", "step", "both"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(KINDS[name], id=name, marks=[pytest.mark.long] * (name not in ("ddp", "diloco"))) for name in KINDS],
)
def test_files_are_those_of_a_fit_that_waits(tmp_path: Path, kind: Any, work: Any) -> None:
    run(_both, 2, str(tmp_path), kind, Buffered, work, nodes=[1, 1])
    for step in range(EVERY, STEPS, EVERY):
        waits, apart = (_load(tmp_path / how / f"step={step}.ckpt") for how in ("waits", "apart"))
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks"):
            assert _same(waits[key], apart[key]), key
        ours = [one["lightning_hetero"] for one in (waits, apart)]
        assert ours[0].keys() == ours[1].keys()
        assert _same(ours[0]["random"], ours[1]["random"])
        replicas = [one.get("replicas", {}) for one in ours]
        assert _same(*({**one, "save": ""} for one in replicas))
        for id in replicas[0].get("ids", []):
            shards = [
                _load(tmp_path / how / f"step={step}.ckpt.shards" / f"replica-{id}-{one['save']}.pt")
                for how, one in zip(("waits", "apart"), replicas, strict=True)
            ]
            assert _same(*shards), (step, id)


@pytest.mark.parametrize("kind", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_what_is_written_between_two_steps_is_not_in_it(tmp_path: Path, kind: Any) -> None:
    run(_both, 2, str(tmp_path), kind, Clamped, _only_before_the_step, nodes=[1, 1])
    for step in range(EVERY, STEPS, EVERY):
        waits, apart = (_load(tmp_path / how / f"step={step}.ckpt")["state_dict"] for how in ("waits", "apart"))
        assert _same(waits, apart)
        assert max(value.abs().max() for value in apart.values()) > 0.2  # the step has moved it since it was clamped


def _resumed(folder: str, kind: Any) -> Any:
    copies.PIECE, copies.Copies.work = 7, _some_at_once
    whole = fit(f"{folder}/whole", kind, Dropping)
    path = f"{folder}/whole/step={2 * EVERY}.ckpt"
    return whole, fit(f"{folder}/again", kind, Dropping, ckpt_path=path)


@pytest.mark.parametrize("kind", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_a_resumed_run_ends_as_if_never_stopped(tmp_path: Path, kind: Any) -> None:
    for whole, again in run(_resumed, 2, str(tmp_path), kind, nodes=[1, 1]):
        assert torch.equal(whole, again)


def _unguarded(folder: str, kind: Any) -> None:
    copies.Copies.work = lambda self: (time.sleep(0.2), self.finish())
    Apart.finish_copies = Apart.finish_copies_for_step = lambda *_: None
    fit(folder, kind, Dropping)


@pytest.mark.parametrize("kind", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_without_the_guard_nothing_is_saved(tmp_path: Path, kind: Any) -> None:
    for outcome in attempt(_unguarded, 2, str(tmp_path), kind, nodes=[1, 1]):
        assert "CheckpointError" in outcome.trace
        assert "parameters were written to after the step" in str(outcome.error)
    assert not list(tmp_path.glob("*.ckpt"))


class Broken(AtomicCheckpointIO):
    """A disk of one rank that is full."""

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
