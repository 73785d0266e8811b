"""Losses and gradients that are not finite on accelerators: the device leaves the step out, the host learns later."""

import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import attempt, run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader
from torch.utils.data import SequentialSampler as InOrder

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.batching import nonfinite
from lightning_hetero.errors import NotFiniteError

STEPS, BATCH = 8, 6
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
ON_DEVICE = {"adamw", "sgd", "fused"}


class Model(Net):
    def __init__(self, optimizer: str, breaks: int = -1, what: str = "loss", rank: int = 1) -> None:
        super().__init__()
        self.kind, self.breaks, self.what, self.rank = optimizer, breaks, what, rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if batch_idx != self.breaks or int(os.environ["RANK"]) != self.rank:
            return loss
        return loss * float("nan") if self.what == "loss" else loss + (0 * self.net[2].weight.sum()).sqrt()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_after_backward(self) -> None:
        if self.what == "repaired":
            for p in self.parameters():
                p.grad.nan_to_num_(0.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](self.parameters())


class Spy(pl.Callback):
    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.left: torch.Tensor | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights.append(parameters(pl_module).cpu())

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.left = parameters(pl_module).cpu()


def _fit(model: Model, validates: bool = False, folder: str = "") -> tuple[str, list[torch.Tensor], Any, int]:
    warnings.filterwarnings("ignore", "Ranks .* share ")
    accelerator, spy, found = fake_device.load_if_given(), Spy(), ""
    ask, steps = nonfinite.leaves_out_on_device, 0

    def asked(optimizer: Any) -> bool:
        nonlocal steps
        steps += (leaves := ask(optimizer))
        return leaves

    nonfinite.leaves_out_on_device = asked  # type: ignore[assignment]
    saves = [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")] if folder else []
    world = int(os.environ["WORLD_SIZE"])
    settings = {
        **FAST,
        "accelerator": accelerator,
        "devices": 1,
        "num_nodes": world,
        "enable_checkpointing": bool(folder),
    }
    trainer = pl.Trainer(
        strategy=HeteroDDPStrategy(balance="off", timeout=60),
        max_steps=STEPS,
        val_check_interval=1,
        limit_val_batches=1.0 if validates else 0,
        num_sanity_val_steps=0,
        callbacks=[spy, *saves],
        **settings,
    )
    data = dataset(STEPS * BATCH * world)
    try:
        trainer.fit(model, DataLoader(data, BATCH, sampler=InOrder(data)), DataLoader(dataset(6), BATCH))
    except NotFiniteError as error:
        found = str(error)
    return found, spy.weights, spy.left if found else parameters(model).cpu(), steps


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_weights_are_those_from_before(device: str, optimizer: str, what: str) -> None:
    env = {"FAKE_LIBRARY": device}
    whole = run(_fit, 2, Model(optimizer), nodes=[1, 1], env=env)
    for (found, weights, left, steps), (nothing, healthy, *_) in zip(
        run(_fit, 2, Model(optimizer, 4, what), nodes=[1, 1], env=env), whole, strict=True
    ):
        assert not nothing
        assert f"At step 5 (epoch 0, batch 4) the {what} of rank 1 was not finite" in found
        assert "The optimizer has not stepped" in found
        assert torch.equal(left, weights[3])
        assert all(torch.equal(own, its) for own, its in zip(weights[:4], healthy, strict=False))
        assert len(weights) == (5 if optimizer in ON_DEVICE else 4)  # the host learns a step later
        assert (steps > 0) == (optimizer in ON_DEVICE)


def _weighed(dtype: torch.dtype, loss: float, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    where = fake_device.load_if_given()
    value = torch.tensor(loss, dtype=dtype, device=where, requires_grad=True)
    guard = nonfinite.NonFiniteGuard("error", [0], lambda: None, nullcontext, str, on_devices=True)
    weighed = guard.weigh(value, weight)
    weighed.backward()
    return weighed.detach().cpu().double(), value.grad.cpu().double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_is_weighed_as_precisely_as_on_a_cpu(device: str, dtype: torch.dtype) -> None:
    """A weight is not rounded to less than the loss's precision: 8 of 12 samples on one of two ranks weigh 4/3."""
    [(loss, gradient)] = run(_weighed, 1, dtype, 0.3, 4 / 3, env={"FAKE_LIBRARY": device})
    exact, rounding = torch.tensor(0.3, dtype=dtype).double() * (4 / 3), torch.finfo(dtype).eps
    assert abs(loss - exact) <= rounding * exact
    assert abs(gradient - 4 / 3) <= rounding * 4 / 3


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_is_spread(device: str, value: float) -> None:
    [(loss, gradient)] = run(_weighed, 1, torch.float32, value, 4 / 3, env={"FAKE_LIBRARY": device})
    assert loss.isnan()
    assert gradient.isnan()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_fused_form_takes_the_same_steps(device: str, optimizer: str) -> None:
    """The steps are those of one process on its CPU, to rounding."""
    [(_, _, alone, _)] = run(_fit, 1, Model(optimizer))
    [(_, _, final, steps)] = run(_fit, 1, Model(optimizer), env={"FAKE_LIBRARY": device})
    assert steps >= STEPS - 1
    assert (final - alone).abs().max() < 1e-12


def test_gradients_that_a_hook_has_repaired_are_taken(device: str) -> None:
    """The gradient was not finite, but the one that the optimizer gets is."""
    env = {"FAKE_LIBRARY": device}
    awaited = run(_fit, 2, Model("foreach", 4, "repaired"), nodes=[1, 1], env=env)
    left = run(_fit, 2, Model("adamw", 4, "repaired"), nodes=[1, 1], env=env)
    for (found, weights, *_), (_, others, *_) in zip(left, awaited, strict=True):
        assert not found
        assert len(weights) == STEPS
        assert all((own - its).abs().max() < 1e-12 for own, its in zip(weights, others, strict=True))


@pytest.mark.parametrize("where", ["end", "validation", "checkpoint"])
def test_the_host_learns_of_it_before_others_look(device: str, tmp_path: Path, where: str) -> None:
    """At the end of training, and before weights are validated or saved."""
    breaks = STEPS - 1 if where == "end" else 4
    folder = str(tmp_path / "saved") if where == "checkpoint" else ""
    env = {"FAKE_LIBRARY": device}
    for outcome in attempt(_fit, 2, Model("adamw", breaks), where == "validation", folder, nodes=[1, 1], env=env):
        assert outcome.value is not None, outcome.trace
        found, weights, left, _ = outcome.value
        assert f"At step {breaks + 1} (epoch 0, batch {breaks}) the loss of rank 1 was not finite" in found
        assert torch.equal(left, weights[breaks - 1])
    if folder:
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"step={n}.ckpt" for n in range(1, 5)]
