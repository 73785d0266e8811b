"""The Lightning face of every strategy: overrides only. One training step reads from top to bottom."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
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
from lightning_hetero.engine.checkpoint import REPLICAS, add_plan, readable, restore_plan
from lightning_hetero.engine.collectives import Collectives
from lightning_hetero.engine.finite import OnNaN, StepLeftOutError
from lightning_hetero.engine.job import Job, tell_failure
from lightning_hetero.engine.padding import no_gradients
from lightning_hetero.engine.single import Engine, Outcome, SingleReplica
from lightning_hetero.engine.step import Workshare
from lightning_hetero.launch.environment import RaggedEnvironment, check_variables, local_devices
from lightning_hetero.launch.observer import ObservedLauncher
from lightning_hetero.strategies import joining, saving
from lightning_hetero.strategies.guards import check_model, check_trainer
from lightning_hetero.strategies.logged import counting, counting_nothing, evaluated
from lightning_hetero.strategies.options import Options, check_accelerator, check_ddp_options, seconds
from lightning_hetero.strategies.position import fetch_anew_between_epochs, fetch_anew_if_moved
from lightning_hetero.strategies.replica_ddp import ReplicaDDP, ReplicaSyncBatchNorm, has_batch_norm
from lightning_hetero.strategies.signals import StopRequest, end_at_once
from lightning_hetero.workload.timer import StepTimer

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HeteroStrategy(DDPStrategy):
    """Base of the strategies: splits batches by speed, and weighs gradients by samples within a replica.

    Arguments by position are those of Lightning's ``DDPStrategy``; the options of this class are given by name.

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
        parallel_devices: set by the Trainer.
        cluster_environment: where ranks and addresses come from. Default: detected.
        checkpoint_io: how checkpoints are written and read.
        precision_plugin: set by the Trainer.
        ddp_comm_state: state for ``ddp_comm_hook``.
        ddp_comm_hook: gradient communication hook of DDP; on CPU too.
        ddp_comm_wrapper: wraps ``ddp_comm_hook``.
        model_averaging_period: for PyTorch's post-local-SGD hook, as in ``DDPStrategy``.
        process_group_backend: not a choice here: all ranks meet over gloo, and groups of GPUs use NCCL by themselves.
        start_method: how processes start if no launcher has: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"``.
        **kwargs: options of ``DistributedDataParallel``, such as ``find_unused_parameters``.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable | None = None,
        ddp_comm_wrapper: Callable | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: None = None,
        timeout: timedelta | float = 1800.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
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
        self.options = Options(
            type(self).__name__,
            balance,
            global_batch_size,
            min_batch_size,
            max_batch_size,
            balance_iterable,
            rebalance_every_n_steps,
            ranks_per_node,
            limit,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend="gloo",
            timeout=limit,
            start_method=start_method,
            **kwargs,
        )
        self._timer = StepTimer(torch.device("cpu"))
        self.collectives = Collectives(self._timer, self._alone, self._loss_counts)

    # -- joining -----------------------------------------------------------------------------------

    job: Job | None = None  # once this process has joined
    share: Workshare
    engine: Engine
    _stop: StopRequest | None = None  # of the running fit
    _all_stop = False  # whether all ranks stop after the same step
    _weight: float | None = None  # of the loss whose backward pass runs; 0 if its samples are left out
    _random_states: dict[str, Any] | None = None  # of a checkpoint, to restore once training starts

    #: What a strategy has of the job that it has joined, or of the running fit. A copy has yet to join.
    of_the_job: ClassVar[tuple[str, ...]] = ("job", "share", "engine", "_parts", "_stop", "_all_stop")

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
            assert self.cluster_environment is not None
            self._launcher = ObservedLauncher(
                cluster_environment=RaggedEnvironment(self.cluster_environment),
                num_processes=self.num_processes,
                num_nodes=self.num_nodes,
            )
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
            if has_batch_norm(self.model):
                self.share.planner.least = 2  # BatchNorm cannot normalise one sample
            if self._layer_sync is not None:
                self._layer_sync = ReplicaSyncBatchNorm(self._parts.data_group)
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
        # A LightningCLI passes every option of DDP, the group too.
        options = {**_lightning.ddp_options(self), "process_group": self._parts.data_group}
        options = self._parts.buckets.options(options, model, self.root_device)
        return ReplicaDDP(self._timer, module=model, device_ids=self.determine_ddp_device_ids(), **options)

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
        return self._parts.loaders.process(dataloader, _lightning.trainer_of(self.lightning_module))

    # -- a step ------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module is not None:
            _lightning.watch_fetching(self.trainer, self._timer.fetching, self._timer.fetched)
            if self.trainer.training:
                self._batch_ended()  # if nothing else has ended the last one
                self.share.begin()
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, drawn = self.lightning_module, self.share.current()
        assert module is not None
        self.engine.before_window()
        if isinstance(self.model, ReplicaDDP) and self.model.outgrown():
            self.model = module
            with self._timer.waiting(), deadline("take unfrozen parameters in"):
                self.configure_ddp()
        if callable(measure := getattr(module, "batch_weight", None)):
            self.share.weigh(measure, args[0] if args else None)
        self._parts.finite.before_forward(module)
        results, samples = _lightning.results_of(self.trainer), drawn.samples
        counts = counting(self.collectives, lambda: samples, results)
        with counts if samples > 0 else counting_nothing(self.collectives, results):
            output = super().training_step(*args, **kwargs)
        if not module.automatic_optimization:
            self._window_ended()
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # DDP takes the plain mean over the W ranks of a replica. With the factor W n_i / N that is the mean over all N
        # samples, of which this rank holds n_i (HetGrad, Moreno-Alvarez et al. 2022).
        module, finite = self.lightning_module, self._parts.finite
        assert module is not None
        self.engine.take_loss(closure_loss * self.trainer.accumulate_grad_batches)  # by which the Trainer has divided
        own, total = finite.count(closure_loss, *self.share.weights())
        weight = self._weight = len(self.share.replica) * own / total if total else 0.0
        loss = finite.weigh(closure_loss, weight)
        self.pre_backward(loss)
        loss = self.precision_plugin.pre_backward(loss, module)
        finite.watch(loss, self.optimizers, self.model)
        self._timer.watch(loss)  # last, so that all that callbacks do in the backward pass is this rank's own work
        with deadline("average gradients"), no_gradients(module) if weight == 0 else nullcontext():
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        self._timer.backward_done()
        self._weight = None
        finite.look(self.optimizers, self.model)
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        if module.automatic_optimization and _lightning.accumulates(self.trainer):
            self._batch_ended()
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        module, finite = self.lightning_module, self._parts.finite
        assert module is not None
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        try:
            output = super().optimizer_step(optimizer, finite.checked(closure, module, scaled), model, **kwargs)
        except StepLeftOutError:
            optimizer.zero_grad()
            output = None
        if module.automatic_optimization:
            self._window_ended()  # before schedulers and callbacks
        return output

    def _window_ended(self) -> None:
        """An optimizer has stepped: with manual optimization, however often; replicas may meet."""
        self._batch_ended(window=True)
        self._apply(self.engine.after_window())

    def _apply(self, outcome: Outcome) -> None:
        if outcome.warning is not None:
            rank_zero_warn(outcome.warning)

    def _batch_ended(self, window: bool = False) -> None:
        if self.share.drawn is not None:
            ends = window and not _lightning.accumulates(self.trainer)
            due = self.engine.due(self.share.step + 1, ends, _lightning.epoch_ends(self.trainer))
            self.share.end(report=due)

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
        self._batch_ended()
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
        _lightning.augment_message(
            exception,
            pattern=".*Expected to have finished reduction in the prior iteration.*",
            new_message=(
                "Some parameters had no part in the loss that training_step returned. If this is meant, give "
                f"`find_unused_parameters=True` to {type(self).__name__}, or add `_find_unused_parameters_true` to the "
                "strategy's name."
            ),
        )

    # -- collectives -------------------------------------------------------------------------------

    def _alone(self) -> bool:
        """Whether there is nobody to meet: no job yet, or this rank has failed, and callbacks save what they can."""
        trainer = _lightning.trainer_of(self.lightning_module)
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        return (interrupted and not self._all_stop) or not dist.is_initialized()

    def _loss_counts(self) -> bool:
        return self.share.counts if self._weight is None else self._weight > 0

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

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = saving.atomic(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.job is not None:
            add_plan(checkpoint, self.share)
            if not self._alone():
                random_states.gather_into(checkpoint)
        with saving.told_to_all(self._alone()):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        self._timer.restart()

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
        restore_plan(checkpoint, self.share, self.job.view.rank)
        self._random_states = random_states.find(checkpoint)
        self._restore_replicas(checkpoint)

    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        """Here there is one replica: what a checkpoint holds of several is left out, with a warning."""
        if (saved := checkpoint.get(REPLICAS)) is not None:
            rank_zero_warn(
                f"The checkpoint was saved by {saved['strategy']}, this is {type(self).__name__}. Training starts from "
                "the checkpoint's weights, the consensus of its replicas, with the optimizer state of the first one."
            )
