"""Batch samplers that yield this rank's slice of every global batch."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_hetero.errors import DataError
from lightning_hetero.workload.order import FixedBatches, GlobalBatches
from lightning_hetero.workload.plan import Plan


class Drawn(NamedTuple):
    """What was drawn for one step: this rank's part of a global batch.

    Attributes:
        samples: this rank's samples; 0 if its batch is a padding batch.
        total: samples of all ranks of its replica.
        parts: of each rank of its replica, its samples; empty if only the total is known.
    """

    samples: float
    total: float
    parts: Mapping[int, float] = {}

    def among(self, kept: Sequence[int], replica: Sequence[int]) -> "Drawn":
        """What counts once only some ranks are left, and other ranks make a replica, perhaps.

        Args:
            kept: of each rank that remains, its number before.
            replica: the ranks that average gradients with this one now.
        """
        if not self.parts:
            return self
        parts = {new: self.parts[kept[new]] for new in replica if kept[new] in self.parts}
        return Drawn(self.samples, sum(parts.values()), parts)


class Position(NamedTuple):
    """Where training stands when an epoch's iterator is made.

    Attributes:
        epoch: epochs done.
        batch: batches of this epoch done; above 0 when a run resumes within an epoch.
        step: batches done since the start of the fit, which plans count.
    """

    epoch: int
    batch: int
    step: int


class Seat(NamedTuple):
    """A rank's place among those that share batches.

    Attributes:
        rank: its number when batches are cut.
        replica: the ranks that average gradients with it, by the same numbers.
        shares: for (sampler, step, index of the batch in the epoch, its size): the share of every rank.
        start: the first step for which the seat holds.
        kept: of each rank that remains, its number when batches are cut; ``None``: all remain.
        now: the replica by the numbers that remain, where ``kept`` is given.
    """

    rank: int
    replica: tuple[int, ...]
    shares: Callable[["ShareSampler", int, int, int], Sequence[int]]
    start: int = 0
    kept: tuple[int, ...] | None = None
    now: tuple[int, ...] = ()

    def draw(self, sampler: "ShareSampler", batch: list[int], in_epoch: int) -> tuple[Drawn, list[int]]:
        """This rank's part of a global batch."""
        shares = self.shares(sampler, sampler.next_step, in_epoch, len(batch))
        own = batch_slice(batch, shares, self.rank)
        drawn = Drawn(len(own), sum(shares[rank] for rank in self.replica), {r: shares[r] for r in self.replica})
        return drawn if self.kept is None else drawn.among(self.kept, self.now), own

    def among(self, kept: Sequence[int], replica: Sequence[int]) -> "Seat":
        """The same seat when only these ranks of the latest numbering are left; ``replica``: by their new numbers."""
        before = tuple(kept) if self.kept is None else tuple(self.kept[rank] for rank in kept)
        return self._replace(kept=before, now=tuple(replica))


class ShareSampler:
    """This rank's slices of the global batches, in training.

    A rank that gets no sample of a batch yields one of its samples all the same, as padding of weight 0, so that every
    rank runs the same number of steps.

    Args:
        batches: the global batches.
        rank: this rank.
        replica: the ranks that average gradients with this one, itself among them.
        position: where training stands; asked whenever an epoch begins.
        shares: for (step, index of the batch in the epoch, its size): the share of every rank.

    Attributes:
        seats: this rank's seat now, and before it those for steps that other ranks have drawn before they were
            regrouped.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        rank: int,
        replica: Sequence[int],
        position: Callable[[], Position],
        shares: Callable[["ShareSampler", int, int, int], Sequence[int]],
    ) -> None:
        self.batches, self.seats = batches, [Seat(rank, tuple(replica), shares)]
        self._position = position
        self.sampler = batches.sampler  # where Lightning looks for `set_epoch`
        self.drawn: deque[Drawn] = deque()  # drawn but not yet trained on, in order
        self.begun: Position | None = None  # where the running epoch began, or was resumed
        self.next_step = 0  # first step not drawn yet
        self.padding = 1  # samples of a padding batch
        self.before_draw: Callable[[int], object] = lambda step: None  # waits until a step's plan is sure
        self._left = 0  # batches that the running pass has still to draw

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # All happens at the first draw: a DataLoader with workers makes two iterators and uses the second.
        position = self._position()
        same_epoch = self.begun is not None and self.begun.epoch == position.epoch
        if same_epoch and not self._left and not self.drawn:  # all trained on: a shorter loader starts over
            first = 0
        else:  # a new epoch; what was prefetched beyond the end of the last one is void
            self.drawn.clear()
            self.begun, self.next_step = position, position.step
            first = position.batch % max(len(self), 1)
        assert self.begun is not None
        origin = self.begun.step - self.begun.batch  # the step at which the epoch began, or would have
        self._left = len(self) - first
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(position.epoch)
        for batch in self.batches.draw(first):
            self.before_draw(self.next_step)  # in which others may be regrouped
            drawn, own = self._seat().draw(self, batch, self.next_step - origin)
            self.next_step, self._left = self.next_step + 1, self._left - 1
            self.drawn.append(drawn)
            yield own or (batch * self.padding)[: self.padding]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.seats[-1].rank

    @property
    def replica(self) -> tuple[int, ...]:
        """The ranks that average gradients with this one, itself among them."""
        return self.seats[-1].replica

    def _seat(self) -> "Seat":
        while len(self.seats) > 1 and self.seats[1].start <= self.next_step:
            del self.seats[0]
        return self.seats[0]

    def regroup(self, seat: "Seat", kept: Sequence[int], position: Callable[[], Position]) -> None:
        """Other ranks share the batches from a step on; what was drawn stays as it is.

        Args:
            seat: of this rank, from the first step that no rank has drawn.
            kept: of each rank that remains, its number before.
            position: where training stands.
        """
        self._position = position
        self.drawn = deque(drawn.among(kept, seat.replica) for drawn in self.drawn)
        self.seats = [one.among(kept, seat.replica) for one in self.seats if one.start < seat.start] + [seat]

    def take(self) -> Drawn:
        """What was drawn for the batch that is about to be trained on."""
        return self.drawn.popleft()


class EvaluationSampler:
    """This rank's parts of the global batches, in evaluation: every sample once, on one rank.

    Where all ranks take equal parts, they take samples in turn, as with PyTorch's ``DistributedSampler``: of ``world``
    ranks, rank ``r`` has the samples ``r``, ``r + world``, ``r + 2 * world``, ... of the order. Else each rank has
    consecutive samples of each global batch, and so it has of batches that the user's own sampler has put together.

    Args:
        batches: the global batches.
        rank: this rank.
        world: number of ranks.
        plan: the agreed plan of the moment.
        grows: whether its upper limits are those of training steps, which grow with a batch that is larger than all of
            them together.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        rank: int,
        world: int,
        plan: Callable[[], Plan],
        grows: Callable[[], bool] = lambda: False,
    ) -> None:
        self.batches, self.sampler = batches, batches.sampler
        self.regroup(rank, world, plan, grows)

    def regroup(self, rank: int, world: int, plan: Callable[[], Plan], grows: Callable[[], bool]) -> None:
        """Other ranks share the batches from the next pass on; arguments like the constructor's."""
        self.rank, self._world, self._plan, self._grows = rank, world, plan, grows

    def __len__(self) -> int:
        # A batch with fewer samples than ranks gives one sample each to the first of them, whatever the plan.
        sizes = [self.batches.size(i) for i in range(len(self.batches))]
        return sum(size is None or size > self.rank for size in sizes)

    def __iter__(self) -> Iterator[list[int]]:
        rank, world, plan = self.rank, self._world, self._plan()  # those of now, for the whole pass
        begin, in_turn = 0, False
        for batch in self.batches.draw(0):
            if not begin and isinstance(self.batches, FixedBatches):
                in_turn = len(set(self._shares(world, plan, -(-len(batch) // world) * world))) == 1
            if in_turn:
                own = batch[(rank - begin) % world :: world]
            else:
                own = batch_slice(batch, self._shares(world, plan, len(batch)), rank)
            begin += len(batch)
            if own:
                yield own

    def _shares(self, world: int, plan: Plan, samples: int) -> Sequence[int]:
        """How many samples of a batch each rank gets."""
        if samples <= world:
            return [int(rank < samples) for rank in range(world)]
        high = tuple(max(high, 1) for high in plan.high)
        if self._grows() and (room := sum(high)) < samples:
            high = tuple(-(-most * samples // room) for most in high)
        return replace(plan, low=(1,) * world, high=high).split([samples])[0]


def batch_slice(batch: list[Any], shares: Sequence[int], rank: int) -> list[Any]:
    """The part of ``batch`` that belongs to ``rank`` when consecutive parts of the given sizes go to the ranks."""
    first = sum(shares[:rank])
    return batch[first : first + shares[rank]]


def check_enough(samples: int, world: int, name: str) -> None:
    """Refuse a dataset that cannot give every rank a sample.

    Raises:
        DataError: fewer samples than ranks.
    """
    if samples < world:
        raise DataError(
            f"the {name} dataset has {samples} samples for {world} ranks, so that some rank would have none. "
            "Use fewer ranks or more data."
        )
