"""A DDP strategy whose ranks form a job: it joins one, and goes on with other ranks when the job's view changes."""

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_hetero import lightning_compat
from lightning_hetero.algorithms.base import FitInfo
from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.repartition import Repartition, ShareHistory
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.comm import failures
from lightning_hetero.comm.agreement import raise_on_all, value_of_rank
from lightning_hetero.comm.collectives import Collectives
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.job import Job, RendezvousAddress, ViewSuccession, join_world
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.stores import StoreUser
from lightning_hetero.comm.threads import record_sockets
from lightning_hetero.comm.topology import Topology, interface_towards, place_of, use_interface
from lightning_hetero.comm.transport import free_port, listen_within
from lightning_hetero.comm.view import View
from lightning_hetero.errors import MembershipLostError, UnsupportedError, not_none
from lightning_hetero.launch.environment import RenumberedEnvironment, check_variables, hostname, local_devices
from lightning_hetero.launch.observer import ObservedLauncher
from lightning_hetero.replicas import optimizer_states
from lightning_hetero.replicas.sharding import Columns, ShardTraffic, forget_step, is_sharded, wrong_mesh
from lightning_hetero.replicas.vectors import broadcast_shards
from lightning_hetero.strategies.default_groups import GroupOverrides, register_hook
from lightning_hetero.strategies.fit import Fit, Lasting
from lightning_hetero.strategies.metrics import MonitoredMetrics
from lightning_hetero.strategies.numbering import continue_logs, launched, show_progress
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.position import length_of
from lightning_hetero.strategies.recovery_policy import JoinTicket, RecoveryPolicy
from lightning_hetero.strategies.replica_ddp import ReplicaDDP, use_shared_memory_allreduce
from lightning_hetero.strategies.signals import StopRequest
from lightning_hetero.strategies.training_step import TrainingStep
from lightning_hetero.version import __version__

if TYPE_CHECKING:
    import lightning.pytorch as pl


class JobStrategy(DDPStrategy):
    """DDP over the ranks of each replica, in a job whose ranks may change during a fit.

    It holds what the job and the fit are made of. Subclasses say how training goes.

    Args:
        options: that all strategies share.
        accelerator: set by the Trainer.
        *args: of ``DDPStrategy``.
        **kwargs: of ``DDPStrategy`` and ``DistributedDataParallel``.
    """

    def __init__(self, options: Options, accelerator: Accelerator | None = None, *args: Any, **kwargs: Any) -> None:
        self.options = options
        super().__init__(accelerator, *args, **kwargs)
        self.timer = StepTimer(torch.device("cpu"))
        self.collectives = Collectives(self.timer.waiting, self._is_alone, self._loss_counts, self._devices_of_all)
        self.group_overrides = GroupOverrides()
        self.recovery = RecoveryPolicy()

    _fit: Fit | None = None  # in the present view, once this process has joined a job
    announced_route: tuple[View | None, str] = None, ""  # how gradients travel in a view, as the user has read
    _wraps_again = False  # whether the model is about to be wrapped in another DDP
    ticket: JoinTicket | None = None  # if it joins a job that runs, until training starts
    stop_request: StopRequest | None = None  # of the latest fit
    #: In a fit: what works through the job's store, by its purpose, in the same order on all ranks.
    store_users: dict[str, StoreUser]
    monitored: MonitoredMetrics | None = None  # of the latest run
    columns: Columns | None = None  # of a sharded model, with which ranks of other replicas this one exchanges

    #: Attributes that belong to a job or a fit. A copy of the strategy has yet to join.
    of_the_job: ClassVar[tuple[str, ...]] = (
        "_fit",
        "stop_request",
        "store_users",
        "monitored",
        "columns",
        "announced_route",
    )

    def __getstate__(self) -> dict[str, Any]:
        """For copies: options, and what the Trainer has set, but no connections."""
        state = {name: value for name, value in super().__getstate__().items() if name not in self.of_the_job}
        if isinstance(self.model, DistributedDataParallel):
            state["_model"] = self.model.module
        return state

    # -- what a subclass says ----------------------------------------------------------------------

    def algorithm_options(self) -> dict[str, Any]:
        """Options beyond those that all strategies share, by name; they must be the same on every rank."""
        return {"on_nan": self.options.on_nan}

    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """The replicas of the job, each the ranks that average gradients at every step; here one, the world."""
        return (tuple(range(topology.world)),)

    # -- the Trainer, the launcher -----------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether this process has joined a job."""
        return self._fit is not None

    @property
    def collaborators(self) -> Fit:
        """Collaborators of the fit in the present view of the job.

        Raises:
            UnsupportedError: this process has not joined a job yet.
        """
        if self._fit is None:
            raise UnsupportedError(
                "strategy.job is there from the beginning of a fit, validation, test or prediction on: the ranks meet "
                "then. Ask for it there, such as in a callback's hook."
            )
        return self._fit

    @property
    def job(self) -> Job:
        """The job that this process has joined."""
        return self.collaborators.job

    @property
    def accounting(self) -> BatchAccounting:
        """Accounting of this rank's batches."""
        return self.collaborators.accounting

    @property
    def engine(self) -> Engine:
        """Engine that calls the algorithm between replicas."""
        return self.collaborators.engine

    @property
    def step(self) -> TrainingStep:
        """A training step of this rank."""
        return self.collaborators.step

    @property
    def module(self) -> "pl.LightningModule":
        """The module that is trained or evaluated, without DDP.

        Raises:
            UnsupportedError: there is none yet.
        """
        if (module := self.lightning_module) is None:
            raise UnsupportedError("strategy.module is there from the beginning of a fit, validation, or test on.")
        return module

    @property
    def trainer(self) -> "pl.Trainer":
        """The Trainer that this strategy serves.

        Raises:
            UnsupportedError: it has none yet.
        """
        if (trainer := lightning_compat.trainer_of(self.lightning_module)) is None:
            raise UnsupportedError(
                "strategy.trainer is there from the beginning of a fit, validation, test or prediction on: a Trainer "
                "tells its strategy of itself with the model. Ask for it there, such as in a callback's hook."
            )
        return trainer

    @property
    def environment(self) -> ClusterEnvironment:
        """The environment of this process: of the launcher, or as it has changed since.

        Raises:
            UnsupportedError: there is no Trainer yet.
        """
        if self.cluster_environment is None:
            raise UnsupportedError("strategy.environment is there once a Trainer has been made with the strategy.")
        return self.cluster_environment

    @property
    def interface(self) -> str:
        """This rank's address in the network of the job."""
        return interface_towards(self.environment.main_address, self.options.interface)

    @property
    def launch(self) -> str:
        """Name of the launcher's job in which this process was started."""
        cluster = launched(self.environment)
        return f"{cluster.main_address}:{cluster.main_port}"

    @property
    def survives(self) -> bool:
        """Whether a fit goes on when ranks are lost."""
        return self.options.on_peer_loss == "continue"

    @override
    def set_world_ranks(self) -> None:
        check_variables(self.environment, self.num_nodes)
        self.parallel_devices = local_devices(
            self.environment, not_none(self.parallel_devices, "the devices of this machine")
        )
        super().set_world_ranks()
        launched_as = self.global_rank, self.world_size
        if failures.watched() and (now := (dist.get_rank(), dist.get_world_size())) != launched_as:
            self.renumber(*now)  # in an earlier fit of this process ranks were lost, or have joined
        self._choose_network()

    def _choose_network(self) -> None:
        """Set where this process listens, as the options say."""
        listen_within(self.options.port_range)
        if self.options.port_range:
            lightning_compat.choose_main_port(self.environment, free_port(""))
        use_interface(self.options.interface)

    def renumber(self, rank: int, world: int) -> None:
        """Let this process have another number, among other ranks than were launched with it."""
        self.cluster_environment = RenumberedEnvironment(launched(self.environment), rank, world)
        rank_zero_only.rank = rank  # type: ignore[attr-defined]

    def take_number(self, job: Job) -> None:
        """Let this process have its new number, and the duties of rank zero if that is it."""
        first = not self.is_global_zero and job.view.rank == 0
        self.renumber(job.view.rank, job.view.world)
        if first:
            continue_logs(self.trainer)
            if self.trainer.training:
                show_progress(self.trainer)

    # -- joining a job -----------------------------------------------------------------------------

    def join_world(self, began: float) -> None:
        """Join the world's process group (collective), unless this rank is in that of a running job already.

        Args:
            began: when this rank began to look for others, by ``time.monotonic()``; ``timeout`` counts from then.
        """
        limit = self.options.limit
        if self.ticket is not None:
            failures.watch_ranks(self.interface, limit.total_seconds())
            return
        environment = self.environment
        address = RendezvousAddress.of(environment, self.interface)

        def init() -> None:
            with record_sockets(of_all=True):
                lightning_compat.init_dist_connection(environment, "gloo", timeout=limit, **_store_of_restart(limit))

        launcher = self.launcher
        hint = ""
        if self.survives and address.rank == 0 and self.options.join_file is None:
            hint = (
                "If they train already without an earlier process of this rank, it cannot come back here: a rank 0 "
                "that is started again finds its job through the strategy's `join_file` only."
            )
        ended = launcher.ended if isinstance(launcher, ObservedLauncher) else lambda: None
        join_world(init, address, limit, ended, hint, began)

    def join_job(self) -> Job:
        """Learn who takes part in the job (collective)."""
        self.timer.move_to(self.root_device)
        options, ticket = self.options, self.ticket
        place = place_of(self.root_device, hostname(), self.node_rank, self.local_rank)
        follows = None
        if ticket is not None:
            follows = ViewSuccession(ticket.admission.view, self.launch, ticket.replica, ticket.entry)
        agreed = {
            "lightning_hetero": __version__,
            "strategy": type(self).__name__,
            **options.agreed(),
            **self.algorithm_options(),
        }
        job = Job.join(place, options.ranks_per_node, self.replicas, agreed, options.limit, follows)
        if ticket is not None and is_sharded(self.lightning_module):
            job.view = replace(job.view, ranks_leave=False)  # also where one replica remains
        for device, ranks in job.view.topology.shared_devices().items():
            rank_zero_warn(
                f"Ranks {ranks} share {device}: each takes its own memory of it, they slow each other down, and NCCL "
                "does not connect them, so that gradients between them go through the host's memory. Start one rank "
                "per GPU."
            )
        return job

    def _is_alone(self) -> bool:
        """Whether there is nobody to meet: no job yet, or this rank has failed, and callbacks save what they can."""
        interrupted = lightning_compat.interrupted(lightning_compat.trainer_of(self.lightning_module))
        return (interrupted and not self.stopped) or not dist.is_initialized()

    @property
    def stopped(self) -> bool:
        """Whether all ranks have been asked to stop, have saved, and end."""
        return self.stop_request is not None and self.stop_request.all_stop

    def _devices_of_all(self, device: torch.device) -> dist.ProcessGroup | None:
        return self.job.devices_of_all() if device == self.root_device else None

    def _loss_counts(self) -> bool:
        """Whether this rank's samples have a part in the gradient of the running step."""
        return not self.joined or self.step.counts

    # -- the view, and what is made from it --------------------------------------------------------

    def build(self, job: Job, repartition: Repartition | None = None) -> None:
        """Make what depends on who takes part, by the job's view (collective).

        In the midst of a fit ``repartition`` says which of the former ranks remain.
        """
        lasting = Lasting(
            self.options,
            self.root_device,
            self.timer,
            self.collectives,
            lambda: self.trainer,
            lambda: self.accounting,
            lambda operation: self.recovery.retry(operation),
            lambda: self.recovery.changing,
        )
        self.columns, self._fit = None, Fit.build(job, lasting, self._fit, repartition)

    def continue_with(self, job: Job, repartition: Repartition, missed: bool, source: int, past: ShareHistory) -> None:
        """Go on with the ranks that remain (collective).

        Args:
            job: of these ranks.
            repartition: which ones, by their former numbers, and from which step on they share batches.
            missed: whether the others have completed an exchange between replicas that this rank has not.
            source: a rank that has acted on the latest reports.
            past: learns by which plans the ranks have shared batches until now.
        """
        before, engine = self.job, self.engine
        self.take_number(job)
        failures.continue_to_watch(job.view.ids)
        self.collaborators.settle_plan()
        planner = self.accounting.planner  # it may have missed the latest reports
        planner.plans, planner.most = value_of_rank((planner.plans, planner.most), source)
        past.end(self.collaborators.sharing.ids, planner, repartition.start)
        self.build(job, repartition)
        self.engine.take_over(engine, [before.view.index_of(member.id) for member in job.view.replicas])
        if self.accumulates_locally:  # else they are means over all ranks already
            scale_gradients(self.module, self.step.accumulated_scale)
        if is_sharded(self.module):
            self.job.device_mesh(self.options.tensor_parallel, former=self.module.device_mesh)
            self.configure_ddp()
        self.wrap_in_view()  # first: a replica shares its buffers by its DDP
        self.engine.continue_after_loss(missed, self.fit_info())
        self.continue_in_view()

    def wrap_in_view(self) -> None:
        """Let the replica average gradients in a new view (collective)."""
        self.group_overrides.lend_layers(self.module, self.job.data_group())
        self.wrap_again()
        self.connect_shards()

    def continue_in_view(self) -> None:
        """Let what works through the store, and plans, go on in a new view (collective)."""
        for purpose, user in self.store_users.items():
            user.move(self.job.store(purpose))
        self.collaborators.begin_plans()
        self.timer.restart()

    def abandon(self) -> None:
        """Drop what is under way: all connections are broken. Local."""
        self.accounting.forget()
        self.engine.abandon()
        forget_step(self.module)

    @property
    def accumulates_locally(self) -> bool:
        """Whether each rank adds up gradients of its own until a window ends, and ranks average the sum."""
        return self.module.automatic_optimization and self.trainer.accumulate_grad_batches > 1

    def check_shards(self, view: View, done: Sequence[tuple[int, int]]) -> None:
        """See that the ranks of each replica have shards of the same step, where the model is sharded.

        Args:
            view: of the ranks that remain.
            done: of each rank, its optimizer steps and its exchanges.

        Raises:
            MembershipLostError: on every rank: they do not.
        """
        for ranks in view.ranks if is_sharded(self.module) else ():
            if len({done[rank] for rank in ranks}) > 1:
                raise MembershipLostError(
                    f"Ranks {list(ranks)} cannot go on: another rank was lost just when some of them had completed a "
                    f"step or an exchange ({[done[rank] for rank in ranks]} steps and exchanges), and the others "
                    "cannot get it from them, since each has shards of its own. Start again from a checkpoint."
                )

    def copy_states(self, steps: Sequence[int]) -> None:
        """Let the ranks of each replica go on from the one that has taken most optimizer steps (collective).

        Args:
            steps: optimizer steps of each rank.
        """
        for replica in self.job.view.replicas:
            taken = [steps[rank] for rank in replica.ranks]
            if len(set(taken)) > 1:
                self._copy_state(replica.ranks, replica.ranks[taken.index(max(taken))])

    def _copy_state(self, ranks: Sequence[int], source: int) -> None:
        """Give some ranks the weights, gradients and optimizers' state of one of them (collective over all ranks)."""
        module, own = self.module, None
        if self.global_rank == source:
            states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
            own = module.state_dict(), [parameter.grad for parameter in module.parameters()], states
        theirs = value_of_rank(own, source)
        if self.global_rank not in ranks or self.global_rank == source:
            return
        values, gradients, states = theirs
        module.load_state_dict(values)
        set_gradients(module, gradients)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            # The learning rate is this rank's own: its schedule has yet to follow.
            optimizer_states.restore(optimizer, {**optimizer.state_dict(), "state": state})

    def fit_info(self) -> FitInfo:
        """The job and the fit, as the algorithm between replicas needs to know them."""
        return FitInfo(
            self.job.view.topology,
            self.job.view.ranks if self.columns is None else tuple((rank,) for rank in self.columns.ranks[0]),
            self.job.groups,
            self.interface,
            self.options.on_nan == "skip",
            lambda: length_of(self.trainer),
            bool(getattr(self.trainer, "fast_dev_run", False)),
            lambda: self.accounting.batch_seconds() * self.trainer.accumulate_grad_batches,
            self.job.view.number > 0,
        )

    # -- a sharded model ---------------------------------------------------------------------------

    def lend_mesh(self) -> None:
        """Give the module a mesh of its replica's ranks, if it has a ``configure_model`` (collective over the replica).

        Raises:
            ConfigurationError: on every rank: the options' sizes do not fit.
        """
        if (module := self.lightning_module) is None:
            return
        ranks, options, mesh = self.job.view.replica.ranks, self.options, None
        tensor = self.options.tensor_parallel
        data = max(len(ranks) // tensor, 1) if options.data_parallel_size == "auto" else options.data_parallel_size
        former = module.device_mesh if is_sharded(module) else None
        raise_on_all(wrong_mesh(data, tensor, ranks, former), "the sizes of the device mesh")
        if is_overridden("configure_model", module):
            mesh = self.job.device_mesh(tensor, former)
        lightning_compat.lend_mesh(module, mesh)

    def connect_shards(self) -> None:
        """Let each rank exchange its shards with those that hold the same, if the model is sharded (collective)."""
        self.columns = self.collaborators.connect(self.module)
        if self.columns is not None and self.job.view.count > 1:
            rank_zero_info(f"{type(self).__name__}: {self.columns}.")

    def share_shards(self) -> None:
        """Give all replicas the first one's values, if the model is sharded (collective)."""
        view, groups = self.job.view, self.job.groups
        if is_sharded(self.module) and view.count > 1:
            columns = self.columns or Columns.of(self.module, view.ranks, view.rank)
            collective("receive rank 0's values", lambda: broadcast_shards(self.module, columns, groups))

    @property
    def shard_traffic(self) -> ShardTraffic | None:
        """The traffic of shards within the replica, if the model is sharded and its replica has several ranks."""
        return self.collaborators.nonfinite.shard_traffic if self.joined else None

    def share_buffers(self) -> None:
        """Give all ranks of the replica the buffers of its first (collective over the replica)."""
        if isinstance(self.model, ReplicaDDP):
            self.model.share_buffers()
        elif self.shard_traffic is not None:
            with self.timer.waiting(), deadline("share buffers"):
                self.shard_traffic.share_unsharded(self.module)

    # -- DDP over the replica ----------------------------------------------------------------------

    @override
    def configure_ddp(self) -> None:
        """Wrap the model in a DDP over the ranks of this replica (collective over the replica)."""
        model, parts, job = self.model, self.collaborators, self.job
        ranks, group = job.view.replica.ranks, job.data_group()
        if group is None:
            return  # nothing to average with: DDP would only cost time
        if is_sharded(model):  # fully_shard averages
            beside = None if self.root_device.type == "cpu" else self.timer.in_other_stream
            traffic = ShardTraffic(group, self.timer.waiting, beside, parts.nonfinite.look)
            traffic.serve(not_none(model, "the model"))
            traffic.share_unsharded(self.module)
            parts.nonfinite.shard_traffic = traffic
            self._announce_route(f"{job.view.topology.route(ranks)}, into shards")
            return
        options = {**lightning_compat.ddp_options(self), "device_ids": self.determine_ddp_device_ids()}
        options["process_group"] = group  # a LightningCLI passes every option, the group too
        options = parts.buckets.options(options, not_none(model, "the model"), self.root_device)
        if self.ticket is not None or self._wraps_again:  # all hold the same values, but after a loss one may be ahead
            options["init_sync"] = False
        ddp = ReplicaDDP(self.timer, module=model, **options)
        if (hook := lightning_compat.comm_hook(self)) is not None:
            register_hook(ddp, *hook, group, self.group_overrides, job.view.count > 1)
        topology = job.view.topology
        way = use_shared_memory_allreduce(self.options, ddp, topology, ranks, group, hooked=hook is not None)
        self._announce_route(way or topology.route(ranks))
        self.model = ddp

    def _announce_route(self, way: str) -> None:
        view = self.job.view
        if (view, way) != self.announced_route:
            self.announced_route = view, way
            who = "all ranks" if view.count == 1 else f"ranks {list(view.replica.ranks)}"
            rank_zero_info(f"{type(self).__name__}: gradients of {who} are averaged {way}.")

    def wrap_again(self) -> None:
        """Let DDP wait for the gradients of what is trainable now (collective over the replica)."""
        if isinstance(self.model, ReplicaDDP):
            self.model, self._wraps_again = self.lightning_module, True
            try:
                with self.timer.waiting(), deadline("agree on trainable parameters"):
                    self.configure_ddp()
            finally:
                self._wraps_again = False


def gradients_of(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """A copy of the gradients of a module's parameters, in their order."""
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def set_gradients(module: torch.nn.Module, gradients: Sequence[torch.Tensor | None]) -> None:
    """Set the gradients of a module's parameters, given in their order."""
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def scale_gradients(module: torch.nn.Module, factor: float) -> None:
    """Multiply the gradients of a module's parameters."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor


def _store_of_restart(timeout: timedelta) -> dict[str, Any]:
    """Keys of their own for ranks that torchrun has started again: its store may hold addresses of those before.

    With several agents torchrun makes another store for each start, and counts restarts apart.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    store, *_ = next(rendezvous("env://", timeout=timeout))
    return {"store": dist.PrefixStore(f"restart {restarts}", store)}
