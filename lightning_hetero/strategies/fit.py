"""The collaborators of a fit: made from a view of the ranks, and made again when the view changes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.nonfinite import NonFiniteGuard
from lightning_hetero.batching.plan_thread import PlanAgreement
from lightning_hetero.batching.repartition import Repartition, plan_for_survivors
from lightning_hetero.batching.sampler import Position
from lightning_hetero.batching.stream_peers import StreamPeers
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.comm import failures
from lightning_hetero.comm.agreement import AsyncAllGather, gather, value_of_rank
from lightning_hetero.comm.all_reduce import Between, ReplicaLinks
from lightning_hetero.comm.collectives import Collectives
from lightning_hetero.comm.job import Job
from lightning_hetero.comm.view import View
from lightning_hetero.errors import UnsupportedError, not_none
from lightning_hetero.replicas.drift import ParameterDriftCheck
from lightning_hetero.replicas.optimizer_states import hyperparameters
from lightning_hetero.replicas.sharding import Columns, is_sharded
from lightning_hetero.strategies.default_groups import GroupOverrides
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.position import describe, position
from lightning_hetero.strategies.replica_ddp import BucketSize, ReplicaSyncBatchNorm
from lightning_hetero.strategies.training_step import TrainingStep

if TYPE_CHECKING:
    import lightning.pytorch as pl


_fits = count()  # of this process


@dataclass(frozen=True)
class Lasting:
    """Collaborators of a strategy that last from one view to the next, and what it says of itself.

    Attributes:
        options: of the strategy.
        device: on which this rank computes.
        timer: this rank's timer.
        collectives: of the strategy.
        trainer: gives the Trainer once there is one.
        current: gives the accounting of the latest view; what loaders hold outlives a view.
        retry: calls a function of what ranks do together, and calls it again if a rank was lost meanwhile.
        changing: whether ranks recover from a loss.
    """

    options: Options
    device: torch.device
    timer: StepTimer
    collectives: Collectives
    trainer: "Callable[[], pl.Trainer]"
    current: Callable[[], BatchAccounting]
    retry: Callable[[Callable[[], Any]], Any]
    changing: Callable[[], bool]


@dataclass(frozen=True)
class Fit:
    """The collaborators of a fit in one view of the ranks.

    :meth:`build` makes them, but for those that need more than the view: :meth:`connect` follows once the model is
    wrapped, :meth:`begin_plans` when training starts.

    Attributes:
        job: with the view.
        sharing: the view of those who share out samples.
        lasting: what lasts from one view to the next.
        accounting: of this rank's batches.
        engine: what happens between replicas.
        step: a training step.
        loaders: the dataloaders.
        nonfinite: looks for losses and gradients that are not finite.
        buckets: chooses the size of DDP's buckets.
        drift: compares parameters where the replica has unlike devices.
    """

    job: Job
    sharing: View
    lasting: Lasting
    accounting: BatchAccounting
    engine: Engine
    step: TrainingStep
    loaders: Loaders
    nonfinite: NonFiniteGuard
    buckets: BucketSize
    drift: ParameterDriftCheck | None

    def ready_for_batch_norm(self, model: torch.nn.Module, layer_sync: Any, lent: GroupOverrides) -> Any:
        """See to BatchNorm, if the model has it: least shares, and over which ranks it normalises.

        Args:
            model: to be trained.
            layer_sync: the Trainer's plugin for ``sync_batchnorm=True``, else ``None``.
            lent: lends the replica's group to layers.

        Returns:
            The plugin to use.
        """
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            self.accounting.planner.least = 2  # it cannot normalise one sample
        group = self.job.data_group()
        lent.lend_layers(model, group)
        return None if layer_sync is None else ReplicaSyncBatchNorm(group, lent)

    @classmethod
    def build(
        cls,
        job: Job,
        lasting: Lasting,
        former: "Fit | None" = None,
        repartition: Repartition | None = None,
    ) -> "Fit":
        """Make the collaborators for the view of a job (collective).

        Args:
            job: with the view.
            lasting: what lasts from one view to the next.
            former: what was made from an earlier view, which goes on in the new parts.
            repartition: in the midst of a fit: which of the former ranks remain, and from which step on they share
                batches.

        Raises:
            UnsupportedError: on every rank, when loaders are set up: each rank has a stream of its own, and several
                are to get the same samples.
        """
        options, timer, collectives = lasting.options, lasting.timer, lasting.collectives
        trainer, current, retry = lasting.trainer, lasting.current, lasting.retry
        view, size = job.view, options.tensor_parallel
        sharing = view.data_parallel(size)
        # Replicas that differ look when they meet, so that all learn of it at once.
        mode = options.on_nan if view.count == 1 else "ignore"
        planner = options.planner(sharing.world, sharing.entries if view.number else None)
        if former is not None and repartition is not None:
            planner = plan_for_survivors(former.accounting.planner, repartition.former_ranks, planner)

        def begin_epoch() -> Position:  # reports on their way are applied first: the draw needs a plan
            retry(lambda: current().begin_epoch())
            here = position(trainer(), current().step)
            current().planner.origin = here.batch - here.step
            return here

        streams = count()

        def stream_peers(length: int | None) -> StreamPeers:
            if size > 1:
                raise UnsupportedError(
                    f"each rank's own stream with tensor_parallel_size={size}: ranks that split layers need the same "
                    "samples. Wrap the dataset in lightning_hetero.SharedStream, or use a map-style dataset."
                )
            return StreamPeers(job, timer, length, next(streams))

        rank, replica = sharing.rank, sharing.replica.ranks
        loaders = Loaders(rank, replica, planner, options, begin_epoch, collectives.broadcast, stream_peers, retry)
        ranks, small = job.data_parallel_ranks(size), partial(job.small_group, size)
        gathering = AsyncAllGather(job.report_group(), size)
        accounting = BatchAccounting(planner, timer, loaders, replica, small, gathering, view.count > 1)
        accounting.settings = lambda: hyperparameters(trainer().optimizers)
        on_devices = all(view.topology.places[rank].device != "cpu" for rank in view.replica.ranks)
        nonfinite = NonFiniteGuard(mode, ranks, small, timer.waiting, lambda: describe(trainer()), on_devices)
        if former is not None:
            accounting.continue_from(former.accounting, repartition)
        links = _links(job, options, lasting.device)
        engine = Engine(view, links, accounting, options.rebalance_every_n_steps, sharing)
        if former is not None:
            engine.continue_from(former.engine)
        step = TrainingStep(accounting, engine, nonfinite, collectives, options)
        drift = _drift_check(job)
        if former is not None and repartition is not None:
            nonfinite.continue_from(former.nonfinite)
            step.continue_from(former.step, repartition)
            loaders.continue_from(former.loaders, repartition)  # last: it changes loaders, which go on
        return cls(job, sharing, lasting, accounting, engine, step, loaders, nonfinite, BucketSize(), drift)

    def connect(self, model: torch.nn.Module) -> Columns | None:
        """Let each rank exchange its shards with those that hold the same, if the model is sharded (collective).

        Args:
            model: is wrapped.

        Returns:
            With which ranks of other replicas this one exchanges; ``None``: the model is whole.
        """
        if not is_sharded(model):
            return None
        columns = Columns.of(model, self.job.view.ranks, self.job.view.rank)
        links = _links(self.job, self.lasting.options, self.lasting.device, columns)
        links.traffic, self.engine.links = self.engine.links.traffic, links
        return columns

    # -- plans that are agreed in the background ---------------------------------------------------

    def begin_plans(self) -> None:
        """Agree on plans in the background from now on, if that serves the strategy (collective).

        Where replicas exchange all at once, plans come from the reports that they exchange there. So they do where
        only reports tell how large a step is.
        """
        self.end_plans()  # of an earlier fit that failed before it ended them
        job, planner, lasting = self.job, self.accounting.planner, self.lasting
        moves = planner.auto and not planner.frozen and planner.total > 0 and not planner.infers_total
        if not moves or self.engine.lockstep or job.view.count == 1:
            return
        fit = next(_fits)
        if job.view.rank == 0:
            PlanAgreement.open_mailboxes(job.store(f"plans/{fit}"), job.view.world)
        store = job.store(f"plans/{value_of_rank(fit, 0)}")

        def lost() -> str | None:
            failure = failures.first_failure(0.0)
            return str(failure) if failure else "a rank was lost" if lasting.changing() else None

        def before_draw(step: int) -> None:
            agreement = lasting.current().agreement  # another one, once ranks were lost
            if agreement is not None:
                agreement.before_draw(step)

        PlanAgreement(self.accounting, store, job.view.rank, lasting.options.limit.total_seconds(), lost)
        planner.before_draw = lambda step: lasting.retry(lambda: before_draw(step))

    def settle_plan(self) -> None:
        """End with the same plan on all ranks that remain (collective over them)."""
        if (agreement := self.accounting.agreement) is not None:
            agreement.settle()

    def end_plans(self) -> None:
        """All ranks have trained on all that they draw, or are about to have (collective)."""
        if (agreement := self.accounting.agreement) is not None:
            retry = self.lasting.retry
            retry(lambda: gather(None, "the end of training"))  # until then some may wait for others
            retry(self.settle_plan)
            agreement.close()

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """The run has ended, or an error has ended it; idempotent."""
        if self.accounting.agreement is not None:
            self.accounting.agreement.close()
        self.engine.close()
        self.step.close()


def _links(job: Job, options: Options, device: torch.device, columns: Columns | None = None) -> ReplicaLinks:
    """The network between replicas; with columns, between their shards (collective)."""
    skip: Literal["error", "skip"] = "skip" if options.on_nan == "skip" else "error"
    ranks, cut = () if columns is None else columns.ranks, None if columns is None or columns.alike else columns.cut
    between: Between = "gloo" if ranks or options.on_peer_loss == "continue" else options.between
    return ReplicaLinks(job.view.rank, job.view.ranks, job.groups, skip, job.on_devices(between, device), ranks, cut)


def _drift_check(job: Job) -> ParameterDriftCheck | None:
    """The drift check of this rank's replica; ``None`` if its devices are alike (collective over it)."""
    ranks = job.view.replica.ranks
    if len(ranks) == 1 or job.view.topology.backend(ranks) is not None:
        return None
    data = not_none(job.data_group(), "the group in which a replica averages gradients")
    return ParameterDriftCheck(ranks, data, not_none(job.small_group(), "the group of a replica for small tensors"))
