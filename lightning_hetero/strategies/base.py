"""The Lightning face of every strategy: overrides only. One training step reads from top to bottom."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from typing_extensions import override

from lightning_hetero import _lightning
from lightning_hetero.checks import one_of
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.topology import Topology
from lightning_hetero.engine import random_states
from lightning_hetero.engine.checkpoint import add_plan, readable, restore_plan, warn_if_too_new, warn_of_replicas
from lightning_hetero.engine.collectives import Collectives
from lightning_hetero.engine.finite import OnNaN
from lightning_hetero.engine.job import Job, tell_failure
from lightning_hetero.engine.shards import Shards
from lightning_hetero.engine.single import Engine, SingleReplica
from lightning_hetero.engine.step import Workshare
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.launch.environment import check_variables, local_devices
from lightning_hetero.strategies import joining, saving
from lightning_hetero.strategies.guards import check_model, check_trainer
from lightning_hetero.strategies.logged import counting, evaluated
from lightning_hetero.strategies.options import Options, check_accelerator, check_ddp_options, seconds
from lightning_hetero.strategies.position import fetch_anew_between_epochs, fetch_anew_if_moved
from lightning_hetero.strategies.replica_ddp import ReplicaDDP
from lightning_hetero.strategies.signals import StopRequest, end_at_once
from lightning_hetero.strategies.training import TrainingStep, explain_unused
from lightning_hetero.workload.timer import StepTimer

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HeteroStrategy(DDPStrategy):
    """Base of the strategies: splits batches by speed, and weighs gradients by samples within a replica.

    Arguments by position, and options that are not listed here, are those of Lightning's ``DDPStrategy``, such as
    ``checkpoint_io`` and ``ddp_comm_hook``, and of PyTorch's ``DistributedDataParallel``, such as
    ``find_unused_parameters``.

    Args:
        balance: ``"auto"`` splits every global batch by measured speed; ``"off"`` evenly; a list gives each rank's
            relative share (0 for none).
        global_batch_size: samples that all ranks together take per step. Default: the DataLoader's ``batch_size``
            times the number of ranks, as with Lightning's ``ddp``.
        min_batch_size: least samples of a rank per step: one number for all, or one per rank. Default: 1; for models
            with BatchNorm a quarter of an even share, at least 2 and no more than 16.
        max_batch_size: most samples of a rank per step, for instance for its memory: one number for all, or one per
            rank.
        balance_iterable: with ``balance="auto"``, move shares over iterable datasets without a length, too. A fast rank
            then takes more of its own shard in each step and comes to its end earlier, so give it a larger shard, or
            make all of them endless. Default: even shares, and as many steps per epoch as with ``ddp``.
        rebalance_every_n_steps: how often (in batches) the ranks exchange their measured speeds.
        on_nan: what to do about a loss or gradient that is not finite on some rank, before the optimizer steps:
            ``"error"`` raises on every rank and names it; ``"skip"`` leaves the samples of a rank with such a loss out
            (exactly: the others weigh more), and the whole step if only a gradient is; ``"ignore"`` looks at nothing.
        ranks_per_node: group consecutive ranks into nodes of this size, or these sizes, instead of asking the
            launcher; to try one machine as several nodes.
        timeout: longest wait for other ranks, in seconds or as a timedelta, before an error.
        accelerator: set by the Trainer.
        *args: further arguments by position.
        process_group_backend: not a choice here: all ranks meet over gloo, and groups of GPUs use NCCL by themselves.
        start_method: how processes start if no launcher has: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"``.
        **kwargs: further options.

    Raises:
        ConfigurationError: an option that cannot work.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import HeteroStrategy

        trainer = Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2)
        assert isinstance(trainer.strategy, HeteroStrategy)
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        *args: Any,
        process_group_backend: None = None,
        timeout: timedelta | float = 1800.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        balance: Literal["auto", "off"] | list[float] = "auto",
        global_batch_size: int | None = None,
        min_batch_size: int | list[int] | None = None,
        max_batch_size: int | list[int] | None = None,
        balance_iterable: bool = False,
        rebalance_every_n_steps: int = 4,
        on_nan: OnNaN = "error",
        ranks_per_node: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        check_accelerator(accelerator)
        limit = seconds(timeout)
        one_of("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        one_of("on_nan", on_nan, ("error", "skip", "ignore"))
        check_ddp_options(process_group_backend, kwargs)
        self.on_nan = on_nan
        sizes = balance, global_batch_size, min_batch_size, max_batch_size, balance_iterable
        self.options = Options(type(self).__name__, *sizes, rebalance_every_n_steps, ranks_per_node, limit)
        super().__init__(  # type: ignore[misc]
            accelerator, *args, process_group_backend="gloo", timeout=limit, start_method=start_method, **kwargs
        )
        self._shards = Shards()
        self._timer = StepTimer(torch.device("cpu"))
        self.collectives = Collectives(self._timer, self._alone, self._loss_counts)

    # -- joining -----------------------------------------------------------------------------------

    job: Job | None = None  # once this process has joined
    share: Workshare
    engine: Engine
    step: TrainingStep
    _stop: StopRequest | None = None  # of the running fit
    _all_stop = False  # whether all ranks stop after the same step
    _random_states: dict[str, Any] | None = None  # of a checkpoint, to restore once training starts

    #: What a strategy has of the job that it has joined, or of the running fit. A copy has yet to join.
    of_the_job: ClassVar[tuple[str, ...]] = ("job", "share", "engine", "step", "_parts", "_stop", "_all_stop")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: options, and what the Trainer has set, but no connections."""
        state = {name: value for name, value in self.__dict__.items() if name not in self.of_the_job}
        if isinstance(self.model, DistributedDataParallel):
            state["_model"] = self.model.module
        return state

    def algorithm_options(self) -> dict[str, Any]:
        """Options beyond those that all strategies share, by name; they must be the same on every rank."""
        return {"on_nan": self.on_nan}

    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """The replicas of the job, each the ranks that average gradients at every step; here one, the world."""
        return (tuple(range(topology.world)),)

    @property
    def topology(self) -> Topology | None:
        """Which ranks live on which node, once this process has joined."""
        return None if self.job is None else self.job.view.topology

    @override
    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        check_variables(self.cluster_environment, self.num_nodes)
        self.parallel_devices = local_devices(self.cluster_environment, self.parallel_devices)
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        if _lightning.start_method(self) == "popen":
            self._launcher = joining.launcher(self)
        else:
            super()._configure_launcher()

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        joining.connect(self)
        if self.job is None:
            self._timer = StepTimer(self.root_device)
            self.collectives = Collectives(self._timer, self._alone, self._loss_counts)
            self.build(joining.join(self))

    def build(self, job: Job) -> None:
        """Make what depends on who takes part, by the job's view (collective); again when it has changed."""
        parts = joining.make_parts(self, job, self._timer)
        if self.job is not None:
            parts.share.take_over(self.share)
        self._parts, self.share = parts, parts.share
        engine = self.make_engine(job)
        if self.job is not None:
            engine.take_over(self.engine)
        self.engine, self.job = engine, job
        self.step = TrainingStep(self.share, engine, parts.finite, self.collectives)

    def make_engine(self, job: Job) -> Engine:
        """What happens between replicas."""
        return SingleReplica(self.options.rebalance_every_n_steps)

    # -- model -------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.job is not None
        assert self.model is not None
        _lightning.keep_batch_samplers(trainer)
        check_trainer(trainer, self._layer_sync, self.root_device, self.job.view.ranks)
        check_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self._layer_sync = self._parts.ready_for_batch_norm(self.model, self._layer_sync)
            self._all_stop = False
            fit = self.broadcast(next(StopRequest.fits))
            self._stop = StopRequest(trainer, fit, self.options.timeout.total_seconds(), self._save_and_stop)
        else:
            end_at_once(trainer)
        super().setup(trainer)

    @override
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        if len(self.share.replica) == 1:
            return model  # nothing to average with: DDP would only cost time
        options = {**_lightning.ddp_options(self), "device_ids": self.determine_ddp_device_ids()}
        return self._parts.wrapped(model, self.root_device, options)

    @override
    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            _lightning.register_comm_hook(self, self.model)

    # -- data --------------------------------------------------------------------------------------

    @property
    def trainer(self) -> "pl.Trainer":
        """The Trainer that this strategy serves."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Lightning's samplers yield the global order, which this strategy's samplers cut up.
        return {"num_replicas": 1, "rank": 0}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = _lightning.trainer_of(self.lightning_module)
        if self.job is None or trainer is None or trainer.state.stage is None:
            raise UnsupportedError(
                "a dataloader was to be set up while no fit, validation, test or prediction is running. Its parts "
                "follow from where a run stands, and all ranks set it up together: pass it to one of these."
            )
        return self._parts.loaders.process(dataloader, trainer)

    # -- a step ------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module is not None:
            self.step.begin(self.trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.before_window()
        if isinstance(self.model, ReplicaDDP) and self.model.outgrown():
            self.model = self.lightning_module
            with self._timer.waiting(), deadline("take unfrozen parameters in"):
                self.configure_ddp()
        with self.step.forward(self.trainer, args[0] if args else None):
            output = super().training_step(*args, **kwargs)
        if not self.trainer.lightning_module.automatic_optimization:
            self.step.window_ended(self.trainer)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        trainer, module = self.trainer, self.trainer.lightning_module
        loss = self.step.weigh(closure_loss, trainer.accumulate_grad_batches)
        self.pre_backward(loss)
        loss = self.precision_plugin.pre_backward(loss, module)
        with self.step.backward(trainer, loss, self.optimizers):
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        if module.automatic_optimization and _lightning.accumulates(trainer):
            self.step.batch_ended(trainer)
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        stepping = super().optimizer_step
        output = self.step.optimize(
            self.trainer, optimizer, closure, lambda checked: stepping(optimizer, checked, model, **kwargs)
        )
        if self.trainer.lightning_module.automatic_optimization:
            self.step.window_ended(self.trainer)  # before schedulers and callbacks
        return output

    # -- evaluation: the bare module; ranks need not run the same number of batches, for which DDP would wait ------

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if isinstance(self.model, ReplicaDDP):
            self.model.share_buffers()  # of the replica's first rank, as DDP would
        self.engine.hold(self.trainer.sanity_checking)

    @override
    def on_validation_end(self) -> None:
        self.engine.release()  # after the callbacks' hooks: what they have saved is what was validated
        super().on_validation_end()
        self._timer.restart()  # it is no part of a training step's time

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("val", "validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test", "test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict", "predict_step", *args, **kwargs)

    def _evaluate(self, stage: str, name: str, *args: Any, **kwargs: Any) -> Any:
        samples, infers = evaluated(args[0] if args else None)
        counts = counting(self.collectives, samples, _lightning.results_of(self.trainer), infers)
        with getattr(self.precision_plugin, f"{stage}_step_context")(), counts:
            return getattr(self.lightning_module, name)(*args, **kwargs)

    # -- begin, end --------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._parts.finite.begin(searching=_lightning.searches_lr(self.trainer))
        fetch_anew_if_moved(self.trainer, self.share)
        if self._random_states is not None:  # after the loaders were made, which draws random numbers
            random_states.restore(self._random_states)
            self._random_states = None
            fetch_anew_between_epochs(self.trainer, self.share)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.step.batch_ended(self.trainer)
        self.share.listen()  # leave nothing in flight
        if self._stop is not None:
            self._stop.finish()

    @override
    def teardown(self) -> None:
        if self._stop is not None:
            self._stop.close()
            self._stop = None
        if self.job is not None:
            self.engine.close()
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        tell_failure(exception)
        if (trainer := _lightning.trainer_of(self.lightning_module)) is not None:
            _lightning.forget_loader_that_failed(trainer)
        explain_unused(exception, type(self).__name__)

    # -- collectives -------------------------------------------------------------------------------

    def _alone(self) -> bool:
        """Whether there is nobody to meet: no job yet, or this rank has failed, and callbacks save what they can."""
        interrupted = _lightning.interrupted(_lightning.trainer_of(self.lightning_module))
        return (interrupted and not self._all_stop) or not dist.is_initialized()

    def _loss_counts(self) -> bool:
        return self.job is None or self.step.counts

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.collectives.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.collectives.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        return self.collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return self.collectives.all_gather(tensor, group, sync_grads)

    # -- checkpoints -------------------------------------------------------------------------------

    #: Names the algorithm in checkpoints. A subclass goes by the name of the strategy that it extends, unless it sets
    #: its own. Empty: the name of the averager's class.
    saved_as: ClassVar[str] = ""

    @DDPStrategy.checkpoint_io.getter  # type: ignore[attr-defined]
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads the files; the user's own plugin, if one was given."""
        self._checkpoint_io = saving.atomic(self._checkpoint_io)
        return self._checkpoint_io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.job is not None:
            add_plan(checkpoint, self.share)
            if not self._alone():
                random_states.gather_into(checkpoint)
        with saving.told_to_all(self._alone()):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        self._timer.restart()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self._shards.removed(self.checkpoint_io, filepath)

    def _save_and_stop(self) -> None:
        saving.save_to_resume(self)
        self.share.listen()  # leave nothing in flight
        self._all_stop = True

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with readable(checkpoint_path):  # Lightning passes `weights_only` from 2.6 on
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self.job is not None
        warn_if_too_new(checkpoint)
        restore_plan(checkpoint, self.share, self.job.view.rank)
        self._random_states = random_states.find(checkpoint)
        self._restore_replicas(checkpoint)

    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore what replicas hold of their own; here there is one replica."""
        warn_of_replicas(checkpoint, type(self).__name__)
