"""Asynchronous DiLoCo: each replica sends its outer gradient to a center when its local steps are done."""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.async_center import AsyncCenterAverager
from lightning_hetero.algorithms.base import Outcome, StepContext
from lightning_hetero.algorithms.state import Own, PerReplica, Shared, model_values, zeros
from lightning_hetero.argument_checks import is_number, one_of
from lightning_hetero.comm.centers.base import CenterRule
from lightning_hetero.comm.centers.client import CenterOptions
from lightning_hetero.comm.object_collectives import finite
from lightning_hetero.errors import ConfigurationError

#: Gives the parts of vectors that belong to parameters, and those that belong to buffers.
Views = Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]


class OuterRule(CenterRule, ABC):
    """Rule of an outer step: what a replica's steps since it came to the center, an arrival, do to the center.

    Buffers move towards those of the arrival by its weight: so a variance stays above 0, which sums of differences from
    old centers would not promise.

    The vectors of the center are those of ``c``; a table of the replicas' speeds; those of the momentum ``m``; those of
    a sum ``s``; and a number of arrivals. A client sends ``d``, what its steps have changed, before its weight, its
    buffers, and a table that is 0 but for its own speed, and gets the values to go on from and the table of all.

    Args:
        replicas: N.
        lr: learning rate.
        momentum: mu.
        views: tells parameters and buffers apart.
    """

    def __init__(self, replicas: int, lr: float, momentum: float, views: Views) -> None:
        self.replicas, self.lr, self.momentum, self._views = replicas, lr, momentum, views

    @override
    def travelling(self, center: Sequence[Tensor]) -> Sequence[Tensor]:
        return center[: (len(center) - 2) // 3 + 1]

    @override
    def measure(self, values: Sequence[Tensor], center: Sequence[Tensor]) -> float:
        arriving, statistics = self._views(values[:-1])
        square = sum(float(step.square().sum()) for step in arriving)
        return square if finite(statistics) else math.nan

    @override
    def move(self, values: Sequence[Tensor], center: Sequence[Tensor], push: float, square: float) -> None:
        count = len(values) - 1
        c, speeds, state, came = center[:count], center[count], center[count + 1 : -1], center[-1]
        torch.where(values[-1] > 0, values[-1], speeds, out=speeds)
        (arriving, statistics), (means, own) = self._views(values[:-1]), self._views(c)
        (momenta, _), (sums, _) = self._views(state[:count]), self._views(state[count:])
        if push and math.isfinite(square):
            for part, arrived in zip(own, statistics, strict=True):
                part.lerp_(arrived, push)
            came.add_(1)
            for each in zip(means, arriving, momenta, sums, strict=True):
                self.step(*each, weight=push, last=bool(came >= self.replicas))
            came.remainder_(self.replicas)
        for value, own_value in zip(values, (*c, speeds), strict=True):
            value.copy_(own_value)
        for start, momentum in zip(self._views(values[:-1])[0], momenta, strict=True):
            self.look_ahead(start, momentum)

    @abstractmethod
    def step(self, c: Tensor, d: Tensor, m: Tensor, s: Tensor, weight: float, last: bool) -> None:
        """Move a parameter of the center.

        Args:
            c: its values, which move.
            d: what the arrival has changed, which may be overwritten.
            m: its momentum.
            s: its sum.
            weight: of the arrival; those of N replicas add up to 1.
            last: whether N replicas have arrived since the last one of N had.
        """

    def look_ahead(self, start: Tensor, m: Tensor) -> None:
        """Move the values that a replica goes on from."""


class DelayedNesterov(OuterRule):
    """Delayed Nesterov momentum: each arrival moves the center at once, the momentum once in N arrivals.

    N arrivals come to one step of Nesterov's momentum with their weighted mean.

    Source: Liu et al. 2024 (arXiv:2401.09135), algorithm 3, with c = 0.
    """

    @override
    def step(self, c: Tensor, d: Tensor, m: Tensor, s: Tensor, weight: float, last: bool) -> None:
        c.add_(d.mul_(weight), alpha=self.lr)
        s.add_(d)
        if last:
            m.mul_(self.momentum).add_(s)
            c.add_(m, alpha=self.lr * self.momentum)
            s.zero_()


class LookAhead(OuterRule):
    """Nesterov momentum at each arrival, dampened, from which replicas go on ahead: ``c + lr mu m``.

    Weights are scaled so that those of N replicas alike are ``1 / sqrt(N)``.

    Source: HeLoCo (arXiv:2606.00271), without its correction.
    """

    @override
    def step(self, c: Tensor, d: Tensor, m: Tensor, s: Tensor, weight: float, last: bool) -> None:
        d = self.corrected(d, m).mul_(weight * math.sqrt(self.replicas))
        m.mul_(self.momentum).add_(d, alpha=1 - self.momentum)
        c.add_(d.add_(m, alpha=self.momentum), alpha=self.lr)

    @override
    def look_ahead(self, start: Tensor, m: Tensor) -> None:
        start.add_(m, alpha=self.lr * self.momentum)

    def corrected(self, d: Tensor, m: Tensor) -> Tensor:
        """Correct an arrival by the momentum."""
        return d


class HeLoCo(LookAhead):
    """Look-ahead with arrivals that are turned towards the momentum, parameter by parameter, where they are stale.

    With ``cos`` the cosine between an arrival ``d`` and the momentum ``m``, and ``trust = |d| / (|d| + 3 |m|)``: if
    ``cos >= 0.2``, ``d`` stays. If ``cos < 0``, a part of what points against ``m`` is taken away. Between, ``d`` is
    turned towards ``m``, and keeps its length.

    Source: HeLoCo (arXiv:2606.00271).
    """

    SURE, AGAINST, TURN, TRUST, MOST, TINY = 0.2, 0.5, 1.0, 3.0, 0.5, 1e-8

    @override
    def corrected(self, d: Tensor, m: Tensor) -> Tensor:
        length, other = float(d.norm()), float(m.norm())
        if min(length, other) < self.TINY:
            return d
        cos = float((d * m).sum()) / (length * other)
        trust = length / (length + self.TRUST * other + self.TINY)
        if cos >= self.SURE:
            return d
        if cos < 0:
            part = min(-self.AGAINST * cos * trust, self.MOST)
            return d.sub_(m, alpha=part * cos * length / other)
        part = min(self.TURN * (1 - cos) * trust, 1.0)
        turned = d.mul_((1 - part) / length).add_(m, alpha=part / other)
        return turned.mul_(length / float(turned.norm()))


MOMENTUM_RULES: dict[str, type[OuterRule]] = {
    "delayed_nesterov": DelayedNesterov,
    "look_ahead": LookAhead,
    "heloco": HeLoCo,
}


@dataclass
class OuterAsyncAverager(AsyncCenterAverager):
    """A replica brings what its local steps have done to a center, alone, and goes on from what the center is then.

    With weights ``w_i`` by samples, ``c_i`` the center that replica ``i`` began from, and N replicas, for each arrival
    (delayed Nesterov)::

        g <- w_i (c_i - x_i);  c <- c - lr g;  s <- s + g
        every N arrivals:  m <- mu m + s;  c <- c - lr mu m;  s <- 0
        x_i <- c

    Local steps follow the measured speed (DyLU), so that all arrive about equally often: the fastest replica takes
    ``tau`` steps, another one ``tau`` times its steps per second over those of the fastest. All take ``tau`` in their
    first round, before speeds are known.

    The center, moved by what replicas have done since they came to it, is validated, saved and left at the end:
    ``c + sum_i w_i (x_i - c_i)``. The replicas' mean would take back what others have brought since the slow ones
    began. Buffers, which have no gradients, take the mean.

    With ``momentum_rule="look_ahead"`` the momentum moves the center at each arrival, and replicas go on ahead of the
    center; ``"heloco"`` also turns stale arrivals towards the momentum.

    Source: Liu et al. 2024 (arXiv:2401.09135), algorithms 3 (delayed Nesterov, with c = 0) and 4 (DyLU); HeLoCo
    (arXiv:2606.00271).

    Args:
        tau: local steps of the fastest replica from one exchange to its next.
        outer_lr: learning rate of the outer step.
        outer_momentum: its momentum.
        momentum_rule: when the momentum moves the center: ``"delayed_nesterov"``, ``"look_ahead"`` or ``"heloco"``.
        follow_speed: whether local steps follow the measured speed; ``False``: every replica takes ``tau``.
        center: where it lives: ``"shared_memory"`` of one host, or a ``"thread"`` of the first replica, which serves
            any. ``"auto"``: shared memory if it can.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when the ranks have met: the center cannot live there.
    """

    traits = replace(
        AsyncCenterAverager.traits,
        between="the center moved by what replicas have done since, and each such look costs as much as an exchange",
    )
    momentum = Shared[list[Tensor]](zeros)
    gradient_sum = Shared[list[Tensor]](zeros)
    arrivals = Shared[Tensor](lambda averager: torch.zeros(1, dtype=torch.float64))
    speeds = PerReplica[Tensor](lambda averager: torch.zeros(averager.links.count, dtype=torch.float64))
    begun_from = Own[list[Tensor]](model_values)
    last_step = Own[int](-1)
    local_steps = Own[int](lambda averager: averager.tau)

    tau: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    follow_speed: bool = True
    center: Literal["auto", "shared_memory", "thread"] = field(default="auto", kw_only=True)
    momentum_rule: Literal["delayed_nesterov", "look_ahead", "heloco"] = field(default="delayed_nesterov", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        lr, momentum = self.outer_lr, self.outer_momentum
        if not (is_number(lr) and is_number(momentum)) or lr <= 0 or not 0 <= momentum < 1:
            raise ConfigurationError(
                f"outer_lr={lr!r}, outer_momentum={momentum!r}: the first must be above 0, the second at least 0 and "
                "below 1."
            )
        one_of("follow_speed", self.follow_speed, (True, False))
        one_of("momentum_rule", self.momentum_rule, tuple(MOMENTUM_RULES))
        one_of("center", self.center, ("auto", "shared_memory", "thread"))

    @override
    def center_options(self) -> CenterOptions:
        rule = MOMENTUM_RULES[self.momentum_rule]
        return CenterOptions(
            self.center, rule=rule(self.links.count, self.outer_lr, self.outer_momentum, self.replica.views)
        )

    @override
    def prepare(self) -> Outcome | None:
        self._given = [torch.empty_like(value) for value in (*self.last_center, self.speeds)]
        self._seconds: deque[float] = deque(maxlen=64)  # of the latest steps
        self._resumed = math.nan
        return super().prepare()

    @property
    @override
    def center_vectors(self) -> list[Tensor]:
        return [*self.last_center, self.speeds, *self.momentum, *self.gradient_sum, self.arrivals]

    @property
    @override
    def uses_center(self) -> bool:
        return False  # replicas have learned something since they came to the center

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        self.before_save()
        values = [value.to("cpu", old.dtype) for value, old in zip(self.replica.pack(), self.reference, strict=True)]
        own, begun, now = (self.replica.views(flats)[0] for flats in (values, self.begun_from, self.last_center))
        for value, start, center in zip(own, begun, now, strict=False):  # the last ones may be excluded
            value.add_(center - start)
        return self.links.average(values, context.samples_per_replica, self.reference).mean

    @override
    def join_values(self, context: StepContext) -> list[Tensor]:
        return self.consensus(context)  # it has both: the center, and what replicas have learned since

    @override
    def before_step(self, context: StepContext) -> None:
        if self.last_step < 0:
            self.last_step = context.step

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        if not math.isnan(self._resumed):
            self._seconds.append(time.perf_counter() - self._resumed)
        outcome = None
        if context.step - self.last_step >= self.local_steps:
            self._visit(context)
            outcome = Outcome(exchanged=True)
        self._resumed = time.perf_counter()
        return outcome

    def _visit(self, context: StepContext) -> None:
        """Bring the outer gradient to the center, and go on from there."""
        *moved, speeds = self._given
        self._packed = self.replica.pack(self._packed)
        for out, value, start in zip(moved, self._packed, self.begun_from, strict=False):
            torch.sub(value.to("cpu", start.dtype), start, out=out)
        for part, start in zip(self.replica.views(moved)[1], self.replica.views(self.begun_from)[1], strict=True):
            part.add_(start)  # buffers travel as they are
        push = context.samples_per_replica[self.links.index] / sum(context.samples_per_replica)
        healthy = self.is_finite(moved)
        if not healthy:
            push = 0.0
            for out in moved:
                out.zero_()
        speeds.zero_()
        speeds[self.links.index] = 1 / median(self._seconds) if self._seconds else 0.0
        seen = self._client.push_pull(self._given, push)()
        self._rates.observe(seen.counts)
        self._distance = math.sqrt(seen.square)
        for start, value in zip(self.begun_from, moved, strict=True):
            start.copy_(value)
        if healthy:
            self.replica.unpack(self.begun_from)
        else:
            self.restart_from(self.begun_from)
        self.last_step, self.local_steps = context.step, self._steps_to_next(speeds)

    def _steps_to_next(self, speeds: Tensor) -> int:
        """Until the next exchange; the same on all ranks of the replica, which have the same table."""
        own, most = float(speeds[self.links.index]), float(speeds.max())
        return max(round(self.tau * own / most), 1) if self.follow_speed and own and most else self.tau

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), "local_steps": float(self.local_steps)}

    @override
    def replace_center(self, context: StepContext) -> None:
        super().replace_center(context)
        # What replicas have done since they began is in the mean, and must not count twice.
        for start, value in zip(self.begun_from, self.replica.pack(), strict=False):
            start.copy_(value)
