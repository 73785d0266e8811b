"""Rules of an outer step at a center, which replicas come to one by one: one class for each paper."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.async_center import Views
from lightning_hetero.comm.centers.base import CenterRule, RoundRule, T
from lightning_hetero.comm.centers.rounds import Quorum
from lightning_hetero.comm.object_collectives import finite


class FragmentVectors(NamedTuple):
    """Vectors of a center that belong to one fragment of the model, and the tables of replicas, which belong to all.

    Attributes:
        c: the values.
        speeds: steps per second of each replica.
        late: parts of each replica that came after their round had closed.
        m: their momentum.
        s: a sum of what has arrived.
        arrivals: their number, a view of one value.
        rounds: number of rounds that have closed, a view of one value.
    """

    c: Sequence[Tensor]
    speeds: Tensor
    late: Tensor
    m: Sequence[Tensor]
    s: Sequence[Tensor]
    arrivals: Tensor
    rounds: Tensor


class OuterRule(CenterRule, ABC):
    """Rule of an outer step: what a replica's steps since it came to the center, an arrival, do to a fragment of it.

    Buffers move towards those of the arrival by its weight: so a variance stays above 0, which sums of differences from
    old centers would not promise.

    The vectors of the center are those of ``c``; a table of the replicas' speeds; one of how often they were late;
    those of the momentum ``m``; those of a sum ``s``; the number of arrivals of each fragment since its momentum has
    moved; and the number of its rounds that have closed. A client sends ``d``, what its steps have changed in the
    fragment, before its weight, its buffers, and two tables that are 0 but for itself: its own speed, and 1. It gets
    the values to go on from and the tables of all.

    Args:
        replicas: N.
        lr: learning rate.
        momentum: mu.
        views: tells parameters and buffers of the fragment apart.
        fragment: its number.
        vectors: which of ``c`` are its own. Default: all.
    """

    def __init__(
        self,
        replicas: int,
        lr: float,
        momentum: float,
        views: Views,
        fragment: int = 0,
        vectors: slice = slice(None),
    ) -> None:
        self.replicas, self.lr, self.momentum, self._views = replicas, lr, momentum, views
        self._fragment, self._vectors = fragment, vectors

    @override
    def travelling(self, center: Sequence[T]) -> Sequence[T]:
        count = (len(center) - 4) // 3
        return [*center[:count][self._vectors], *center[count : count + 2]]

    @override
    def measure(self, values: Sequence[Tensor], center: Sequence[Tensor]) -> float:
        arriving, statistics = self._views(values[:-2])
        square = sum(float(step.square().sum()) for step in arriving)
        return square if finite(statistics) else math.nan

    @override
    def move(self, values: Sequence[Tensor], center: Sequence[Tensor], push: float, square: float) -> None:
        fragment = self._fragment_of(center)
        torch.where(values[-2] > 0, values[-2], fragment.speeds, out=fragment.speeds)
        arriving, statistics = self._views(values[:-2])
        if push and math.isfinite(square):
            for each in zip(*self._buffers_in(center), statistics, strict=True):
                self.take_buffer(*each, weight=push)
            last = self.count(fragment.arrivals)
            for each in zip(*self._parameters_in(center), arriving, strict=True):
                self.step(*each, weight=push, last=last)
        self.answer(values, center)

    def answer(self, values: Sequence[Tensor], center: Sequence[Tensor]) -> None:
        """Overwrite values with those that a replica goes on from."""
        fragment = self._fragment_of(center)
        for value, own in zip(values, (*fragment.c, fragment.speeds, fragment.late), strict=True):
            value.copy_(own)
        momenta = self._views(fragment.m)[0]
        for start, momentum in zip(self._views(values[:-2])[0], momenta, strict=True):
            self.look_ahead(start, momentum)

    def _fragment_of(self, center: Sequence[Tensor]) -> FragmentVectors:
        count = (len(center) - 4) // 3
        groups = center[:count], center[count + 2 : 2 * count + 2], center[2 * count + 2 : -2]
        c, m, s = (group[self._vectors] for group in groups)
        speeds, late, arrivals, rounds = *center[count : count + 2], *center[-2:]
        return FragmentVectors(c, speeds, late, m, s, arrivals[self._fragment], rounds[self._fragment])

    def _parameters_in(self, center: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The values of the fragment's parameters in ``c``, ``m`` and ``s``."""
        fragment = self._fragment_of(center)
        return self._views(fragment.c)[0], self._views(fragment.m)[0], self._views(fragment.s)[0]

    def _buffers_in(self, center: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        fragment = self._fragment_of(center)
        return self._views(fragment.c)[1], self._views(fragment.m)[1], self._views(fragment.s)[1]

    def count(self, arrivals: Tensor) -> bool:
        """Count an arrival; whether N have come since the last one of N had."""
        last = bool(arrivals.add_(1) >= self.replicas)
        arrivals.remainder_(self.replicas)
        return last

    @abstractmethod
    def step(self, c: Tensor, m: Tensor, s: Tensor, d: Tensor, weight: float, last: bool) -> None:
        """Move a parameter of the center.

        Args:
            c: its values, which move.
            m: its momentum.
            s: its sum.
            d: what the arrival has changed, which may be overwritten.
            weight: of the arrival; those of N replicas add up to 1.
            last: whether N replicas have arrived since the last one of N had.
        """

    def take_buffer(self, c: Tensor, m: Tensor, s: Tensor, arrived: Tensor, weight: float) -> None:
        """Move a buffer of the center; ``m`` and ``s`` are at the rule's disposal."""
        c.lerp_(arrived, weight)

    def look_ahead(self, start: Tensor, m: Tensor) -> None:
        """Move the values that a replica goes on from."""


class DelayedNesterov(OuterRule):
    """Delayed Nesterov momentum: each arrival moves the center at once, the momentum once in N arrivals.

    N arrivals come to one step of Nesterov's momentum with their weighted mean.

    Source: Liu et al. 2024 (arXiv:2401.09135), algorithm 3, with c = 0.
    """

    @override
    def step(self, c: Tensor, m: Tensor, s: Tensor, d: Tensor, weight: float, last: bool) -> None:
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
    def step(self, c: Tensor, m: Tensor, s: Tensor, d: Tensor, weight: float, last: bool) -> None:
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
    ``cos >= 0.2``, ``d`` stays. If ``cos < 0``, a part of what points against ``m`` is taken away::

        p = min(-0.5 cos trust, 0.5);  d <- d - p cos (|d| / |m|) m

    Between, ``d`` is turned towards ``m``, and keeps its length::

        p = min((1 - cos) trust, 1);  d <- |d| u / |u| with u = (1 - p) d / |d| + p m / |m|

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


class RoundStep(OuterRule, RoundRule):
    """Nesterov's momentum once in a round: the outer step of synchronous DiLoCo, without those that are late.

    ``s <- s + w_i d_i`` with each arrival; ``m <- mu m + s;  c <- c + lr (s + mu m);  s <- 0`` when the round closes.
    Buffers then take the mean of the arrivals, and of their old values for weights that are missing.

    Source: DiLoCo, Douillard et al. 2023, algorithm 1; the quorum with a time of grace is that of Decoupled DiLoCo
    (arXiv:2604.21428).

    Args:
        quorum: condition on which a round closes.
        others: arguments of :class:`OuterRule`.
    """

    def __init__(self, quorum: Quorum, *others: Any) -> None:
        super().__init__(*others)
        self.quorum = quorum

    @override
    def step(self, c: Tensor, m: Tensor, s: Tensor, d: Tensor, weight: float, last: bool) -> None:
        s.add_(d, alpha=weight)

    @override
    def count(self, arrivals: Tensor) -> bool:
        return False

    @override
    def take_buffer(self, c: Tensor, m: Tensor, s: Tensor, arrived: Tensor, weight: float) -> None:
        s.add_(arrived, alpha=weight)
        m.add_(weight)

    @override
    def arrive(self, values: Sequence[Tensor], center: Sequence[Tensor], late: bool) -> None:
        fragment = self._fragment_of(center)
        if late:
            fragment.late.add_(values[-1])
        else:
            fragment.arrivals.add_(1)

    @override
    def rounds(self, center: Sequence[Tensor]) -> tuple[int, int]:
        *_, arrivals, closed = self._fragment_of(center)
        return int(arrivals), int(closed)

    @override
    def close(self, center: Sequence[Tensor]) -> None:
        *_, arrivals, closed = self._fragment_of(center)
        for c, m, s in zip(*self._parameters_in(center), strict=True):
            m.mul_(self.momentum).add_(s)
            c.add_(s.add_(m, alpha=self.momentum), alpha=self.lr)
            s.zero_()
        for c, weight, s in zip(*self._buffers_in(center), strict=True):  # with late ones it may be above 1
            c.mul_((1 - weight).clamp_(min=0)).add_(s.div_(weight.clamp(min=1)))
            weight.zero_()
            s.zero_()
        arrivals.zero_()
        closed.add_(1)


MOMENTUM_RULES: dict[str, type[OuterRule]] = {
    "delayed_nesterov": DelayedNesterov,
    "look_ahead": LookAhead,
    "heloco": HeLoCo,
}
