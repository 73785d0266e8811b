"""The Lightning face of every strategy of this package."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.exceptions import _augment_message
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from typing_extensions import override

from lightning_hetero.checks import one_of
from lightning_hetero.comm.async_all_gather import AsyncAllGather
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.groups import new_group
from lightning_hetero.comm.topology import Topology
from lightning_hetero.strategies import random_states
from lightning_hetero.strategies.connector import keep_batch_samplers
from lightning_hetero.strategies.fillers import logs_nothing, no_gradients
from lightning_hetero.strategies.finite import FiniteSteps, OnNaN, StepLeftOutError
from lightning_hetero.strategies.guards import check_model, check_trainer
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.options import Options, check_accelerator, check_ddp_options, seconds
from lightning_hetero.strategies.replica_ddp import BucketSize, ReplicaDDP, ReplicaSyncBatchNorm
from lightning_hetero.strategies.saving import Saving
from lightning_hetero.strategies.signals import StopRequest, end_at_once
from lightning_hetero.strategies.weights import StepWeight
from lightning_hetero.strategies.workshare import Workshare, exchanger
from lightning_hetero.workload.timer import StepTimer

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HeteroStrategy(Saving):
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

    # -- membership --------------------------------------------------------------------------------

    _stop: StopRequest | None = None  # of the running fit
    of_the_job: ClassVar[tuple[str, ...]] = (*Saving.of_the_job, "_stop", "_all_stop", "_buckets", "_finite")

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {"on_nan": self.on_nan}

    @override
    def _join(self, topology: Topology) -> None:
        for ranks in self.replicas(topology):  # every process takes part in the making of every group
            groups = [
                new_group(self, ranks, self.options.timeout, backend) for backend in (topology.backend(ranks), "gloo")
            ]
            if topology.rank in ranks:
                replica, (self._data_group, small) = ranks, groups
        self._buckets = BucketSize(self._data_group)
        # Replicas that differ look when they meet, so that all learn of it at once.
        mode = self.on_nan if len(replica) == topology.world else "ignore"
        self._finite = FiniteSteps(mode, replica, small, self._timer.waiting, self._where)
        pulse = AsyncAllGather(new_group(self, None, self.options.timeout))
        planner = self.options.planner(topology.world)
        exchange = exchanger(small, self._timer.waiting)
        loaders = Loaders(
            topology.rank,
            replica,
            planner,
            self._begin_pass,
            self.broadcast,
            exchange,
            self._samples_in,
            self.options.global_batch_size,
            self.options.sizes,
            self.options.balance_iterable,
        )
        self.share = Workshare(planner, self._timer, loaders, replica, small, pulse, self._report_due)

    def _report_due(self, step: int) -> bool:
        """Whether the ranks exchange reports after ``step`` batches."""
        return step % self.options.rebalance_every_n_steps == 0

    # -- model -------------------------------------------------------------------------------------

    def setup(self, trainer: "pl.Trainer") -> None:
        """Check that all ranks can train together, then set up as DDP does."""
        assert self.model is not None
        assert self.topology is not None
        keep_batch_samplers(trainer)
        check_trainer(trainer, self._layer_sync, self.root_device, self.replicas(self.topology))
        check_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in self.model.modules()):
                self.share.planner.least = 2  # BatchNorm cannot normalise one sample
            self.share.loaders.combined = lambda: trainer.fit_loop._combined_loader
            if self._layer_sync is not None:
                self._layer_sync = ReplicaSyncBatchNorm(self._data_group)
            self._all_stop = False
            fit = self.broadcast(next(StopRequest.fits))
            self._stop = StopRequest(trainer, fit, self.options.timeout.total_seconds(), self._save_and_stop)
        else:
            end_at_once(trainer)
        super().setup(trainer)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        if len(self.share.replica) == 1:
            return model  # nothing to average with: DDP would only cost time
        # A LightningCLI passes every option of DDP, the group too.
        options = {**self._ddp_kwargs, "process_group": self._data_group}
        options = self._buckets.options(options, model, self.root_device)
        return ReplicaDDP(self._timer, module=model, device_ids=self.determine_ddp_device_ids(), **options)

    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    # -- a step ------------------------------------------------------------------------------------

    _weight: float | None = None  # of the loss whose backward pass runs; 0 if its samples are left out

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; in training this is where a step begins."""
        if self.lightning_module is not None and self._trainer.training:
            self.share.begin()
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; what it logs counts by this rank's samples."""
        drawn, module = self.share.current(), self.lightning_module
        assert module is not None
        if isinstance(self.model, ReplicaDDP) and self.model.outgrown():
            self.model = module
            with self._timer.waiting(), deadline("take unfrozen parameters in"):
                self.configure_ddp()
        if callable(measure := getattr(module, "batch_weight", None)):
            self.share.weigh(measure, args[0] if args else None)
        self._finite.before_forward(module)
        results = self._trainer._results
        counts = drawn.samples > 0 or results is None
        with (
            StepWeight(self, lambda: drawn.samples, results if counts else None),
            nullcontext() if counts else logs_nothing(results),
        ):
            output = super().training_step(*args, **kwargs)
        if not module.automatic_optimization:
            self.share.end()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Weigh the loss by this rank's part of the samples, so that DDP's plain mean is the mean over all samples.

        With ``W`` ranks in the replica, of which this one holds ``n_i`` of ``N`` samples, the factor is ``W n_i / N``
        (HetGrad, Moreno-Alvarez et al. 2022).
        """
        module = self.lightning_module
        assert module is not None
        own, total = self._finite.count(closure_loss, *self.share.weights())
        weight = self._weight = len(self.share.replica) * own / total if total else 0.0
        loss = self._finite.weigh(closure_loss, weight)
        self.pre_backward(loss)
        loss = self.precision_plugin.pre_backward(loss, module)
        self._finite.watch(loss, self.optimizers, self.model)
        self._timer.watch(loss)  # last, so that all that callbacks do in the backward pass is this rank's own work
        with deadline("average gradients"), no_gradients(module) if weight == 0 else nullcontext():
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        self._timer.backward_done()
        self._weight = None
        self._finite.look(self.optimizers, self.model)
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        if module.automatic_optimization and self._trainer.fit_loop._should_accumulate():
            self.share.end()
        return loss

    @override
    def _loss_counts(self) -> bool:
        if self._weight is not None:
            return self._weight > 0
        return self.share.drawn is None or self.share.weights()[0] > 0

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer; with automatic optimization the step ends here, before schedulers and callbacks."""
        module = self.lightning_module
        assert module is not None
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        try:
            output = super().optimizer_step(optimizer, self._finite.checked(closure, module, scaled), model, **kwargs)
        except StepLeftOutError:
            optimizer.zero_grad()
            output = None
        if module.automatic_optimization:
            self.share.end()
        return output

    # -- begin, end --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """If the loaders were set up before a checkpoint was restored, let them begin again where it stands."""
        super().on_train_start()
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        self._finite.begin(searching=any(isinstance(callback, _LRCallback) for callback in callbacks))
        position = self._position()
        sources = self.share.loaders.sources()
        begun = [getattr(source, "begun", None) for source in sources]
        if any(b is not None and (b.epoch, b.batch) != (position.epoch, position.batch) for b in begun):
            self._fetch_anew()
        if self._random_states is not None:  # after the loaders, whose making draws random numbers
            random_states.restore(self._random_states)
            self._random_states = None
            samplers = all(hasattr(source, "begun") for source in sources)  # a stream would lose what it has drawn
            if samplers and position.batch in (0, self._trainer.num_training_batches):
                self._fetch_anew()  # the next epoch's loader draws numbers, too

    def _fetch_anew(self) -> None:
        fetcher = self._trainer.fit_loop._data_fetcher
        assert fetcher is not None
        iter(fetcher)

    def on_train_end(self) -> None:
        """Leave nothing in flight."""
        super().on_train_end()
        self.share.end()
        self.share.listen()
        if self._stop is not None:
            self._stop.finish()

    @override
    def teardown(self) -> None:
        if self._stop is not None:
            self._stop.close()
            self._stop = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Let the error be seen, with what to do about unused parameters in this strategy's terms."""
        self._tell_others(exception)
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        loader = None if trainer is None else trainer.fit_loop._combined_loader
        if trainer is not None and loader is not None and loader._iterator is None:
            # It failed to start; tearing it down would raise another error over this one.
            trainer.fit_loop._data_fetcher = None
        _augment_message(
            exception,
            pattern=".*Expected to have finished reduction in the prior iteration.*",
            new_message=(
                "Some parameters had no part in the loss that training_step returned. If this is meant, give "
                f"`find_unused_parameters=True` to {type(self).__name__}, or add `_find_unused_parameters_true` to the "
                "strategy's name."
            ),
        )
