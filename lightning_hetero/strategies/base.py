"""The Lightning face of every strategy: one training step that reads from top to bottom, and other overrides."""

import time
from collections.abc import Callable, Mapping
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
from torch.optim.optimizer import Optimizer
from typing_extensions import override

from lightning_hetero import lightning_compat
from lightning_hetero.batching.passes import Passes, batches_of
from lightning_hetero.checkpoint import directory
from lightning_hetero.checkpoint.format import explain_unreadable, trainable_in, warn_of_replicas
from lightning_hetero.checkpoint.shards import Shards
from lightning_hetero.checkpoint.writer import BackgroundWriter
from lightning_hetero.comm import device_exit, failures, threads, waits
from lightning_hetero.comm.agreement import raise_on_all
from lightning_hetero.comm.job import announce_failure
from lightning_hetero.comm.object_collectives import portable
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.topology import Topology
from lightning_hetero.errors import DisagreementError, UnsupportedError
from lightning_hetero.launch.environment import check_process_group
from lightning_hetero.launch.observer import ObservedLauncher, ReturningLauncher
from lightning_hetero.replicas import optimizer_states, sharding
from lightning_hetero.replicas.sharding import is_sharded
from lightning_hetero.strategies import capacity, saving
from lightning_hetero.strategies.default_groups import beyond
from lightning_hetero.strategies.job import JobStrategy
from lightning_hetero.strategies.metrics import MonitoredMetrics
from lightning_hetero.strategies.options import Options, check_accelerator, with_shared_options
from lightning_hetero.strategies.position import describe, tell_while_waiting
from lightning_hetero.strategies.recovery import PeerRecovery
from lightning_hetero.strategies.replica_ddp import ReplicaDDP
from lightning_hetero.strategies.signals import StopRequest, end_at_once
from lightning_hetero.strategies.stopping import save_to_resume
from lightning_hetero.strategies.trainer_checks import check_model, check_trainer, restore_trainable, unshardable
from lightning_hetero.strategies.training_step import (
    EvaluationStep,
    explain_unused,
    mark_sizes_dynamic,
    say_outcome,
    values_shared,
)

_PATIENCE = 5.0  # seconds


@with_shared_options
class HeteroStrategy(JobStrategy):
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
        options, kwargs = Options.taken_from(kwargs, type(self))
        super().__init__(options, accelerator, *args, **kwargs)
        self._evaluation = EvaluationStep(self.collectives)
        self._rank_state, self._shards = saving.RankState(self), Shards()
        if self.survives:
            self.recovery = PeerRecovery(self)

    # -- the job -----------------------------------------------------------------------------------

    @property
    def cluster(self) -> Topology | None:
        """The ranks of each node, once this process has joined."""
        return self.job.view.topology if self.joined else None

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The process group in which the ranks of this replica average gradients (collective over them at first).

        For what would otherwise go over all ranks, such as ``torch.distributed.all_reduce`` in ``training_step``, or a
        ``ZeroRedundancyOptimizer``. ``None``: the replica is this rank alone, or there is no job yet. Do not pass that
        on to ``torch.distributed``, for which ``None`` means all ranks.
        """
        return self.job.data_group() if self.joined else None

    @override
    def _configure_launcher(self) -> None:
        if self.options.start_method != "popen":
            self._launcher = ReturningLauncher(self, self.options.start_method)
            return
        newcomers = self.recovery.newcomers
        self._launcher = ObservedLauncher(
            cluster_environment=self.environment,
            num_processes=self.num_processes,
            num_nodes=self.num_nodes,
            survive=self.survives,
            around=None if newcomers is None else newcomers.until_done,
        )

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        began = time.monotonic()
        if self.ticket is None:
            check_process_group(failures.watched(), self.survives)
            if (newcomers := self.recovery.newcomers) is not None:
                newcomers.enter_running_job()
            trainer = lightning_compat.trainer_of(self.lightning_module)
            if self.survives and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                threads.freeze_gc()  # before others wait for this rank
        self.join_world(began)
        if not self.joined:
            if (newcomers := self.recovery.newcomers) is not None:
                newcomers.resume()
            self.build(self.join_job())
        self.lend_mesh()

    # -- model -------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        lightning_compat.keep_batch_samplers(trainer)
        tell_while_waiting(trainer)
        self._check_setup(trainer)
        self._materialize()
        sharding.keep_in_shards(trainer.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            device_exit.begin_fit()
            self._layer_sync = self.collaborators.ready_for_batch_norm(
                trainer.lightning_module, self._layer_sync, self.group_overrides
            )
        self.stop_request = self._handle_sigterm(trainer)
        self.store_users = {} if self.stop_request is None else {"stop": self.stop_request.agreed}
        with values_shared(trainer.lightning_module, trainer.state.fn, self.root_device):
            super().setup(trainer)
        if (newcomers := self.recovery.newcomers) is not None:
            newcomers.share_rest()
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_groups()
        else:
            self.share_shards()
        self.monitored = MonitoredMetrics(trainer, self.collectives, self.monitored)
        self.collaborators.loaders.begin(trainer)

    def _materialize(self) -> None:
        """Give values to what the module has made on the meta device."""
        lightning_compat.materialize(self.module, self.root_device, self.job.view.replica.ranks.index(self.global_rank))

    def _check_setup(self, trainer: pl.Trainer) -> None:
        """Refuse a Trainer and a model that would hang or be wrong, on every rank (collective)."""
        check_trainer(trainer, self._layer_sync, self.root_device, self.job.view)
        if trainer.state.fn == TrainerFn.FITTING and self.options.max_batch_size == "auto":
            raise_on_all(capacity.problem(self.options, trainer), "the search for the largest batches")
        module = trainer.lightning_module
        check_model(module)
        problem = sharding.problem(module, module.device_mesh)
        if problem is None and trainer.state.fn == TrainerFn.FITTING and is_sharded(module):
            problem = unshardable(trainer.callbacks)  # type: ignore[attr-defined]
        raise_on_all(problem, "the model's shards")

    def _check_groups(self) -> None:
        """Refuse parts of a model, and optimizers, that go over the ranks of several replicas (collective)."""
        if (view := self.job.view).count > 1:
            problem = beyond(self.module, self.optimizers, view.replica.ranks)
            raise_on_all(problem, "the model and its optimizers")

    def _handle_sigterm(self, trainer: pl.Trainer) -> StopRequest | None:
        """The handler of SIGTERM for the run that is set up: in a fit it is a request to stop (collective)."""
        if trainer.state.fn != TrainerFn.FITTING:
            end_at_once(trainer)
            return None
        store = self.job.store(f"stop/{self.broadcast(next(StopRequest.fits))}")
        return StopRequest(trainer, store, self.options.limit.total_seconds(), self._save_and_stop, self.recovery)

    def _save_and_stop(self) -> None:
        """All ranks have been asked to stop: save, and let no rank count as lost that ends now (collective)."""
        save_to_resume(self.trainer)
        self.accounting.apply_reports()  # leave nothing in flight
        self.recovery.end()

    # -- data --------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}  # the global order, which this strategy's samplers cut up

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = lightning_compat.trainer_of(self.lightning_module)
        stage = None if trainer is None else trainer.state.stage
        if not self.joined or trainer is None or stage is None:
            raise UnsupportedError(
                "a dataloader was to be set up while no fit, validation, test or prediction is running. Its parts "
                "follow from where a run stands, and all ranks set it up together: pass it to one of these."
            )
        return self.collaborators.loaders.process(dataloader, trainer, stage)

    # -- a step ------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module is not None:
            self.recovery.retry(lambda: self.step.begin(self.trainer))
        moved = [super(HeteroStrategy, self).batch_to_device(one, device, dataloader_idx) for one in batches_of(batch)]
        if self.lightning_module is not None and self.trainer.training and self.options.balance != "off":
            mark_sizes_dynamic(moved)
        return Passes(moved) if isinstance(batch, Passes) else moved[0]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``. With manual optimization that is all of a step."""
        self.recovery.retry(lambda: self.engine.before_window())
        if isinstance(self.model, ReplicaDDP) and self.model.outgrown():
            self.wrap_again()
        run, (batch, *more) = super().training_step, args

        def step() -> Any:
            return self.step.forward(self.trainer, batch, lambda one: run(one, *more, **kwargs))

        manual = not self.trainer.lightning_module.automatic_optimization
        output = self.recovery.step(step, instead=lambda: None, backward=manual)
        if manual:
            if self.step.passes == 0:
                self.recovery.retry(self._none_ran_backward)
            self._window_ended()
        return output

    def _none_ran_backward(self) -> None:
        """See that no rank of the replica has run a backward pass on this batch, as this one has not."""
        with self.timer.waiting():
            silent = self.job.others_skip(self.accounting.step, _PATIENCE, self.options.limit.total_seconds())
        if silent:
            others = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
            raise DisagreementError(
                f"rank {self.global_rank} ran no backward pass in `training_step` at {describe(self.trainer)}, and "
                f"{others} of its replica did: with gradients to average they wait for this rank, and would get those "
                "of its next batch. With manual optimization all ranks must run the same number of backward passes on "
                "a batch. Where a rank has nothing to learn from its part, let it run "
                "`self.manual_backward(0.0 * loss)` instead of returning early."
            )

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward pass of the loss, weighed by this rank's samples."""
        trainer, module, precision = self.trainer, self.trainer.lightning_module, self.precision_plugin
        while self.step.goes_on:  # without hooks, in which ranks may meet
            closure_loss = self.step.finish_pass(
                trainer, closure_loss, lambda loss: precision.backward(loss, module, optimizer, *args, **kwargs)
            )
        loss = self.step.weigh(closure_loss, trainer.accumulate_grad_batches)
        self.pre_backward(loss)
        loss = precision.pre_backward(loss, module)
        with self.step.backward(trainer, loss, self.optimizers):
            precision.backward(loss, module, optimizer, *args, **kwargs)
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        if module.automatic_optimization and lightning_compat.accumulates(trainer):
            self.recovery.retry(lambda: self.step.batch_ended(trainer))
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Let an optimizer step. With automatic optimization that makes the gradients first, and ends a window."""
        stepping = partial(super().optimizer_step, optimizer, model=model, **kwargs)

        def step() -> Any:
            with self.step.hooks():
                return self.step.optimize(self.trainer, optimizer, closure, stepping)

        output = self.recovery.step(step, instead=lambda: lightning_compat.mark_executed(closure))
        if self.trainer.lightning_module.automatic_optimization:
            self._window_ended()  # before schedulers and callbacks
        return output

    def _window_ended(self) -> None:
        """An optimizer has stepped, or with manual optimization any number of them: replicas may meet."""
        self.engine.step_taken()
        self.recovery.retry(lambda: self.step.batch_ended(self.trainer, window=True))
        self.step.window_ended(manual=not self.trainer.lightning_module.automatic_optimization)
        self._compare_parameters()
        say_outcome(self.recovery.exchange(lambda: self.engine.exchange()), type(self).__name__)
        self.recovery.retry(lambda: self.engine.exchange_completed())

    def _compare_parameters(self) -> None:
        """See now and then that unlike devices of a replica hold the same parameters (collective over the replica)."""
        if (same := self.collaborators.drift) is None:
            return
        begun = False

        def once() -> None:  # after a loss not again: others may have completed it
            nonlocal begun
            if not begun:
                begun = True
                with self.timer.waiting():
                    same.stepped(self.trainer.lightning_module, lambda: describe(self.trainer))

        self.recovery.retry(once)

    # -- evaluation --------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        step, context = self.trainer.lightning_module.validation_step, self.precision_plugin.val_step_context()
        return self._evaluation.run(self.trainer, step, context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        step, context = self.trainer.lightning_module.test_step, self.precision_plugin.test_step_context()
        return self._evaluation.run(self.trainer, step, context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        step, context = self.trainer.lightning_module.predict_step, self.precision_plugin.predict_step_context()
        return self._evaluation.run(self.trainer, step, context, *args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.collaborators.nonfinite.settle(self.module)
        self.collectives.settle()
        collective("share buffers", self.share_buffers)  # as DDP would
        self.engine.hold(
            collective("find the consensus", lambda: self.engine.evaluation_values(self.trainer.sanity_checking))
        )

    @override
    def on_validation_end(self) -> None:
        self.engine.release()  # after the callbacks' hooks: what they have saved is what was validated
        super().on_validation_end()
        self.collectives.settle()
        self.timer.restart()  # it is no part of a training step's time

    # -- begin, end --------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.collaborators.nonfinite.begin(searching=lightning_compat.searches_lr(self.trainer))
        self.step.begin_fit(self.trainer.lightning_module)
        self._rank_state.begin()
        self.recovery.begin()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.collaborators.nonfinite.settle(self.module)
        self.collectives.settle()
        self.recovery.retry(lambda: self.step.batch_ended(self.trainer))
        self.recovery.retry(lambda: self.accounting.apply_reports())  # leave nothing in flight
        if self.stop_request is not None:
            self.stop_request.finish()
        self.recovery.end()
        device_exit.end_fit()

    @override
    def teardown(self) -> None:
        if self.stop_request is not None:
            self.stop_request.close()
        if self.monitored is not None:
            self.monitored.close()
        if self.joined:
            self.collaborators.close()
        with lightning_compat.module_without_values_stays(self.lightning_module):
            super().teardown()
        self.group_overrides.take_back()
        device_exit.end_fit()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.recovery.end() if self.stopped else self.recovery.failed(exception)
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
        state = super().lightning_module_state_dict()
        return saving.copied_for_join(self.checkpoint_io, self.module, state)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        again = partial(self._save, checkpoint, filepath, storage_options)
        saving.retry_on_peer_loss(self.recovery, self.checkpoint_io, again)

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        """Save a checkpoint (collective). It may be called again."""
        joins = saving.others_join(self.checkpoint_io)
        with self._rank_state.saving(checkpoint) as whole:
            if is_sharded(self.lightning_module) and not joins:
                self._save_sharded(whole, filepath, storage_options)
                return
            if self.is_global_zero and not joins:
                directory.remove(filepath)
            super().save_checkpoint(whole, filepath, storage_options)
            if joins and not self.is_global_zero:
                # Kept on each rank: rank 0 may be lost before it sends its own.
                self.checkpoint_io.save_checkpoint(portable(checkpoint), filepath)

    def _save_sharded(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        """Let the first replica save the shards of a model (collective over it)."""
        view = self.job.view
        if view.index != 0:
            return
        if self.options.save_distributed_checkpoint:
            where = filepath, self.job.small_group(), view.is_leader
            if isinstance(io := self.checkpoint_io, BackgroundWriter):
                io.save_in_steps(checkpoint, lambda copied: directory.DirectoryWriter(copied, *where).steps)
            else:
                directory.save(checkpoint, *where)
            return
        whole = directory.gathered(checkpoint, first=view.is_leader)
        if view.is_leader:
            directory.remove(filepath)
            self.checkpoint_io.save_checkpoint(portable(whole), filepath, storage_options=storage_options)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not is_sharded(self.lightning_module):
            return super().optimizer_state(optimizer)
        if saving.others_join(self.checkpoint_io):
            return optimizer_states.of_rank(optimizer)
        return directory.optimizer_state(self.module, optimizer)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self._shards.removed(self.checkpoint_io, filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with explain_unreadable(checkpoint_path):  # Lightning passes `weights_only` from 2.6 on
            if directory.is_directory(checkpoint_path):
                return self._rank_state.read(directory.read(checkpoint_path, *args, **kwargs))
            return self._rank_state.read(super().load_checkpoint(checkpoint_path, *args, **kwargs))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if directory.SHARDS in checkpoint or is_sharded(self.lightning_module):
            self._materialize()
            with saving.raise_on_all_ranks(alone=False, doing="resume"):
                load = directory.load_model if self.ticket is None else directory.load_shards
                load(checkpoint, self.module, strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if directory.SHARDS in checkpoint or is_sharded(self.lightning_module):
            restore_trainable(self.module, trainable_in(checkpoint))  # optimizers have state of these alone
            if self.ticket is None:  # else its shards are restored with the replicas
                with saving.raise_on_all_ranks(alone=False, doing="resume"):
                    directory.load_optimizers(checkpoint, self.module, self.optimizers)
        else:
            super().load_optimizer_state_dict(checkpoint)
        self._rank_state.load(checkpoint)
        self._restore_replicas(checkpoint)

    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore what replicas hold of their own; here there is one replica."""
        warn_of_replicas(checkpoint, type(self).__name__)
