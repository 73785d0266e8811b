"""Base of asynchronous algorithms with a center: replicas exchange with it one by one, each whenever it is ready."""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Outcome, StepContext
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.algorithms.state import PerReplica
from lightning_hetero.comm.centers.base import Center
from lightning_hetero.comm.centers.client import CenterClient, CenterOptions, layout_of, open_center


class ExchangeRates:
    """Rate of this replica's exchanges, against the mean of all.

    A replica that comes four times as often would pull the center four times as much. So what each adds is divided by
    its rate.

    Args:
        index: this replica.
        window: own exchanges to look back.
    """

    def __init__(self, index: int, window: int = 16) -> None:
        self._index = index
        self._seen: deque[tuple[float, list[int]]] = deque(maxlen=window + 1)

    def observe(self, counts: Sequence[int]) -> None:
        """Take in the exchanges of each replica so far, at an exchange of this one."""
        self._seen.append((time.monotonic(), list(counts)))

    @property
    def factor(self) -> float:
        """Mean rate over own rate."""
        if len(self._seen) < 2:
            return 1.0
        since = self._since()
        return sum(since) / len(since) / since[self._index]

    def per_second(self) -> list[float]:
        """Exchanges of each replica."""
        seconds = self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0
        return [count / seconds for count in self._since()] if seconds > 0 else []

    def _since(self) -> list[int]:
        (_, first), (_, last) = self._seen[0], self._seen[-1]
        return [b - a for a, b in zip(first, last, strict=True)]


class AsyncCenterAverager(CenteredAverager):
    """Base of averagers that exchange with a center one by one: it opens the center, saves it, and replaces a lost one.

    Replicas wait for each other at the ends of epochs only, and where all evaluate or save.

    Attributes:
        counts: of each replica, its exchanges with the center, as far as this one has seen.
    """

    traits = replace(CenteredAverager.traits, lockstep=False, one_column=True)
    counts = PerReplica[list[int]](lambda averager: [0] * averager.links.count)
    _center: Center

    @abstractmethod
    def center_options(self) -> CenterOptions:
        """The center's home, and the rule of an exchange."""

    @property
    def center_vectors(self) -> list[Tensor]:
        """All vectors that the center keeps, as they were when all last looked."""
        return self.last_center

    def make_center(self) -> Center:
        """The center of all replicas, not open yet (collective)."""
        topology, groups = self.run.job
        layout = layout_of(topology.rank, self.run.replicas, topology.world, groups.timeout)
        return open_center(self.center_options(), topology, layout, groups, self.run.interface)

    @override
    def prepare(self) -> Outcome | None:
        outcome = super().prepare()
        self._center = self.make_center()
        self._rates = ExchangeRates(self.links.index)
        self._client = CenterClient(self._center, self.links)
        self._center.open(self.center_vectors)
        return outcome

    @override
    def due(self, context: StepContext) -> bool:
        return context.epoch_ends

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        outcome = super().finish(context)
        self._center.leave()
        return outcome

    @override
    def status(self, step: int) -> dict[str, float | str]:
        rates = {f"exchanges_per_s/replica{i}": rate for i, rate in enumerate(self._rates.per_second())}
        return {**super().status(step), **rates}

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        self.before_save()
        return super().consensus(context)

    @override
    def before_save(self) -> None:
        self.counts = self._client.read(self.center_vectors)
        self.commits = sum(self.counts)

    @override
    def after_restore(self) -> None:
        self._client.write(self.center_vectors, self.counts)

    @override
    def absorb_arrived(self, lost: Sequence[int]) -> None:
        self.commits = -1
        if (found := self._center.peek()) is not None:  # it lives here; the others get it from this replica
            for own, value in zip(self.center_vectors, found[0], strict=True):
                own.copy_(value)
            self.counts = list(found[1])
            self.commits = sum(self.counts)

    @override
    def after_loss(self, former: Mapping[str, Any], step: int, context: StepContext) -> None:
        if self.commits < 0:
            self.replace_center(context)
        self.commits = sum(self.counts)

    def replace_center(self, context: StepContext) -> None:
        """The center was lost with its host: begin again with the mean of the replicas that remain (collective)."""
        for own, mean in zip(self.reference, self.average(context).mean, strict=True):
            own.copy_(mean)

    @override
    def close(self) -> None:
        if hasattr(self, "_center"):  # not if it could not be made
            self._center.close()
