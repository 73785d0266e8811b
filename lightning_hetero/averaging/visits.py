"""Replicas that visit a center one by one, each when it comes to it."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import StepContext
from lightning_hetero.averaging.center import CenteredAverager, Order
from lightning_hetero.averaging.elastic import Pull, stability
from lightning_hetero.comm.centers.center import Center, PushPull
from lightning_hetero.comm.centers.client import CenterClient
from lightning_hetero.comm.links import ReplicaLinks
from lightning_hetero.comm.replica import Replica, finite
from lightning_hetero.errors import NotFiniteError


class VisitRates:
    """How often this replica visits, against the mean of all.

    A replica that comes four times as often would pull the center four times as much. So what each adds is divided by
    its rate.

    Args:
        index: this replica.
        window: own visits to look back.
    """

    def __init__(self, index: int, window: int = 16) -> None:
        self._index = index
        self._seen: deque[tuple[float, list[int]]] = deque(maxlen=window + 1)

    def saw(self, counts: Sequence[int]) -> None:
        """Take in the visits of each replica so far, at a visit of this one."""
        self._seen.append((time.monotonic(), list(counts)))

    @property
    def factor(self) -> float:
        """Mean rate over own rate."""
        if len(self._seen) < 2:
            return 1.0
        since = self._since()
        return sum(since) / len(since) / since[self._index]

    def per_second(self) -> list[float]:
        """Visits of each replica."""
        seconds = self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0
        return [visits / seconds for visits in self._since()] if seconds > 0 else []

    def _since(self) -> list[int]:
        (_, first), (_, last) = self._seen[0], self._seen[-1]
        return [b - a for a, b in zip(first, last, strict=True)]


class VisitingAverager(CenteredAverager):
    """Asynchronous EASGD: every tau steps of its own, a replica visits the center.

    Of p replicas, each with a share ``w_i`` of the samples::

        x_i -= alpha D_i;  c += beta w_i (mean rate / rate_i) D_i

    Replicas wait for each other at the ends of epochs only, and where all evaluate or save.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; round robin ("Original EASGD") and Hogwild EASGD, You et
    al. 2017. The rates are this package's.

    Args:
        pull: gives alpha and beta.
        tau: optimizer steps from one visit to the next.
        center: where all go; not open yet.
        order: when ``D_i`` is taken: before the replica's own step (and the visit passes in its background), or after.
        overlap: ``False``: a visit comes before the step rather than in its background.
        debias: whether what a replica adds is divided by how often it comes.
        skip: whether a replica that is not finite takes over the center, instead of raising an error.
        check: of the optimizers, before all begins.
    """

    lockstep = False

    def __init__(
        self,
        pull: Pull,
        tau: int,
        center: Center,
        order: Order = "jacobi",
        overlap: bool = True,
        debias: bool = True,
        skip: bool = False,
        check: Callable[[Sequence[Optimizer]], None] = lambda _: None,
    ) -> None:
        super().__init__(tau)
        self.pull, self.order, self.overlap, self.debias = pull, order, overlap, debias
        self._center, self._skip, self._check = center, skip, check
        self._visit: Callable[[], PushPull] | None = None

    @override
    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self._check(optimizers())
        super().setup(replica, links, optimizers)
        self._rates = VisitRates(links.index)
        self._client = CenterClient(self._center, links)
        self._difference = [torch.empty_like(c) for c in self.known]
        self._snapshot = self._packed[: replica.included]
        self._center.open(self.known)
        self._moved = self.pull.nothing  # the center never will: nothing is sent, for the mean neither
        self.warning = stability(*self._strength())

    def _strength(self) -> tuple[float, float]:
        alpha = self.pull.alpha(self.optimizers(), self.links.count)
        return alpha, self.pull.of_center(alpha, self.links.count)

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends

    def _visits(self, step: int) -> bool:
        return not self.pull.nothing and step % self.tau == 0

    @override
    def before_step(self, context: StepContext) -> None:
        if self.order == "jacobi" and self._visits(context.step + 1):
            self._go(context.samples_per_replica)

    @override
    def after_step(self, context: StepContext) -> None:
        if not self._visits(context.step):
            return
        if self.order == "gauss_seidel":
            self._go(context.samples_per_replica)
        assert self._visit is not None
        visit, self._visit = self._visit(), None
        self._rates.saw(visit.counts)
        self.meetings += 1
        self._distance = math.sqrt(visit.square) if visit.square >= 0 else math.nan
        if not self._healthy:
            self._take_center()
        elif math.isfinite(visit.square):
            self.replica.add(self._difference, -self._alpha)
        else:
            raise NotFiniteError([self.links.index])  # for the wire

    def _go(self, samples_per_replica: Sequence[int]) -> None:
        self._alpha, beta = self._strength()
        stability(self._alpha, beta)  # raises if the learning rate has made it unstable
        self._snapshot = self.replica.pack(self._snapshot)
        for difference, value in zip(self._difference, self._snapshot, strict=True):
            difference.copy_(value)
        share = samples_per_replica[self.links.index] / sum(samples_per_replica)
        self._healthy = finite(self._difference)
        if not self._healthy:
            if not self._skip:
                raise NotFiniteError([self.links.index])
            share = 0.0
            for difference in self._difference:
                difference.zero_()  # of which the visit will make 0 - c
        # Past the center it would swing: a replica that comes very rarely cannot make up for all of it at once.
        push = min(beta * share * (self._rates.factor if self.debias else 1.0), max(beta, 1.0))
        self._visit = self._client.push_pull(self._difference, push)
        if not self.overlap:
            visit = self._visit()
            self._visit = lambda: visit

    def _take_center(self) -> None:
        for difference in self._difference:
            difference.neg_()
        self.begin_again(self._difference)
        self.links.traffic.skipped.append(self.links.index)

    @override
    def consensus(self, samples_per_replica: Sequence[int]) -> list[Tensor]:
        counts = self._client.read(self.known)
        self._moved |= any(counts)
        return super().consensus(samples_per_replica)

    @override
    def finish(self, samples_per_replica: Sequence[int]) -> None:
        super().finish(samples_per_replica)
        self._center.leave()

    @override
    def status(self, step: int) -> dict[str, float | str]:
        rates = {f"exchanges_per_s/replica{i}": rate for i, rate in enumerate(self._rates.per_second())}
        return {**super().status(step), **rates}

    @override
    def state_dict(self) -> dict[str, Any]:
        counts = self._client.read(self.known)
        return {**super().state_dict(), "counts": counts}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._client.write(self.known, state["counts"])

    @override
    def close(self) -> None:
        self._center.close()
