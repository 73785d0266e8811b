"""The dataloaders of a fit, each with a sampler that follows the plan."""

import copy
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.batching.global_batch import GlobalBatchSizes
from lightning_hetero.batching.passes import CollateInPasses, CollateWhole
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.repartition import Repartition
from lightning_hetero.batching.sample_costs import (
    BatchCosts,
    SampleCosts,
    StreamCosts,
    sample_costs_of,
    stream_costs_of,
)
from lightning_hetero.batching.sampler import (
    AgreedOrder,
    Drawn,
    EvaluatedGroups,
    EvaluationSampler,
    EvenBatches,
    FixedBatches,
    GlobalBatches,
    GroupedBatches,
    ListsOfBatches,
    Position,
    RankSlot,
    SharedBatches,
    ShareSampler,
    WholeBatches,
    batch_slice,
    check_enough,
    has_own_batches,
    loader_is_sharded,
    makes_whole_batches,
)
from lightning_hetero.batching.stream_peers import StreamPeers
from lightning_hetero.batching.streams import (
    BatchRequests,
    EvaluatedStream,
    SharedStream,
    SharedStreamLoader,
    Stream,
    VaryingBatchSizes,
)
from lightning_hetero.batching.weights import samples_in
from lightning_hetero.checkpoint.random_states import LoaderSeedState
from lightning_hetero.comm.agreement import check_equal, gather, raise_on_all
from lightning_hetero.errors import DataError, HeteroError, UnsupportedError
from lightning_hetero.lightning_compat import (
    IndexBatchSamplerWrapper,
    add_worker_init_fn,
    combined_loader,
    inner_batch_sampler,
    inner_sampler,
    mode_of,
    user_shards,
)
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.trainer_checks import one_pass, say_passes

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: ``map``: batches of a map-style dataset, which any rank can take. ``shared stream``: all ranks read it alike.
#: ``resizable stream``: each rank's own, in batches whose size can be chosen. ``stream``: each rank's own, as it comes.
Kind = Literal["map", "shared stream", "resizable stream", "stream"]


def kind_of(loader: Any, sharded_by_user: bool, options: Options) -> Kind:
    """The kind of a training loader.

    Args:
        loader: of the user's.
        sharded_by_user: whether it yields this rank's part of the data.
        options: of the strategy.

    Raises:
        UnsupportedError: it cannot be what the options ask for.
    """
    is_dataloader = isinstance(loader, DataLoader)  # else it yields batches of its own
    if is_dataloader and getattr(loader, "in_order", True) is False and loader.num_workers > 1:
        raise UnsupportedError(
            "DataLoader(in_order=False) delivers batches in any order, so the weights of the batches are unknown. "
            "Use in_order=True."
        )
    if is_dataloader and isinstance(loader.dataset, SharedStream):
        if loader.batch_size is None:
            raise UnsupportedError(
                "a DataLoader of a SharedStream needs a batch_size: the strategy makes the batches. Give one."
            )
        return "shared stream"
    if is_dataloader and not has_iterable_dataset(loader) and not sharded_by_user:
        if problem := no_batches(loader, "training"):
            raise problem
        return "map"
    resizable = is_dataloader and has_iterable_dataset(loader) and sized_len(loader) is None and loader.batch_size
    if resizable and (options.balance_iterable or options.sizes):
        if isinstance(options.balance, list) and 0 in options.balance:
            raise UnsupportedError(
                f"balance={options.balance} gives rank {options.balance.index(0)} nothing of a training dataset of "
                "which each rank reads a part of its own, and nobody else would read that part. Give it a share above "
                "0, or wrap the dataset in lightning_hetero.SharedStream."
            )
        return "resizable stream"
    if options.sizes:
        raise UnsupportedError(
            "fixed shares, global_batch_size and limits per rank need batches that can be sized here: those of a "
            "DataLoader of a map-style dataset, or of an iterable one without a length. Yours are sized by your own "
            f"{type(loader).__name__}: remove these options, or let it make batches of the right size on each rank."
        )
    if options.balance_iterable:
        raise UnsupportedError(
            "balance_iterable=True needs a DataLoader with a batch_size, of an iterable dataset without a length "
            f"(`__len__`): with your {type(loader).__name__} the sizes of batches, or their number, are settled. "
            "Remove the option, or use such a DataLoader."
        )
    return "stream"


def no_batches(loader: DataLoader, name: str) -> HeteroError | None:
    """The reason why a loader of a map-style dataset has no batches that can be split, if so."""
    otherwise = "or shard the data yourself and set Trainer(use_distributed_sampler=False)."
    if loader.batch_sampler is None:
        return UnsupportedError(
            f"the {name} DataLoader has batch_size=None: the dataset makes the batches, and there is nothing to split. "
            "Give a batch_size; a sampler of lists of indices (torch.utils.data.BatchSampler), if the dataset takes "
            f"lists; {otherwise}"
        )
    if has_own_batches(loader) and sized_len(loader.batch_sampler) is None:
        return UnsupportedError(
            f"the {name} DataLoader's batch sampler {type(loader.batch_sampler).__name__} has no length, so that "
            f"nobody knows how many batches an epoch has. Give it a `__len__`, {otherwise}"
        )
    return None


def described(loader: Any, kind: Kind, batches: GlobalBatches | None) -> dict[str, Any]:
    """The settings that must be the same on every rank, by their names in messages.

    Args:
        loader: a training or evaluation loader.
        kind: of training loader, or ``"map"``.
        batches: that are made of a map-style dataset.
    """
    if kind == "stream":
        return {}
    if batches is None:  # a plan needs to know the size of all ranks' batches together
        return {"batch_size": loader.batch_size}
    sampler, agreed = getattr(loader.batch_sampler, "sampler", None), isinstance(batches.sampler, AgreedOrder)
    return {
        # Rank 0 sends such an order when it is drawn: with workers at once, without them at the first batch.
        "num_workers above 0, with a sampler of yours": agreed and loader.num_workers > 0,
        "samples": sized_len(loader.dataset),
        "batch_size": loader.batch_size,
        "batch sampler": type(loader.batch_sampler).__name__,
        "its batches": sized_len(loader.batch_sampler) if has_own_batches(loader) else None,
        "drop_last": loader.drop_last,
        "sampler": type(sampler).__name__,
        "seed (seed_everything)": getattr(sampler, "seed", None),
    }


LoaderSource = ShareSampler | Stream | SharedStreamLoader


def source_of(loader: Any) -> LoaderSource | None:
    """The source of a loader's parts of batches; see :class:`~lightning_hetero.strategies.loaders.Loaders`."""
    if isinstance(loader, Stream | SharedStreamLoader):
        return loader
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, ShareSampler) else None


def samples_in_order(batches: GlobalBatches) -> int:
    """Samples of an epoch; a number that is surely large enough where only batches can be counted."""
    length = len(batches.sampler)
    return length if isinstance(batches, FixedBatches) else length * 10**9 if length else 0


def with_whole_batches(loader: Any) -> Any:
    """A loader with a batch sampler, where its dataset makes whole batches from the lists of its sampler."""
    if makes_whole_batches(loader):
        batches = loader.sampler
        object.__setattr__(loader, "dataset", WholeBatches(loader.dataset))
        object.__setattr__(loader, "batch_sampler", batches)
    return loader


def with_batch_sampler(loader: Any, batch_sampler: Any) -> Any:
    """A loader with another batch sampler."""
    # DataLoader forbids this after its construction; going around it keeps subclasses and persistent workers intact.
    object.__setattr__(loader, "batch_sampler", batch_sampler)
    if isinstance(batch_sampler, ShareSampler):
        # The Trainer saves the position itself; these tell it that the loader resumes there.
        object.__setattr__(loader, "state_dict", dict)
        object.__setattr__(loader, "load_state_dict", lambda state: None)
    return loader


def _batch_size(loader: Any) -> int:
    return int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)


class Loaders:
    """The dataloaders of one strategy.

    Args:
        rank: this rank.
        replica: the ranks that average gradients with this one, itself among them.
        planner: the agreed plans.
        options: of the strategy.
        begin: applies the reports on their way, and says where training stands; called whenever an epoch's first batch
            is drawn.
        broadcast: sends an object from rank 0 (collective).
        peers: the other ranks, for a stream; given the batches of the longest one, if known (collective).
        retry: calls a function of what ranks do together, and calls it again if a rank was lost meanwhile.
    """

    def __init__(
        self,
        rank: int,
        replica: Sequence[int],
        planner: Planner,
        options: Options,
        begin: Callable[[], Position],
        broadcast: Callable[[Any], Any],
        peers: Callable[[int | None], StreamPeers],
        retry: Callable[[Callable[[], Any]], Any] = lambda operation: operation(),
    ) -> None:
        self.rank, self.replica, self.planner, self._options = rank, replica, planner, options
        self._begin, self._broadcast, self._peers, self._retry = begin, broadcast, peers, retry
        self.combined: Callable[[], CombinedLoader | None] = lambda: None  # the Trainer's, once it has one
        #: When a source was made.
        self.seed_states: WeakKeyDictionary[LoaderSource, LoaderSeedState] = WeakKeyDictionary()
        self.own_sizes = [0] * planner.world  # of each rank's batches, where its own loader sizes them; 0: not known
        self.sizes = GlobalBatchSizes(planner.world, options.global_batch_size)
        self.evaluated: WeakSet[EvaluationSampler] = WeakSet()
        self._trainer: pl.Trainer | None = None  # of the running fit, validation, test or prediction
        self._evaluates_by: Plan | None = None  # in the running fit, once it has validated
        self._warned = False  # that limits are too small for evaluations

    def begin(self, trainer: "pl.Trainer") -> None:
        """A fit, validation, test or prediction is about to begin."""
        self._trainer, self._evaluates_by = trainer, None

    def evaluation_plan(self) -> Plan:
        """The plan by which ranks evaluate now: in a fit always that of its first validation, so that parts stay."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return self.planner.in_force()
        self._evaluates_by = self._evaluates_by or self.planner.in_force()
        return self._evaluates_by

    def continue_from(self, former: "Loaders", repartition: Repartition) -> None:
        """Go on with the loaders of an earlier view, in the midst of a fit (collective).

        Batches that no rank has drawn are cut among those that remain; drawn ones keep their parts, of which those of
        lost ranks are not trained on.
        """
        kept = repartition.former_ranks
        streams = [source for source in former.sources() if isinstance(source, Stream)]
        peers = [self._peers(stream.peers.length).for_survivors(stream.peers, kept) for stream in streams]
        # From here on nothing breaks.
        for stream, ones in zip(streams, peers, strict=True):
            stream.repartition(ones, kept, self.replica)
            if isinstance(sizes := getattr(stream, "batch_sampler", None), VaryingBatchSizes):
                sizes.share = self._own_share
        self.combined, self.seed_states, self.evaluated = former.combined, former.seed_states, former.evaluated
        self.own_sizes = [former.own_sizes[rank] for rank in kept]
        self.sizes = former.sizes
        self._trainer, planner = former._trainer, self.planner
        if list(kept) == list(range(former.planner.world)):  # nobody has left
            self._evaluates_by = former._evaluates_by
        for evaluated in self.evaluated:
            evaluated.repartition(self.rank, planner.world, self.evaluation_plan, self._grow)
        for source in self.sources():
            if isinstance(source, Stream):
                continue
            batches: SharedBatches = source.batch_sampler if isinstance(source, SharedStreamLoader) else source
            cut = self._cut if isinstance(batches, ShareSampler) else self._plan
            slot = RankSlot(self.rank, tuple(self.replica), cut, repartition.start)
            batches.repartition(slot, kept, self._begin_epoch)
            batches.before_draw = planner.ready
        for sampler in (*self.evaluated, *self.sources()):
            if isinstance(order := getattr(sampler, "sampler", None), AgreedOrder):
                order.agree_by(self._broadcast, lambda: self.rank == 0)

    # -- entry -------------------------------------------------------------------------------------

    def process(self, loader: object, trainer: "pl.Trainer", stage: RunningStage) -> object:
        """Give a loader a sampler that follows the plan (collective), for what the Trainer is running."""
        sharded = user_shards(trainer) or loader_is_sharded(loader)
        if isinstance(loader, DataLoader) and not sharded and not has_iterable_dataset(loader):
            loader = with_whole_batches(loader)
        if trainer.training:
            self.sizes.begin(resumed=trainer.ckpt_path is not None)
            self.combined = lambda: combined_loader(trainer)
            made = self.training(loader, sharded, trainer.lightning_module)
            if (source := source_of(made)) is not None:
                self.seed_states[source] = LoaderSeedState(getattr(loader, "generator", None))
            return made
        name = stage.dataloader_prefix or "validation"
        if sharded or not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
            return self._evaluated_stream(loader, "validation" if name == "val" else name, trainer)
        return self.evaluation(loader, name)

    def training(self, loader: object, sharded_by_user: bool, module: "pl.LightningModule | None") -> object:
        """Make a training loader yield this rank's share (collective).

        Args:
            loader: of the user's.
            sharded_by_user: whether it yields this rank's part of the data.
            module: to be trained; ``None``: a program of the user's trains, which runs a batch at once.

        Raises:
            UnsupportedError: on every rank, if batches are to stay whole, and there are none or no passes.
        """
        problem: HeteroError | None = None
        kind: Kind = "stream"
        costs: SampleCosts | StreamCosts | None = None
        whole = self._options.whole_batches
        try:
            kind = kind_of(loader, sharded_by_user, self._options)
            costs = self._costs(loader, kind, module)
            if whole and not (kind == "map" and has_own_batches(loader)):
                raise UnsupportedError(
                    f"whole_batches={whole} keeps the batches of your own batch sampler whole, and this training "
                    "dataloader has none. Give DataLoader(batch_sampler=...) with a map-style dataset, or remove the "
                    "option."
                )
            if whole and (why := one_pass(module, of_ranks=False)):
                raise UnsupportedError(
                    f"whole_batches={whole} lets a rank run several batches in a step, each in a pass, which it cannot "
                    f"here: {why} Remove the option."
                )
        except HeteroError as error:
            problem = error
        raise_on_all(problem, "the training dataloader")
        batches = self._batches(loader, evaluation=False) if kind == "map" else None
        told = costs and f"{costs.source}{costs.digest and f', digest {costs.digest}'}"
        check_equal(
            "the training dataloader", {"kind": kind, "costs of samples": told, **described(loader, kind, batches)}
        )
        of_ranks = kind not in ("map", "shared stream")
        self.planner.hold(of_ranks and not self._options.balance_iterable)
        self.planner.one_pass = one_pass(module, of_ranks)
        if costs is not None:
            how = "padded to the longest of a part" if costs.padded else "added up"
            rank_zero_info(f"Batches are dealt by what samples cost: {costs.source}, {how}.")
        if batches is not None:
            assert not isinstance(costs, StreamCosts)
            made: object = self._shared_batches(loader, batches, costs)
        elif kind == "shared stream":
            assert not isinstance(costs, SampleCosts)
            made = self._shared_stream(loader, costs)
        else:
            made = self._stream(loader, kind, module)
        if module is not None and self.planner.in_passes(self.planner.total):
            say_passes(self.planner, module)
        return made

    def _costs(self, loader: Any, kind: Kind, module: "pl.LightningModule | None") -> SampleCosts | StreamCosts | None:
        """The costs of a training loader's samples, if they are known."""
        options = self._options
        if module is None:
            return None
        if kind == "shared stream":
            return stream_costs_of(loader.dataset.dataset, options.sample_cost, options.cost)
        if kind == "map":
            return sample_costs_of(loader.dataset, module, options.sample_cost, options.cost)
        options.refuse_costs()
        return None

    def evaluation(self, loader: DataLoader, name: str) -> object:
        """Make an evaluation loader yield every sample once, on one rank (collective)."""
        raise_on_all(no_batches(loader, name), f"the {name} dataloader")
        batches = self._batches(loader, evaluation=True)
        check_equal(f"the {name} dataloader", described(loader, "map", batches))
        check_enough(samples_in_order(batches), self.planner.world, name)
        world, planner = self.planner.world, self.planner
        sampler = EvaluationSampler(batches, self.rank, world, self.evaluation_plan, lambda *_: planner.limits_measured)
        self.evaluated.add(sampler)
        indexed = name == "predict"
        return with_batch_sampler(loader, IndexBatchSamplerWrapper(sampler) if indexed else sampler)

    def _grow(self, samples: int, limits: Sequence[int]) -> bool:
        """Let the ranks that are left take more in an evaluation: the Trainer has counted its batches before."""
        if not (self.planner.limits_measured or self._warned):
            self._warned = True
            rank_zero_warn(
                f"Since a rank was lost, the others take at most {list(limits)} samples ({sum(limits)} together) by "
                f"max_batch_size, and an evaluation's batch has {samples}. The Trainer has counted its batches, so "
                "that they stay as they are, and in evaluations of this fit ranks take more, in proportion. If memory "
                "runs out, use a smaller batch_size for evaluation."
            )
        return True

    # -- what was drawn ----------------------------------------------------------------------------

    def sources(self) -> list[LoaderSource]:
        """The sources of the parts of a training batch, one per loader."""
        combined = self.combined()
        found = [] if combined is None else [source_of(loader) for loader in combined.flattened]
        return [source for source in found if source is not None]

    def next_step(self) -> int:
        """The first step that this rank has not drawn yet."""
        sources = self.sources()
        sizes = [getattr(source, "batch_sampler", None) for source in sources]  # of samples that workers read ahead
        ahead = [source.next_step for source in sources]
        return max([*ahead, *(one.next_step for one in sizes if isinstance(one, VaryingBatchSizes))], default=0)

    @property
    def own_streams(self) -> bool:
        """Whether each rank has training data of its own, which no other rank reads."""
        return any(isinstance(source, Stream) for source in self.sources())

    def take(self) -> Drawn:
        """The draw for the batch that is about to be trained on: samples of all loaders together.

        Raises:
            DataError: on every rank of the replica, if its ranks have unequal proportions of the loaders' parts.
        """
        parts = [source.take() for source in self.sources() if source.drawn]
        if len(parts) == 1:
            return parts[0]
        each = {rank: sum(part.parts.get(rank, 0) for part in parts) for part in parts for rank in part.parts}
        samples, total, cost = (sum(getattr(part, name) for part in parts) for name in ("samples", "total", "cost"))
        uneven = any(part.parts.get(rank, 0) * total != part.total * n for part in parts for rank, n in each.items())
        if uneven or (total and not all(part.total for part in parts)):
            sizes = ", ".join(f"rank {rank}: {[int(part.parts.get(rank, 0)) for part in parts]}" for rank in each)
            raise DataError(
                f"the training loaders' parts of a batch have unequal proportions on the ranks of a replica ({sizes} "
                "samples), and one weight for all parts of a rank cannot be right. Give each rank as many samples of "
                "each loader as the others (drop_last=True), or combine the datasets before the DataLoader."
            ).of_all()
        return Drawn(samples, total, each, cost)

    def ended(self) -> bool:
        """Whether this rank's replica has come to the end of its own data, so that padding batches follow."""
        return all(isinstance(source, Stream) and source.padding_follows for source in self.sources())

    # -- one kind at a time ------------------------------------------------------------------------

    def _batches(self, loader: Any, evaluation: bool) -> GlobalBatches:
        batch_sampler, whole = inner_batch_sampler(loader.batch_sampler), self._options.whole_batches
        if loader.batch_size is None and (whole or type(batch_sampler) is not BatchSampler):
            if (size := self._options.global_batch_size) is not None:
                raise UnsupportedError(
                    f"global_batch_size={size} and the batch sampler {type(batch_sampler).__name__} both say how "
                    "large a batch is. Remove one."
                )
            if evaluation:
                return EvaluatedGroups(self._agreed(batch_sampler), self.planner.world, bool(whole))
            number = None if isinstance(whole, bool) else whole
            return GroupedBatches(self._agreed(batch_sampler), self.sizes.of_groups(number), bool(whole))
        order = self._order(batch_sampler.sampler)
        if not evaluation:
            return FixedBatches(order, self.sizes.trained(_batch_size(loader)), batch_sampler.drop_last)
        size = self.sizes.evaluated(_batch_size(loader))
        if not self.planner.limits_measured:  # an evaluation has no passes
            size = min(size, sum(max(most, 1) for most in self.planner.plans[-1].high))
        return EvenBatches(order, size, self.planner.world)

    def _order(self, sampler: Any) -> Any:
        # Lightning has put a DistributedSampler here, of one replica: around the dataset, in which case the order
        # follows from seed and epoch, or around the user's own sampler, and then its order is kept.
        inner = inner_sampler(sampler)
        if isinstance(sampler, DistributedSampler) and (inner is None or isinstance(inner, SequentialSampler)):
            return sampler
        return self._agreed(sampler if inner is None else inner)

    def _agreed(self, sampler: Any) -> AgreedOrder:
        return AgreedOrder(
            sampler, self._broadcast, lambda: self.rank == 0, seed=int(os.environ.get("PL_GLOBAL_SEED", 0))
        )

    def _shared_batches(self, loader: Any, batches: GlobalBatches, costs: SampleCosts | None) -> object:
        check_enough(samples_in_order(batches), self.planner.world, "training")
        self.planner.expect(batches.batch_size if isinstance(batches, FixedBatches) else None)
        by: SampleCosts | BatchCosts | None = costs
        if isinstance(batches, GroupedBatches) and batches.whole:
            by = self._whole_batches(loader, batches, costs)
        sampler = ShareSampler(batches, self.rank, self.replica, self._begin_epoch, self._cut, by)
        sampler.padding, sampler.before_draw = self.planner.least, self.planner.ready
        if self._options.max_batch_size is not None:  # a part may be more than a rank takes at once
            collate = CollateInPasses(loader.collate_fn, self.planner.high[self.rank])
            object.__setattr__(loader, "collate_fn", collate)
        return with_batch_sampler(loader, sampler)

    def _whole_batches(self, loader: Any, batches: GroupedBatches, costs: SampleCosts | None) -> BatchCosts:
        """Let a loader make whole batches, and say what they cost; the planner learns how many make a step."""
        self.planner.whole = batches.world
        by_samples = self._options.cost == "samples"
        mean = max((sized_len(loader.dataset) or 0) / max(len(batches.sampler), 1), 1.0)
        by = "by the number of their samples" if by_samples else "as if they cost the same"
        rank_zero_info(
            f"Batches of your own batch sampler stay whole, {batches.world} in a step of all ranks, and are dealt to "
            f"ranks {by if costs is None else 'by what their samples cost'}."
        )
        object.__setattr__(loader, "dataset", ListsOfBatches(loader.dataset))
        object.__setattr__(loader, "collate_fn", CollateWhole(loader.collate_fn))
        return BatchCosts(costs, 0.0 if by_samples else mean)

    def _shared_stream(self, loader: Any, costs: StreamCosts | None) -> SharedStreamLoader:
        total = self.sizes.trained(_batch_size(loader))
        self.planner.expect(total)
        requests = BatchRequests(total, RankSlot(self.rank, tuple(self.replica), self._plan), self._begin_epoch)
        requests.before_draw = self.planner.ready
        add_worker_init_fn(loader, self.rank)
        return SharedStreamLoader(loader, requests, self.planner.least, costs)

    def _stream(self, loader: Any, kind: Kind, module: "pl.LightningModule | None") -> Stream:
        usual = None  # samples in a batch, if the loaders of all ranks are made for the same number
        if kind == "stream":
            self.planner.expect(0)
            sizes = gather(getattr(loader, "batch_size", None), "the sizes of batches")
            self.own_sizes = [size if type(size) is int else 0 for size in sizes]
            usual = float(sizes[0] or 1) if len({*self.own_sizes}) == 1 else None
            if self.planner.auto and has_iterable_dataset(loader):
                rank_zero_info(
                    "Every rank takes batch_size samples of its own part of the iterable dataset per step, fast or "
                    "slow. balance_iterable=True splits by speed here, too: see the strategy's documentation."
                )
        begin = self._begin
        if kind == "resizable stream":
            total, begin = self.sizes.trained(_batch_size(loader)), self._begin_epoch
            self.planner.expect(total)
            loader = copy.copy(loader)  # the user's own stays as it is
            share = VaryingBatchSizes(self._own_share, lambda: stream.next_step, total)
            object.__setattr__(loader, "batch_sampler", share)
        add_worker_init_fn(loader, self.rank)
        lengths = gather(None if kind == "resizable stream" else sized_len(loader), "the lengths of dataloaders")
        sized = all(length is not None for length in lengths)
        peers, own = self._peers(max(lengths) if sized else None), [lengths[rank] for rank in self.replica]

        def size_of(batch: Any) -> float:
            if callable(getattr(module, "batch_weight", None)):
                return 1.0  # the user's own weights count
            return samples_in(batch)

        stream = Stream(loader, size_of, begin, peers, usual, self._retry, max(own) if sized else math.inf)
        return stream

    def _evaluated_stream(self, loader: Any, name: str, trainer: "pl.Trainer") -> object:
        if trainer.state.fn == TrainerFn.FITTING and sized_len(loader) is None and trainer.limit_val_batches == 1.0:
            rank_zero_info(
                "The validation dataloader has no length, and limit_val_batches is not set: if its data never end, nor "
                "will the first validation. Trainer(limit_val_batches=...) limits it."
            )
        if self.planner.world == 1:
            return loader
        lengths = gather(sized_len(loader), "the lengths of dataloaders")
        module = trainer.lightning_module
        may_be_empty = name == "predict" or module.allow_zero_length_dataloader_with_multiple_devices
        return EvaluatedStream(
            loader, name, lengths, lambda value: gather(value, f"how far ranks are with {name} data"), not may_be_empty
        )

    def _own_share(self, step: int) -> int:
        """Samples of this rank's own data for a step."""
        return self.planner.ready(step).split([self.planner.total])[0][self.rank]

    def _plan(self, step: int) -> tuple[Plan, bool]:
        """The split of a shared stream's batch, and whether ranks get the rest of a division in turn."""
        return self.planner.at(step), self.planner.rotates

    def _cut(
        self, sampler: ShareSampler, step: int, in_epoch: int, batch: list[Any]
    ) -> tuple[list[Any], Sequence[int], Sequence[Sequence[int]]]:
        """Cut one loader's batch by cost, or by samples, in proportion to those of loaders that it is combined with."""
        plan, combined = self.planner.at(step), self.combined()
        turn = in_epoch if self.planner.rotates else None  # counts from the step's epoch
        sources = self.sources()
        if combined is None or len(sources) <= 1:
            if isinstance(sampler.costs, BatchCosts):
                batch, shares = sampler.costs.deal(plan, batch)
                sizes = [[len(one) for one in batch_slice(batch, shares, rank)] or [0] for rank in range(len(shares))]
                return batch, shares, sizes
            self.planner.check_room(len(batch))
            if sampler.costs is not None and not plan.by_samples:
                batch, shares = sampler.costs.deal(plan, batch)
            else:
                shares = plan.split([len(batch)], turn)[0]
            return batch, shares, plan.pass_sizes(shares)
        by_loader = plan.split([self._size_at(source, in_epoch, mode_of(combined)) for source in sources], turn)
        shares = by_loader[next(i for i, source in enumerate(sources) if source is sampler)]
        return batch, shares, [[share] for share in shares]

    def _begin_epoch(self) -> Position:
        sources, combined = self.sources(), self.combined()
        if combined is not None and len(sources) > 1:
            if any(isinstance(source, SharedStreamLoader) for source in sources):
                raise UnsupportedError(
                    "a SharedStream cannot be one of several training loaders: all parts of a batch must have equal "
                    "proportions on every rank. Combine the streams into one before the DataLoader."
                )
            streams = [getattr(source, "batch_sampler", None) for source in sources]
            totals = [sizes.total for sizes in streams if isinstance(sizes, VaryingBatchSizes)]
            if totals:
                if len(totals) < len(sources) or len({*totals}) > 1:
                    raise UnsupportedError(
                        "several training loaders, of which some are of iterable datasets whose batches the strategy "
                        f"sizes (global batches of {totals} samples): a rank has one share for all loaders, so "
                        "that all must be of that kind and size. Give them the same batch_size, or combine the "
                        "datasets before the DataLoader."
                    )
                return self._begin()
            samplers = [source for source in sources if isinstance(source, ShareSampler)]
            if any(source.costs is not None for source in samplers):
                rank_zero_warn(
                    "Several training loaders: their parts of a batch must have equal proportions on every rank, so "
                    "batches are split by samples, whatever these cost. Combine the datasets before the DataLoader to "
                    "deal by cost, or set cost='samples'."
                )
                for source in samplers:
                    source.costs = None
            self.planner.one_pass = "there are several training loaders, of which each pass would need equal parts."
            length = max(map(len, samplers))
            steps = [[self._size_at(source, i, mode_of(combined)) for source in sources] for i in range(length)]
            self.planner.expect(sum(steps[0]))
            for step, sizes in enumerate(steps):
                self._check_proportions(step, sizes)
            position = self._begin()
            return position._replace(again=mode_of(combined) == "max_size_cycle" or position.batch >= length)
        return self._begin()

    def _check_proportions(self, step: int, sizes: Sequence[int]) -> None:
        world, units = self.planner.world, math.gcd(*sizes)
        most = -(-units // world) * (sum(sizes) // max(units, 1))
        if most > 2 * -(-self.planner.total // world):
            raise DataError(
                f"batch {step} of the epoch combines batches of {list(sizes)} samples, which {world} ranks cannot "
                "split in equal proportions, as one weight for all of them needs. Use drop_last=True, or batch sizes "
                "and dataset lengths with a large common divisor."
            )

    @staticmethod
    def _size_at(source: LoaderSource, in_epoch: int, mode: str) -> int:
        if not isinstance(source, ShareSampler) or not isinstance(source.batches, FixedBatches):
            raise UnsupportedError(
                "a CombinedLoader for training needs map-style datasets with a fixed batch size: their parts of a "
                "batch must have equal proportions on every rank. Combine the datasets before the DataLoader instead."
            )
        length = len(source)
        if mode == "max_size_cycle":
            in_epoch %= length
        return source.batches.size(in_epoch) if in_epoch < length else 0
