"""The position of training within the fit, and loaders that begin again there."""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero import lightning_compat
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.sampler import Position
from lightning_hetero.batching.streams import Stream
from lightning_hetero.checkpoint import loader_states
from lightning_hetero.comm import waits

if TYPE_CHECKING:
    import lightning.pytorch as pl


def position(trainer: "pl.Trainer", step: int) -> Position:
    """The position of training after so many batches since the start of the fit.

    It holds for any ranks: batches are global ones, whose size and order do not depend on who shares them.
    """
    fit = trainer.fit_loop
    epochs: Any = fit.epoch_progress.current
    # After a checkpoint of an epoch's last batch the Trainer counts this epoch as done, but may keep its batch count.
    within = fit.restarting and epochs.processed < epochs.ready
    batches = fit.epoch_loop.batch_progress.current.processed if within else 0  # type: ignore[attr-defined]
    return Position(epochs.processed, batches, step)


def describe(trainer: "pl.Trainer") -> str:
    """The step that runs, for messages."""
    batch = trainer.fit_loop.epoch_loop.batch_idx
    return f"step {trainer.global_step + 1} (epoch {trainer.current_epoch}, batch {batch})"


def tell_while_waiting(trainer: "pl.Trainer") -> None:
    """Let notices of long waits say which batch this rank processes."""
    found = weakref.ref(trainer)

    def batch() -> str:
        trainer = found()
        if trainer is None or not trainer.training:
            return ""
        return f"epoch {trainer.current_epoch}, batch {trainer.fit_loop.epoch_loop.batch_idx}"

    waits.describe_batch_by(batch)


def refetch_if_moved(trainer: "pl.Trainer", accounting: BatchAccounting, checkpoint: Mapping[str, Any] | None) -> None:
    """If the loaders were set up before a checkpoint was restored, let them begin again where it stands.

    Args:
        trainer: runs the fit.
        accounting: of this rank's batches.
        checkpoint: that was restored, if any.
    """
    here = position(trainer, accounting.step)
    sources = accounting.loaders.sources()
    resumed = checkpoint is not None and loader_states.restore(checkpoint, sources)
    begun = [getattr(source, "begun", None) for source in sources]
    if resumed or any(b is not None and (b.epoch, b.batch) != (here.epoch, here.batch) for b in begun):
        lightning_compat.restart_loaders(trainer)
    if checkpoint is not None:
        _say_what_is_lost(trainer, here.batch, sources)
        if here.batch and any(not isinstance(source, Stream) for source in sources):
            _say_what_has_changed(here.batch, accounting)
    if checkpoint is not None and (ended := loader_states.ended(checkpoint, accounting)) is not None:
        accounting.ended = ended


def _say_what_is_lost(trainer: "pl.Trainer", batch: int, sources: Sequence[Any]) -> None:
    """Warn of what a checkpoint that was saved after so many batches of an epoch does not hold."""
    left = batch % trainer.accumulate_grad_batches
    if left and batch != trainer.num_training_batches:
        rank_zero_warn(
            f"The checkpoint was saved while gradients accumulated: those of {left} batch(es) are not in it, and the "
            f"next step takes those of the others only. Save after a step, that is after a multiple of "
            f"{trainer.accumulate_grad_batches} batches."
        )
    if (
        batch
        and math.isinf(trainer.num_training_batches)  # else Lightning says so
        and any(isinstance(source, Stream) and not source.stateful for source in sources)
    ):
        rank_zero_warn(
            f"The checkpoint was saved after {batch} batches of an epoch, and the training data cannot go on there: "
            "they begin again, so that samples come twice. Use a loader with state_dict and load_state_dict, such as "
            "torchdata's StatefulDataLoader, or a SharedStream."
        )


def _say_what_has_changed(batch: int, accounting: BatchAccounting) -> None:
    """Warn of batches of other sizes, in a fit that goes on after so many batches of an epoch."""
    if (sizes := accounting.loaders.sizes.changed()) is None:
        return
    before, now = sizes
    rank_zero_warn(
        f"The checkpoint was saved after {batch} batches of an epoch, when a step of all ranks took {before}; now it "
        f"takes {now}. The position counts batches, so that samples of this epoch are left out, or come twice. Go on "
        "with the former size (batch_size, or global_batch_size of the strategy), or from a checkpoint of the end of "
        "an epoch."
    )


def begin_next_epoch(trainer: "pl.Trainer") -> None:
    """After a checkpoint of an epoch's last batch, let the next epoch begin as any other; last of all.

    Lightning counts that epoch as done, but not the next one as begun. A run that goes on from a checkpoint within the
    next one would then begin it again.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if trainer.fit_loop.restarted_mid_epoch and epochs.processed >= epochs.ready:
        trainer.fit_loop.reset_restart_stage()


def refetch_between_epochs(trainer: "pl.Trainer", accounting: BatchAccounting) -> None:
    """Let the next epoch's loaders begin again, now that the random states are restored that they draw from."""
    sources = accounting.loaders.sources()
    if any(isinstance(source, Stream) for source in sources):
        return  # it would lose what it drew
    if position(trainer, accounting.step).batch in (0, trainer.num_training_batches):
        lightning_compat.restart_loaders(trainer)


def length_of(trainer: "pl.Trainer") -> tuple[float, float]:
    """Optimizer steps of a fit, and of an epoch; infinite where nobody knows."""
    total = trainer.estimated_stepping_batches
    if trainer.train_dataloader is None:  # as Lightning asks: all ranks set the data up together, newcomers too
        trainer.fit_loop.setup_data()
    batches = trainer.num_training_batches / trainer.accumulate_grad_batches
    return total if total >= 0 else math.inf, batches if math.isinf(batches) else math.ceil(batches)
