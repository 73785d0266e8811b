"""A loss or gradient that is not finite on one rank: an error before the step, or its samples are left out."""

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from oracles import oracle
from ranks import run
from tasks import FAST, GanLike, Net, dataset, error, fit, parameters
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.errors import NotFiniteError

SHARES = [3.0, 1.0, 2.0]  # of 12 samples three ranks take 6, 2 and 4
FIXED = {"balance": SHARES}


class BrokenLoss(Net):
    """The loss of some ranks is not finite at a batch."""

    at, ranks = 4, (1,)

    def breaks(self, batch_idx: int) -> bool:
        return self.current_epoch == 0 and batch_idx == self.at and self.global_rank in self.ranks

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.break_loss(loss) if self.breaks(batch_idx) else loss

    def break_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan")


class InfiniteLoss(BrokenLoss):
    ranks = (0, 2)

    def break_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss + float("inf")  # its gradient is finite


class BrokenGradient(BrokenLoss):
    """Has a gradient that is not finite; its loss is."""

    def break_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss + (0 * self.net[2].weight.sum()).sqrt()


class BrokenByHand(BrokenLoss, GanLike):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        if self.breaks(batch_idx):
            self.manual_backward(Net.loss(self, batch) * float("nan") + self.critic(batch[0][:, :1]).sum())
            first.step()
        GanLike.training_step(self, batch, batch_idx)


class Spy(pl.Callback):
    """Keeps the weights after each batch, and those at an exception."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.left: torch.Tensor | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights.append(parameters(pl_module))

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.left = parameters(pl_module)


def _breaks(make: Any, folder: str, **options: Any) -> dict[str, Any]:
    spy = Spy()
    callbacks: dict[str, Any] = {"callbacks": [spy]}
    if make is not BrokenByHand:
        keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
        callbacks = {"callbacks": [spy, keep], "enable_checkpointing": True}
    with pytest.raises(NotFiniteError) as caught:
        fit(make, 12, **callbacks, **options)
    return {"error": str(caught.value), "path": spy.weights, "left": spy.left}


FILES: list[tuple[Any, dict[str, Any], int, str]] = [  # model, options, number of batches, words of the error
    (BrokenLoss, {"strategy": FIXED}, 4, "At step 5 (epoch 0, batch 4) the loss of rank 1 was not finite"),
    (InfiniteLoss, {"strategy": FIXED}, 4, "the losses of ranks 0, 2 were not finite"),
    (BrokenGradient, {}, 4, "the gradient of rank 1 was not finite although the loss was, first in 'net.2.weight'"),
    (
        BrokenLoss,
        {"strategy": FIXED, "accumulate_grad_batches": 3},
        5,
        "At step 2 (epoch 0, batch 5) the loss of rank 1",
    ),
    (BrokenGradient, {"accumulate_grad_batches": 3}, 5, "the gradient of rank 1"),
    (BrokenByHand, {"strategy": {"find_unused_parameters": True}}, 4, "the loss of rank 1 was not finite"),
]


def _break_all(folder: str) -> list[Any]:
    results = [_breaks(make, f"{folder}/{i}", **options) for i, (make, options, *_) in enumerate(FILES)]
    return [*results, fit(BrokenLoss, 12, strategy={"on_nan": "ignore"}, max_epochs=1)]


def test_all_ranks_say_which_before_the_optimizer_steps(tmp_path: Path) -> None:
    for *results, ignored in run(_break_all, 3, str(tmp_path)):
        for result, (_, _, steps, words) in zip(results, FILES, strict=True):
            assert words in result["error"]
            assert "on_nan='skip'" in result["error"]
            assert len(result["path"]) == steps
            assert torch.equal(result["left"], result["path"][-1])
            assert result["left"].isfinite().all()
        assert ignored["steps"] == 9
        assert not ignored["parameters"].isfinite().all()
    for path in tmp_path.glob("*/*.ckpt"):
        assert all(value.isfinite().all() for value in torch.load(path, weights_only=True)["state_dict"].values())


def _alone(folder: str) -> list[dict[str, Any]]:
    BrokenLoss.ranks = (0,)
    return [_breaks(make, f"{folder}/{make.__name__}") for make in (BrokenLoss, BrokenGradient)]


def test_of_one_rank(tmp_path: Path) -> None:
    [results] = run(_alone, 1, str(tmp_path))
    for what, result in zip(("loss", "gradient"), results, strict=True):
        assert f"the {what} of rank 0 was not finite" in result["error"]
        assert torch.equal(result["left"], result["path"][-1])


# -- what is no error ----------------------------------------------------------------------------------------


class LogsWithoutSamples(Net):
    """The loss of rank 1, which has no sample, is not finite, and is logged."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (float("nan") if self.global_rank == 1 else 1.0)


class RepairsGradients(BrokenGradient):
    """Repairs its gradients itself."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.nan_to_num_(0.0)


def _harmless() -> list[dict[str, Any]]:
    results = []
    for mode in ("error", "skip"):
        results.append(fit(LogsWithoutSamples, 12, strategy={"balance": [3.0, 0.0, 1.0], "on_nan": mode}))
        results.append(fit(RepairsGradients, 12, strategy={"on_nan": mode}))
    return results


def test_padding_and_mended_gradients_are_no_error() -> None:
    truth = oracle(Net, 12)
    for results in run(_harmless, 3):
        for padded, mended in (results[:2], results[2:]):
            assert error(padded["parameters"], parameters(truth)) <= 1e-10
            logged = {name: value.item() for name, value in truth.trainer.callback_metrics.items()}
            assert padded["metrics"] == pytest.approx(logged, rel=1e-10)
            assert mended["parameters"].isfinite().all()


class Exploding(Net):
    """Its loss is not finite at large learning rates."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss if self.trainer.optimizers[0].param_groups[0]["lr"] < 0.1 else loss * float("nan")


def _searched(folder: str) -> Any:
    warnings.filterwarnings("ignore", "`weights_only` was not set")
    module, chosen = Exploding(), HeteroDDPStrategy(timeout=30)
    trainer = pl.Trainer(strategy=chosen, **{**FAST, "max_epochs": 1, "default_root_dir": folder})
    data = DataLoader(dataset(48), batch_size=4)
    found = Tuner(trainer).lr_find(module, data, num_training=6, early_stop_threshold=None, update_attr=False)
    trainer.fit(module, data)
    return [found.results["loss"][-1], parameters(module)]


def test_a_search_for_a_learning_rate_may_end_in_infinity(tmp_path: Path) -> None:
    for last, weights in run(_searched, 2, str(tmp_path)):
        assert not math.isfinite(last)
        assert weights.isfinite().all()


def _scaled() -> list[dict[str, Any]]:
    results = []
    for mode in ("error", "skip"):
        # Gradients are infinite until the scale has been lowered a few times.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-6)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        make = partial(Net, dtype=torch.float32)
        result = fit(make, 12, dtype=torch.float32, strategy={"on_nan": mode}, plugins=[plugin])
        results.append({**result, "scale": scaler.get_scale()})
    return results


def test_infinite_gradients_are_a_scalers_business() -> None:
    for results in run(_scaled, 2):
        for result in results:
            assert 1 <= result["scale"] <= 2.0**28
            assert result["parameters"].isfinite().all()
            assert error(result["parameters"], parameters(Net(dtype=torch.float32))) > 1e-3
