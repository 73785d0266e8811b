"""Streams: batches of sizes that only their own rank knows, of iterable datasets and loaders that the user shards."""

import copy
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from typing_extensions import override

from lightning_hetero.batching.passes import Passes, in_passes
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.sample_costs import StreamCosts
from lightning_hetero.batching.sampler import Drawn, Position, RankSlot, SharedBatches, batch_slice
from lightning_hetero.batching.stream_peers import StepTally, StreamPeers
from lightning_hetero.errors import DataError


class StreamPosition(NamedTuple):
    """Position of a stream.

    Attributes:
        epoch: epochs done before the running one.
        batches: of this epoch that have been trained on, padding batches included.
        state: of the loader after its latest batch; before it if the loader has come to its end, since that batch
            serves for padding. ``None``: the loader cannot tell, or this is its first batch.
        ended: whether the loader has come to its end.
        before: state of the loader before its latest batch, which serves for padding if no other one follows.
    """

    epoch: int
    batches: int
    state: Any
    ended: bool
    before: Any


class LoaderProxy:
    """Proxy of a loader: attributes that are not found here are looked up on it.

    Args:
        loader: any iterable of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: unpickling, copying
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:  # Lightning resets a DataLoader's workers through this
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = iterator


class Stream(LoaderProxy):
    """Iterates over a loader in step with the other ranks, which learn its batch sizes as they come.

    A rank that has no more data repeats its last batch with weight 0 until all have ended: every sample counts
    exactly once, every rank runs the same number of steps, and nobody waits for a rank that has left.

    Args:
        loader: any iterable of batches. Attributes that are not found here are looked up on it.
        size_of: samples in a batch; raises if it cannot tell.
        begin: says where training stands; called whenever an epoch's first batch is drawn.
        peers: the other ranks.
        usual: samples as which every rank's batch counts where sizes cannot be told; ``None``: that is an error, since
            those of ranks surely differ.
        retry: calls a function of what ranks do together, and calls it again if a rank was lost meanwhile.
        replica_length: batches until the last one of this replica's streams ends, if that is known.

    Attributes:
        peers: the other ranks, of the present view.
        next_step: first step not drawn yet.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        size_of: Callable[[Any], float],
        begin: Callable[[], Position],
        peers: StreamPeers,
        usual: float | None = None,
        retry: Callable[[Callable[[], Any]], Any] = lambda operation: operation(),
        replica_length: float = math.inf,
    ) -> None:
        super().__init__(loader)
        self._size_of, self._begin, self.peers, self._usual, self._retry = size_of, begin, peers, usual, retry
        self._replica_length = replica_length
        self._passes = self.next_step = self._epoch = 0
        self._unknown = False  # whether the size of some batch was
        self.drawn: deque[Drawn] = deque()
        self._count = 0  # batches of this pass so far
        self._over = False  # whether the pass is
        self._states: deque[StreamPosition] = deque()  # after each batch drawn but not yet trained on
        self._place: StreamPosition | None = None  # after the batch that is trained on, of a loader that can tell
        self._resumed: StreamPosition | None = None  # where to go on, until a batch has been trained on
        self.another_batch = False  # whether that is within the running epoch

    @property
    def padding_follows(self) -> bool:
        """Whether the batch after the one that is trained on is a padding batch on all ranks of this replica."""
        padding = self.drawn[0].total == 0 if self.drawn else self._over
        return padding or self._count >= self._replica_length

    def __len__(self) -> int:
        if self.peers.length is None:
            raise TypeError("the stream of some rank has no length")
        return self.peers.length

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and self.stateful:
            return _keep_no_state  # Lightning saves rank 0's state only; this tells it that the loader resumes
        return super().__getattr__(name)

    def __iter__(self) -> Iterator[Any]:
        epoch, _, step, _ = self._begin()
        if self._over and self.drawn and epoch == self._epoch:
            self._resumed = None  # a shorter loader begins again, while its last batch is yet to be trained on
        else:
            self.drawn.clear()
            self._states.clear()
            self.next_step = step
        self._epoch = epoch
        self._passes += 1
        self._retry(lambda: self.peers.begin(self._passes))
        end = object()
        first = self._count = self._go_on(epoch)
        batches = iter(self.loader)
        batch = next(batches, end) if first and self._resumed and self._resumed.ended else end
        before, after = (None, None) if self._resumed is None else (self._resumed.before, self._resumed.state)
        self._over, ended = False, False
        while True:
            current = end if ended else next(batches, end)
            ended = current is end
            if ended and batch is end and first and self._resumed:  # it was saved after its last batch
                batch = self._last_batch(self._resumed, end)
            samples, problem = self._measure(current) if not ended else (0.0, None)
            mine = StepTally(samples, float(not ended), float(ended and batch is end))
            if self._count == first:
                self.peers.compare(None if ended else current)
                if not self._somebody_has_data(self.peers.of_all(mine), problem):
                    break
            tallies: dict[int, StepTally] = self._retry(lambda: self.peers.of_replica(mine))  # noqa: B023  called at once
            self._check_size(StepTally.over(tallies.values()), problem)
            if self._unknown and self._usual is not None:
                samples = self._usual * mine.alive
                tallies = {rank: one._replace(samples=self._usual * one.alive) for rank, one in tallies.items()}
            tally = StepTally.over(tallies.values())
            # Now: within the next question ranks may be lost, and then it counts among those that remain.
            self.drawn.append(Drawn(samples, tally.samples, {rank: one.samples for rank, one in tallies.items()}))
            if not self._retry(lambda: self.peers.another_batch(self._count, tally.alive > 0)):  # noqa: B023
                self.drawn.pop()
                break
            batch, self._count, self.next_step = batch if ended else current, self._count + 1, self.next_step + 1
            if self.stateful and not ended:
                before, after = after, copy.deepcopy(self.loader.state_dict())  # type: ignore[attr-defined]
            self._states.append(StreamPosition(epoch, self._count, before if ended else after, ended, before))
            yield batch
        self._over = True

    def repartition(self, peers: StreamPeers, kept: Sequence[int], replica: Sequence[int]) -> None:
        """Go on without the ranks that were lost; what they had drawn does not count any more.

        Args:
            peers: the ranks that remain.
            kept: of each of them, its number before.
            replica: the ranks that average gradients with this one.
        """
        self.peers = peers
        self.drawn = deque(drawn.for_survivors(kept, replica) for drawn in self.drawn)

    def take(self) -> Drawn:
        """The draw of the batch that is about to be trained on."""
        self._place, self._resumed = self._states.popleft(), None
        return self.drawn.popleft()

    @property
    def stateful(self) -> bool:
        """Whether the loader can tell where it stands, and go on there."""
        return all(callable(getattr(self.loader, name, None)) for name in ("state_dict", "load_state_dict"))

    def position(self) -> dict[str, Any] | None:
        """Position of the data after the batch that is trained on; builtins, and what the loader tells."""
        return self._place._asdict() if self.stateful and self._place is not None else None

    def go_on_from(self, position: dict[str, Any]) -> None:
        """Let the next iteration begin at what :meth:`position` has told."""
        self._resumed = StreamPosition(**position)

    def _go_on(self, epoch: int) -> int:
        """Bring the loader where the checkpoint says; the batches of this epoch that come before."""
        if (place := self._resumed) is None:
            return 0
        if place.state is not None:
            self.loader.load_state_dict(place.state)  # type: ignore[attr-defined]
        self.another_batch = place.epoch == epoch
        if self.another_batch:
            return place.batches
        for _, _ in zip(range(1 + place.ended), self.loader, strict=False):
            pass  # ends the epoch that the checkpoint knows; the next iteration begins another
        return 0

    def _last_batch(self, place: StreamPosition, end: Any) -> Any:
        """The batch after which the loader came to its end."""
        if place.before is not None:
            self.loader.load_state_dict(place.before)  # type: ignore[attr-defined]
        batches = list(self.loader)  # to its end, so that the next iteration begins an epoch
        return batches[-1] if batches else end

    def _somebody_has_data(self, everyone: StepTally, problem: str | None) -> bool:
        """Look at the first batches of all ranks; an error is raised on every rank at once."""
        self._check_size(everyone, problem)
        if everyone.alive and everyone.empty:
            raise DataError(
                f"{int(everyone.empty)} rank(s) got no training batch at all while others did. Give every rank at "
                "least one: check how the dataset is sharded."
            )
        return everyone.alive > 0

    def _check_size(self, tally: StepTally, problem: str | None) -> None:
        """Look whether all sizes are known; where one is not, none counts from then on."""
        if not math.isnan(tally.samples) or self._unknown:  # on every rank of the replica at once
            return
        if self._usual is None:
            raise DataError(
                "the number of samples in a training batch is unknown"
                + (f": {problem.rstrip('.')}." if problem else " on another rank.")
                + " Ranks have batches of different sizes here, so each must say what it weighs. Return tensors with "
                "the batch as their first dimension, or define `batch_weight(batch)` on the LightningModule."
            )
        self._unknown = True
        self.peers.warn_of_unknown_size(problem.rstrip(".") if problem else "another rank cannot tell")

    def _measure(self, batch: Any) -> tuple[float, str | None]:
        try:
            return float(self._size_of(batch)), None
        except Exception as error:
            return float("nan"), str(error)


def _keep_no_state(*_: Any) -> dict[str, Any]:
    return {}


class EvaluatedStream(LoaderProxy):
    """Iterates over this rank's own part of the data, in evaluation.

    Ranks may run different numbers of steps, and need not wait for each other, unless a step calls a collective: all
    ranks must have the same number then, or some would wait for ranks that are at the end of the epoch. Before that
    happens an error is raised on all of them.

    Args:
        loader: any iterable of batches.
        name: of the stage, such as ``"validation"``.
        lengths: batches of each rank's loader, ``None`` if unknown.
        gather: one value per rank (collective).
        needs_data: whether each rank must have a batch, if any rank has.

    Raises:
        DataError: on every rank, if only some have a batch, when they are to draw the first one.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        name: str,
        lengths: Sequence[int | None],
        gather: Callable[[Any], list[Any]],
        needs_data: bool,
    ) -> None:
        super().__init__(loader)
        self._name, self._gather, self._needs_data = name, gather, needs_data
        self._drawn, self._ended, self._in_step = 0, False, False
        self._sized = all(length is not None for length in lengths)
        if self._sized:
            self._check_data([bool(length) for length in lengths])

    def __len__(self) -> int:
        if not self._sized:
            raise TypeError(f"the {self._name} dataloader has no length, on some rank")
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._drawn, self._ended, self._in_step = 0, False, False
        end = object()
        batches = iter(self.loader)
        while True:
            batch = next(batches, end)
            self._ended = batch is end
            if self._sized:  # and compared before; nobody draws beyond the end
                pass
            elif not self._drawn:
                self._check_data(self._gather(not self._ended))
            elif self._in_step:
                self._check_steps(self._gather((self._drawn + (not self._ended), self._ended)))
            if self._ended:
                return
            self._drawn += 1
            yield batch

    def before_collective(self, steps: float) -> None:
        """A step calls a collective, on all ranks (collective, the first time in a pass).

        Args:
            steps: that this rank will run, if its loader has a length.

        Raises:
            DataError: on every rank, if they run different numbers of steps.
        """
        if self._in_step:
            return
        self._in_step = True
        self._check_steps(self._gather((int(steps), True) if self._sized else (self._drawn, self._ended)))

    def _check_data(self, has_data: Sequence[bool]) -> None:
        without = [rank for rank, some in enumerate(has_data) if not some]
        if self._needs_data and 0 < len(without) < len(has_data):
            raise DataError(
                f"rank(s) {', '.join(map(str, without))} got no {self._name} batch at all while others did, so that "
                "ranks would not log the same values. Give every rank at least one batch: check how the dataset is "
                "sharded."
            ).of_all(without)

    def _check_steps(self, everyone: Sequence[tuple[int, bool]]) -> None:
        if len(set(everyone)) > 1:
            fewest = min(number for number, ended in everyone if ended) if any(e for _, e in everyone) else 0
            steps = ", ".join(f"rank {r}: {n}" if e else f"rank {r}: {n} or more" for r, (n, e) in enumerate(everyone))
            raise DataError(
                f"ranks have different numbers of {self._name} batches ({steps}), and the {self._name} step calls a "
                "collective, such as self.log(..., on_step=True, sync_dist=True) or self.all_gather: some rank would "
                "wait for one that has no batch left. Log with on_step=False, give every rank the same number of "
                f"batches, or limit them to {fewest} with the Trainer's limit_..._batches."
            ).of_all()


class VaryingBatchSizes:
    """Batch sampler for an iterable dataset: asks it for this rank's share of samples, which may change by the step.

    Args:
        share: samples for this rank at a given step.
        step: first step of the pass; asked when an epoch begins.
        total: samples of all ranks together.

    Attributes:
        share: another one, once ranks were lost.
    """

    def __init__(self, share: Callable[[int], int], step: Callable[[], int], total: int) -> None:
        self.share, self._step, self.total = share, step, total
        self.next_step = 0

    def __iter__(self) -> Iterator[list[None]]:
        self.next_step = self._step()
        while True:
            share = max(self.share(self.next_step), 1)
            self.next_step += 1
            yield [None] * share


class SharedStream(IterableDataset):
    """An iterable dataset that a strategy may split by speed: each sample counts once, and shares move.

    Every rank reads the whole stream, and takes its part of each global batch by the sample's number. So a fast rank
    takes more, the global batch keeps its size, ranks end together, and a resumed run goes on at the right sample.
    That costs each rank, and each of its workers, the reading of the samples of others, unless the dataset can jump.

    Under strategies that are not of this package, such as ``ddp``, ranks and workers take samples in turns.

    Args:
        dataset: iterable over samples. It must yield the same samples in the same order on every rank and in every
            worker: shuffle by a seed, and do not shard it. It may have

            * ``__len__``: samples of an epoch; the Trainer then knows how many steps there are;
            * ``set_epoch(epoch)``: called before each epoch is read, for instance to shuffle again;
            * ``iter_from(index)``: an iterator that begins at a sample, so that those before it need not be read;
            * ``sample_cost(sample)``: what a sample costs; each global batch is then dealt by cost.

    Example::

        from lightning_hetero import SharedStream
        from torch.utils.data import DataLoader, IterableDataset


        class Numbers(IterableDataset):
            def __iter__(self):
                return iter(range(1000))


        loader = DataLoader(SharedStream(Numbers()), batch_size=8)
        assert next(iter(loader)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # in one process
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # an error that says so where there is no length

    def __iter__(self) -> Iterator[Any]:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return islice(self.dataset, rank * workers + worker, None, world * workers)


class BatchRequest(NamedTuple):
    """Request for a global batch, of a rank or a worker of it.

    Attributes:
        epoch: epochs done before it.
        first: number of its first sample in the epoch.
        size: samples.
        plan: how they are split.
        turn: the number of the batch, if ranks get what is left over in turn.
        rank: that takes its part.
        replica: the ranks that average gradients with it.
    """

    epoch: int
    first: int
    size: int
    plan: Plan
    turn: int | None
    rank: int
    replica: tuple[int, ...]


class BatchRequests(SharedBatches):
    """Batch sampler of global batches, without an end: where the stream ends is known when it has been read.

    Args:
        size: samples in a global batch.
        slot: of this rank. Its ``cut`` gives, for a step, the plan in force, by which readers cut the batch, and
            whether ranks get what is left over in turn.
        position: where training stands; asked whenever an epoch begins.
    """

    def __init__(self, size: int, slot: RankSlot, position: Callable[[], Position]) -> None:
        super().__init__(slot, position)
        self.batch_size = size
        self._asked: deque[RankSlot] = deque()  # for what is being read

    def __iter__(self) -> Iterator[BatchRequest]:
        position = self._position()
        self._begin(position)
        self._asked.clear()
        while True:
            self.before_draw(self.next_step)  # in which others may be regrouped
            slot, done = self._slot(), position.batch + self.next_step - position.step
            self._asked.append(slot)
            plan, in_turn = slot.cut(self.next_step)
            self.next_step += 1
            size, turn = self.batch_size, done if in_turn else None
            yield BatchRequest(position.epoch, done * size, size, plan, turn, slot.rank, slot.replica)

    @override
    def repartition(self, slot: RankSlot, kept: Sequence[int], position: Callable[[], Position]) -> None:
        super().repartition(slot, kept, position)
        self._asked = deque(one.for_survivors(kept, slot.replica) for one in self._asked)

    def arrived(self, drawn: Drawn | None) -> None:
        """Note that the first of the requests has been read.

        Args:
            drawn: of it; ``None``: the stream has ended before it.
        """
        slot = self._asked.popleft()
        if drawn is not None:
            self.drawn.append(slot.counted(drawn))
        else:
            self.next_step -= 1 + len(self._asked)  # there are no such steps in this epoch
            self._asked.clear()


class BatchPart(NamedTuple):
    """Part of a global batch that a rank takes.

    Attributes:
        batch: collated; ``None``: the stream has ended.
        drawn: how many samples it holds.
    """

    batch: Any
    drawn: Drawn


class StreamReader(Dataset):
    """Reads global batches from a stream, and keeps one rank's part of each. Looks like a map-style dataset.

    Args:
        stream: the same on every rank.
        padding: samples of a padding batch.
        costs: of the samples, if they are known.
    """

    def __init__(self, stream: Iterable[Any], padding: int, costs: StreamCosts | None = None) -> None:
        self.stream, self._padding, self._costs = stream, padding, costs
        self._epoch, self._next = -1, 0  # the sample that comes next
        self._samples: Iterator[Any] = iter(())

    def __getitems__(self, request: BatchRequest) -> tuple[list[Any], Drawn]:
        """This rank's samples of a global batch; padding if it has none, nothing where the stream has ended."""
        self._seek(request.epoch, request.first)
        batch = list(islice(self._samples, request.size))
        self._next += len(batch)
        everyone = list(range(len(batch)))
        if self._costs is None or request.plan.by_samples or not batch:
            costs, order, shares = None, everyone, request.plan.split([len(batch)], request.turn)[0]
        else:
            costs = self._costs.of(batch, request.first)
            order, shares = costs.deal(request.plan, everyone)
        own = batch_slice(order, shares, request.rank)
        drawn = Drawn.of(request.plan.pass_sizes(shares), request.rank, request.replica)
        if costs is not None:
            own, cost = costs.padded_if_empty(own, everyone, self._padding)
            drawn = drawn._replace(cost=cost)
        return [batch[i] for i in own or (everyone * self._padding)[: self._padding]], drawn

    def _seek(self, epoch: int, first: int) -> None:
        """Go to a sample of an epoch."""
        again = epoch != self._epoch or first < self._next
        if again and callable(set_epoch := getattr(self.stream, "set_epoch", None)):
            set_epoch(epoch)
        jump = getattr(self.stream, "iter_from", None)
        if callable(jump) and (again or first > self._next):
            self._samples, self._next = iter(jump(first)), first
        elif again:
            self._samples, self._next = iter(self.stream), 0
        self._epoch = epoch
        self._next += sum(1 for _ in islice(self._samples, first - self._next))


def collate_part(collate: Callable[[list[Any]], Any], read: tuple[list[Any], Drawn]) -> BatchPart:
    """Collate a rank's samples as the user's loader does."""
    samples, drawn = read
    if drawn.sizes:
        return BatchPart(Passes(collate(part) for part in in_passes(samples, len(drawn.sizes))), drawn)
    return BatchPart(collate(samples) if samples else None, drawn)


class SharedStreamLoader:
    """Iterates over this rank's parts of the global batches of a :class:`SharedStream`.

    Args:
        loader: of the user's.
        requests: the global batches.
        padding: samples of a padding batch.
        costs: of the samples, if they are known.

    Attributes:
        like: the user's loader.
        loader: what reads the parts.
    """

    def __init__(
        self, loader: DataLoader, requests: BatchRequests, padding: int, costs: StreamCosts | None = None
    ) -> None:
        self.stream, self.batch_sampler, self.like = loader.dataset, requests, loader
        self._length = -(-n // requests.batch_size) if (n := _length_of(self.stream)) is not None else None
        same = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "generator", "prefetch_factor")
        more = ("multiprocessing_context", "persistent_workers")
        self.loader = DataLoader(
            StreamReader(self.stream.dataset, padding, costs),  # type: ignore[attr-defined]
            batch_sampler=requests,  # type: ignore[arg-type]
            collate_fn=partial(collate_part, loader.collate_fn),
            **{name: getattr(loader, name) for name in (*same, *more)},
        )

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.stream

    @property
    def begun(self) -> Position | None:
        """Position at which the running epoch began, or was resumed."""
        return self.batch_sampler.begun

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.stream.dataset).__name__} has no length")  # type: ignore[attr-defined]
        return self._length

    @property
    def drawn(self) -> deque[Drawn]:
        """Drawn but not yet trained on, in order."""
        return self.batch_sampler.drawn

    @property
    def next_step(self) -> int:
        """First step not drawn yet; what workers were asked for beyond the end of the stream is no step."""
        begun, ahead = self.batch_sampler.begun, self.batch_sampler.next_step
        if self._length is None or begun is None:
            return ahead
        return min(ahead, begun.step - begun.batch + self._length)

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()
        read = 0
        for batch, drawn in self.loader:
            self.batch_sampler.arrived(None if batch is None else drawn)
            if batch is None:
                break
            read += 1
            yield batch
        if read == 0 and self.batch_sampler.begun is not None and self.batch_sampler.begun.batch == 0:
            raise DataError("the training stream is empty: it must yield at least one sample.")

    def take(self) -> Drawn:
        """The draw of the batch that is about to be trained on."""
        return self.batch_sampler.take()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the Trainer saves the position itself. With this it knows that the loader resumes there."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing; see :meth:`state_dict`."""


def _length_of(stream: Any) -> int | None:
    try:
        return len(stream)
    except (TypeError, NotImplementedError):
        return None
