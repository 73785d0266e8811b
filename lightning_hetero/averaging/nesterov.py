"""Delayed Nesterov: what an asynchronous center makes of each replica's outer gradient, as it comes."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.centers.center import Rule
from lightning_hetero.comm.replica import finite

#: Gives the parts of vectors that belong to parameters, and those that belong to buffers.
Views = Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]


class DelayedNesterov(Rule):
    """Each arrival's gradient moves the center at once; the momentum does once in N arrivals.

    With ``g`` the outer gradient of an arrival, weighted, so that those of N arrivals make one mean::

        c <- c - lr g;  s <- s + g
        every N arrivals:  m <- mu m + s;  c <- c - lr mu m;  s <- 0

    So N arrivals come to one step of Nesterov's momentum with their mean gradient. Buffers move towards those of the
    arrival by its weight: so a variance stays above 0, which sums of differences from old centers would not promise.

    The vectors of the center are those of ``c``; a table of the replicas' speeds; those of ``m``; those of ``s``; and
    the arrivals since the latest momentum. A client sends ``-g`` before its weight, its buffers, and a table that is 0
    but for its own speed, and gets ``c`` and the table of all.

    Args:
        arrivals: N.
        lr: learning rate.
        momentum: mu.
        views: tells parameters and buffers apart.
    """

    def __init__(self, arrivals: int, lr: float, momentum: float, views: Views) -> None:
        self._arrivals, self._lr, self._momentum, self._views = arrivals, lr, momentum, views

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
        m, s = state[:count], state[count:]
        torch.where(values[-1] > 0, values[-1], speeds, out=speeds)
        if push and math.isfinite(square):
            (arriving, statistics), (means, own) = self._views(values[:-1]), self._views(c)
            for part, arrived in zip(own, statistics, strict=True):
                part.lerp_(arrived, push)
            for step in arriving:
                step.mul_(push)
            (sums, _), (momenta, _) = self._views(s), self._views(m)
            for mean, step, total in zip(means, arriving, sums, strict=True):
                mean.add_(step, alpha=self._lr)
                total.add_(step)
            came.add_(1)
            if came >= self._arrivals:
                for mean, momentum, total in zip(means, momenta, sums, strict=True):
                    momentum.mul_(self._momentum).add_(total)
                    mean.add_(momentum, alpha=self._lr * self._momentum)
                    total.zero_()
                came.zero_()
        for value, own_value in zip(values, (*c, speeds), strict=True):
            value.copy_(own_value)
