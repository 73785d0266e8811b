"""The Lightning face of every strategy: overrides only. One training step reads from top to bottom."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
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

from lightning_hetero import lightning_compat
from lightning_hetero.algorithms.engine import Engine, SingleReplica
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.planner import Repartition
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.checkpoint.format import explain_unreadable, warn_of_replicas
from lightning_hetero.checkpoint.shards import Shards
from lightning_hetero.comm import failures, waits
from lightning_hetero.comm.collectives import Collectives
from lightning_hetero.comm.failures import collective
from lightning_hetero.comm.job import Job, announce_failure
from lightning_hetero.comm.topology import Topology
from lightning_hetero.errors import DisagreementError
from lightning_hetero.replicas.drift import ParameterDriftCheck
from lightning_hetero.strategies import fit, join, saving
from lightning_hetero.strategies.default_groups import GroupOverrides
from lightning_hetero.strategies.guards import check_beyond, check_setup, running, served
from lightning_hetero.strategies.metrics import MonitoredMetrics
from lightning_hetero.strategies.options import Options, check_accelerator, with_shared_options
from lightning_hetero.strategies.position import describe, tell_while_waiting
from lightning_hetero.strategies.recovery import PeerRecovery
from lightning_hetero.strategies.recovery_policy import RecoveryPolicy
from lightning_hetero.strategies.replica_ddp import share_buffers, take_unfrozen_in
from lightning_hetero.strategies.signals import StopRequest, handle_sigterm
from lightning_hetero.strategies.training_step import (
    TrainingStep,
    apply,
    evaluation_step,
    explain_unused,
    values_shared,
)

_PATIENCE = 5.0  # seconds


def begin(strategy: "HeteroStrategy") -> None:
    """A batch is on its way to the device."""
    strategy.survival.again(lambda: strategy.step.begin(strategy.trainer))


def forward(strategy: "HeteroStrategy", run: Callable[[], Any], batch: Any) -> Any:
    """Run the module's ``training_step``. With manual optimization that is all of a step.

    Args:
        strategy: in a fit.
        run: runs it.
        batch: its first argument.
    """
    strategy.survival.again(lambda: strategy.engine.before_window())
    take_unfrozen_in(strategy)

    def step() -> Any:
        with strategy.step.forward(strategy.trainer, batch):
            return run()

    output = strategy.survival.step(step, left_out=lambda: None)
    if not strategy.trainer.lightning_module.automatic_optimization:
        if strategy.step.passes == 0:
            strategy.survival.again(lambda: _none_ran_backward(strategy))
        window_ended(strategy)
    return output


def _none_ran_backward(strategy: "HeteroStrategy") -> None:
    """See that no rank of the replica has run a backward pass on this batch, as this one has not.

    Raises:
        DisagreementError: others have, it seems. They wait for this rank's gradients.
    """
    assert strategy.job is not None
    with strategy.timer.waiting():
        silent = strategy.job.others_skip(strategy.share.step, _PATIENCE, strategy.options.limit.total_seconds())
    if silent:
        others = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        raise DisagreementError(
            f"rank {strategy.global_rank} ran no backward pass in `training_step` at {describe(strategy.trainer)}, and "
            f"{others} of its replica did: with gradients to average they wait for this rank, and would get those of "
            "its next batch. With manual optimization all ranks must run the same number of backward passes on a "
            "batch. Where a rank has nothing to learn from its part, let it run "
            "`self.manual_backward(0.0 * loss)` instead of returning early."
        )


def backward(
    strategy: "HeteroStrategy",
    loss: Tensor,
    optimizer: Optimizer | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Run a backward pass of the loss, weighed by this rank's samples.

    Args:
        strategy: in a fit.
        loss: the mean over this rank's samples.
        optimizer: that is to step, where Lightning knows it.
        args: of the user's ``manual_backward``.
        kwargs: of the user's ``manual_backward``.
    """
    trainer, module, precision = strategy.trainer, strategy.trainer.lightning_module, strategy.precision_plugin
    loss = strategy.step.weigh(loss, trainer.accumulate_grad_batches)
    strategy.pre_backward(loss)
    loss = precision.pre_backward(loss, module)
    with strategy.step.backward(trainer, loss, strategy.optimizers):
        precision.backward(loss, module, optimizer, *args, **kwargs)
    loss = precision.post_backward(loss, module)
    strategy.post_backward(loss)
    if module.automatic_optimization and lightning_compat.accumulates(trainer):
        strategy.step.batch_ended(trainer)
    return loss


def optimize(
    strategy: "HeteroStrategy", optimizer: Optimizer, closure: Callable[[], Any], stepping: Callable[[Callable], Any]
) -> Any:
    """Let an optimizer step. With automatic optimization that makes the gradients first, and ends a window.

    Args:
        strategy: in a fit.
        optimizer: that is to step.
        closure: makes the gradients.
        stepping: lets it step, given the closure.
    """

    def step() -> Any:
        with strategy.step.hooks():
            return strategy.step.optimize(strategy.trainer, optimizer, closure, stepping)

    output = strategy.survival.step(step, left_out=lambda: lightning_compat.mark_executed(closure))
    if strategy.trainer.lightning_module.automatic_optimization:
        window_ended(strategy)  # before schedulers and callbacks
    return output


def window_ended(strategy: "HeteroStrategy") -> None:
    """An optimizer has stepped, or with manual optimization any number of them: replicas may meet."""
    strategy.survival.again(lambda: strategy.step.batch_ended(strategy.trainer, window=True))
    strategy.step.window_ended()
    if (same := strategy.parts.same) is not None:
        _compare(strategy, same)
    apply(strategy.survival.exchange(lambda: strategy.engine.exchange()), type(strategy).__name__)
    strategy.survival.again(lambda: strategy.engine.exchange_completed())


def _compare(strategy: "HeteroStrategy", same: ParameterDriftCheck) -> None:
    """See now and then that unlike devices of a replica hold the same parameters (collective over the replica)."""
    begun = False

    def once() -> None:  # after a loss not again: others may have completed it
        nonlocal begun
        if not begun:
            begun = True
            with strategy.timer.waiting():
                same.stepped(strategy.trainer.lightning_module, lambda: describe(strategy.trainer))

    strategy.survival.again(once)


@with_shared_options
class HeteroStrategy(DDPStrategy):
    """Base of the strategies: splits batches by speed, and weighs gradients by samples within a replica.

    Arguments by position, and options that are not listed here, are those of Lightning's ``DDPStrategy``, such as
    ``checkpoint_io`` and ``ddp_comm_hook``, and of PyTorch's ``DistributedDataParallel``, such as
    ``find_unused_parameters``.

    Args:
        accelerator: set by the Trainer.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import HeteroStrategy

        trainer = Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2)
        assert isinstance(trainer.strategy, HeteroStrategy)
    """

    def __init__(self, accelerator: Accelerator | None = None, *args: Any, **kwargs: Any) -> None:
        check_accelerator(accelerator)
        self.options, kwargs = Options.taken_from(kwargs, type(self))
        super().__init__(accelerator, *args, **kwargs)
        self.timer = StepTimer(torch.device("cpu"))
        self.collectives = Collectives(self.timer, partial(fit.alone, self), partial(fit.loss_counts, self))
        self._rank_state, self._shards = saving.RankState(self.options), Shards()
        self.lent = GroupOverrides()
        self.survival = PeerRecovery(self) if self.options.on_peer_loss == "continue" else RecoveryPolicy()

    job: Job | None = None  # once this process has joined
    entry: join.JoinTicket | None = None  # if it joins a job that runs, until training starts
    share: BatchAccounting
    engine: Engine
    step: TrainingStep
    parts: fit.Fit
    stop_request: StopRequest | None = None  # of the latest fit
    evaluated: float | None = 0.0  # samples of this rank in the running evaluation; None if they are unknown
    monitored: MonitoredMetrics | None = None  # of the latest run

    #: What a strategy has of its job, or of a fit. A copy has yet to join.
    of_the_job: ClassVar[tuple[str, ...]] = ("job", "share", "engine", "step", "parts", "stop_request", "monitored")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: options, and what the Trainer has set, but no connections."""
        state = {name: value for name, value in super().__getstate__().items() if name not in self.of_the_job}
        if isinstance(self.model, DistributedDataParallel):
            state["_model"] = self.model.module
        return state

    def algorithm_options(self) -> dict[str, Any]:
        """Options beyond those that all strategies share, by name; they must be the same on every rank."""
        return {"on_nan": self.options.on_nan}

    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """The replicas of the job, each the ranks that average gradients at every step; here one, the world."""
        return (tuple(range(topology.world)),)

    @property
    def cluster(self) -> Topology | None:
        """Which ranks live on which node, once this process has joined."""
        return None if self.job is None else self.job.view.topology

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The process group in which the ranks of this replica average gradients (collective over them at first).

        For what would otherwise go over all ranks, such as ``torch.distributed.all_reduce`` in ``training_step``, or a
        ``ZeroRedundancyOptimizer``. ``None``: the replica is this rank alone, or there is no job yet. Do not pass that
        on to ``torch.distributed``, for which ``None`` means all ranks.
        """
        return None if self.job is None else self.job.data_group()

    @override
    def set_world_ranks(self) -> None:
        self.parallel_devices = fit.devices(self)
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        self._launcher = fit.launcher(self)

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        fit.connect(self)
        if self.job is None:
            self.build(fit.join_job(self))

    def build(self, job: Job, repartition: Repartition | None = None) -> fit.Fit | None:
        """Make what depends on who takes part, by the job's view (collective); returns what was there before.

        In the midst of a fit ``repartition`` says which of the former ranks remain.
        """
        former = None if self.job is None else self.parts
        parts = fit.make_parts(self, job, former, repartition)
        self.job, self.parts, self.share, self.engine, self.step = job, parts, parts.share, parts.engine, parts.step
        return former

    def make_engine(self, job: Job, share: BatchAccounting) -> Engine:
        """What happens between replicas."""
        return SingleReplica(self.options.rebalance_every_n_steps)

    # -- model -------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        lightning_compat.keep_batch_samplers(trainer)
        tell_while_waiting(trainer)
        check_setup(self, trainer, self._layer_sync)
        if trainer.state.fn == TrainerFn.FITTING:
            failures.begin_fit()
            self._layer_sync = self.parts.ready_for_batch_norm(trainer.lightning_module, self._layer_sync, self.lent)
        self.stop_request = handle_sigterm(self, trainer)
        with values_shared(trainer.lightning_module, trainer.state.fn, self.root_device):
            super().setup(trainer)
        join.share_rest(self)
        if trainer.state.fn == TrainerFn.FITTING:
            check_beyond(self)
        self.monitored = MonitoredMetrics(trainer, self.collectives, self.monitored)
        self.parts.loaders.begin(trainer)

    @override
    def configure_ddp(self) -> None:
        self.model = self.parts.wrapped(self)

    # -- data --------------------------------------------------------------------------------------

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that this strategy serves."""
        return served(self)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}  # the global order, which this strategy's samplers cut up

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = running(self)
        return self.parts.loaders.process(dataloader, trainer)

    # -- a step ------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module is not None:
            begin(self)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return forward(self, partial(super().training_step, *args, **kwargs), args[0] if args else None)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return backward(self, closure_loss, optimizer, args, kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        stepping = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return optimize(self, optimizer, closure, stepping)

    # -- evaluation --------------------------------------------------------------------------------

    validation_step = evaluation_step("validation_step", "val_step_context")
    test_step = evaluation_step("test_step", "test_step_context")
    predict_step = evaluation_step("predict_step", "predict_step_context")

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        collective("share buffers", lambda: share_buffers(self.model))  # as DDP would
        self.engine.hold(
            collective("find the consensus", lambda: self.engine.evaluation_values(self.trainer.sanity_checking))
        )

    @override
    def on_validation_end(self) -> None:
        self.engine.release()  # after the callbacks' hooks: what they have saved is what was validated
        super().on_validation_end()
        self.timer.restart()  # it is no part of a training step's time

    # -- begin, end --------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.parts.finite.begin(searching=lightning_compat.searches_lr(self.trainer))
        self.step.begin_fit(self.trainer.lightning_module, self.options.balance != "off")
        self._rank_state.begin(self)
        self.survival.begin()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.survival.again(lambda: self.step.batch_ended(self.trainer))
        self.survival.again(lambda: self.share.apply_reports())  # leave nothing in flight
        if self.stop_request is not None:
            self.stop_request.finish()
        self.survival.end()
        failures.end_fit()

    @override
    def teardown(self) -> None:
        if self.stop_request is not None:
            self.stop_request.close()
        if self.monitored is not None:
            self.monitored.close()
        if self.job is not None:
            self.engine.close()
            self.step.close()
        super().teardown()
        self.lent.take_back()
        failures.end_fit()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.survival.end() if fit.stopped(self) else self.survival.failed(exception)
        announce_failure(exception)
        lightning_compat.forget_loader_that_failed(lightning_compat.trainer_of(self.lightning_module))
        explain_unused(exception, type(self).__name__)

    # -- collectives -------------------------------------------------------------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.collectives.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.collectives.broadcast(obj, src, self.root_device, waits.caller())

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        return self.collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return self.collectives.all_gather(tensor, group, sync_grads)

    # -- checkpoints -------------------------------------------------------------------------------

    #: Names the algorithm in checkpoints; subclasses share it, unless they set their own. Empty: the averager's class.
    saved_as: ClassVar[str] = ""

    @DDPStrategy.checkpoint_io.getter  # type: ignore[attr-defined]
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads the files; the user's own plugin, if one was given."""
        self._checkpoint_io = saving.atomic(self._checkpoint_io)
        return self._checkpoint_io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return saving.copied_for_join(self, super().lightning_module_state_dict())

    @override
    @saving.retry_on_peer_loss
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        with self._rank_state.saving(checkpoint, self) as portable:
            super().save_checkpoint(portable, filepath, storage_options)
            saving.keep_in_memory(self, checkpoint, filepath)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self._shards.removed(self.checkpoint_io, filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with explain_unreadable(checkpoint_path):  # Lightning passes `weights_only` from 2.6 on
            return self._rank_state.read(super().load_checkpoint(checkpoint_path, *args, **kwargs), self)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._rank_state.load(checkpoint, self)
        self._restore_replicas(checkpoint)

    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore what replicas hold of their own; here there is one replica."""
        warn_of_replicas(checkpoint, type(self).__name__)
