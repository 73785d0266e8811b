"""Lightning's `ddp*` names taken over: models, loops and logs give the results of Lightning's own strategy.

Each job runs twice, with Lightning's strategy as the oracle, and with ours under the same name and uneven shares.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from namesakes import both
from tasks import FAST, EvaluatedNet, Memory, Net, dataset, parameters
from torch import nn
from torch.utils.data import DataLoader

TOLERANCE = {"rtol": 0.0, "atol": 1e-10}


def training_data(samples: int = 96) -> DataLoader:
    return DataLoader(dataset(samples), batch_size=4, shuffle=True)


def other_data(samples: int = 40) -> DataLoader:
    return DataLoader(dataset(samples), batch_size=4)


def trainer_of(strategy: Any = "ddp", **options: Any) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, devices=2, **{**FAST, "max_epochs": 2, **options})


# -- models --------------------------------------------------------------------------------------------------


class Unused(Net):
    """Has a parameter that is used in every second loss only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 1).double()

    def loss(self, batch: Any) -> torch.Tensor:
        extra = self.extra(batch[0]).square().mean() if len(self.seen) % 2 else 0.0
        return super().loss(batch) + extra


class Tied(Net):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.second.weight = self.first.weight

    def loss(self, batch: Any) -> torch.Tensor:
        x, *rest = batch
        return super().loss((self.second(self.first(x).tanh()), *rest))


class Configured(Net):
    """Makes its layers once the strategy asks for them."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Net().net


class Ignored(Net):
    """Has a buffer that DDP is to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(1))
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.own += self.global_rank
        return super().training_step(batch, batch_idx)


class ByHand(Net):
    """One optimizer, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def _models() -> dict[str, Any]:
    entry = StrategyRegistry["ddp"]
    found = {}
    for model, strategy, options in (
        (Unused, "ddp_find_unused_parameters_true", {}),
        (Tied, "ddp", {}),
        (Configured, "ddp", {}),
        (Ignored, "ddp", {}),
        (Net, None, {"static_graph": True, "gradient_as_bucket_view": True}),
        (ByHand, None, {"static_graph": True}),
    ):
        module = model()
        trainer = trainer_of(strategy or entry["strategy"](**entry["init_params"], **options))
        trainer.fit(module, training_data())
        found[model.__name__] = parameters(module)
        if model is Ignored:
            found["own"] = module.own
    return found


def test_models_and_options_of_ddp() -> None:
    for theirs, ours in zip(*both(_models), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


# -- loops ---------------------------------------------------------------------------------------------------


def spy() -> tuple[pl.Callback, list[str]]:
    """A callback that records calls of its hooks, and the record."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *_, **__: calls.append(name)

    hooks = [name for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction) if name.startswith("on_")]
    return type("Spy", (pl.Callback,), {name: noting(name) for name in (*hooks, "setup", "teardown")})(), calls


class Asking(EvaluatedNet):
    def configure_optimizers(self) -> Any:
        self.numbers = [self.trainer.estimated_stepping_batches, self.trainer.num_training_batches]
        return super().configure_optimizers()


LOOPS: dict[str, dict[str, Any]] = {
    "everything": {"accumulate_grad_batches": 2, "val_check_interval": 6, "gradient_clip_val": 1.0},
    "accumulation that changes": {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]},
    "few batches again and again": {"overfit_batches": 2},
    "fresh loaders": {"reload_dataloaders_every_n_epochs": 1},
    "seldom validation": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "steps": {"max_steps": 7, "max_epochs": -1},
    "parts of an epoch": {"limit_train_batches": 0.5, "val_check_interval": 0.5, "limit_val_batches": 0.5},
    "a trial": {"fast_dev_run": 3},
}


def _loops() -> dict[str, Any]:
    warnings.filterwarnings("ignore", "You requested to overfit but enabled")
    found = {}
    for name, options in LOOPS.items():
        callback, calls = spy()
        module = EvaluatedNet() if "callbacks" in options else Asking()  # Asking would raise there
        trainer = trainer_of(**{**options, "callbacks": [*options.get("callbacks", ()), callback]})
        trainer.fit(module, training_data(), other_data())
        if name == "everything":
            trainer.validate(module, other_data(), verbose=False)
            trainer.test(module, other_data(), verbose=False)
            trainer.predict(module, other_data())
        numbers = getattr(module, "numbers", None)
        found[name] = parameters(module), calls, numbers, trainer.global_step, trainer.current_epoch
    return found


@pytest.mark.long
def test_loops_and_their_hooks() -> None:
    for theirs, ours in zip(*both(_loops), strict=True):
        for name in LOOPS:
            assert ours[name][1:] == theirs[name][1:], name
            torch.testing.assert_close(ours[name][0], theirs[name][0], **TOLERANCE, msg=name)


class Stopping(EvaluatedNet):
    """Logs a metric that improves only on rank 0 (and in the mean), and one that gets worse on both ranks."""

    def on_validation_epoch_end(self) -> None:
        self.log("mine", -float(self.current_epoch) if self.global_rank == 0 else 1.0)
        self.log("ours", 1.0 + 0.1 * self.current_epoch, sync_dist=True)


def _stopping(monitors: dict[str, int]) -> tuple[Any, ...]:
    warnings.filterwarnings("ignore", "It is recommended to use `self.log\\('mine'")
    callbacks = [EarlyStopping(name, patience=patience) for name, patience in monitors.items()]
    trainer = trainer_of(max_epochs=9, callbacks=callbacks)
    trainer.fit(Stopping(), training_data(), other_data())
    return trainer.current_epoch, [callback.stopped_epoch for callback in callbacks]


def test_all_stop_at_the_same_time() -> None:
    theirs, ours = both(_stopping, {"ours": 4, "val": 9})
    assert ours == theirs == [(5, [4, 0])] * 2
    # With a metric that is not synchronised, ddp stops when one rank would; here all ranks use its mean.
    theirs, ours = both(_stopping, {"mine": 2, "ours": 4, "val": 9})
    assert theirs == [(3, [2, 0, 0])] * 2
    assert ours == [(5, [0, 4, 0])] * 2


# -- logs ----------------------------------------------------------------------------------------------------


class Rows(Memory):
    """Keeps what rank 0 logs."""

    log_metrics = rank_zero_only(Memory.log_metrics)


class Logging(EvaluatedNet):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        both_times = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("largest", float(batch_idx + self.global_rank), reduce_fx="max", **both_times)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", prog_bar=True, **both_times)
        self.log("everyone's", 2.0)
        if self.trainer.is_global_zero:
            self.log("rank 0's", 3.0, rank_zero_only=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank), sync_dist=True, batch_size=1)  # else by the samples of each rank
        self.log("last rank", self.global_rank, sync_dist=True, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("ranks", 1.0, sync_dist=True, reduce_fx="sum")


class TwoLoaders(EvaluatedNet):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx)


def _logs() -> dict[str, Any]:
    module, logger = Logging(), Rows()
    trainer = trainer_of(logger=logger, log_every_n_steps=2, val_check_interval=6)
    trainer.fit(module, training_data(), other_data())
    return {
        "rows": [(-1 if step is None else step, row) for step, row in logger.rows],
        "callbacks": {name: value.double() for name, value in trainer.callback_metrics.items()},
        "progress bar": {name: float(value) for name, value in trainer.progress_bar_metrics.items()},
        "validation": trainer.validate(module, other_data(), verbose=False),
        "test": trainer.test(TwoLoaders(), [other_data(), other_data(24)], verbose=False),
    }


def test_what_is_logged() -> None:
    theirs, ours = both(_logs)
    for left, right in zip(theirs, ours, strict=True):
        torch.testing.assert_close(right, left, **TOLERANCE)
    assert ours[0]["rows"]
    assert not ours[1]["rows"]  # rank 1 logs nothing
