"""`max_batch_size="auto"`: each rank finds once how many samples fit into its memory, and tells the others."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hetero import _lightning
from lightning_hetero.comm.agreement import gather
from lightning_hetero.engine.checkpoint import FORMAT, KEY, part_of
from lightning_hetero.engine.collectives import Trial
from lightning_hetero.engine.trial import Trials
from lightning_hetero.errors import ConfigurationError, HeteroError, ShareError, UnsupportedError
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.replica_ddp import wrap_anew
from lightning_hetero.strategies.trial_batches import TrialBatches
from lightning_hetero.workload.capacity import largest, memory_per_rank, usable
from lightning_hetero.workload.planner import Planner

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy

_NAME = "capacity"


class Finding(NamedTuple):
    """What a rank has found, or why it could not.

    Attributes:
        fitting: samples of the largest batch that fits.
        problem: the error of a trial, in words.
    """

    fitting: int = 0
    problem: str | None = None


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
    _module: "weakref.ref[Any] | None" = None  # for which it was found
    _restored: bool = False  # from a checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which serve other models."""
        return {**vars(self), "_module": None}

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was found in a checkpoint; builtins only."""
        if self.found is not None:
            kept = {"found": list(self.found), "basis": list(self.basis)}
            checkpoint.setdefault(KEY, {"format": FORMAT})[_NAME] = kept

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what a checkpoint knows."""
        if (kept := part_of(checkpoint).get(_NAME)) is not None:
            self.found, self.basis, self._restored = kept["found"], kept["basis"], True

    def begin(self, strategy: "HeteroStrategy") -> None:
        """Training is about to start: limit the ranks to what fits, and search for it if it is unknown (collective).

        Raises:
            UnsupportedError: the data do not allow it, or a trial failed on some rank.
            ShareError: not even the least batch fits on some rank, or all of them together do not make a global batch.
        """
        if self.options.max_batch_size != "auto":
            return
        trainer, share = strategy.trainer, strategy.share
        loaders = _lightning.combined_loader(trainer)
        assert loaders is not None
        with strategy.timer.waiting(), untouched_order():
            batches = TrialBatches(loaders)
        own = [_name_of(strategy.root_device), self._memory(strategy)]
        basis = [*gather(own, "devices and their memory"), batches.total]
        if not self._known(basis, trainer.lightning_module):
            self.found, self.basis = self._search(strategy, batches, [own[1] for own in basis[:-1]]), basis
            self._module, self._restored = weakref.ref(trainer.lightning_module), False
            wrap_anew(strategy)  # DDP has counted the backward passes
        assert self.found is not None
        if sum(self.found) < batches.total:
            raise ShareError(
                f"max_batch_size='auto': the ranks take at most {self.found} samples, {sum(self.found)} together, by "
                f"what fits into their memory, but a global batch has {batches.total}. Use a smaller batch with "
                "accumulate_grad_batches, or raise max_batch_memory if the devices have more."
            )
        asked = None if share.planner.auto else share.planner.shares(share.step)
        if share.planner.limit(self.found):
            _tell_if_moved(asked, share.planner, share.step)
            _draw_anew(strategy)
        strategy.timer.restart()

    def _memory(self, strategy: "HeteroStrategy") -> int | None:
        assert strategy.job is not None
        view = strategy.job.view
        return memory_per_rank("max_batch_memory", self.options.max_batch_memory, view.world)[view.rank]

    def _known(self, basis: list[Any], module: Any) -> bool:
        """Whether what was found holds here; the same on all ranks."""
        if self.found is None:
            return False
        if self.basis == basis and (self._restored or (self._module and self._module() is module)):
            self._module = weakref.ref(module)
            return True
        if self._restored:
            rank_zero_info(
                "max_batch_size='auto': the checkpoint's limits were found for other ranks, devices, memory or "
                "batches. Searching again."
            )
        return False

    def _search(self, strategy: "HeteroStrategy", batches: TrialBatches, memory: list[int | None]) -> list[int]:
        least = max(strategy.share.planner.least, 1)
        error: Exception | None = None
        try:
            own = Finding(_fitting(strategy, batches, memory[strategy.global_rank], least))
        except Exception as failure:
            error, own = failure, Finding(problem=f"{type(failure).__name__}: {str(failure).rstrip('.')}")
        findings = [Finding(*row) for row in gather(tuple(own), "the batch sizes that fit")]
        for rank, finding in enumerate(findings):
            if finding.problem is not None:
                raise UnsupportedError(
                    f"max_batch_size='auto': rank {rank} could not try a batch: {finding.problem}. A trial runs "
                    "training_step and the backward pass on one rank alone, without hooks. Correct the error, or give "
                    "max_batch_size as numbers."
                ) from error
        if small := [rank for rank, finding in enumerate(findings) if finding.fitting == 0]:
            raise ShareError(
                f"max_batch_size='auto': not even a batch of {least} fits into the memory of rank(s) {small}. (Given "
                f"as max_batch_memory: {memory} bytes.) Take a smaller model, leave these ranks out, or raise "
                "max_batch_memory if the devices have more."
            )
        fitting = [finding.fitting for finding in findings]
        found = [usable(n, least, batches.total) for n in fitting]
        rank_zero_info(
            f"max_batch_size='auto': of a global batch of {batches.total} samples {fitting} fit on the ranks; they "
            f"take at most {found}."
        )
        return found


def problem(strategy: "HeteroStrategy", trainer: "pl.Trainer") -> HeteroError | None:
    """Why this rank cannot search for its largest batch, if it cannot."""
    options, device = strategy.options, strategy.root_device
    assert strategy.job is not None
    view = strategy.job.view
    try:
        memory = memory_per_rank("max_batch_memory", options.max_batch_memory, view.world)[view.rank]
    except HeteroError as error:
        return error
    if memory is None and device.type != "cuda":
        return ConfigurationError(
            f"max_batch_size='auto' on {device.type} (rank {view.rank}) needs a limit: a device that is no CUDA device "
            "does not say when its memory is full, so the machine would swap, or end the job. Give "
            "max_batch_memory, such as '8GiB', or a list with one amount per rank."
        )
    if not trainer.lightning_module.automatic_optimization:
        return UnsupportedError(
            "max_batch_size='auto' with manual optimization: training_step itself lets the optimizers step, so a trial "
            "would train. Give max_batch_size as numbers."
        )
    return None


def _fitting(strategy: "HeteroStrategy", batches: TrialBatches, memory: int | None, least: int) -> int:
    """Samples of the largest batch that fits on this rank."""
    module, device = strategy.trainer.lightning_module, strategy.root_device
    trials = Trials(module, strategy.optimizers, device, memory)
    unit = batches.unit
    with _silent(strategy.trainer), trials.begun():
        units = largest(
            lambda units: trials.fits(partial(_step, strategy, batches, units * unit)),
            -(-least // unit),
            batches.total // unit,
        )
    return units * unit


def _step(strategy: "HeteroStrategy", batches: TrialBatches, samples: int) -> None:
    """The forward and backward pass of a batch, as a step of the fit runs them, but without the other ranks."""
    trainer, module, precision = strategy.trainer, strategy.trainer.lightning_module, strategy.precision_plugin
    batch = _lightning.before_transfer(module, precision.convert_input(batches.of(samples)))
    batch = DDPStrategy.batch_to_device(strategy, batch, strategy.root_device)
    trial = Trial(batches.sizes(samples), strategy.world_size)
    with strategy.collectives.trying(trial), precision.train_step_context():
        output = module.training_step(*_lightning.step_arguments(trainer, batch))
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        with strategy.collectives.trying(trial):
            module.backward(loss)


@contextmanager
def _silent(trainer: "pl.Trainer") -> Iterator[None]:
    """Nothing is logged in this block."""
    module, loggers = trainer.lightning_module, trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    before: dict[str, Any] = {name: vars(module)[name] for name in ("log", "log_dict") if name in vars(module)}
    for name in ("log", "log_dict"):
        vars(module)[name] = _log_nothing
    try:
        yield
    finally:
        trainer.loggers = loggers
        del vars(module)["log"], vars(module)["log_dict"]
        vars(module).update(before)


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def untouched_order() -> Iterator[None]:
    """Looking at the order of the samples in this block draws no random numbers that training would."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _name_of(device: torch.device) -> str:
    """Tells devices of different memory apart."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory} bytes"


def _tell_if_moved(asked: list[int] | None, planner: Planner, step: int) -> None:
    """Say so if shares that the user has fixed do not fit."""
    if asked is not None and (shares := planner.shares(step)) != asked:
        rank_zero_warn(
            f"max_batch_size='auto': the shares that you have asked for, {asked} of a batch, do not fit into the "
            f"memory of all ranks. They are {shares} now. Use a smaller global batch to keep the shares."
        )


def _draw_anew(strategy: "HeteroStrategy") -> None:
    """Let batches be drawn again, of the new sizes, that workers have prefetched."""
    loaders, combined = strategy.share.loaders, _lightning.combined_loader(strategy.trainer)
    sources = loaders.sources()
    assert combined is not None
    begun = [getattr(getattr(source, "batch_sampler", source), "begun", None) for source in sources]
    if all(position is None for position in begun):
        return
    with ExitStack() as stack:
        for source in reversed(sources):
            stack.enter_context(loaders.moments[source].again())  # type: ignore[attr-defined]
        for loader in combined.flattened:
            reader = getattr(loader, "loader", loader)
            if getattr(reader, "persistent_workers", False):  # they have drawn random numbers for their batches
                object.__setattr__(reader, "_iterator", None)
        _lightning.fetch_anew(strategy.trainer)
