"""Values that callbacks and schedulers use: means over all samples, equal on all ranks, however they were logged."""

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from ranks import run
from tasks import FAST, ChangePlan, Net, dataset
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy

SAMPLES = 30
SHARES = [3.0, 1.0]  # of two ranks
NUMBERS = np.arange(SAMPLES, dtype=np.float64)


class Watches(pl.Callback):
    """A callback of a user's that keeps the values that it gets."""

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.seen: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and self.monitor in trainer.callback_metrics:
            self.seen.append(trainer.callback_metrics[self.monitor].item())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.monitor in trainer.callback_metrics:
            self.seen.append(trainer.callback_metrics[self.monitor].item())


class Unsynced(Net):
    """Logs each rank's own values."""

    def __init__(self, **log: Any) -> None:
        super().__init__()
        self.log_options, self.numbers = log, list[list[float]]()

    def on_validation_epoch_start(self) -> None:
        self.numbers.append([])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.numbers[-1] += batch[0].tolist()
        for reduction in ("mean", "min", "max", "sum"):
            value = getattr(batch[0], reduction)()
            self.log(f"val_{reduction}", value, reduce_fx=reduction, **self.log_options)

    def on_validation_epoch_end(self) -> None:
        self.log("after", float(self.global_rank))


def _train(callbacks: list[pl.Callback], module: pl.LightningModule, strategy: Any = None, **options: Any) -> Any:
    warnings.filterwarnings("ignore", "It is recommended to use `self.log")  # Lightning, where nothing is monitored
    trainer = pl.Trainer(
        strategy=strategy or HeteroDDPStrategy(balance=SHARES),
        **{**FAST, "max_epochs": 2, "callbacks": callbacks, **options},
    )
    numbers = DataLoader(TensorDataset(torch.from_numpy(NUMBERS)), batch_size=4)
    validates = is_overridden("validation_step", module)
    trainer.fit(module, DataLoader(dataset(32), batch_size=4), numbers if validates else None)
    return trainer


def _validated(**log: Any) -> dict[str, Any]:
    names = [f"val_{reduction}" for reduction in ("mean", "min", "max", "sum")] + ["after"]
    watching = [Watches(name) for name in names]
    module = Unsynced(**log)
    trainer = _train([EarlyStopping("val_mean", patience=9), *watching], module)
    validated = trainer.validate(module, DataLoader(TensorDataset(torch.from_numpy(NUMBERS)), 4), verbose=False)
    seen = {callback.monitor: callback.seen for callback in watching}
    return {"seen": seen, "stopping": trainer.callbacks[0].best_score.item(), "validated": validated[0]}


@pytest.mark.parametrize("log", [{}, {"on_step": True, "on_epoch": True}], ids=["epoch", "both"])
def test_what_is_monitored_in_validation_is_of_all_samples(log: dict[str, Any]) -> None:
    truth = {f"val_{name}": getattr(NUMBERS, name)() for name in ("mean", "min", "max", "sum")} | {"after": 7 / 30}
    for result in run(_validated, 2, **log):
        for name, values in result["seen"].items():
            assert values, name
            assert values == pytest.approx([truth[name]] * len(values)), name
        assert result["stopping"] == pytest.approx(truth["val_mean"])
        assert result["validated"]["val_mean_epoch" if log else "val_mean"] == pytest.approx(truth["val_mean"])


class SeveralLoaders(Unsynced):
    def val_dataloader(self) -> list[Any]:
        parts = torch.from_numpy(NUMBERS).split([18, 12])
        return [DataLoader(TensorDataset(part), batch_size=4) for part in parts]


def _several() -> list[float]:
    warnings.filterwarnings("ignore", "It is recommended to use `self.log")  # Lightning, where nothing is monitored
    watching = Watches("val_mean/dataloader_idx_1")
    trainer = pl.Trainer(
        strategy=HeteroDDPStrategy(balance=SHARES), **{**FAST, "max_epochs": 2, "callbacks": [watching]}
    )
    trainer.fit(SeveralLoaders(), DataLoader(dataset(32), batch_size=4))
    return watching.seen


def test_of_several_loaders() -> None:
    for seen in run(_several, 2):
        assert seen
        assert seen == pytest.approx([NUMBERS[18:].mean()] * len(seen))


class TrainingValues(Net):
    """Logs in training values that only its own rank knows, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[tuple[float, int]]] = []

    def on_train_epoch_start(self) -> None:
        self.kept.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("latest", loss)  # of the step, as is the default in training
        self.log("both", loss, on_step=True, on_epoch=True)
        self.kept[-1].append((loss.item(), len(batch[0])))
        return loss

    def on_train_epoch_end(self) -> None:
        losses, sizes = zip(*self.kept[-1], strict=True)
        self.log("at_end", float(np.average(losses, weights=sizes)), batch_size=sum(sizes))


class Scores(ModelCheckpoint):
    """Keeps the scores by which it decides."""

    def __init__(self, **options: Any) -> None:
        super().__init__(save_top_k=-1, **options)
        self.scores: list[float] = []

    def check_monitor_top_k(self, trainer: pl.Trainer, current: torch.Tensor | None = None) -> bool:
        assert current is not None
        self.scores.append(current.item())
        return super().check_monitor_top_k(trainer, current)


def _trained(folder: str, diloco: bool) -> dict[str, Any]:
    names, module = ("latest", "both", "both_epoch", "at_end"), TrainingValues()
    by_epoch = {name: Scores(dirpath=f"{folder}/{name}", monitor=name, save_on_train_epoch_end=True) for name in names}
    by_step = Scores(dirpath=f"{folder}/steps", monitor="both_step", every_n_train_steps=2)
    strategy = DiLoCoStrategy(balance=SHARES, tau=2) if diloco else None
    _train([*by_epoch.values(), by_step], module, strategy, enable_checkpointing=True)
    return {
        "scores": {name: callback.scores for name, callback in by_epoch.items()},
        "steps": by_step.scores,
        "kept": module.kept,
        "paths": [callback.best_model_path for callback in by_epoch.values()],
    }


@pytest.mark.long(after=1)
@pytest.mark.parametrize("diloco", [False, True])
def test_what_is_monitored_in_training_is_of_all_samples(tmp_path: Any, diloco: bool) -> None:
    results = run(_trained, 2, str(tmp_path), diloco)
    epochs = [np.array(parts) for parts in zip(*(result["kept"] for result in results), strict=True)]
    steps = [np.average(step[:, 0], weights=step[:, 1]) for epoch in epochs for step in epoch.transpose(1, 0, 2)]
    whole = [np.average(epoch[..., 0], weights=epoch[..., 1]) for epoch in epochs]
    each = len(steps) // 2
    for result in results:
        assert result["scores"]["latest"] == pytest.approx(steps[each - 1 :: each])
        for name in ("both", "both_epoch", "at_end"):
            assert result["scores"][name] == pytest.approx(whole), name
        assert result["steps"] == pytest.approx(steps[1::2])
        assert result["paths"] == results[0]["paths"]


class Plateau(Net):
    """A scheduler on a value that each rank logs for itself: on rank 1 it rises, on rank 0 it falls."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("own", float(self.global_step) * (2 if self.global_rank else -1))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.current_epoch) * (2 if self.global_rank else -1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        monitor = "own" if self.interval == "step" else "val"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": monitor, "interval": self.interval},
        }


def _plateau(interval: str) -> float:
    trainer = _train([], Plateau(interval), HeteroDDPStrategy(balance="off"), max_epochs=3)
    return trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_plateau_is_the_same_on_all_ranks(interval: str) -> None:
    first, second = run(_plateau, 2, interval)
    assert first == second < 0.1  # the mean rises


class OnOneRank(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("val", torch.tensor(3.0 - self.current_epoch))


def _on_one_rank() -> tuple[list[float], float]:
    watching = Watches("val")
    trainer = _train([EarlyStopping("val", patience=9), watching], OnOneRank())
    return watching.seen, trainer.callbacks[0].best_score.item()


def test_a_key_that_one_rank_alone_has_logged() -> None:
    first, second = run(_on_one_rank, 2)
    assert first == second
    assert first[1] == 2.0


def _on_one_callback() -> float:
    # Only one rank has a callback.
    callbacks = [Watches("val_mean")] if os.environ["RANK"] == "1" else []
    return _train(callbacks, Unsynced()).callback_metrics["val_mean"].item()


def test_a_callback_that_one_rank_alone_has() -> None:
    assert run(_on_one_callback, 2) == pytest.approx([NUMBERS.mean()] * 2)


def _messages() -> list[str]:
    import logging

    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(Keep())
    _train([EarlyStopping("val_mean", patience=9)], Unsynced())
    return [message for message in messages if "val_mean" in message]


def test_it_is_said_once() -> None:
    first, second = run(_messages, 2)
    assert len(first) == 1
    assert "sync_dist" in first[0]
    assert not second


# -- which rank evaluates what -------------------------------------------------------------------------------


class KeepsSamples(Net):
    """Validates by the current shares; keeps the samples that it got in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[list[float]] = []

    def on_validation_epoch_start(self) -> None:
        self.parts.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.parts[-1] += batch[0].tolist()
        self.log("val", batch[0].mean())


class Faster(pl.Callback):
    """Makes one rank after the other the faster one."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        shares = [[3.0, 1.0], [1.0, 3.0], [5.0, 1.0]][trainer.current_epoch]
        ChangePlan({trainer.global_step: shares}).on_train_start(trainer, pl_module)


def _parts() -> list[list[float]]:
    module = KeepsSamples()
    _train([Faster()], module, HeteroDDPStrategy(balance="off"), max_epochs=3)
    return module.parts


def test_evaluation_parts_stay_the_same_in_a_fit() -> None:
    first, second = run(_parts, 2)
    for parts in zip(first, second, strict=True):
        assert sorted(parts[0] + parts[1]) == NUMBERS[: len(parts[0] + parts[1])].tolist()
    assert [len(part) for part in first[1:]] == [len(first[1])] * 3
    assert all(part == first[1] for part in first[1:])  # after the sanity check
    assert len(first[1]) > 2 * len(second[1])


# -- in which order ------------------------------------------------------------------------------------------


class Predicts(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> list[float]:
        return batch[0].tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0].tolist())


def _predicted(strategy: Any, samples: int, batch_size: int) -> tuple[Any, Any]:
    warnings.filterwarnings("ignore", "Using `DistributedSampler` with the dataloaders")  # Lightning, of ddp
    module, trainer = Predicts(), pl.Trainer(strategy=strategy, devices=2, **FAST)
    loader = DataLoader(TensorDataset(torch.arange(float(samples))), batch_size=batch_size)
    predicted = trainer.predict(module, loader)
    trainer.validate(module, loader, verbose=False)
    return predicted, module.seen


@pytest.mark.parametrize(("samples", "batch_size"), [(22, 4), (24, 4), (6, 1), (17, 4), (23, 4), (7, 3)])
def test_equal_parts_are_those_of_ddp(samples: int, batch_size: int) -> None:
    ours = run(_predicted, 2, HeteroDDPStrategy(balance="off"), samples, batch_size)
    for rank, (predicted, seen) in enumerate(ours):
        assert sorted(i for batch in predicted for i in batch) == list(range(rank, samples, 2))
        assert predicted == seen
    assert len({len(predicted) for predicted, _ in ours}) == 1
    if samples % 2 == 0:  # otherwise ddp repeats samples
        assert ours == run(_predicted, 2, "ddp", samples, batch_size)
