"""Strategies with replicas that train apart, and are brought together by an averager."""

import sys
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from inspect import Parameter, Signature, get_annotations, getsourcefile, isabstract, signature
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_hetero.algorithms.base import Averager, BufferAverager, Outcome
from lightning_hetero.argument_checks import one_of, plain
from lightning_hetero.checkpoint import shards
from lightning_hetero.checkpoint.consensus import BackgroundConsensus
from lightning_hetero.checkpoint.format import COMMON, CheckpointIdentity, add_replicas, replica_mismatch
from lightning_hetero.checkpoint.snapshot import identity
from lightning_hetero.checkpoint.writer import BackgroundWriter
from lightning_hetero.checkpoint_sections import FORMAT
from lightning_hetero.comm.agreement import check_equal, raise_on_all
from lightning_hetero.comm.all_reduce import Traffic
from lightning_hetero.comm.object_collectives import portable
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.topology import ReplicaKind, Topology
from lightning_hetero.errors import ConfigurationError, UnsupportedError
from lightning_hetero.lightning_compat import WrappingCheckpointIO
from lightning_hetero.replicas import optimizer_states
from lightning_hetero.replicas.sharding import is_sharded
from lightning_hetero.replicas.vectors import broadcast_values
from lightning_hetero.strategies import saving
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.metrics import LoggedMetrics
from lightning_hetero.strategies.options import Options, documented
from lightning_hetero.strategies.trainer_checks import averages_again, complex_parameters, two_points, unsupported
from lightning_hetero.strategies.training_step import say_outcome
from lightning_hetero.strategies.weight_averaging import WeightAverages, averages_weights

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ReplicaStrategy(HeteroStrategy):
    """Base of strategies with several replicas, such as nodes, in which ranks average gradients at every step.

    Between replicas an averager brings parameters together. What is validated, saved as the model's weights, and left
    at the end of a fit is the consensus of all replicas.

    Args:
        replica: what trains apart from the others: each ``"rank"``, or each ``"node"``. The ranks of a node
            then average gradients at every step.
        on_nan: what to do when replicas meet and one holds values that are not finite: ``"error"`` raises on every
            rank before they spread; ``"skip"`` leaves the replica out and lets it go on with the mean of the others,
            or the center where there is one. Under gossip in pairs, and by push or pull, it goes on with the values
            with which all began, and does not count until it has heard of another replica; under push-sum with its
            values of the latest round; under NoLoCo with its slow weights.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.base.HeteroStrategy`.

    Raises:
        ConfigurationError: an option that cannot work.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import ReplicaStrategy

        trainer = Trainer(strategy="hetero_daso", accelerator="cpu", devices=2)
        assert isinstance(trainer.strategy, ReplicaStrategy)
    """

    of_the_job: ClassVar[tuple[str, ...]] = (*HeteroStrategy.of_the_job, "_metrics", "_source", "weight_averages")
    weight_averages = WeightAverages()
    _source = saving.ResumedFile()  # the checkpoint from which the fit goes on
    averager_class: ClassVar[type[Averager] | None] = None  # of which the options are
    algorithm: Averager | None = None  # with the options that were given; each fit has a new one like it

    def __init__(
        self, replica: ReplicaKind = "node", on_nan: Literal["error", "skip"] = "error", **kwargs: Any
    ) -> None:
        one_of("replica", replica, ("rank", "node"))
        one_of("on_nan", on_nan, ("error", "skip"))
        averages_again(kwargs)
        self.replica = replica
        super().__init__(on_nan=on_nan, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The algorithm's options are the strategy's, too: ``strategy.tau``."""
        algorithm = self.__dict__.get("algorithm")
        if algorithm is not None and name in algorithm.options():
            return getattr(algorithm, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def make_averager(self) -> Averager:
        """The algorithm between replicas, for a fit that begins: a new one, of this strategy's options.

        Raises:
            ConfigurationError: the class has no averager.
        """
        if self.algorithm is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no averager. Make its class with "
                "lightning_hetero.strategy_for(averager, name)."
            )
        return replace(self.algorithm)  # type: ignore[type-var]

    @override
    def algorithm_options(self) -> dict[str, Any]:
        own = {} if self.algorithm is None else self.algorithm.options()
        return {**super().algorithm_options(), "replica": self.replica, **own}

    @override
    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        return topology.replicas(self.replica)

    # -- what people may want to see ---------------------------------------------------------------

    @property
    def averager(self) -> Averager | None:
        """The algorithm between replicas, during a fit."""
        return self.engine.averager if self.joined else None

    @property
    def traffic(self) -> Traffic:
        """The cost of exchanges between replicas since the ranks have met.

        Raises:
            UnsupportedError: they have not met yet.
        """
        if not self.joined:
            raise UnsupportedError(
                "strategy.traffic is there from the beginning of a fit on: it counts what exchanges have cost since "
                "the ranks have met. Ask for it during the fit, or after it."
            )
        return self.engine.traffic

    def status(self) -> dict[str, float | str]:
        """The algorithm's own numbers and words, by name, such as its phase; empty outside of a fit."""
        return {} if self.averager is None else self.averager.status(self.engine.windows)

    @property
    def pairings(self) -> list[list[int]] | None:
        """Of each replica, its completed exchanges with each; under gossip, once a fit has ended, else nothing."""
        return None if self.averager is None else self.averager.pairings

    # -- a fit -------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        raise_on_all(unsupported(callbacks), "the Trainer's callbacks")
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            check_equal("the checkpoint to go on from", self._source.summary)
            _insert_callbacks(callbacks)
        super().setup(trainer)
        if fits:
            raise_on_all(complex_parameters(self.module), "the model")
            self.connect_shards()
            if self.ticket is None:  # else all have loaded the same values
                self._broadcast_values()
            self._metrics = LoggedMetrics(trainer)
            self.start_averager()
            if self.engine.averages:
                raise_on_all(two_points(self.optimizers), "the optimizers")
            self.weight_averages = WeightAverages.of(callbacks if self.engine.averages else (), self.module)

    def _broadcast_values(self) -> None:
        """Give all ranks the first replica's values (collective)."""
        if self.columns is None:
            broadcast_values(self.module)
        else:
            self.share_shards()

    def start_averager(self) -> None:
        """Let a new averager serve the replicas, which hold the same values (collective)."""
        say_outcome(self._start(self.make_averager(), self._source.buffers), type(self).__name__)

    def _start(self, averager: Averager, buffers: Collection[str] | None) -> Outcome | None:
        """Let an averager serve the replicas, which hold the same values (collective).

        Args:
            averager: a new one.
            buffers: names of those that replicas exchange in the run that goes on; ``None``: it begins.
        """
        replica, view = averager.make_replica(self.trainer.lightning_module, self.share_buffers), self.engine.view
        if buffers is not None:  # their values now may be others than those by which that run has chosen
            replica = replica.with_buffers(buffers)
        if self.options.tensor_parallel > 1 and not averager.traits.lockstep:
            raise UnsupportedError(
                f"{type(self).__name__} with tensor_parallel_size={self.options.tensor_parallel}: each replica "
                "exchanges at its own pace, and ranks that get the same samples would not. Use tensor_parallel_size=1; "
                "or hetero_node, hetero_daso, hetero_easgd or hetero_diloco."
            )
        # Ranks at their own pace keep in step if their shares are right in the mean.
        self.accounting.planner.rotates = 1 < view.world == view.count and not averager.traits.lockstep
        metrics = self._metrics.mean_over_ranks
        return self.engine.start(averager, replica, lambda: self.optimizers, self.fit_info(), metrics)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._metrics.begin()
        self.collaborators.begin_plans()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:  # callbacks have unfrozen, or frozen, what they want to for the epoch
            self.change_layout()

    def change_layout(self) -> None:
        """Between two steps, go on with the parameters that are trainable now (collective)."""
        if problem := complex_parameters(self.module):
            raise problem
        if self.engine.change_layout():
            self.wrap_again()

    def finish(self) -> None:
        """Make all replicas equal, at the end of the fit (collective)."""
        if self.engine.averages:
            outcome, values = collective(
                "make replicas equal", lambda: (self.engine.finish(), self.engine.own_values())
            )  # the model may hold the values that are evaluated
            say_outcome(outcome, type(self).__name__)
            self.engine.running.replica.unpack(values)
            self._broadcast_values()  # also what does not travel

    def rest(self) -> None:
        """After :meth:`finish`: only statistics, such as BatchNorm's, still change (collective)."""
        if self.averager is not None and self.engine.averages:
            resting = BufferAverager(self.averager.pairings)
            self.averager.close()
            self._start(resting, self.averager.replica.exchanged)
            self.trainer.lightning_module.zero_grad()  # an optimizer may step once more, at the end of the epoch

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Collective: the Trainer asks for it on all ranks when it saves. Not once it is interrupted: ranks may be gone.
        training = self.joined and self.engine.averages and self.trainer.state.fn == TrainerFn.FITTING
        if not training or self.engine.holds or self.engine.finished or self.collectives.alone():
            return super().lightning_module_state_dict()
        io, joins = self.checkpoint_io, saving.others_join(self.checkpoint_io)
        if isinstance(io, BackgroundWriter):
            later = io.consensus_later(super().lightning_module_state_dict())
            if later is not None:
                return later
        if joins:
            values = collective("find where all begin", lambda: self.engine.join_values())  # after a loss another one
        else:
            values = collective("find the consensus", lambda: self.engine.consensus(self.trainer.sanity_checking))
        with self.engine.running.replica.with_values(values):
            state = super(HeteroStrategy, self).lightning_module_state_dict()
            if joins:
                return saving.copied_for_join(io, self.module, state, values)
            if is_sharded(self.module):
                return {name: value.detach().clone() for name, value in state.items()}
            if self.root_device.type != "cpu":
                return portable(dict(state))  # the device has no room for a copy
            return dict(state) if isinstance(io, BackgroundWriter) else deepcopy(dict(state))

    def _identity(self) -> CheckpointIdentity:
        """The name of this strategy in checkpoints."""
        return CheckpointIdentity(type(self).__name__, self.saved_as or type(self.averager).__name__)

    @override
    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        if self.averager is None or isinstance(self.averager, BufferAverager) or self.collectives.alone():
            super()._save(checkpoint, filepath, storage_options)
            return
        precision = self.precision_plugin.state_dict()
        if saving.others_join(self.checkpoint_io):
            checkpoint[COMMON] = self.recovery.retry(lambda: self.engine.shared_state())
            self._add_replicas(checkpoint, "")
            self.weight_averages.save(checkpoint)
            super()._save(checkpoint, filepath, storage_options)
            return
        io = self.checkpoint_io
        flat = io.snapshot.vector if isinstance(io, BackgroundWriter) and self.columns is None else None
        own = self.recovery.retry(lambda: self.engine.state_dict(self.optimizers, precision, flat))
        with self._shards.saving(io, filepath, own is not None, isinstance(io, WrappingCheckpointIO)) as save:
            self.weight_averages.save(checkpoint)
            self._add_replicas(checkpoint, save)
            with saving.raise_on_all_ranks(alone=False):
                if own is not None:
                    shard = shards.shard_path(filepath, self._state_name(), save)
                    state = saving.on_cpu(io, {"format": FORMAT, "state": own})
                    io.save_checkpoint(state, shard, storage_options=storage_options)
            super()._save(checkpoint, filepath, storage_options)  # last, so that it never lacks a shard

    def _add_replicas(self, checkpoint: dict[str, Any], save: str) -> None:
        """Describe the replicas in a checkpoint (collective)."""
        view, buffers = self.engine.view, self.engine.running.replica.exchanged
        add_replicas(checkpoint, self._identity(), view, save, self._seen(), self.columns is not None, buffers)

    def _seen(self) -> dict[str, Any]:
        """This rank's training loss, and logged metrics, as far as averagers have yet to see them."""
        return {"losses": self.engine.losses.state_dict(), "metrics": self._metrics.state_dict()}

    def _state_name(self) -> str:
        """The name of what this rank saves of its replica: the replica's id, and with shards the rank's place in it."""
        replica = self.engine.view.replica
        return str(replica.id) if self.columns is None else f"{replica.id}.{replica.ranks.index(self.global_rank)}"

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        load = super().load_checkpoint
        self._source = saving.ResumedFile.of(checkpoint, checkpoint_path, lambda path: load(path, *args, **kwargs))
        return checkpoint

    @override
    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        self.change_layout()  # to what was trainable
        self.weight_averages.load(checkpoint)
        who, view, sharded = self._identity(), self.engine.view, self.columns is not None
        if self.ticket is not None:
            why = replica_mismatch(checkpoint, who, view, sharded) or "Nobody has joined after all."
            self._start_from_consensus(_common_of(checkpoint), why)
            return
        mine = self._source.replica(checkpoint, who, view, self._state_name(), sharded)
        if isinstance(mine, str):
            near = None if sharded else self._source.nearest(checkpoint, who, view)
            self._start_from_consensus(near, mine)
            return
        self.engine.load_state_dict(mine, self.optimizers)
        self._metrics.load_state_dict(mine["metrics"])
        self._restore_precision(mine["precision"])

    def _restore_precision(self, state: dict[str, Any]) -> None:
        """Let the precision plugin go on from what a replica has saved of its own.

        Under ``"16-mixed"`` only GPUs scale losses. A replica that was on a CPU has saved nothing of that: a scaler
        begins again.
        """
        if state:
            self.precision_plugin.load_state_dict(state)

    def _start_from_consensus(self, near: dict[str, Any] | None, why: str) -> None:
        """Let all replicas start from the checkpoint's weights, each with the nearest replica's state where it fits."""
        start, trainer = f"{why} All replicas start from the checkpoint's weights,", self.trainer
        tell = rank_zero_warn if self.ticket is None else rank_zero_info  # that others have joined is no surprise
        if near is None:
            tell(f"{start} with its optimizers' state. What the algorithm keeps, such as outer momentum, starts over.")
        else:
            tell(
                f"{start} each with its own optimizers' state, and a replica that has none with that of the one with "
                "the nearest number."
            )
            for optimizer, saved in zip(self.optimizers, near["optimizers"], strict=True):
                optimizer_states.restore(optimizer, saved)
            self._restore_precision(near["precision"])
            self.engine.load_shared_state(near["algorithm"])
        progress = trainer.fit_loop.epoch_loop.batch_progress.total
        by_hand = not trainer.lightning_module.automatic_optimization
        self.engine.resume(progress.processed if by_hand else trainer.global_step)  # type: ignore[attr-defined]

    def background_consensus(self) -> BackgroundConsensus | None:
        """Finds the replicas' mean, or the center, on the thread that saves; ``None``: at the step (collective).

        At the step it is found where it is neither the mean nor a center, or where a hook looks at it before.
        """
        module, callbacks = self.trainer.lightning_module, self.trainer.callbacks  # type: ignore[attr-defined]
        averager, engine = self.averager, self.engine
        if self.survives or self.columns is not None:
            return None  # a rank that is lost would break connections within the thread; each rank has its own shards
        if averager is None or not engine.averages or engine.view.count == 1 or any(map(averages_weights, callbacks)):
            return None
        if not averager.consensus_is_mean:
            return None
        if not _is_ours(type(averager).before_save) or not _is_ours(type(self).save_checkpoint):
            return None
        hooks = [type(one).on_save_checkpoint for one in (module, *callbacks)]
        if not all(_is_ours(hook) or hook.__module__.startswith("lightning.") for hook in hooks):
            return None
        values = {identity(value) for value in (*module.parameters(), *module.buffers())}
        if not all(identity(value) in values for value in module.state_dict().values() if isinstance(value, Tensor)):
            return None
        return BackgroundConsensus(engine, averager, lambda: self.averager is averager)

    @override
    def on_train_end(self) -> None:
        self.collaborators.end_plans()
        self._shards.clean(self.checkpoint_io, self.engine.links.is_leader)
        super().on_train_end()

    @override
    def teardown(self) -> None:
        self.weight_averages.detach()
        self._source, self.weight_averages = saving.ResumedFile(), WeightAverages()
        super().teardown()


def _is_ours(function: Any) -> bool:
    return function.__module__.startswith("lightning_hetero.")


def _common_of(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the nearest replica in a checkpoint that was made for others to join; ``None``: it holds none."""
    if COMMON not in checkpoint:
        return None
    return {"optimizers": checkpoint["optimizer_states"], "precision": {}, "algorithm": checkpoint[COMMON]}


class FinishFirst(Callback):
    """Lets replicas be equal before any other callback sees the end of training."""

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Before SWA gives the model its average."""
        strategy = trainer.strategy
        if isinstance(strategy, ReplicaStrategy) and strategy.weight_averages.measure_batch_norm(trainer):
            strategy.finish()

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Before callbacks give the model their average."""
        strategy = trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            strategy.finish()
            strategy.weight_averages.finish()


class UpdateWhereReplicasMeet(Callback):
    """Comes right after the callbacks that average weights, and makes the updates that they have asked for."""

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """SWA has asked, or has given the model its average and reset BatchNorm's statistics."""
        strategy = trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            if strategy.weight_averages.measure_batch_norm(trainer):
                strategy.rest()
            strategy.weight_averages.make(strategy.engine, strategy.timer)

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        """WeightAveraging has asked."""
        strategy = trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            strategy.weight_averages.after_batch(strategy.engine, strategy.timer)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """WeightAveraging has asked."""
        strategy = trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            strategy.weight_averages.make(strategy.engine, strategy.timer)


def _insert_callbacks(callbacks: list[Callback]) -> None:
    """Put these callbacks where they belong among a Trainer's, once."""
    callbacks[:] = [one for one in callbacks if not isinstance(one, FinishFirst | UpdateWhereReplicasMeet)]
    if where := [i for i, callback in enumerate(callbacks, 1) if averages_weights(callback)]:
        callbacks.insert(where[-1], UpdateWhereReplicasMeet())
    callbacks.insert(0, FinishFirst())


S = TypeVar("S", bound=type[ReplicaStrategy])


def strategy_for(averager: type[Averager], name: str, **defaults: Any) -> type[ReplicaStrategy]:
    """Make the strategy class of an averager, and register a name for it with Lightning.

    Its options are the averager's fields, then those of :class:`~lightning_hetero.ReplicaStrategy`; help, YAML, and the
    check that all ranks were given the same options, know them from there.

    Assign the result to a variable of the class's name, so that copies in other processes find it: the averager's name
    without "Averager", and with "Strategy".

    Args:
        averager: a dataclass, in which the fields are the options.
        name: the strategy string, as in ``Trainer(strategy=name)``.
        **defaults: defaults of the options, where they differ, such as ``replica="rank"``.

    Returns:
        The class.

    Raises:
        ConfigurationError: the averager is no dataclass, lacks a method, or has a field with the name of an option or
            attribute of strategies; the name is taken, or is no text; or a default cannot be used.

    Example::

        from dataclasses import dataclass

        from lightning_hetero import Averager, strategy_for


        @dataclass
        class LocalSGD(Averager):
            every: int = 8

            def due(self, context):
                return context.step % self.every == 0


        LocalSGDStrategy = strategy_for(LocalSGD, name="hetero_local_sgd", replica="rank")
    """
    _checked(averager)
    if not (isinstance(name, str) and name):
        raise ConfigurationError(f"name={name!r}: give the strategy's string, such as 'hetero_local_sgd'.")
    one_of("replica", defaults.get("replica", "node"), get_args(ReplicaKind))
    title = averager.__name__.removesuffix("Averager") + "Strategy"
    module = sys._getframe(1).f_globals.get("__name__", averager.__module__)  # as namedtuple does
    made = type(title, (ReplicaStrategy,), {"__module__": module, "__qualname__": title, "__doc__": averager.__doc__})
    strategy = with_options_of(averager, **defaults)(made)
    taken = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else strategy
    if (_file_of(taken), taken.__qualname__) != (_file_of(strategy), title):  # else the file has been run once more
        raise ConfigurationError(
            f"name={name!r} is taken by {taken.__module__}.{taken.__qualname__}. Choose another name for {title}."
        )
    register_name(name, strategy)
    return strategy


def with_options_of(averager: type[Averager], **defaults: Any) -> Callable[[S], S]:
    """A decorator that gives a strategy class the options of an averager, and the averager made of them.

    Args:
        averager: a dataclass, in which the fields are the options.
        **defaults: defaults of the options, where they differ.

    Raises:
        ConfigurationError: the averager cannot be used; see :func:`strategy_for`.
    """
    names = _checked(averager)
    given = {name: defaults.pop(name) for name in names if name in defaults}

    def decorate(kind: S) -> S:
        whole = _signature(averager, {**given, **defaults})
        if unknown := sorted({*defaults} - {*whole.parameters}):
            raise ConfigurationError(f"{averager.__name__}: {', '.join(unknown)} is no option of its strategy.")

        def options(arguments: Any, more: dict[str, Any]) -> tuple[Averager, dict[str, Any]]:
            bound = whole.bind(None, *arguments, **more).arguments
            others = {**defaults, **bound.pop("kwargs", {}), **bound}
            del others["self"]
            own = {**given, **{name: plain(others.pop(name)) for name in names if name in others}}
            return averager(**own), others

        def __init__(self: ReplicaStrategy, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self.algorithm, kwargs = options(args, kwargs)
            ReplicaStrategy.__init__(self, **kwargs)  # jsonargparse reads here where `kwargs` go

        __init__.__signature__ = whole  # type: ignore[attr-defined]
        __init__.__qualname__ = f"{kind.__qualname__}.__init__"
        kind.__init__ = __init__  # type: ignore[method-assign]
        kind.averager_class = averager
        explained_by = (*averager.__mro__, *kind.__mro__[1:])
        kind.__doc__ = documented(kind.__doc__, [*whole.parameters], explained_by)
        return kind

    return decorate


def register_name(name: str, strategy: type[HeteroStrategy]) -> None:
    """Register a strategy string with Lightning, in the variants that ``ddp`` has; checkpoints go by it, too.

    Args:
        name: such as ``"hetero_ddp"``.
        strategy: the class that it makes; the first line of its docstring describes it.
    """
    strategy.saved_as = name
    summary = (strategy.__doc__ or strategy.__name__).strip().split("\n")[0].rstrip(".")
    for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        for unused in (None, True, False):
            StrategyRegistry.register(
                name + suffix + ("" if unused is None else f"_find_unused_parameters_{unused}".lower()),
                strategy,
                description=f"{summary} ({start_method})",
                override=True,
                start_method=start_method,
                **({} if unused is None else {"find_unused_parameters": unused}),
            )


def _file_of(kind: type) -> str:
    """The file and name of a strategy class's algorithm; under another name if the file was run as a script."""
    try:
        return getsourcefile(getattr(kind, "averager_class", kind)) or kind.__module__
    except (OSError, TypeError):  # in a notebook, say
        return kind.__module__


def _checked(averager: type[Averager]) -> list[str]:
    """The names of an averager's options, if a strategy can be made of it."""
    if not (isinstance(averager, type) and issubclass(averager, Averager)):
        raise ConfigurationError(f"{averager!r} is no subclass of lightning_hetero.Averager.")
    if not is_dataclass(averager):
        raise ConfigurationError(
            f"{averager.__name__} is no dataclass, so that its options are unknown. Put @dataclass above it, and let "
            "its fields be the options."
        )
    if isabstract(averager):
        missing = ", ".join(sorted(averager.__abstractmethods__))
        raise ConfigurationError(f"{averager.__name__} lacks {missing}, which every averager must define.")
    taken = {*signature(ReplicaStrategy.__init__).parameters, *signature(HeteroStrategy.__init__).parameters}
    taken |= {*signature(DistributedDataParallel.__init__).parameters, *dir(Averager), *Averager.__annotations__}
    # Gossip has an option `topology`; the attribute of this name is the job's.
    taken |= {*dir(ReplicaStrategy), *chain(*map(get_annotations, ReplicaStrategy.__mro__))} - {"topology"}
    if clash := [field.name for field in fields(averager) if field.name in taken]:
        raise ConfigurationError(
            f"{averager.__name__}: {', '.join(clash)} is a name that strategies or averagers use themselves. Give the "
            f"field another name, such as `my_{clash[0].lstrip('_')}`."
        )
    return [field.name for field in fields(averager) if field.init]


def _signature(averager: type[Averager], defaults: dict[str, Any]) -> Signature:
    """The options of an averager, then of replicas, then of every strategy, with their types and defaults."""
    hints = get_type_hints(averager)
    own = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in signature(averager).parameters.values()]
    _, *of_replicas, _ = signature(ReplicaStrategy.__init__).parameters.values()
    inherited: dict[str, Parameter] = {}
    for p in (*of_replicas, *signature(Options).parameters.values()):
        inherited.setdefault(p.name, p.replace(kind=Parameter.KEYWORD_ONLY))
    options = [p.replace(default=defaults[p.name]) if p.name in defaults else p for p in (*own, *inherited.values())]
    positional = [p for p in options if p.kind is not Parameter.KEYWORD_ONLY]
    keyword = [p for p in options if p.kind is Parameter.KEYWORD_ONLY]
    first = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    last = Parameter("kwargs", Parameter.VAR_KEYWORD, annotation=Any)
    return Signature([first, *positional, *keyword, last], return_annotation=None)
