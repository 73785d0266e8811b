"""Samplers: the global order of samples, cut into global batches and shares; the same on every rank."""

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_hetero.batching.passes import in_passes
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.sample_costs import BatchCosts, SampleCosts
from lightning_hetero.batching.shares import check_limits
from lightning_hetero.errors import DataError


def shuffles_by_itself(loader: Any) -> bool:
    """Whether ``shuffle=True`` has made a sampler that Lightning does not know, as torchdata's loader does."""
    sampler = loader.sampler
    made = type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
    # Not of a type that can be imported here: torchdata need not be installed.
    return made and not sampler.replacement and sampler.num_samples == len(loader.dataset)


def has_own_batches(loader: Any) -> bool:
    """Whether a loader was given a ``batch_sampler`` and no ``batch_size``; a DataLoader then has no batch size."""
    return (loader.batch_sampler is not None and loader.batch_size is None) or makes_whole_batches(loader)


def makes_whole_batches(loader: Any) -> bool:
    """Whether a loader's dataset is given all indices of a batch: ``batch_size=None``, and a sampler of lists."""
    if loader.batch_size is not None or loader.batch_sampler is not None:
        return False
    if isinstance(sampler := loader.sampler, BatchSampler):
        return True
    if isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)) or not isinstance(sampler, Iterable):
        return False
    with seeded(0):  # which leaves the random states as they are
        return isinstance(next(iter(sampler), None), list | tuple)


class WholeBatches(Dataset):
    """A dataset that makes whole batches, for a loader with a ``batch_sampler``.

    Args:
        dataset: takes lists of indices.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset[indices]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet: unpickling, copying
            raise AttributeError(name)
        return getattr(self.dataset, name)


class ListsOfBatches(WholeBatches):
    """A dataset that is asked for several batches at once, each of which stays by itself."""

    @override
    def __getitems__(self, indices: list[Any]) -> Any:
        fetch = getattr(self.dataset, "__getitems__", None) or (lambda batch: [self.dataset[i] for i in batch])
        return [fetch(batch) for batch in indices]


def loader_is_sharded(loader: Any) -> bool:
    """Whether one of a loader's samplers says that it yields this rank's part of the data."""
    batches = getattr(loader, "batch_sampler", None)
    own = getattr(loader, "sampler", None)
    samplers = (own, getattr(own, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(isinstance(n := getattr(sampler, "num_replicas", None), int) and n > 1 for sampler in samplers)


class FixedBatches:
    """Global batches of ``batch_size`` consecutive samples of an order.

    Args:
        sampler: yields dataset indices, the same on every rank, and has a length.
        batch_size: samples in a global batch.
        drop_last: leave out the last batch if it is short.
    """

    whole = False

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __len__(self) -> int:
        full, tail = divmod(len(self.sampler), self.batch_size)
        return full + (tail > 0 and not self.drop_last)

    def size(self, index: int) -> int:
        """Samples in batch ``index``."""
        return min(self.batch_size, len(self.sampler) - index * self.batch_size)

    def draw(self, first: int) -> Iterator[list[Any]]:
        """Yield the batches from index ``first`` on."""
        order = islice(self.sampler, sum(map(self.size, range(first))), None)
        for index in range(first, len(self)):
            yield list(islice(order, self.size(index)))


class EvenBatches(FixedBatches):
    """Batches of ``batch_size`` samples that hold them all, none with fewer samples than there are ranks.

    Evaluation uses them: all ranks run the same number of batches and yet see every sample exactly once. Where the last
    batch would be too small, all are as even as can be instead. Only where ``batch_size`` itself leaves each rank one
    sample, or little more, can a batch be larger than ``batch_size``, by less than one sample per rank.

    Args:
        sampler: yields dataset indices, the same on every rank, and has a length, at least ``world``.
        batch_size: most samples in a global batch, except as said above.
        world: number of ranks.
    """

    def __init__(self, sampler: Any, batch_size: int, world: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        full, last = divmod(len(sampler), batch_size)
        self._cut_evenly = 0 < last < world or batch_size < world
        self._count = max(1, min(full + (last > 0), len(sampler) // world))

    def __len__(self) -> int:
        return self._count

    @override
    def size(self, index: int) -> int:
        if not self._cut_evenly:
            return super().size(index)
        least, extra = divmod(len(self.sampler), len(self))
        return least + (index < extra)


class GroupedBatches:
    """Global batches of ``world`` consecutive batches of a batch sampler of the user's.

    Args:
        batch_sampler: yields lists of dataset indices, the same on every rank, and has a length.
        world: number of its batches that make a global batch.
        whole: whether they stay whole; a global batch is a list of them then.
    """

    def __init__(self, batch_sampler: Any, world: int, whole: bool = False) -> None:
        self.sampler = batch_sampler
        self.world, self.whole = world, whole

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.world)

    def size(self, index: int) -> int | None:
        """``None``: that is not known before the batch is drawn."""
        return None

    def draw(self, first: int) -> Iterator[list[Any]]:
        """Yield the batches from index ``first`` on."""
        batches = iter(self.sampler)
        for index in range(len(self)):
            parts = [list(part) for part in islice(batches, self.world) if len(part)]
            if index >= first and parts:
                yield parts if self.whole else [i for part in parts for i in part]


class EvaluatedGroups(GroupedBatches):
    """Grouped batches of which none has fewer samples than there are ranks, so that all ranks run the same number.

    Where one would, all samples are cut again, into as many batches of equal size as can be. If batches stay whole,
    each rank has one of each group. For that, the largest ones are halved until there are enough.

    Raises:
        DataError: when they are drawn, if all of them together have fewer samples than there are ranks.
    """

    @override
    def draw(self, first: int) -> Iterator[list[Any]]:
        batches = list(super().draw(0))
        if self.whole:
            parts = [part for group in batches for part in group]
            while len(parts) % self.world and len(largest := max(parts, key=len)) > 1:
                at = parts.index(largest)
                parts[at : at + 1] = in_passes(largest, 2)
            if not len(parts) % self.world:
                yield from [parts[i : i + self.world] for i in range(0, len(parts), self.world)][first:]
                return
            batches = parts  # of one sample each
        if any(len(batch) < self.world for batch in batches):
            samples = [i for batch in batches for i in batch]
            if len(samples) < self.world:
                raise DataError(
                    f"an evaluation's batch sampler yields {len(samples)} samples for {self.world} ranks, so that some "
                    "rank would have none. Use fewer ranks or more data."
                )
            count = min(len(batches), len(samples) // self.world)
            edges = [len(samples) * i // count for i in range(count + 1)]
            batches = [samples[begin:end] for begin, end in pairwise(edges)]
        yield from [in_passes(batch, self.world) if self.whole else batch for batch in batches[first:]]


#: The global batches of one epoch: lists of dataset indices, or with ``whole`` of batches, each of which stays whole.
GlobalBatches = FixedBatches | GroupedBatches


class AgreedOrder:
    """The user's own sampler; rank 0 decides its order for all ranks.

    A sampler may draw from the process's random state, which differs between ranks. It runs on rank 0 with the state
    seeded by the epoch, so that an interrupted epoch can be repeated, and its order is sent to the others.

    Args:
        sampler: yields dataset indices, or lists of them; has a length.
        broadcast: sends an object from rank 0 to all (collective).
        decides: whether this is rank 0, now.
        seed: of the first epoch.
    """

    def __init__(
        self, sampler: Iterable[Any], broadcast: Callable[[Any], Any], decides: Callable[[], bool], seed: int
    ) -> None:
        self.sampler, self._seed = sampler, seed
        self.agree_by(broadcast, decides)
        self._epoch = 0
        self._own_seeds: dict[int, int] = {}  # of generators that the user gave to samplers, by their ids

    def agree_by(self, broadcast: Callable[[Any], Any], decides: Callable[[], bool]) -> None:
        """Agree among other ranks from now on; arguments like the constructor's."""
        self._broadcast, self._decides = broadcast, decides

    def set_epoch(self, epoch: int) -> None:
        """Let the order depend on the epoch."""
        self._epoch = epoch
        for owner in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        order: list[Any] | None = None
        while order is None:  # again if rank 0 was lost before it has told the others, and another rank decides now
            order = self._broadcast(self._decided() if self._decides() else None)
        return iter(order)

    def _decided(self) -> list[Any]:
        with seeded(self._seed + self._epoch):
            for owner in (self.sampler, getattr(self.sampler, "sampler", None)):
                if isinstance(own := getattr(owner, "generator", None), torch.Generator):
                    seed = self._own_seeds.setdefault(id(own), own.initial_seed())
                    own.manual_seed(seed + self._epoch)
            order = list(self.sampler)
        if len(order) > len(self):
            warnings.warn(
                f"{type(self.sampler).__name__} yields {len(order)} items, but its length says {len(self)}: the "
                "rest is not used. Let its `__len__` tell how many it yields.",
                stacklevel=3,
            )
        return order


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with the global CPU random states of torch, NumPy and Python seeded, and restore them after it."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


class Drawn(NamedTuple):
    """Draw of one step: this rank's part of a global batch.

    Attributes:
        samples: this rank's samples; 0 if its batch is a padding batch.
        total: samples of all ranks of its replica.
        parts: of each rank of its replica, its samples; empty if only the total is known.
        cost: of the samples that this rank processes, where a mean one costs 1; 0: nobody has said what they cost.
        sizes: samples of each pass in which this rank runs them; empty: one pass.
        in_passes: whether some rank of the job needs several.
    """

    samples: float
    total: float
    parts: Mapping[int, float] = {}
    cost: float = 0.0
    sizes: tuple[int, ...] = ()
    in_passes: bool = False

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]], rank: int, replica: Sequence[int]) -> "Drawn":
        """The draw of a rank of a replica, by the samples of each pass of all ranks."""
        parts, own = {other: sum(sizes[other]) for other in replica}, tuple(sizes[rank])
        several = max(map(len, sizes)) > 1
        return cls(sum(own), sum(parts.values()), parts, 0.0, own if len(own) > 1 else (), several)

    @property
    def pass_sizes(self) -> Sequence[float]:
        """Samples of each pass, if there is one only, too."""
        return self.sizes or (self.samples,)

    def for_survivors(self, kept: Sequence[int], replica: Sequence[int]) -> "Drawn":
        """The draw as it counts once only some ranks are left, and perhaps other ranks make a replica.

        Args:
            kept: of each rank that remains, its number before.
            replica: the ranks that average gradients with this one now.
        """
        if not self.parts:
            return self
        parts = {new: self.parts[kept[new]] for new in replica if kept[new] in self.parts}
        return self._replace(total=sum(parts.values()), parts=parts)


class Position(NamedTuple):
    """Position of training when an epoch's iterator is made.

    Attributes:
        epoch: epochs done.
        batch: batches of this epoch done; above 0 when a run resumes within an epoch.
        step: batches done since the start of the fit, which plans count.
        again: whether a loader that ends before the epoch does begins again.
    """

    epoch: int
    batch: int
    step: int
    again: bool = True


class RankSlot(NamedTuple):
    """Place of a rank among those that share batches.

    Attributes:
        rank: its number when batches are cut.
        replica: the ranks that average gradients with it, by the same numbers.
        cut: how batches are cut: see :class:`ShareSampler`, and the requests of a shared stream.
        start: the first step for which the slot holds.
        kept: of each rank that remains, its number when batches are cut; ``None``: all remain.
        now: the replica by the numbers that remain, where ``kept`` is given.
    """

    rank: int
    replica: tuple[int, ...]
    cut: Callable[..., Any]
    start: int = 0
    kept: tuple[int, ...] | None = None
    now: tuple[int, ...] = ()

    def draw(self, sampler: "ShareSampler", batch: list[Any], in_epoch: int) -> tuple[Drawn, list[Any]]:
        """This rank's part of a global batch."""
        batch, shares, sizes = self.cut(sampler, sampler.next_step, in_epoch, batch)
        own = batch_slice(batch, shares, self.rank)
        return self.counted(Drawn.of(sizes, self.rank, self.replica)), own

    def counted(self, drawn: Drawn) -> Drawn:
        """A draw by the numbers when batches are cut, as it counts among the ranks that remain."""
        return drawn if self.kept is None else drawn.for_survivors(self.kept, self.now)

    def for_survivors(self, kept: Sequence[int], replica: Sequence[int]) -> "RankSlot":
        """The same slot when only these ranks of the latest numbering are left; ``replica``: by their new numbers."""
        before = tuple(kept) if self.kept is None else tuple(self.kept[rank] for rank in kept)
        return self._replace(kept=before, now=tuple(replica))


class SharedBatches:
    """Global batches of which this rank takes its part, by a slot that changes when ranks are lost.

    Args:
        slot: of this rank.
        position: where training stands; asked whenever an epoch begins.

    Attributes:
        slots: this rank's slot now, and before it those for steps that other ranks have drawn before they were
            regrouped.
    """

    def __init__(self, slot: RankSlot, position: Callable[[], Position]) -> None:
        self.slots, self._position = [slot], position
        self.drawn: deque[Drawn] = deque()  # drawn but not yet trained on, in order
        self.begun: Position | None = None  # where the running epoch began, or was resumed
        self.next_step = 0  # first step not drawn yet
        self.before_draw: Callable[[int], object] = lambda step: None  # waits until a step's plan is sure

    @property
    def rank(self) -> int:
        """This rank."""
        return self.slots[-1].rank

    @property
    def replica(self) -> tuple[int, ...]:
        """The ranks that average gradients with this one, itself among them."""
        return self.slots[-1].replica

    def _begin(self, position: Position) -> None:
        """An epoch begins, or goes on, here; what was prefetched beyond the end of the last one is void."""
        self.drawn.clear()
        self.begun, self.next_step = position, position.step
        while len(self.slots) > 1 and self.slots[1].start <= position.step:
            del self.slots[0]

    def _slot(self) -> RankSlot:
        """The slot at the next step; steps that are void come again, so that an earlier slot may count once more."""
        return next(slot for slot in reversed(self.slots) if slot.start <= self.next_step)

    def repartition(self, slot: RankSlot, kept: Sequence[int], position: Callable[[], Position]) -> None:
        """Other ranks share the batches from a step on; what was drawn stays as it is.

        Args:
            slot: of this rank, from the first step that no rank has drawn.
            kept: of each rank that remains, its number before.
            position: where training stands.
        """
        self._position = position
        self.drawn = deque(drawn.for_survivors(kept, slot.replica) for drawn in self.drawn)
        self.slots = [one.for_survivors(kept, slot.replica) for one in self.slots if one.start < slot.start] + [slot]

    def take(self) -> Drawn:
        """The draw of the batch that is about to be trained on."""
        return self.drawn.popleft()


class ShareSampler(SharedBatches):
    """This rank's slices of the global batches, in training.

    A rank that gets no sample of a batch yields ``padding`` of its samples all the same, with weight 0, so that every
    rank runs the same number of steps.

    Args:
        batches: the global batches.
        rank: this rank.
        replica: the ranks that average gradients with this one, itself among them.
        position: acts on reports that are on their way, and says where training stands; asked whenever an epoch begins
            (collective).
        cut: by the plan in force at the step. For (sampler, step, index of the batch in the epoch, batch): its samples,
            or whole batches, in the order of the ranks that take them, how many of them each takes, and the samples of
            each of its passes.
        costs: of the samples, or of whole batches; ``None``: nobody says what they cost.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        rank: int,
        replica: Sequence[int],
        position: Callable[[], Position],
        cut: Callable[["ShareSampler", int, int, list[Any]], tuple[list[Any], Sequence[int], Sequence[Sequence[int]]]],
        costs: SampleCosts | BatchCosts | None = None,
    ) -> None:
        super().__init__(RankSlot(rank, tuple(replica), cut), position)
        self.batches, self.sampler = batches, batches.sampler  # Lightning looks for `set_epoch` there
        self.costs = costs
        self.padding = 1  # samples of a padding batch
        self._left = 0  # batches of the epoch still to be drawn

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        # All happens at the first draw: a DataLoader with workers makes two iterators and uses the second.
        position = self._position()
        begun = self.begun
        if begun is not None and begun.epoch == position.epoch and not self._left and not self.drawn:
            first = 0  # all trained on: a shorter loader starts over
        else:
            self._begin(begun := position)
            first = position.batch % max(len(self), 1) if position.again else min(position.batch, len(self))
        origin = begun.step - begun.batch  # the step at which the epoch began, or would have
        self._left = len(self) - first
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(position.epoch)
        for batch in self.batches.draw(first):
            self.before_draw(self.next_step)  # in which others may be regrouped
            drawn, own = self._slot().draw(self, batch, self.next_step - origin)
            self.next_step, self._left = self.next_step + 1, self._left - 1
            if self.costs is not None:
                own, cost = self.costs.padded_if_empty(own, batch, self.padding)
                drawn = drawn._replace(cost=cost)
            self.drawn.append(drawn)
            yield own or (batch * self.padding)[: self.padding]


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
        grows: for the samples of a batch, and the ranks' limits, which are less together: whether the limits grow.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        rank: int,
        world: int,
        plan: Callable[[], Plan],
        grows: Callable[[int, Sequence[int]], bool] = lambda samples, limits: False,
    ) -> None:
        self.batches, self.sampler = batches, batches.sampler
        self.repartition(rank, world, plan, grows)

    def repartition(
        self, rank: int, world: int, plan: Callable[[], Plan], grows: Callable[[int, Sequence[int]], bool]
    ) -> None:
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
            high = self._limits(plan, len(batch))
            if not begin and isinstance(self.batches, FixedBatches):
                rounded = -(-len(batch) // world) * world
                in_turn = rounded <= sum(high) and len({*self._shares(world, plan, rounded, high)}) == 1
            if self.batches.whole:  # one each, or more as one, if ranks were lost since the loader was set up
                own = [i for part in in_passes(batch, world)[rank] for i in part]
            elif in_turn:
                own = batch[(rank - begin) % world :: world]
            else:
                own = batch_slice(batch, self._shares(world, plan, len(batch), high), rank)
            begin += len(batch)
            if own:
                yield own

    def _limits(self, plan: Plan, samples: int) -> tuple[int, ...]:
        """Most samples of each rank, of a batch of so many."""
        high = tuple(max(most, 1) for most in plan.high)
        if (room := sum(high)) < samples and self._grows(samples, high):
            return tuple(-(-most * samples // room) for most in high)
        return high

    @staticmethod
    def _shares(world: int, plan: Plan, samples: int, high: tuple[int, ...]) -> Sequence[int]:
        """Number of samples of a batch for each rank, of which each takes so many at most."""
        if samples <= world:
            return [int(rank < samples) for rank in range(world)]
        check_limits(samples, plan.costs, (1,) * world, high)  # there are no passes here
        plan = replace(plan, low=(1,) * world, high=high, idle=())
        shares = plan.split([samples])[0]
        # After a loss the others may not be trusted with a whole batch, and then the least shares do not hold.
        return shares if all(shares) else replace(plan, reach=()).split([samples])[0]


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
