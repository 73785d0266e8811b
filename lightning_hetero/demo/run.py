"""One training of the demo: ``python -m lightning_hetero.demo.run STRATEGY EPOCHS RESULT``, which starts its ranks."""

import logging
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.callbacks.emulation import EmulatedSpeed
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.demo.demo import DEVICES, GLOBAL_BATCH, DigitReader, Result, Step, digits
from lightning_hetero.strategies.algorithms import DASOStrategy
from lightning_hetero.strategies.replica import ReplicaStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


def train(name: str, epochs: int, path: Path) -> None:
    """Train under the strategy of this name, and leave a :class:`~lightning_hetero.demo.demo.Result` at ``path``."""
    seed_everything(1, verbose=False)
    training, testing = digits()
    stopwatch = Stopwatch()
    callbacks = [EmulatedSpeed(DEVICES), stopwatch, Bar(name)]
    if name.startswith("hetero"):
        callbacks.insert(0, HeteroMonitor(path.with_suffix("")))  # its report lies beside the result
    trainer = Trainer(
        strategy=DASOStrategy(ranks_per_node=2) if name == "hetero_daso" else name,
        accelerator="cpu",
        devices=len(DEVICES),
        max_epochs=epochs,
        callbacks=callbacks,
        plugins=LightningEnvironment(),  # these ranks are started here, whatever launcher this runs under
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = DigitReader()
    share = GLOBAL_BATCH // len(DEVICES)  # what each rank takes, unless a strategy splits the batches otherwise
    trainer.fit(model, DataLoader(training, batch_size=share, shuffle=True, drop_last=True))
    [metrics] = trainer.test(model, DataLoader(testing, batch_size=share), verbose=False)
    if trainer.is_global_zero:
        Result(name, metrics["accuracy"], stopwatch.ranks).save(path)


class Stopwatch(Callback):
    """Times each step of each rank, alike under every strategy.

    Attributes:
        ranks: the steps of every rank, once training has ended.
    """

    def __init__(self) -> None:
        self.ranks: list[list[Step]] = []
        self._steps: list[Step] = []
        self._timer = StepTimer(torch.device("cpu"))
        self._start = 0.0
        self._exposed = 0.0  # seconds so far

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.time()  # one clock for all processes of this machine
        self._timer.restart()

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor) -> None:
        """The rank's own work ends when its last gradient is ready."""
        self._timer.watch(loss)

    @override
    def on_after_backward(self, *_: Any) -> None:
        """All ranks' gradients are here."""
        self._timer.backward_done()

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        [(samples, work, wait, *_)] = self._timer.end_step(len(batch[0]))
        if isinstance(trainer.strategy, ReplicaStrategy):  # it waits for other nodes after the optimizer's step
            exposed = trainer.strategy.traffic.exposed
            work, wait = work - (exposed - self._exposed), wait + exposed - self._exposed
            self._exposed = exposed
        self._steps.append(Step(trainer.current_epoch, self._start, int(samples), work, wait))

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.ranks = [[]] * trainer.world_size
        torch.distributed.all_gather_object(self.ranks, self._steps)


class Bar(TQDMProgressBar):
    """Lightning's progress bar, labelled, and for training only.

    Args:
        label: what is being trained.
    """

    def __init__(self, label: str) -> None:
        super().__init__(refresh_rate=2)
        self.BAR_FORMAT = f"{label}: {{desc}}{{bar}}| {{n_fmt}}/{{total_fmt}} [{{rate_noinv_fmt}}{{postfix}}]"

    @override
    def get_metrics(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> dict[str, Any]:
        """Leave out what the bar's batches per second say already, and more, so that it fits into a narrow terminal."""
        metrics = dict(super().get_metrics(trainer, pl_module))
        for name in ("samples/s", "global_every", "wait"):
            metrics.pop(name, None)
        return metrics

    @override
    def on_test_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """The test takes a moment; the table has its result."""
        self.disable()
        super().on_test_start(trainer, pl_module)


if __name__ == "__main__":
    # Lightning's advice on seeds, workers and samplers is for larger jobs.
    for source in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(source).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", PossibleUserWarning)
    warnings.simplefilter("ignore", FutureWarning)
    name, count, result = sys.argv[1:]
    train(name, int(count), Path(result))
