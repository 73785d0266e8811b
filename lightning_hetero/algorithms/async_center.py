"""Base of asynchronous algorithms with a center: replicas exchange with it one by one, each whenever it is ready."""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Outcome, ReplicaLoss, StepContext
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.algorithms.state import Own, PerReplica
from lightning_hetero.comm.centers.base import Center, CenterInColumns, CenterLayout
from lightning_hetero.comm.centers.client import CenterClient, CenterOptions, open_center
from lightning_hetero.comm.columns import Layout
from lightning_hetero.errors import ConfigurationError, UnsupportedError, not_none

#: Gives the parts of vectors that belong to parameters, and those that belong to buffers.
Views = Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]


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

    def state_dict(self) -> list[tuple[float, list[int]]]:
        """Builtins only: how long ago exchanges were, and their counts."""
        now = time.monotonic()
        return [(now - at, counts) for at, counts in self._seen]

    def load_state_dict(self, state: Sequence[tuple[float, list[int]]]) -> None:
        """Continue from :meth:`state_dict`."""
        now = time.monotonic()
        self._seen.clear()
        self._seen.extend((now - ago, list(counts)) for ago, counts in state)

    def _since(self) -> list[int]:
        (_, first), (_, last) = self._seen[0], self._seen[-1]
        return [b - a for a, b in zip(first, last, strict=True)]


def check_home(wire: str, center: str) -> None:
    """See that a center can be where an option wants it.

    Raises:
        ConfigurationError: it has no wire there.
    """
    if wire != "fp32" and center not in ("auto", "thread"):
        raise ConfigurationError(
            f"wire={wire!r}: a center in {center} has no wire. Use wire='fp32' or center='thread'."
        )


class AsyncCenterAverager(CenteredAverager):
    """Base of averagers that exchange with a center one by one: it opens the center, saves it, and replaces a lost one.

    Replicas wait for each other at the ends of epochs only, and where all evaluate or save.

    Attributes:
        counts: of each replica, its exchanges with the center, as far as this one has seen.
        visits: of this replica, as far as it has got the answers.
    """

    traits = replace(CenteredAverager.traits, lockstep=False)
    counts = PerReplica[list[int]](lambda averager: [0] * averager.links.count)
    visits = Own[int](0)
    _rates = Own[ExchangeRates](lambda averager: ExchangeRates(averager.links.index))
    _center: Center

    @abstractmethod
    def center_options(self, views: Callable[[slice], Views]) -> CenterOptions:
        """The center's home, and the rule of an exchange.

        Args:
            views: gives, for some of the model's vectors, what tells their parameters and buffers apart.
        """

    @property
    def center_vectors(self) -> list[Tensor]:
        """All vectors that the center keeps, as they were when all last looked."""
        return self.last_center

    @property
    def center_layout(self) -> Layout:
        """Of each vector that the center keeps, the values in it, by name."""
        return self.replica.layout[: self.replica.included]

    def make_center(self) -> Center:
        """The center of all replicas, not open yet (collective).

        Raises:
            UnsupportedError: on every rank: it cannot live there.
        """
        (topology, groups), links = self.run.job, self.links
        if (cut := links.cut(self.center_layout)) is None:
            leaders = tuple(ranks[0] for ranks in self.run.replicas)
            layout = CenterLayout(topology.rank, topology.world, leaders, links.index, groups.timeout)
            options = self.center_options(lambda vectors: self.replica.part(vectors).views)
            return open_center(options, topology, layout, groups, self.run.interface)
        centers = []
        for number, ranks in enumerate(links.columns):
            options = self.center_options(partial(self._views_in, number))
            if options.home == "mpi" or (options.wire != "fp32" and any(part.known for part in options.parts)):
                asked, remedy = f"wire={options.wire!r}", "wire='fp32'"
                if options.home == "mpi":
                    asked, remedy = "center='mpi'", "center='thread'"
                raise UnsupportedError(
                    f"{asked} with a sharded model needs replicas of one size (ranks_per_node). Use {remedy}."
                )
            group = groups.get("the center's clients", ranks)
            layout = CenterLayout(topology.rank, topology.world, ranks, links.index, groups.timeout, group)
            centers.append(open_center(options, topology, layout, groups, self.run.interface))
        return CenterInColumns(centers, cut)

    def _views_in(self, column: int, vectors: slice) -> Views:
        layout, parameters = self.replica.layout[: self.replica.included][vectors], set(self.replica.parameter_names)
        cut = not_none(self.links.cut(layout), "the cut into columns")

        def views(flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            found: tuple[list[Tensor], list[Tensor]] = [], []
            for name, part in cut.by_name(flats, column):
                found[name not in parameters].append(part)
            return found

        return views

    @override
    def prepare(self) -> Outcome | None:
        outcome = super().prepare()
        self._center = self.make_center()
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
    def before_save(self, lost: Sequence[int] | None = None) -> None:
        if lost is None:
            self.counts = self._client.read(self.center_vectors)
        elif (found := self._center.peek()) is None:  # another replica has it, or it was lost with its host
            self.commits = -1
            return
        else:
            for own, value in zip(self.center_vectors, found[0], strict=True):
                own.copy_(value)
            self.counts = list(found[1])
        self.commits = sum(self.counts)

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        if loss is not None:
            if self.commits < 0:
                self.replace_center(loss.context)
            # The center may count a visit whose answer was lost, and which is repeated.
            self.counts = self.links.gather_of_replicas(self.visits)
            self.commits = sum(self.counts)
            self._rates = ExchangeRates(self.links.index)  # those before were of other replicas
        self._client.write(self.center_vectors, self.counts)

    def replace_center(self, context: StepContext) -> None:
        """The center was lost with its host: begin again with the mean of the replicas that remain (collective)."""
        for own, mean in zip(self.reference, self.average(context).mean, strict=True):
            own.copy_(mean)

    @override
    def close(self) -> None:
        if hasattr(self, "_center"):  # not if it could not be made
            self._center.close()
