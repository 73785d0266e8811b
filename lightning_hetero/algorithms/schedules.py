"""Schedules of exchanges: DASO's phases and rate, and the automatic number of local steps."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from lightning_hetero.argument_checks import at_least_one, is_number
from lightning_hetero.errors import ConfigurationError

#: Part of the steps' time for which replicas may wait.
MAX_WAITING = 0.05


def smallest_wait(exchange: float, every: int) -> int:
    """The fewest steps that hide an exchange in the background, at most until the next one begins.

    Args:
        exchange: how long it lasts, in steps.
        every: steps between the beginnings of two exchanges.

    Returns:
        At least 1.

    Example::

        >>> from lightning_hetero.algorithms.schedules import smallest_wait
        >>> smallest_wait(2.3, every=8), smallest_wait(0.0, every=8), smallest_wait(9.5, every=8)
        (3, 1, 8)
    """
    return min(every, max(math.ceil(exchange), 1))


def smallest_tau(exchanges: Sequence[float], delay: int, longest: int | None = None) -> int:
    """The least tau with exchanges that are hidden, or for which replicas wait at most a twentieth of the time.

    Args:
        exchanges: how long that of each fragment lasts, in steps.
        delay: steps for which an exchange may last in the background.
        longest: the largest tau; ``None``: any.

    Example: two fragments of 3 steps each, waited for, or hidden behind up to 4 steps::

        >>> from lightning_hetero.algorithms.schedules import smallest_tau
        >>> smallest_tau([3.0, 3.0], delay=0), smallest_tau([3.0, 3.0], delay=4)
        (120, 6)
    """
    waited = sum(max(0.0, each - delay) for each in exchanges)
    carried = sum(exchanges) if delay else 0.0  # one exchange after another: the links carry them all within tau
    least = max(math.ceil(waited / MAX_WAITING - 1e-9), math.ceil(carried - 1e-9), delay + 1)
    return least if longest is None else min(least, longest)


Phase = Literal["warm-up", "cycling", "cool-down"]
#: Optimizer steps for a part of a run of which nobody knows the length. Its end comes unannounced.
DEFAULT_STEPS = {"warmup": 100, "cooldown": 0}


def with_latest(lasted: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Durations of the latest five exchanges.

    Args:
        lasted: those of the ones before, in steps.
        steps: what each replica measured of the new one, in steps of its own; NaN where unknown. The least counts: the
            others' include waiting for a replica that was late.
    """
    known = [number for number in steps if math.isfinite(number)]
    return [*lasted[-4:], min(known)] if known else list(lasted)


class RateSchedule:
    """B, the steps between two exchanges, and W, the steps that an exchange may take; pure.

    When the loss has not fallen by ``threshold`` (relative to its best) for ``patience`` checks, both are halved, to no
    less than 1 (a W of 0 stays 0). At B = 1 the next plateau starts over with B = ``max_every`` and W = B / 4.

    Args:
        every: first B, in steps.
        wait: first W, in steps; 0 is blocking; ``"auto"`` (beyond the paper): always the smallest that hides an
            exchange as it has been measured, at most B, and B before anything has been.
        max_every: B after a plateau at B = 1.
        patience: checks of the loss without progress that make a plateau.
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
        self._given = [every, wait]
        self.auto = wait == "auto"
        self.wait = every if wait == "auto" else wait
        self.lasted: list[float] = []  # the latest exchanges, in steps
        self.patience, self.threshold = patience, threshold
        self.best, self.stalled = math.inf, 0

    def observe_loss(self, loss: float) -> None:
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
        if any(map(math.isfinite, steps)):
            self.lasted = with_latest(self.lasted, steps)
            self._hide()

    def _hide(self) -> None:
        if self.auto:
            self.wait = smallest_wait(median(self.lasted), self.every) if self.lasted else self.every

    def state_dict(self) -> dict[str, Any]:
        """Builtins only."""
        rates = {"every": self.every, "wait": self.wait, "given": self._given, "lasted": self.lasted}
        return {**rates, "best": self.best, "stalled": self.stalled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, but with the first B and W if the user has changed these since."""
        self.lasted, self.best, self.stalled = state["lasted"], state["best"], state["stalled"]
        if state.get("given", self._given) == self._given:
            self.every, self.wait = state["every"], state["wait"]
        else:
            self._hide()


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
            return DEFAULT_STEPS[name] if length else 0
        return round(length * total)
    raise ConfigurationError(f"{name}={length!r}: give a part of the run (0.1), optimizer steps (500) or '4 epochs'.")


class Phases(NamedTuple):
    """The phases of a run, in optimizer steps; all zero: one cool-down.

    Attributes:
        total: length of the run; infinite if nobody knows.
        warmup: length of the warm-up.
        cooldown: length of the cool-down.
    """

    total: float = 0.0
    warmup: int = 0
    cooldown: int = 0

    @classmethod
    def of_run(cls, total: float, per_epoch: float, **asked: float | int | str) -> "Phases":
        """The phases as options ask for them; see :func:`steps_of`.

        Raises:
            ConfigurationError: they are longer than the run.
        """
        lengths = {name: steps_of(name, length, total, per_epoch) for name, length in asked.items()}
        if sum(lengths.values()) > total:
            raise ConfigurationError(
                f"warmup and cooldown take {lengths} of {total} optimizer steps: leave some between."
            )
        return cls(total, **lengths)

    def of_step(self, step: int) -> Phase:
        """The phase of an optimizer step, counted from 1."""
        if step <= self.warmup:
            return "warm-up"
        return "cool-down" if step > self.total - self.cooldown else "cycling"

    def assumed(self, **asked: float | int | str) -> str | None:
        """The message about parts of a run of which nobody knows the length; ``None``: there is none."""
        parts = [f"{name}={part}" for name, part in asked.items() if isinstance(part, float) and part]
        if math.isfinite(self.total) or not parts:
            return None
        return (
            f"{' and '.join(parts)} of the run, of which nobody knows the length: the warm-up takes {self.warmup} "
            f"optimizer steps, the cool-down {self.cooldown}. Give steps to change that."
        )


FIRST_TAU = 8  # steps, before anything has been measured


class TauSchedule:
    """Tau in the midst of a fit, the same on all ranks.

    Args:
        tau: steps between two exchanges of a fragment; ``"auto"``: the smallest by the arithmetic, as measured.
        delay: steps for which an exchange may last in the background.
        longest: the largest tau that ``"auto"`` chooses.
        fragments: how many there are.

    Attributes:
        tau: at present.
        origin: optimizer step from which on it holds.
    """

    def __init__(self, tau: int | Literal["auto"], delay: int, longest: int, fragments: int) -> None:
        self.auto, self._delay, self._longest = tau == "auto", delay, longest
        self.tau: int = min(max(FIRST_TAU, delay + 1), longest) if tau == "auto" else tau
        self.origin = 0
        self._lasted: list[list[float]] = [[] for _ in range(fragments)]  # the latest exchanges of each, in steps

    def beginning(self, step: int) -> list[int]:
        """The fragments with an exchange that begins after a step."""
        count = len(self._lasted)
        return [p for p in range(count) if (step - self.origin) % self.tau == p * self.tau // count]

    def measured(self, fragment: int, steps: Sequence[float]) -> None:
        """Take in how long an exchange took.

        Args:
            fragment: its number.
            steps: what each replica measured, in steps of its own; NaN where unknown; the same on every rank.
        """
        self._lasted[fragment] = with_latest(self._lasted[fragment], steps)

    def settle(self, step: int) -> str | None:
        """Choose tau again, where a round of all fragments is over. It stays if it would change by less than a tenth.

        Args:
            step: that has been taken.

        Returns:
            What to tell of a change, with the arithmetic.
        """
        if not self.auto or (step - self.origin) % self.tau or not all(self._lasted):
            return None
        exchanges = [median(lasted) for lasted in self._lasted]
        tau, before = smallest_tau(exchanges, self._delay, self._longest), self.tau
        if abs(tau - before) * 10 < before:
            return None
        self.tau, self.origin = tau, step
        waited = sum(max(0.0, each - self._delay) for each in exchanges)
        bound = ", which is tau_max" if tau == self._longest else ""
        return (
            f"tau={tau}{bound}, until now {before}: an exchange of the whole model lasts {sum(exchanges):.3g} steps, "
            f"and replicas wait for {waited:.3g} of them, {waited / tau:.1%} of tau."
        )

    def state_dict(self) -> dict[str, Any]:
        """Builtins only."""
        return {"tau": self.tau, "origin": self.origin, "lasted": self._lasted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, if tau is automatic; measurements of other fragments are dropped."""
        if self.auto:
            self.tau, self.origin = min(state["tau"], self._longest), state["origin"]
            if len(state["lasted"]) == len(self._lasted):
                self._lasted = [list(lasted) for lasted in state["lasted"]]
