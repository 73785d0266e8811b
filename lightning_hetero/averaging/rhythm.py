"""How many steps lie between two exchanges: a given number, or as few as their measured cost allows."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from lightning_hetero.forecast.rhythm import smallest_tau

FIRST = 8  # steps, before anything has been measured


class Rhythm:
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
        self.tau: int = min(max(FIRST, delay + 1), longest) if tau == "auto" else tau
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
        if known := [number for number in steps if math.isfinite(number)]:
            # The least: the others' include waiting for a replica that was late.
            self._lasted[fragment] = [*self._lasted[fragment][-4:], min(known)]

    def settle(self, step: int) -> str | None:
        """Choose tau anew, where a round of all fragments is over. It stays if it would change by less than a tenth.

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
