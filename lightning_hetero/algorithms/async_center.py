"""Base of asynchronous algorithms with a center: replicas exchange with it one by one, each whenever it is ready."""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Outcome, StepContext
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.comm.agreement import of_rank
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
    """

    traits = replace(CenteredAverager.traits, lockstep=False)
    #: Entries of the state that tell of the center, and so are the same for all replicas.
    of_center: ClassVar[tuple[str, ...]] = ("reference", "counts", "moved")
    _center: Center | None = None

    @abstractmethod
    def center_options(self) -> CenterOptions:
        """The center's home, and the rule of an exchange."""

    @property
    def center_vectors(self) -> list[Tensor]:
        """All vectors that the center keeps, as they were when all last looked."""
        return self.last_center

    def make_center(self) -> Center:
        """The center of all replicas, not open yet (collective)."""
        topology, groups = self.run.topology, self.run.groups
        assert topology is not None
        assert groups is not None
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
        assert self._center is not None
        self._center.leave()
        return outcome

    @override
    def status(self, step: int) -> dict[str, float | str]:
        rates = {f"exchanges_per_s/replica{i}": rate for i, rate in enumerate(self._rates.per_second())}
        return {**super().status(step), **rates}

    @override
    def state_dict(self) -> dict[str, Any]:
        counts = self._client.read(self.center_vectors)
        return {**super().state_dict(), "counts": counts}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._client.write(self.center_vectors, state["counts"])

    @override
    def state_after_loss(self, kept: Sequence[int]) -> dict[str, Any]:
        assert self._center is not None
        found = self._center.peek()
        if found is not None:
            for own, value in zip(self.center_vectors, found[0], strict=True):
                own.copy_(value)
        counts = found[1] if found is not None else [0] * self.links.count
        state = {**CenteredAverager.state_dict(self), "distance": self._distance, "here": found is not None}
        return {**state, "counts": [counts[index] for index in kept]}

    @override
    def continue_after_loss(self, state: dict[str, Any], context: StepContext) -> None:
        holders = [rank for rank, here in enumerate(self.links.gather(state["here"])) if here]
        if holders:
            theirs = of_rank({name: state[name] for name in self.of_center}, holders[0])
            state = {**state, **theirs}
        else:
            state = {**state, **self.center_lost(context)}
        self.load_state_dict(state)

    def center_lost(self, context: StepContext) -> dict[str, Any]:
        """Replacements for entries of a state when the center was lost with its host (collective).

        It begins again as the mean of those that remain.
        """
        return {"reference": self.average(context).mean}

    @override
    def missed_exchange(self, context: StepContext) -> None:
        """Nothing: replicas come to the center on their own."""

    @override
    def close(self) -> None:
        if self._center is not None:
            self._center.close()
