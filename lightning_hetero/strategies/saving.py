"""Saving and resuming of a strategy: the state of each rank, and errors that reach all ranks."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lightning_hetero.checkpoint import loader_states, random_states, shards
from lightning_hetero.checkpoint.format import (
    COMMON,
    CheckpointIdentity,
    add_plan,
    add_trainable,
    nearest_replicas,
    replica_mismatch,
    restore_plan,
    save_name,
    trainable_in,
    warn_if_unreadable,
)
from lightning_hetero.checkpoint.snapshot import MemoryCheckpointIO
from lightning_hetero.checkpoint.writer import AtomicCheckpointIO, BackgroundWriter
from lightning_hetero.checkpoint_sections import section
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.object_collectives import portable
from lightning_hetero.comm.view import View
from lightning_hetero.errors import not_none
from lightning_hetero.lightning_compat import WrappingCheckpointIO, trainer_of
from lightning_hetero.replicas.sharding import is_sharded
from lightning_hetero.strategies.capacity import Capacity
from lightning_hetero.strategies.job import JobStrategy
from lightning_hetero.strategies.position import begin_next_epoch, refetch_between_epochs, refetch_if_moved
from lightning_hetero.strategies.recovery_policy import RecoveryPolicy
from lightning_hetero.strategies.trainer_checks import restore_trainable


def atomic(io: CheckpointIO | None) -> CheckpointIO:
    """The user's plugin, if there is one, or ours; a plugin that wraps another one gets ours to wrap."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, WrappingCheckpointIO):  # such as AsyncCheckpointIO
        io.checkpoint_io = AtomicCheckpointIO()  # the setter ignores it if it wraps one already
    return io


def retry_on_peer_loss(recovery: RecoveryPolicy, io: CheckpointIO, save: Callable[[], None]) -> None:
    """Save a checkpoint, again if ranks were lost meanwhile: rank 0 may have been the one to write.

    Args:
        recovery: knows the number of the view.
        io: writes; what it holds of the former save is dropped.
        save: saves the checkpoint (collective).
    """
    while True:
        before = recovery.view_number
        save()
        if before is None:
            return
        # All go by what they have gathered. A loss within that has come to some before they know its outcome, and to
        # others after.
        views = gather((before, recovery.view_number), "what was saved")
        if all(since == then for then, since in views):
            return
        if isinstance(io, BackgroundWriter):
            io.forget()


@contextmanager
def raise_on_all_ranks(alone: bool, doing: str = "save") -> Iterator[None]:
    """An error in the block is raised on every rank (collective).

    Args:
        alone: whether there is nobody to tell.
        doing: what the block does: "save" or "resume".

    Raises:
        CheckpointError: another rank could not.
    """
    if alone:
        yield
        return
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    shards.gather_or_raise(None, problem, f"whether all could {doing}", doing)


class RankState:
    """The state of each rank in a checkpoint: its part of the plan, where its loaders stand, and its random states.

    Args:
        strategy: that saves and goes on.
    """

    def __init__(self, strategy: JobStrategy) -> None:
        self._strategy = strategy
        self._capacity = Capacity(strategy.options)
        self._random: dict[str, Any] | None = None  # to restore once training starts
        self._checkpoint: Mapping[str, Any] | None = None  # that was loaded, until training starts

    def read(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Take from a checkpoint what must be known before the data are set up, and return it."""
        trainer = trainer_of(self._strategy.lightning_module)
        if self._strategy.joined and trainer is not None and trainer.training:
            self._strategy.accounting.loaders.sizes.load(checkpoint)
        if self._strategy.ticket is not None:  # before ranks, some of them new, compare their models
            restore_trainable(self._strategy.module, trainable_in(checkpoint))
        return checkpoint

    @contextmanager
    def saving(self, checkpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add it to a checkpoint, and save that in the block, which succeeds or fails on all ranks alike (collective).

        Args:
            checkpoint: to be saved.

        Yields:
            The checkpoint, on the rank that writes it with all tensors on the CPU.
        """
        strategy = self._strategy
        alone = strategy.collectives.alone()
        if strategy.joined:
            self._add_common(checkpoint)
            if not alone:
                strategy.collaborators.nonfinite.settle(strategy.module)
                own = random_states.current(strategy.root_device), loader_states.current(strategy.accounting)
                everyone = gather(own, "random states, and where dataloaders stand, to save them")
                if strategy.is_global_zero:
                    random_states.put(checkpoint, [random for random, _ in everyone])
                    loader_states.put(checkpoint, [loaders for _, loaders in everyone], strategy.accounting.ended)
        with raise_on_all_ranks(alone):
            whole = not is_sharded(strategy.lightning_module) or others_join(strategy.checkpoint_io)
            writes = strategy.is_global_zero and whole
            yield on_cpu(strategy.checkpoint_io, checkpoint) if writes else checkpoint
        strategy.timer.restart()  # it is no part of a step's time

    def _add_common(self, checkpoint: dict[str, Any]) -> None:
        """Add what all ranks know alike to a checkpoint."""
        accounting = self._strategy.accounting
        add_trainable(checkpoint, self._strategy.module)
        add_plan(checkpoint, accounting)
        self._capacity.add_to(checkpoint)
        accounting.loaders.sizes.add_to(checkpoint)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on with the plan of a checkpoint."""
        strategy = self._strategy
        warn_if_unreadable(checkpoint)
        if restore_trainable(strategy.module, trainable_in(checkpoint)):
            strategy.wrap_again()
        place, grown = strategy.collaborators.loaders.rank, strategy.ticket is not None
        restore_plan(checkpoint, strategy.accounting, place, grown)
        self._capacity.load(checkpoint)
        self._random, self._checkpoint = random_states.find(checkpoint), checkpoint

    def begin(self) -> None:
        """Training starts: limit batches to what fits, and go on where the checkpoint stands (collective).

        Raises:
            UnsupportedError: what fits cannot be tried.
            ShareError: the global batch does not fit on all ranks together.
        """
        strategy = self._strategy
        trainer, accounting = strategy.trainer, strategy.accounting
        if self._capacity.begin(trainer, accounting, strategy.collectives):
            strategy.wrap_again()  # DDP has counted the backward passes
        refetch_if_moved(trainer, accounting, self._checkpoint)
        self._checkpoint = None
        if self._random is not None:  # after the loaders were made, which draws random numbers
            random_states.restore(self._random, strategy.root_device)
            self._random = None
            refetch_between_epochs(trainer, accounting)
        begin_next_epoch(trainer)


@dataclass(frozen=True)
class ResumedFile:
    """The file from which a fit goes on, if from one.

    Attributes:
        path: of the checkpoint.
        load: reads another file in the same way.
        summary: tells whether ranks have read the same checkpoint.
        buffers: names of the buffers that its replicas exchange; ``None``: it has none, or does not tell.
    """

    path: Any = None
    load: Callable[[str], dict[str, Any]] | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    buffers: Collection[str] | None = None

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], path: Any, load: Callable[[str], dict[str, Any]]) -> "ResumedFile":
        """The file that has just been read."""
        summary = {"step": checkpoint.get("global_step"), "save": save_name(checkpoint)}
        return cls(path, load, summary, (section(checkpoint, "replicas") or {}).get("buffers"))

    def replica(
        self, checkpoint: Mapping[str, Any], who: CheckpointIdentity, view: View, name: str, sharded: bool
    ) -> dict[str, Any] | str:
        """This replica's own state; else, in words, why no replica can have its own (collective).

        Args:
            checkpoint: that was read.
            who: wants to go on.
            view: who takes part.
            name: of the state: the replica's id, and with shards the rank's place in it.
            sharded: whether the model is sharded.

        Raises:
            CheckpointError: on every rank, if a shard cannot be read.
        """
        saved = section(checkpoint, "replicas") or {}
        problem, error, state = replica_mismatch(checkpoint, who, view, sharded), None, None
        if problem is None and self.load is not None:
            try:
                state = shards.read(self.load, self.path, name, saved["save"])
            except Exception as broken:
                error = broken
        if problem is None and error is None and state is None:
            shard = shards.shard_path(self.path, name, saved["save"])
            problem = (
                f"Rank {view.rank} does not find its replica's own state, which was saved next to the checkpoint as "
                f"{shard}. Copy or rename a checkpoint together with its shards."
            )
        problem = next(filter(None, shards.gather_or_raise(problem, error, "what replicas can resume from")), None)
        return problem or {**not_none(state, "a replica's own state"), **saved["ranks"][view.rank]}

    def nearest(self, checkpoint: Mapping[str, Any], who: CheckpointIdentity, view: View) -> dict[str, Any] | None:
        """The state of the nearest replica that is found here, where not each finds its own (collective).

        Returns:
            It; ``None`` if one rank finds none.

        Raises:
            CheckpointError: on every rank, if a shard cannot be read.
        """
        others, error, state = nearest_replicas(checkpoint, who, view), None, None
        if not others or self.load is None:
            return None
        try:
            load, save = self.load, (section(checkpoint, "replicas") or {})["save"]
            states = (shards.read(load, self.path, str(other), save) for other in others)
            state = next((state for state in states if state is not None), None)
        except Exception as broken:
            error = broken
        found = shards.gather_or_raise(state is not None, error, "what replicas can resume from")
        return state if all(found) else None


def on_cpu(io: CheckpointIO, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint for any plugin, with all tensors on the CPU; ours copies them there itself."""
    return checkpoint if isinstance(io, BackgroundWriter) else portable(checkpoint)


def others_join(io: CheckpointIO) -> bool:
    """Whether what is saved now is what all go on from together with others, who are about to join."""
    return isinstance(io, MemoryCheckpointIO)


def kept_by_each(precision: Precision) -> list[str]:
    """The state that each rank keeps when others join, by its names in a checkpoint."""
    return ["optimizer_states", type(precision).__qualname__, COMMON]


def copied_for_join(
    io: CheckpointIO, module: nn.Module, state: dict[str, Any], new: Collection[Tensor] = ()
) -> dict[str, Any]:
    """The state of the model; where others are about to join, a copy: hooks may change the model before it is loaded.

    Args:
        io: that saves it.
        module: the model.
        state: of the model, whose parameters are the same on all ranks.
        new: tensors that nobody else writes to: what lies in them need not be copied.
    """
    if not isinstance(io, MemoryCheckpointIO):
        return state
    return io.keep(state, [name for name, _ in module.named_parameters(remove_duplicate=False)], new)
