"""`hetero_daso`: gradients within a node, stale asynchronous mixing between nodes at an adaptive rate."""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hetero._lightning import epoch_ends
from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.daso import DASOAverager, Mixing
from lightning_hetero.averaging.schedule import RateSchedule
from lightning_hetero.checks import at_least_one, one_of
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.wire import DTYPES, Wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.replica import ReplicaStrategy


class DASOStrategy(ReplicaStrategy):
    """Averages gradients within each node at every step, and mixes nodes in the background between.

    In the warm-up and the cool-down nodes average at every step. Between, every B steps one rank of each node (in
    rotation) exchanges parameters while training goes on, and mixes them in W steps later. B and W are halved whenever
    the training loss stalls, and start over from the rarest exchange.

    Source: DASO, Coquelin et al. 2021.

    Args:
        warmup: length of the warm-up: a fraction of the run (float), optimizer steps (int), or ``"4 epochs"``.
        cooldown: length of the cool-down: a fraction, optimizer steps, or epochs, as for ``warmup``.
        global_every: first B, in optimizer steps.
        wait: first W, in optimizer steps; 0 is blocking; at most B. ``"auto"``: always the smallest that hides an
            exchange as measured, at most B.
        max_global_every: largest B.
        patience: looks at the loss without progress that make a plateau.
        threshold: relative fall of the loss that counts as progress.
        schedule_every_n_steps: optimizer steps between two looks at the loss. Default: an epoch.
        monitor: a logged metric to watch instead of the training loss; smaller is better.
        mixing: ``"daso"``, the paper's rule, or ``"delta"``, which keeps the nodes' progress since the exchange began.
        wire: number format of background exchanges: ``"fp32"``, ``"bf16"`` or ``"fp16"``; sums are taken in fp32.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.replica.ReplicaStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(
        self,
        warmup: float | int | str = 0.1,
        cooldown: float | int | str = 0.1,
        global_every: int = 4,
        wait: int | Literal["auto"] = 1,
        max_global_every: int = 8,
        patience: int = 2,
        threshold: float = 0.05,
        schedule_every_n_steps: int | None = None,
        monitor: str | None = None,
        mixing: Mixing = "daso",
        wire: Wire = "fp32",
        **kwargs: Any,
    ) -> None:
        RateSchedule(global_every, wait, max_global_every, patience, threshold)  # raises now
        one_of("mixing", mixing, ("daso", "delta"))
        one_of("wire", wire, tuple(DTYPES))
        for name, length in (("warmup", warmup), ("cooldown", cooldown)):
            _steps(name, length, 100, 10)
        if schedule_every_n_steps is not None:
            at_least_one("schedule_every_n_steps", schedule_every_n_steps, ", or None")
        self._daso: dict[str, Any] = {
            "warmup": warmup,
            "cooldown": cooldown,
            "global_every": global_every,
            "wait": wait,
            "max_global_every": max_global_every,
            "patience": patience,
            "threshold": threshold,
            "schedule_every_n_steps": schedule_every_n_steps,
            "monitor": monitor,
            "mixing": mixing,
            "wire": wire,
        }
        self._ended = False  # whether an epoch has, since the latest window
        self._watched: Any = None  # the latest value of the metric to monitor that the schedule has seen
        self._epochs = 0  # that have ended in this fit
        super().__init__(**kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), **self._daso}

    @override
    def make_averager(self) -> Averager:
        o, trainer = self._daso, self.trainer
        schedule = RateSchedule(o["global_every"], o["wait"], o["max_global_every"], o["patience"], o["threshold"])
        self._ended, self._watched, self._epochs = False, None, 0
        if self.engine.view.count == 1:
            rank_zero_info("hetero_daso: there is one node, so no global network: it trains as hetero_ddp would.")
            return DASOAverager(schedule, 0, 0, 0, o["mixing"], o["wire"])
        total = trainer.estimated_stepping_batches
        if math.isinf(trainer.num_training_batches):  # it has not asked for the data yet
            trainer.fit_loop.setup_data()
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        lengths = {name: _steps(name, o[name], total, per_epoch) for name in ("warmup", "cooldown")}
        if getattr(trainer, "fast_dev_run", False):
            lengths = dict.fromkeys(lengths, 0)
        if sum(lengths.values()) > total:
            raise ConfigurationError(
                f"warmup and cooldown take {lengths} of {total} optimizer steps: leave some between."
            )
        run = int(total) if math.isfinite(total) else 2**62
        return DASOAverager(schedule, run, lengths["warmup"], lengths["cooldown"], o["mixing"], o["wire"])

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._ended:  # only now is all known that it has logged
            self._ended, self._epochs = False, self._epochs + 1
            if self._daso["monitor"] is not None and self._daso["schedule_every_n_steps"] is None:
                self._tick()
        output = super().training_step(*args, **kwargs)
        if not self.trainer.lightning_module.automatic_optimization:
            self._window_ended()
        return output

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self.trainer.lightning_module.automatic_optimization:
            self._window_ended()
        return output

    def _window_ended(self) -> None:
        self._ended, steps = epoch_ends(self.trainer), self._daso["schedule_every_n_steps"]
        by_epoch = self._ended and self._daso["monitor"] is None
        if by_epoch if steps is None else self.engine.windows % steps == 0:
            self._tick()

    def _tick(self) -> None:
        """Show the schedule the loss, or the metric to monitor, as the mean over all ranks (collective)."""
        assert isinstance(self.averager, DASOAverager)
        sums = self.engine.losses.restart()
        if self.engine.view.count == 1 or self.averager.phase(self.engine.windows) != "cycling":
            return
        if (name := self._daso["monitor"]) is not None:
            value = self.trainer.callback_metrics.get(name)
            periods = self._epochs // (self.trainer.check_val_every_n_epoch or 1)
            if value is self._watched and (value is not None or periods == 0):
                return  # nothing new has been logged since the last look, or there was no occasion yet
            self._watched = value
            sums = torch.tensor([math.nan if value is None else float(value), 1.0], dtype=torch.float64)
        with self._timer.waiting(), deadline("average the loss"):
            dist.all_reduce(sums)
        mean = (sums[0] / sums[1]).item()
        if name is not None and math.isnan(mean):
            raise ConfigurationError(
                f"monitor={name!r} is NaN, or has not been logged by all ranks; this one has logged "
                f"{sorted(self.trainer.callback_metrics)}. Log it with self.log, or watch the training loss with "
                "monitor=None."
            )
        self.averager.schedule.tick(mean)


def _steps(name: str, value: float | int | str, total: float, per_epoch: float) -> int:
    """A phase's length in optimizer steps."""
    if isinstance(value, str):
        number, _, unit = value.partition(" ")
        if unit.strip() in ("epoch", "epochs") and number.isdigit():
            return int(number) * int(per_epoch)
    elif isinstance(value, int) and value >= 0:
        return value
    elif isinstance(value, float) and 0 <= value < 1:
        if math.isinf(total):
            raise ConfigurationError(f"{name}={value} is a part of the run, whose length is unknown: give steps.")
        return round(value * total)
    raise ConfigurationError(f"{name}={value!r}: give a part of the run (0.1), optimizer steps (500) or '4 epochs'.")
