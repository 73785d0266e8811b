"""Private names of Lightning: every use of one is in this file.

Each was read in Lightning 2.6.6; those that differ in 2.5.2 say so. Other files use public names and ``INHERITED``.
"""

import copy
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as add_worker_init_fn
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataFetcherWrapper as DataFetcherWrapper
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSamplerWrapper
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import _augment_message as augment_message
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, RandomSampler

from lightning_hetero.batching.passes import Passes
from lightning_hetero.batching.sampler import has_own_batches, loader_is_sharded, shuffles_by_itself
from lightning_hetero.batching.weights import replaced
from lightning_hetero.errors import not_none

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: Private names of ``DDPStrategy`` that ``strategies/base.py`` sets, reads on itself, or overrides.
INHERITED = ("_checkpoint_io", "_configure_launcher", "_launcher", "_layer_sync", "_model")
__all__ = ["DataFetcherWrapper", "IndexBatchSamplerWrapper", "SubprocessScriptLauncher", "WrappingCheckpointIO"]
__all__ += ["MultiProcessingLauncher", "add_worker_init_fn", "augment_message"]
__all__ += ["init_dist_connection", "set_num_threads_if_needed"]


# -- the strategy that ours are made from ----------------------------------------------------------


def ddp_options(ddp: DDPStrategy | FabricDDP) -> dict[str, Any]:
    """The options that the user has given for ``DistributedDataParallel``."""
    return ddp._ddp_kwargs


def comm_hook(ddp: DDPStrategy) -> tuple[Any, Callable[..., Any]] | None:
    """The state of the user's communication hook for DDP, and the hook in its wrapper, if there is one."""
    hook, wrapper = ddp._ddp_comm_hook, ddp._ddp_comm_wrapper
    if hook is None:
        return None
    return ddp._ddp_comm_state, hook if wrapper is None else wrapper(hook)


def lend_mesh(module: "pl.LightningModule", mesh: Any) -> None:
    """Let ``self.device_mesh`` of a module be a mesh, or ``None``."""
    module._device_mesh = mesh


def materialize(module: "pl.LightningModule", device: torch.device, place: int) -> None:
    """Give memory and initial values to what has been made on the meta device.

    Args:
        module: the model.
        device: where the memory is to be.
        place: of this rank in its replica. On CPUs each rank draws the values of its shards by itself, which must not
            be the same ones as those of others.
    """
    if device.type != "cpu":
        _materialize_distributed_module(module, device)
        return
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators")
        torch.manual_seed(torch.initial_seed() + place)
        _materialize_distributed_module(module, device)


def trainer_of(module: "pl.LightningModule | None") -> "pl.Trainer | None":
    """The Trainer to which a module is attached, if any; the public property raises an error without one."""
    return None if module is None else module._trainer


def start_ranks(launcher: SubprocessScriptLauncher) -> None:
    """Start the other ranks of this machine."""
    launcher._call_children_scripts()


def tear_down(trainer: "pl.Trainer") -> None:
    """End a run, without the hooks that a user sees."""
    trainer._teardown()


def interrupted(trainer: "pl.Trainer | None") -> bool:
    """Whether an error, or a signal, has ended what the Trainer was doing."""
    return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED


# -- where the fit loop stands ---------------------------------------------------------------------


def accumulates(trainer: "pl.Trainer") -> bool:
    """Whether gradients of the running batch are accumulated, so that no optimizer steps after it."""
    return trainer.fit_loop._should_accumulate()


def epoch_ends(trainer: "pl.Trainer") -> bool:
    """Whether the running batch is the last of its epoch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def logged_step(trainer: "pl.Trainer") -> int:
    """The step under which loggers get a value now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def stops_early(trainer: "pl.Trainer") -> bool:
    """Whether the fit ends after this batch because a callback has asked for it."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def validates_now(trainer: "pl.Trainer") -> bool:
    """Whether validation runs after this batch."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]


def let_plateaus_look(trainer: "pl.Trainer") -> None:
    """At the end of the epoch in which a fit was resumed, let ``ReduceLROnPlateau`` look at its metric if it is there.

    Lightning does not, since what was logged before the checkpoint is unknown.
    """
    loop, configs = trainer.fit_loop, trainer.lr_scheduler_configs
    names = {config.monitor for config in configs if config.reduce_on_plateau and config.interval == "epoch"}
    if not loop.restarting or not names or not epoch_ends(trainer):
        return
    if lacks := sorted(f"{name}" for name in names if name not in trainer.callback_metrics):
        rank_zero_warn(
            f"ReduceLROnPlateau leaves out the end of epoch {trainer.current_epoch}: {', '.join(lacks)} was logged in "
            "this epoch before the checkpoint from which the fit has gone on, and a checkpoint does not hold it."
        )
    else:
        loop._restarting = False


def searches_lr(trainer: "pl.Trainer") -> bool:
    """Whether this fit is the Tuner's search for a learning rate."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def results_of(trainer: "pl.Trainer") -> Any:
    """The collection of logged values of the running loop, if there is one."""
    return trainer._results


def step_arguments(trainer: "pl.Trainer", batch: Any) -> list[Any]:
    """The positional arguments of ``training_step``, for the first batch of an epoch."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values())


def validation_interval(trainer: "pl.Trainer") -> float | None:
    """The ``val_check_interval`` in seconds, if the user has given it as a time."""
    return getattr(trainer, "_val_check_time_interval", None)  # 2.5.2 has none


def saves_by_time(callback: Any) -> bool:
    """Whether a callback saves at certain times (``ModelCheckpoint(train_time_interval=...)``)."""
    return getattr(callback, "_train_time_interval", None) is not None


def before_transfer(module: "pl.LightningModule", batch: Any) -> Any:
    """A batch after the user's ``on_before_batch_transfer``."""
    return module._on_before_batch_transfer(batch)


def transfer_each_pass(module: "pl.LightningModule", overrides: "Overrides") -> None:
    """Let the user's ``on_before_batch_transfer`` see the batch of each pass."""
    overrides.put(module, "_on_before_batch_transfer", partial(_before_transfer_of_passes, module))  # copies of it work


def _before_transfer_of_passes(module: "pl.LightningModule", batch: Any, dataloader_idx: int = 0) -> Any:
    before = type(module)._on_before_batch_transfer
    if isinstance(batch, Passes):
        return Passes(before(module, one, dataloader_idx) for one in batch)
    return before(module, batch, dataloader_idx)


class ResultOfPasses:
    """Takes the place of the class of a training step's result, and keeps the latest: of the first of several passes.

    Attributes:
        latest: what ``training_step`` has returned.
    """

    latest: ClosureResult | None = None

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> "ResultOfPasses":
        """That of a Trainer, which has it from now on."""
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        if not isinstance(loop.output_result_cls, cls):
            loop.output_result_cls = cls()
        return loop.output_result_cls

    def from_training_step_output(self, output: Any, normalize: int = 1) -> ClosureResult:
        """Lightning's result of what ``training_step`` has returned."""
        self.latest = ClosureResult.from_training_step_output(output, normalize)
        return self.latest

    def replace(self, loss: torch.Tensor, last: ClosureResult) -> None:
        """Let optimizers and hooks see the loss of all passes, and what else the last one has returned."""
        if self.latest is not None:
            self.latest.loss, self.latest.extra, self.latest = loss, last.extra, None


def pass_result(trainer: "pl.Trainer", run: Callable[[], Any]) -> ClosureResult:
    """The result of ``training_step`` for a further pass, which logs as the first one does."""
    with replaced(trainer.lightning_module, "_current_fx_name", "training_step"):
        return ClosureResult.from_training_step_output(run(), trainer.accumulate_grad_batches)


# -- what is logged --------------------------------------------------------------------------------


class Unsynced(NamedTuple):
    """A logged value that each rank has of its own.

    Attributes:
        metric: Lightning's, which holds it.
        names: under which callbacks find it.
        reduction: how values are put together: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        of_step: whether it is the value of one step, else of an epoch.
        value: the value; of a mean over an epoch its sum over samples.
        weight: the samples that this sum is over, of a mean over an epoch.
    """

    metric: Any
    names: tuple[str, ...]
    reduction: str
    of_step: bool
    value: torch.Tensor
    weight: torch.Tensor | None

    def replace(self, value: float) -> torch.Tensor:
        """Let callbacks and loggers find another value in its place."""
        new = torch.as_tensor(value, dtype=self.value.dtype, device=self.value.device)
        setattr(self.metric, "_forward_cache" if self.of_step else "_computed", new)
        return new


def monitored_by(trainer: "pl.Trainer") -> set[str]:
    """The names of logged values by which callbacks and schedulers of this rank go."""
    schedulers = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    names = [getattr(one, "monitor", None) for one in (*trainer.callbacks, *schedulers)]  # type: ignore[attr-defined]
    return {name for name in names if isinstance(name, str)}


def unsynced(trainer: "pl.Trainer", names: Collection[str]) -> Iterator[tuple[str, Unsynced]]:
    """The values that this rank has logged for itself, and that callbacks find under some names now; by their keys."""
    results = not_none(trainer._results, "the collection of what is logged")
    stepping = trainer._logger_connector._first_loop_iter is not None
    for key, metric in results.valid_items():
        meta = metric.meta
        if not metric.is_tensor or meta.enable_graph or (meta.sync.should and not meta.sync.rank_zero_only):
            continue
        reduction = meta.reduce_fx.__name__
        name, whole = results._forked_name(metric, on_step=False)
        if meta.on_epoch and not stepping and not {name, whole}.isdisjoint(names):
            weight = metric.cumulated_batch_size if meta.is_mean_reduction else None
            yield key, Unsynced(metric, (name, whole), reduction, False, metric.value, weight)
        _, step = results._forked_name(metric, on_step=True)
        of_step = (name, step) if stepping or not meta.on_epoch else (step,)
        if meta.on_step and results.training and not set(of_step).isdisjoint(names):
            yield f"{key} step", Unsynced(metric, of_step, reduction, True, metric._forward_cache, None)


def logged_names(trainer: "pl.Trainer") -> set[str]:
    """Under which names callbacks find what this rank has logged in the running loop, synchronised or not."""
    results = not_none(trainer._results, "the collection of what is logged")
    items = [metric for _, metric in results.valid_items()]
    return {name for metric in items for step in (True, False) for name in results._forked_name(metric, on_step=step)}


def logged_key(results: Any, fx: str, name: str) -> str | None:
    """The key of a value that was logged by one of the module's functions in the running epoch, if it was."""
    key = _key(results, fx, name, True)
    return key if key in results and not results[key].has_reset else None


def logged_metric(results: Any, fx: str, name: str, add_dataloader_idx: bool = True) -> Any:
    """The holder of the values that were logged under a name in one of the module's functions."""
    return results[_key(results, fx, name, add_dataloader_idx)]


@contextmanager
def step_value_kept(results: Any, fx: str, name: str, add_dataloader_idx: bool = True) -> Iterator[None]:
    """Ignore step values under a name in this block: the last one stays, or NaN if there is none.

    Values that are reduced over ranks are those of the other ranks.
    """
    key = _key(results, fx, name, add_dataloader_idx)
    before = results[key]._forward_cache if key in results else None
    yield
    metric = results[key]
    if metric.is_tensor and metric.meta.on_step and not metric.meta.sync.should:
        now = metric._forward_cache
        metric._forward_cache = torch.full_like(now, torch.nan) if before is None else before
        if not metric.meta.on_epoch:
            metric.value = metric._forward_cache


def logged_so_far(results: Any | None) -> Callable[[], None]:
    """Note what has been logged; the function that is returned takes back what was logged after that.

    Objects of torchmetrics, which change in place, stay as they are.
    """
    before = {key: dict(vars(metric)) for key, metric in (results or {}).items() if metric.is_tensor}

    def take_back() -> None:
        for key, metric in list((results or {}).items()):
            if key in before:
                vars(metric).update(before[key])
            elif metric.is_tensor:
                metric.reset()

    return take_back


def _key(results: Any, fx: str, name: str, add_dataloader_idx: bool) -> str:
    indexed = add_dataloader_idx and results.dataloader_idx is not None
    return f"{fx}.{name}" + (f".{results.dataloader_idx}" if indexed else "")


def let_callbacks_find(trainer: "pl.Trainer", values: Mapping[str, torch.Tensor]) -> None:
    """Let callbacks find values under names, until something else is logged under them."""
    trainer._logger_connector._callback_metrics.update(values)


class Overrides:
    """Methods that single objects have in the place of their classes', until :meth:`restore`."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str]] = []

    def put(self, owner: Any, name: str, by: Callable) -> None:
        """Let an object have another method."""
        vars(owner)[name] = by
        self._all.append((owner, name))

    def restore(self) -> None:
        """Give all objects their own methods back; idempotent."""
        while self._all:
            owner, name = self._all.pop()
            vars(owner).pop(name, None)


class AgreedMetrics(Overrides):
    """Lets ranks agree on what callbacks go by, before these look at it, until :meth:`restore`.

    Ranks must meet where all of them come by, not where some callback asks for a value, perhaps on one rank. In
    training, callbacks that stop the fit or save are the last to be called at the end of an epoch, so that is done when
    the first of them asks.

    Args:
        trainer: whose callbacks and schedulers these are.
        agree: called with ``"evaluation"``, or in training with ``"epoch"`` or ``"step"``, where all ranks come by.
    """

    def __init__(self, trainer: "pl.Trainer", agree: Callable[[str], None]) -> None:
        connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
        self._stale = {True: True, False: True}  # in training or not: whether something was logged since they agreed
        super().__init__()
        self._trainer, self._agree = trainer, agree
        self._before(connector, "update_eval_epoch_metrics", self._fresh)
        self._before(connector, "on_batch_start", self._logs_follow)
        self._before(loop, "_get_monitor_value", self._if_training)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelCheckpoint):
                self._before(callback, "_monitor_candidates", self._if_training)
            elif isinstance(callback, EarlyStopping):
                self._before(callback, "_run_early_stopping_check", self._if_training)
        reached, ended = connector.epoch_end_reached, connector.on_epoch_end

        def on_epoch_end() -> None:
            self._fresh()
            ended()
            if trainer.training:
                let_plateaus_look(trainer)

        self.put(connector, "on_epoch_end", on_epoch_end)

        def epoch_end_reached() -> None:
            reached()
            self._logs_follow()
            if trainer.training:  # callbacks of the user's look now
                self._fresh()
                self._logs_follow()

        self.put(connector, "epoch_end_reached", epoch_end_reached)

    def _before(self, owner: Any, name: str, call: Callable[[], None]) -> None:
        method = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            call()
            return method(*args, **kwargs)

        self.put(owner, name, called)

    def _logs_follow(self) -> None:
        self._stale[self._trainer.training] = True

    def _if_training(self) -> None:
        if self._trainer.training:
            self._fresh()

    def _fresh(self) -> None:
        trainer = self._trainer
        if self._stale[trainer.training] and trainer._results is not None:
            self._stale[trainer.training] = False
            stepping = trainer._logger_connector._first_loop_iter is not None
            self._agree("evaluation" if not trainer.training else "step" if stepping else "epoch")


# -- data ------------------------------------------------------------------------------------------


def combined_loader(trainer: "pl.Trainer") -> CombinedLoader | None:
    """The training loaders, once the Trainer has set them up."""
    return trainer.fit_loop._combined_loader


def evaluated_loader(trainer: "pl.Trainer", index: int) -> tuple[Any, float]:
    """A loader of the running evaluation, and how many of its batches this rank will run; infinite if unknown."""
    loop: Any = trainer._active_loop
    return loop._combined_loader.flattened[index], loop.max_batches[index]


def mode_of(loader: CombinedLoader) -> str:
    """The mode in which loaders are combined, such as ``"max_size_cycle"``."""
    return loader._mode


def inner_batch_sampler(sampler: Any) -> Any:
    """The batch sampler inside of Lightning's wrapper for prediction, or the sampler itself."""
    return sampler._batch_sampler if isinstance(sampler, IndexBatchSamplerWrapper) else sampler


def inner_sampler(sampler: Any) -> Any:
    """The user's sampler inside of Lightning's ``DistributedSamplerWrapper``; ``None``: it wraps the dataset."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def user_shards(trainer: "pl.Trainer") -> bool:
    """Whether the user has set ``Trainer(use_distributed_sampler=False)``."""
    return not trainer._accelerator_connector.use_distributed_sampler


def fetched_batch(fetcher: Any) -> Any:
    """The latest batch that a step has fetched by itself."""
    return fetcher._batch


def watch_fetching(trainer: "pl.Trainer", begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Call functions when the fetching of a training batch begins and ends, beside Lightning's profiler."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None and not isinstance(fetcher._start_profiler, _CallBoth):  # the Trainer sets its own again
        start, stop = fetcher._start_profiler, fetcher._stop_profiler
        fetcher._start_profiler, fetcher._stop_profiler = _CallBoth(start, begins), _CallBoth(ends, stop)


def restart_loaders(trainer: "pl.Trainer") -> None:
    """Let the training loaders begin again."""
    iter(not_none(trainer.fit_loop._data_fetcher, "what fetches the training batches"))


def forget_loader_that_failed(trainer: "pl.Trainer | None") -> None:
    """If the loaders failed to start, do not tear them down: that would raise another error over the first one."""
    loader = None if trainer is None else combined_loader(trainer)
    if trainer is not None and loader is not None and loader._iterator is None:
        trainer.fit_loop._data_fetcher = None


def keep_batch_samplers(trainer: "pl.Trainer") -> None:
    """Let a Trainer pass the user's batch samplers on to the strategy, instead of constructing them again."""
    if type(trainer._data_connector) is _DataConnector:
        trainer._data_connector.__class__ = _Connector  # a class, and no bound function: copies of it work


class _Connector(_DataConnector):
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        decides = not user_shards(self.trainer)
        if decides and isinstance(dataloader, DataLoader) and not has_iterable_dataset(dataloader):
            sharded = loader_is_sharded(dataloader)
            # Where the user has sharded what is predicted, Lightning notes the indices of each batch by itself.
            if (has_own_batches(dataloader) and not sharded) or (sharded and mode != RunningStage.PREDICTING):
                loader = copy.copy(dataloader)  # the user's own stays as it is
                loader._iterator = None
                return loader
            if not sharded and shuffles_by_itself(dataloader):
                dataloader = copy.copy(dataloader)
                object.__setattr__(dataloader, "sampler", RandomSampler(dataloader.dataset))  # type: ignore[arg-type]
        return super()._prepare_dataloader(dataloader, shuffle, mode)


class _CallBoth:
    """Calls one function, then another."""

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        self._first, self._second = first, second

    def __call__(self) -> None:
        self._first()
        self._second()


def mark_executed(closure: Any) -> None:
    """Let the closure of a step count as executed: other ranks have taken the step for this one."""
    closure._result = ClosureResult(closure_loss=None)


def averaged_by(callback: Any) -> torch.nn.Module:
    """The model in which a callback averages weights, once the Trainer has set the callback up."""
    return callback._average_model


def measures_batch_norm(trainer: "pl.Trainer", callback: Any) -> bool:
    """Whether this epoch is one that ``StochasticWeightAveraging`` adds, to measure BatchNorm's statistics."""
    return callback._max_epochs != -1 and trainer.current_epoch == callback.swa_end + 1


def hpc_path(trainer: "pl.Trainer") -> str:
    """The name under which Lightning finds a preempted SLURM job's checkpoint at its next start."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def resume_by(trainer: "pl.Trainer", choose: Callable[[Any, bool], Any]) -> None:
    """Let a function choose what to go on from, given what the Trainer would take, and whether the user named it."""
    connector = trainer._checkpoint_connector

    def start(path: Any = None, *args: Any, **kwargs: Any) -> None:
        del connector.resume_start  # the class's own again; 2.5.2 passes the path alone
        connector.resume_start(choose(path, bool(path) and path != connector._hpc_resume_path), *args, **kwargs)

    connector.resume_start = start  # type: ignore[assignment, method-assign]


def environment_of(trainer: "pl.Trainer") -> Any:
    """The cluster environment that the Trainer has found."""
    return trainer._accelerator_connector.cluster_environment


def handle_signals(trainer: "pl.Trainer", notify: Callable, notify_here: Callable, after_batch: Callable) -> Overrides:
    """Replace what Lightning does on SIGTERM, until the result is told to restore it.

    Args:
        trainer: before it registers its handlers.
        notify: called on SIGTERM, with the signal's number and frame.
        notify_here: called on the signal by which SLURM announces a preemption.
        after_batch: called in the place of ``update_lr_schedulers``; the second time for ``"step"`` ends a batch.
    """
    loop, connector, overrides = trainer.fit_loop.epoch_loop, trainer._signal_connector, Overrides()
    overrides.put(loop, "_broadcast_sigterm_tensor", lambda: None)
    overrides.put(loop, "update_lr_schedulers", after_batch)
    overrides.put(connector, "_sigterm_notifier_fn", notify)
    overrides.put(connector, "_slurm_sigusr_handler_fn", notify_here)
    return overrides


def choose_main_port(environment: ClusterEnvironment, port: int) -> None:
    """Let ranks that Lightning starts meet at a port, unless a variable or an earlier fit has named one."""
    if isinstance(environment, LightningEnvironment) and "MASTER_PORT" not in os.environ:
        environment._main_port = port if environment._main_port == -1 else environment._main_port


def on_sigterm(trainer: "pl.Trainer", notify: Callable) -> None:
    """Call a function on SIGTERM; before the Trainer registers its handlers."""
    trainer._signal_connector._sigterm_notifier_fn = notify  # type: ignore[method-assign]


def set_terminated(trainer: "pl.Trainer") -> None:
    """Let the Trainer know that it was ended by SIGTERM."""
    trainer._signal_connector.received_sigterm = True


@contextmanager
def module_without_values_stays(module: torch.nn.Module | None) -> Iterator[None]:
    """In this block, a teardown does not move a module that is on the meta device: an error came before its values."""
    stays = module is not None and any(parameter.is_meta for parameter in module.parameters())
    with replaced(module, "cpu", lambda: module) if stays else nullcontext():
        yield
