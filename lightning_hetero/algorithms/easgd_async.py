"""Asynchronous EASGD: replicas exchange with the center one by one, each whenever it is ready."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from lightning_hetero.algorithms.async_center import AsyncCenterAverager, Views, check_home
from lightning_hetero.algorithms.base import Outcome, StepContext
from lightning_hetero.algorithms.easgd import ElasticBase, check_momentum, stability
from lightning_hetero.argument_checks import one_of
from lightning_hetero.comm.centers.base import PushPull
from lightning_hetero.comm.centers.client import CenterOptions, Home
from lightning_hetero.comm.compression import refuse_low_bit
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.errors import NotFiniteError


class PushPullAverager(AsyncCenterAverager, ElasticBase):
    """Asynchronous EASGD: every tau steps of its own, a replica exchanges with the center.

    Of p replicas, each with a share ``w_i`` of the samples::

        x_i -= alpha D_i;  c += beta w_i (mean rate / rate_i) D_i

    Replicas wait for each other at the ends of epochs only, and where all evaluate or save.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; round robin ("Original EASGD") and Hogwild EASGD, You et
    al. 2017. The rates are this package's.

    Args:
        wire: number format of what replicas send and get, where the center is a thread's: ``"fp32"``, ``"bf16"`` or
            ``"fp16"``; sums are taken in fp32.

    Attributes:
        center: where the center lives.
        debias: whether what a replica adds is divided by how often it comes.
        overlap: ``False``: an exchange comes before the step rather than in its background.
        locked: whether exchanges wait for each other.
        in_turn: whether replicas are served in their order, over and over.
    """

    overlap, locked, in_turn = True, True, False
    center: Home = "auto"
    debias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_low_bit(self.wire, "where replicas meet the center one by one, no low-bit wire can be used")
        one_of("center", self.center, ("auto", "shared_memory", "thread", "mpi"))
        one_of("debias", self.debias, (True, False))
        check_home(self.wire, self.center)

    @override
    def center_options(self, views: Callable[[slice], Views]) -> CenterOptions:
        return CenterOptions(self.center, self.locked, self.in_turn, self.wire)

    @override
    def prepare(self) -> Outcome | None:
        outcome = super().prepare()
        self._exchange: Callable[[], Outcome] | None = None
        self._difference = [memory_like(c) for c in self.last_center]
        self._snapshot = self._packed[: self.replica.included]
        return outcome

    def _exchanges(self, step: int) -> bool:
        return self.moves and step % self.tau == 0

    @override
    def before_step(self, context: StepContext) -> None:
        if self._exchanges(context.step + 1):
            self._begin(context.samples_per_replica)

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        if not self._exchanges(context.step):
            return None
        exchange = self._exchange or self._begin(context.samples_per_replica)  # the center may have been lost meanwhile
        self._exchange = None
        return exchange()

    def _end(self, exchange: Callable[[], PushPull], alpha: float, healthy: bool) -> Outcome:
        seen = exchange()
        self.visits += 1
        self._rates.observe(seen.counts)
        self._distance = math.sqrt(seen.square) if seen.square >= 0 else math.nan
        if not healthy:
            self.restart_from([difference.neg_() for difference in self._difference])
        elif math.isfinite(seen.square):
            self.replica.add(self._difference, -alpha)
        else:
            raise NotFiniteError([self.links.index])  # for the wire
        return Outcome(exchanged=True)

    def _begin(self, samples_per_replica: Sequence[int]) -> Callable[[], Outcome]:
        alpha, beta = self.strength()
        stability(alpha, beta)  # raises if the learning rate has made it unstable
        self._snapshot = self.replica.pack(self._snapshot)
        for difference, value in zip(self._difference, self._snapshot, strict=True):
            difference.copy_(value)
        share = samples_per_replica[self.links.index] / sum(samples_per_replica)
        healthy = self.is_finite(self._difference)
        if not healthy:
            share = 0.0
            for difference in self._difference:
                difference.zero_()  # of which the exchange will make 0 - c
        # A replica that comes very rarely must not make up for all of it at once: it would pull the center past itself.
        push = min(beta * share * (self._rates.factor if self.debias else 1.0), max(beta, 1.0))
        exchange = self._client.push_pull(self._difference, push)
        if not self.overlap:
            seen = exchange()
            exchange = lambda: seen  # noqa: E731
        self._exchange = partial(self._end, exchange, alpha, healthy)
        return self._exchange


@dataclass
class RoundRobinAverager(PushPullAverager):
    """The original EASGD: replicas exchange with the center strictly in their order, over and over.

    Source: "Original EASGD", You, Buluc and Demmel 2017, algorithm 1.
    """

    overlap, in_turn, center = False, True, "thread"


@dataclass
class AsyncElasticAverager(PushPullAverager):
    """Asynchronous EASGD: whoever comes first is served first.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; You, Buluc and Demmel 2017.

    Args:
        center: where it lives: ``"shared_memory"`` of one host, a ``"thread"`` of the first replica, which serves
            any, or a window of ``"mpi"``. ``"auto"``: shared memory if it can.
        debias: whether what a replica adds is divided by how often it comes, so that all count by their samples,
            fast or slow (this package's own; otherwise the center leans to the fast ones).

    Raises:
        UnsupportedError: when the ranks have met: the center cannot live there.
    """

    center: Home = field(default="auto", kw_only=True)
    debias: bool = field(default=True, kw_only=True)


@dataclass
class AsyncMomentumElasticAverager(AsyncElasticAverager):
    """Asynchronous EASGD with heavy-ball momentum: ``v <- mu v - eta g;  x <- x + v - alpha (x - c)``.

    Source: Momentum EASGD, You, Buluc and Demmel 2017, eq. 5 and 6.

    Raises:
        UnsupportedError: when training starts: another optimizer, or the center cannot live there.
    """

    @override
    def prepare(self) -> Outcome | None:
        check_momentum(self.optimizers, nesterov=False)
        return super().prepare()


@dataclass
class HogwildAverager(PushPullAverager):
    """Asynchronous EASGD without a lock, in the shared memory of one node: replicas do not wait for each other.

    Source: Hogwild EASGD, You, Buluc and Demmel 2017.

    Args:
        debias: whether what a replica adds is divided by how often it comes, so that all count by their samples,
            fast or slow (this package's own; otherwise the center leans to the fast ones).

    Raises:
        UnsupportedError: when the ranks have met: they live on several nodes.
    """

    locked, center = False, "shared_memory"
    debias: bool = field(default=True, kw_only=True)
