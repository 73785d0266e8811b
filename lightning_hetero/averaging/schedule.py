"""DASO's schedule: phases of a run, and how often replicas exchange, by the course of the loss."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from lightning_hetero.checks import at_least_one, is_number
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.forecast.rhythm import smallest_wait

Phase = Literal["warm-up", "cycling", "cool-down"]
#: Optimizer steps for a part of a run of which nobody knows the length. Its end comes unannounced.
OF_UNKNOWN = {"warmup": 100, "cooldown": 0}


class RateSchedule:
    """B, the steps between two exchanges, and W, the steps that an exchange may take; pure.

    When the loss has not fallen by ``threshold`` (relative to its best) for ``patience`` ticks, both are halved, to no
    less than 1. At B = 1 the next plateau starts over with the rarest exchange, ``max_every``, and W = B / 4.

    Args:
        every: first B, in steps.
        wait: first W, in steps; 0 is blocking; ``"auto"`` (beyond the paper): always the smallest that hides an
            exchange as it has been measured, at most B, and B before anything has been.
        max_every: largest B.
        patience: ticks without progress that make a plateau.
        threshold: relative fall of the loss that counts as progress.

    Source: DASO, Coquelin et al. 2021.
    """

    def __init__(
        self,
        every: int = 4,
        wait: int | Literal["auto"] = 1,
        max_every: int = 8,
        patience: int = 2,
        threshold: float = 0.05,
    ) -> None:
        for name, value in (("global_every", every), ("max_global_every", max_every), ("patience", patience)):
            at_least_one(name, value)
        if wait != "auto" and (type(wait) is not int or not 0 <= wait <= every):
            raise ConfigurationError(
                f"wait={wait!r} must be 'auto', or lie between 0 (blocking) and global_every={every} steps."
            )
        if not is_number(threshold) or not 0 <= threshold < 1:
            raise ConfigurationError(f"threshold={threshold!r} must be at least 0 and below 1.")
        self.every, self.max_every = every, max_every
        self.auto = wait == "auto"
        self.wait = every if wait == "auto" else wait
        self.lasted: list[float] = []  # the latest exchanges, in steps
        self.patience, self.threshold = patience, threshold
        self.best, self.stalled = math.inf, 0

    def tick(self, loss: float) -> None:
        """Take in the loss of an interval; the same number on every rank."""
        if math.isfinite(loss) and (self.best == math.inf or loss < self.best - self.threshold * abs(self.best)):
            self.best, self.stalled = loss, 0
            return
        self.stalled += 1
        if self.stalled < self.patience:
            return
        self.stalled = 0
        if self.every == 1:
            self.every, self.wait = self.max_every, max(self.max_every // 4, 1) if self.wait else 0
        else:
            self.every, self.wait = max(self.every // 2, 1), max(self.wait // 2, min(self.wait, 1))
        self._hide()

    def measured(self, steps: Sequence[float]) -> None:
        """Take in how long an exchange took.

        Args:
            steps: what each replica measured, in steps of its own; NaN where unknown; the same on every rank.
        """
        known = [number for number in steps if math.isfinite(number)]
        if known:  # the least: the others' include waiting for a replica that was late
            self.lasted = [*self.lasted[-4:], min(known)]
            self._hide()

    def _hide(self) -> None:
        if self.auto:
            self.wait = smallest_wait(median(self.lasted), self.every) if self.lasted else self.every

    def state_dict(self) -> dict[str, Any]:
        """Builtins only."""
        rates = {"every": self.every, "wait": self.wait, "lasted": self.lasted}
        return {**rates, "best": self.best, "stalled": self.stalled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.every, self.wait, self.lasted = state["every"], state["wait"], state["lasted"]
        self.best, self.stalled = state["best"], state["stalled"]


def phase(step: int, total: float, warmup: int, cooldown: int) -> Phase:
    """The phase of optimizer step ``step`` (from 1) of ``total``."""
    if step <= warmup:
        return "warm-up"
    return "cool-down" if step > total - cooldown else "cycling"


def steps_of(name: str, length: float | int | str, total: float, per_epoch: float) -> int:
    """The length of a phase in optimizer steps.

    Args:
        name: of the option, for the message.
        length: a part of the run (float), steps (int), or epochs (``"4 epochs"``).
        total: steps of the run; infinite if nobody knows.
        per_epoch: steps of an epoch; infinite if nobody knows.

    Raises:
        ConfigurationError: none of these, or epochs of a length that nobody knows.
    """
    if isinstance(length, str):
        number, _, unit = length.partition(" ")
        if unit.strip() in ("epoch", "epochs") and number.isdigit():
            if math.isinf(per_epoch):
                raise ConfigurationError(f"{name}={length!r}, but the length of an epoch is unknown: give steps.")
            return int(number) * int(per_epoch)
    elif isinstance(length, int) and length >= 0:
        return length
    elif isinstance(length, float) and 0 <= length < 1:
        if math.isinf(total):
            return OF_UNKNOWN[name] if length else 0
        return round(length * total)
    raise ConfigurationError(f"{name}={length!r}: give a part of the run (0.1), optimizer steps (500) or '4 epochs'.")
