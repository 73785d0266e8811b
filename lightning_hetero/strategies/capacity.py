"""`max_batch_size="auto"`: each rank finds once how many samples fit into its memory, and tells the others.

A trial is a training step without the optimizer, of samples with which the first global batch begins. It does not fit
if memory runs out, as on a CUDA device, or if it takes more than ``max_batch_memory``, without which other devices
cannot tell. Nothing of a trial stays.
"""

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import lightning_compat
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.passes import CollateInPasses
from lightning_hetero.batching.sampler import FixedBatches, ShareSampler
from lightning_hetero.batching.state_backup import StateBackup
from lightning_hetero.batching.streams import SharedStreamLoader
from lightning_hetero.checkpoint import random_states
from lightning_hetero.checkpoint_sections import add_section, section
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.collectives import Collectives, TrialBatch
from lightning_hetero.comm.object_collectives import CPU
from lightning_hetero.comm.threads import without_process_group
from lightning_hetero.errors import ConfigurationError, HeteroError, ShareError, UnsupportedError, not_none
from lightning_hetero.strategies.options import Options, memory_per_rank
from lightning_hetero.strategies.trainer_checks import say_passes

if TYPE_CHECKING:
    import lightning.pytorch as pl

_USED = 0.9  # of the samples that fit, the part that a rank takes: memory gets fragmented, others can be longer
_OUT_OF_MEMORY = (getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError, MemoryError)
_SAYS_SO = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory")


@dataclass
class Capacity:
    """The most samples of each rank, found by trying, for one model on the same devices.

    Attributes:
        options: of the strategy.
        found: most samples of each rank, once they are known.
        basis: what that depends on: of each rank its device and its memory, then the size of a global batch.
    """

    options: Options
    found: list[int] | None = None
    basis: list[Any] = field(default_factory=list)
    _module: "weakref.ref[Any] | None" = None  # for which it was found; unknown in a checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which serve other models."""
        return {**vars(self), "found": None, "_module": None}

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was found in a checkpoint; builtins only."""
        if self.found is not None:
            kept = {"found": list(self.found), "basis": list(self.basis)}
            add_section(checkpoint, "capacity", kept)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what a checkpoint knows."""
        if (kept := section(checkpoint, "capacity")) is not None:
            self.found, self.basis, self._module = kept["found"], kept["basis"], None

    def begin(self, trainer: "pl.Trainer", accounting: BatchAccounting, collectives: Collectives) -> bool:
        """Training is about to start: limit the ranks to what fits, and search for it if it is unknown (collective).

        Args:
            trainer: runs the fit.
            accounting: of this rank's batches.
            collectives: of the strategy.

        Returns:
            Whether batches were tried.

        Raises:
            UnsupportedError: the data do not allow it, or a trial failed on some rank.
            ShareError: not even the least batch fits on some rank; or all of them together do not make a global batch,
                and cannot be run in passes.
        """
        if self.options.max_batch_size != "auto":
            return False
        module = trainer.lightning_module
        loaders = not_none(lightning_compat.combined_loader(trainer), "the training dataloaders")
        batches = Batches(loaders)
        memory = _memory(self.options, trainer)
        basis = [*gather([_name_of(trainer.strategy.root_device), memory], "devices and their memory"), batches.total]
        found = self._known(basis, module)
        searches = found is None
        if found is None:
            with accounting.timer.waiting(), torch.random.fork_rng(devices=[]):
                batches.draw()
            search = _Search(trainer, collectives, batches, max(accounting.planner.least, 1))
            found = search.run([memory for _, memory in basis[:-1]])
        self.found, self.basis, self._module = found, basis, weakref.ref(module)
        asked = None if accounting.planner.auto else accounting.planner.shares(accounting.step)
        if accounting.planner.limit(found):
            if asked is not None and (shares := accounting.planner.shares(accounting.step)) != asked:
                rank_zero_warn(
                    f"max_batch_size='auto': the shares that you have asked for, {asked} of a batch, do not fit into "
                    f"the memory of all ranks. They are {shares} now. Use a smaller global batch to keep the shares."
                )
            for loader in loaders.flattened:
                if isinstance(collate := getattr(loader, "collate_fn", None), CollateInPasses):
                    collate.limit = found[trainer.global_rank]
            _draw_anew(trainer, accounting, loaders)
            if accounting.planner.in_passes(batches.total):
                say_passes(accounting.planner, module)
        accounting.timer.restart()
        return searches

    def _known(self, basis: list[Any], module: Any) -> list[int] | None:
        """The limits that were found, if they hold here; the same on all ranks."""
        if self.found is None or (self.basis == basis and (self._module is None or self._module() is module)):
            return self.found
        if self._module is None:
            rank_zero_info(
                "max_batch_size='auto': the checkpoint's limits were found for other ranks, devices, memory or "
                "batches. Searching again."
            )
        return None


def _memory(options: Options, trainer: "pl.Trainer") -> int | None:
    """The bytes that a training step may take on this rank; ``None``: as many as there are.

    Raises:
        ConfigurationError: an amount cannot be read, or there is not one per rank of the job as it began.
    """
    view = trainer.strategy.job.view  # type: ignore[attr-defined]
    limits = memory_per_rank(options.max_batch_memory, None if view.number else view.world)
    return limits[view.entries[view.rank] % len(limits)]


def problem(options: Options, trainer: "pl.Trainer") -> HeteroError | None:
    """The reason why this rank cannot search for its largest batch; ``None`` if it can."""
    device = trainer.strategy.root_device
    try:
        memory = _memory(options, trainer)
    except HeteroError as error:
        return error
    if memory is None and device.type != "cuda":
        return ConfigurationError(
            f"max_batch_size='auto' on {device.type} (rank {trainer.global_rank}) needs a limit: a device that is no "
            "CUDA device does not say when its memory is full, so the machine would swap, or end the job. Give "
            "max_batch_memory, such as '8GiB', or a list with one amount per rank."
        )
    if not trainer.lightning_module.automatic_optimization:
        return UnsupportedError(
            "max_batch_size='auto' with manual optimization: training_step itself lets the optimizers step, so a trial "
            "would train. Give max_batch_size as numbers."
        )
    return None


def _name_of(device: torch.device) -> str:
    """Tells devices of different memory apart."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory} bytes"


# -- the search ------------------------------------------------------------------------------------


@dataclass
class _Search:
    """The search for the largest batch of each rank, which takes ``least`` samples at least."""

    trainer: "pl.Trainer"
    collectives: Collectives
    batches: "Batches"
    least: int

    def run(self, memory: list[int | None]) -> list[int]:
        """The most samples of each rank (collective).

        Args:
            memory: bytes that a step may take on each rank; ``None``: what the device has.

        Raises:
            UnsupportedError: a trial failed on some rank.
            ShareError: not even the least batch fits on some rank.
        """
        batches, least = self.batches, self.least
        error: Exception | None = None
        own: tuple[int, str | None]  # samples of the largest batch that fits, or the error of a trial
        try:
            own = self._fitting(memory[self.trainer.global_rank]), None
        except Exception as failure:
            error, own = failure, (0, f"{type(failure).__name__}: {str(failure).rstrip('.')}")
        everyone = gather(own, "the batch sizes that fit")
        for rank, (_, failed) in enumerate(everyone):
            if failed is not None:
                raise UnsupportedError(
                    f"max_batch_size='auto': rank {rank} could not try a batch: {failed}. A trial runs training_step "
                    "and the backward pass on one rank alone, without hooks. Correct the error, or give max_batch_size "
                    "as numbers."
                ) from error
        fitting = [samples for samples, _ in everyone]
        if small := [rank for rank, samples in enumerate(fitting) if samples == 0]:
            raise ShareError(
                f"max_batch_size='auto': not even a batch of {least} fits into the memory of rank(s) {small}. (Given "
                f"as max_batch_memory: {memory} bytes.) Take a smaller model, leave these ranks out, or raise "
                "max_batch_memory if the devices have more."
            )
        found = [usable(samples, least, batches.total) for samples in fitting]
        rank_zero_info(
            f"max_batch_size='auto': of a global batch of {batches.total} samples {fitting} fit on the ranks; they "
            f"take at most {found}."
        )
        return found

    def _fitting(self, memory: int | None) -> int:
        """Samples of the largest batch that fits on this rank; nothing is logged meanwhile."""
        trainer, batches, unit = self.trainer, self.batches, self.batches.unit
        module, loggers = trainer.lightning_module, trainer.loggers
        trials = Trials(module, trainer.strategy.optimizers, trainer.strategy.root_device, memory)
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            with trials.begun():
                vars(module).update(log=lambda *_, **__: None, log_dict=lambda *_, **__: None)  # undone with the trial
                units = largest(
                    lambda units: trials.fits(partial(self._step, units * unit)),
                    -(-self.least // unit),
                    batches.total // unit,
                )
        finally:
            trainer.loggers = loggers
        return units * unit

    def _step(self, samples: int) -> None:
        """The forward and backward pass of a batch, as a step of the fit runs them, but without the other ranks."""
        trainer, strategy, batches = self.trainer, self.trainer.strategy, self.batches
        module, precision = trainer.lightning_module, strategy.precision_plugin
        batch = lightning_compat.before_transfer(module, precision.convert_input(batches.of(samples)))
        batch = Strategy.batch_to_device(strategy, batch, strategy.root_device)
        trial = TrialBatch(batches.sizes(samples), trainer.world_size)
        with self.collectives.trying(trial), precision.train_step_context():
            output = module.training_step(*lightning_compat.step_arguments(trainer, batch))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor):
            with self.collectives.trying(trial):
                module.backward(loss)


def largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest batch that fits, by doubling until one does not, then by bisecting.

    Args:
        fits: tries a number of samples.
        least: samples to begin with.
        most: samples beyond which nothing is tried.

    Returns:
        Between ``least`` and ``most``; 0 if not even ``least`` fit.
    """
    good, bad, wanted = 0, most + 1, min(least, most)
    while bad - good > 1:
        if fits(wanted):
            good = wanted
        else:
            bad = wanted
            if bad <= least:
                return 0
        wanted = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def usable(fitting: int, least: int, most: int) -> int:
    """Samples that a rank may take, of those that fit.

    Args:
        fitting: samples that fit.
        least: what a rank takes at least.
        most: the whole batch. Where it fits, there is nothing to be careful about.
    """
    return most if fitting >= most else max(least, int(_USED * fitting))


def _draw_anew(trainer: "pl.Trainer", accounting: BatchAccounting, combined: CombinedLoader) -> None:
    """Let batches be drawn again, of the new sizes, that workers have prefetched."""
    loaders = accounting.loaders
    sources = loaders.sources()
    if all(getattr(source, "begun", None) is None for source in sources):
        return
    with ExitStack() as stack:
        for source in reversed(sources):
            stack.enter_context(loaders.seed_states[source].replay())  # type: ignore[attr-defined]
        for loader in combined.flattened:
            reader = getattr(loader, "loader", loader)
            if getattr(reader, "persistent_workers", False):  # they have drawn random numbers for their batches
                object.__setattr__(reader, "_iterator", None)
        lightning_compat.restart_loaders(trainer)


# -- trials ----------------------------------------------------------------------------------------


@contextmanager
def preserve_state(*things: Any, device: torch.device = CPU) -> Iterator[None]:
    """Restore modules, optimizers and random states at the end of the block.

    See :class:`~lightning_hetero.batching.state_backup.StateBackup` for what that covers.

    Args:
        *things: modules and optimizers.
        device: on which this rank computes.
    """
    numbers = random_states.current(device)
    kept = StateBackup()
    for thing in things:
        kept.keep(thing)
    try:
        yield
    finally:
        kept.restore()
        random_states.restore(numbers, device)


class Trials:
    """Tries batches, each with a forward and a backward pass.

    Gradients and the optimizers' state are there meanwhile, as from the second training step on: the forward pass of a
    step begins while the gradients of the step before still exist.

    Args:
        module: to be trained.
        optimizers: that are to train it.
        device: of the module.
        limit: bytes that a step may take on the device; ``None``: what the device has.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, limit: int | None
    ) -> None:
        self._module, self._optimizers, self._device, self._limit = module, optimizers, device, limit
        self._ready = False
        # Counts the memory of the device, if it has any of its own.
        self._memory: Any = None if device.type == "cpu" else getattr(torch, device.type, None)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Try batches in this block. After it, all is as it was before."""
        try:
            with (
                preserve_state(self._module, *self._optimizers, device=self._device),
                without_process_group(),
                torch.enable_grad(),
            ):
                self._ready = not self._runs_out(self._fill)
                yield
        finally:
            self._free()

    def fits(self, step: Callable[[], None]) -> bool:
        """Whether a step fits: a forward and a backward pass."""
        if not self._ready:
            return False
        footprint = None
        if hasattr(self._memory, "reset_peak_memory_stats"):
            self._memory.reset_peak_memory_stats(self._device)
            ran_out = self._runs_out(step)
        else:
            footprint = Footprint(self._resident())
            with footprint:
                ran_out = self._runs_out(step)
        if ran_out:
            self._free()
            return False
        peak = self._memory.max_memory_allocated(self._device) if footprint is None else footprint.peak
        return self._limit is None or peak <= self._limit

    def _fill(self) -> None:
        """Make the gradients, and let the optimizers make their state."""
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self._optimizers:
            if not optimizer.state:
                for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                    vars(optimizer).get(hooks, {}).clear()
                optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]

    def _resident(self) -> Iterator[Tensor]:
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad
        for optimizer in self._optimizers:
            yield from (leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor))

    def _runs_out(self, action: Callable[[], None]) -> bool:
        """Whether an action runs out of memory; other errors are raised."""
        try:
            action()
            if self._memory is not None:
                self._memory.synchronize()
        except Exception as error:
            if isinstance(error, _OUT_OF_MEMORY) or any(words in str(error) for words in _SAYS_SO):
                return True  # the error, which holds what the step had made, ends here
            raise
        return False

    def _free(self) -> None:
        gc.collect()
        if self._memory is not None:
            self._memory.empty_cache()


class Footprint(TorchDispatchMode):
    """Counts the bytes of all tensors that live while operations run in this context: the same number in every run.

    What an operation needs for itself is not seen, nor what the allocator does not give back.

    Args:
        resident: tensors that live already.

    Attributes:
        peak: the most bytes so far.
    """

    def __init__(self, resident: Iterable[Any]) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._live = self.peak = 0
        self._add(resident)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add(tree_leaves((args, kwargs)))  # a batch may have been made elsewhere
        result = func(*args, **(kwargs or {}))
        self._add(tree_leaves(result))
        return result

    def _add(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:  # others have no storage
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in self._storages:
                gone = partial(self._gone, storage._cdata, storage.nbytes())
                self._storages[storage._cdata] = weakref.ref(storage, gone)
                self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self._live -= size


# -- batches ---------------------------------------------------------------------------------------


class Batches:
    """Batches of any size, without taking a sample from the fit.

    They are of the samples with which the first global batch begins. The loaders' own ``collate_fn`` makes them, in a
    worker process if the loaders have workers.

    Args:
        loaders: of the fit, with the samplers of the strategy.

    Attributes:
        total: samples in a global batch, of all loaders together.
        unit: samples by which batches grow; more than 1 where several loaders keep their proportions.

    Raises:
        UnsupportedError: the data do not allow it.
    """

    def __init__(self, loaders: CombinedLoader) -> None:
        self._loaders, self._structure = tree_flatten(loaders.iterables)
        self._sizes = [_size_of(loader) for loader in self._loaders]  # of global batches
        self.total = sum(self._sizes)
        self.unit = self.total // math.gcd(*self._sizes)

    def draw(self) -> None:
        """Find out which samples come first (made by all ranks together)."""
        samplers = [getattr(loader, "batch_sampler", None) for loader in self._loaders]
        self._first = [next(s.batches.draw(0)) if isinstance(s, ShareSampler) else None for s in samplers]

    def of(self, samples: int) -> Any:
        """A batch of so many samples, a multiple of the unit."""
        sizes = (samples * size // self.total for size in self._sizes)
        return tree_unflatten(list(map(_load, self._loaders, self._first, sizes)), self._structure)

    def sizes(self, samples: int) -> dict[int, int]:
        """The sizes of such a batch and of its parts, each with that of the global batch or part."""
        return {**{samples * size // self.total: size for size in self._sizes}, samples: self.total}


class _Head(IterableDataset):
    """The first samples of a stream that can be read again, and again if it has too few."""

    def __init__(self, stream: Iterable[Any], samples: int) -> None:
        self._stream, self._samples = stream, samples

    def __iter__(self) -> Iterator[Any]:
        return islice(cycle(self._stream), self._samples)


def _size_of(loader: Any) -> int:
    """Samples of a loader's global batch."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(loader, SharedStreamLoader):
        return sampler.batch_size  # type: ignore[union-attr]
    if isinstance(sampler, ShareSampler) and isinstance(sampler.batches, FixedBatches):
        return sampler.batches.batch_size
    raise UnsupportedError(
        "max_batch_size='auto' tries batches of several sizes before training starts. It needs a map-style dataset "
        "with a batch_size, or a SharedStream: samples of other streams cannot be read twice, and a batch sampler of "
        "yours says itself how large batches are. Give max_batch_size as numbers."
    )


def _load(loader: Any, first: Sequence[Any] | None, samples: int) -> Any:
    """A loader's part of a batch: of the samples with these indices, or of a stream where there are none."""
    like, given = loader, dict[str, Any]()
    if first is None:
        like = loader.like
        given |= {"dataset": _Head(loader.stream.dataset, samples), "batch_size": samples}
    else:
        given |= {"dataset": loader.dataset, "batch_sampler": [list(islice(cycle(first), samples))]}
    if like.num_workers:
        given |= {name: getattr(like, name) for name in ("worker_init_fn", "timeout", "multiprocessing_context")}
    workers, generator = min(1, like.num_workers), torch.Generator()
    collate = like.collate_fn.collate if isinstance(like.collate_fn, CollateInPasses) else like.collate_fn
    return next(iter(DataLoader(**given, collate_fn=collate, num_workers=workers, generator=generator)))
