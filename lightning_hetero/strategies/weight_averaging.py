"""Averages of weights over time (SWA, EMA) where replicas differ: callbacks average the consensus.

``WeightAveraging`` and ``StochasticWeightAveraging`` ask for an update by calling ``update_parameters`` with the model.
Here such a call is only counted. If all replicas are together then, the updates are made right after the callback's
hook, with a model that holds the consensus; else where all replicas meet next, at the end of the epoch at the latest.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.checkpoint_sections import add_section, section
from lightning_hetero.comm.agreement import check_equal
from lightning_hetero.lightning_compat import averaged_by, measures_batch_norm
from lightning_hetero.replicas.vectors import broadcast_values

if TYPE_CHECKING:
    import lightning.pytorch as pl


def _is(callback: Callback, name: str) -> bool:
    """Whether a callback is of a class, or extends it; by name, since older versions of Lightning lack some."""
    return name in {kind.__name__ for kind in type(callback).__mro__}


def averages_weights(callback: Callback) -> bool:
    """Whether a callback averages the model's weights over time."""
    return _is(callback, "WeightAveraging") or _is(callback, "StochasticWeightAveraging")


class _Updates:
    """Takes the place of a callback's ``update_parameters``, and counts the calls instead."""

    def __init__(self, callback: Any, module: torch.nn.Module) -> None:
        self.callback, self.count = callback, 0
        self.average = averaged_by(callback)
        self._owner: Any = callback if _is(callback, "StochasticWeightAveraging") else self.average
        self._arguments: tuple[Any, ...] = (module,)
        self._update: Any = self._owner.update_parameters
        self._owner.update_parameters = self

    def __call__(self, *arguments: Any) -> None:
        self.count, self._arguments = self.count + 1, arguments

    def make(self) -> None:
        """Make the updates that have been asked for, with what the model holds now."""
        for _ in range(self.count):
            self._update(*self._arguments)
        self.count = 0

    def detach(self) -> None:
        """Give the callback its own method back; idempotent."""
        vars(self._owner).pop("update_parameters", None)


class WeightAverages:
    """Makes the updates that callbacks ask for, on the consensus.

    Args:
        updates: of each callback.
    """

    def __init__(self, updates: Sequence[_Updates] = ()) -> None:
        self._all, self._warned = updates, False

    @classmethod
    def of(cls, callbacks: Iterable[Callback], module: torch.nn.Module) -> "WeightAverages":
        """Those of the callbacks that average weights; all ranks' averages begin alike (collective)."""
        found = [_Updates(callback, module) for callback in callbacks if averages_weights(callback)]
        for updates in found:
            broadcast_values(updates.average)  # it was copied from the model before that got rank 0's values
        return cls(found)

    def after_batch(self, engine: Engine, timer: StepTimer) -> None:
        """A batch has been done, and callbacks have asked for what they want (collective if all replicas meet)."""
        averager = engine.averager
        if engine.all_met:
            self.make(engine, timer)
            return
        asks = next((updates.callback for updates in self._all if updates.count), None)
        if asks is not None and averager is not None and not averager.traits.lockstep and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{type(asks).__name__} asks for an update after step {engine.windows}, within an epoch, where not all "
                "replicas meet. All updates of an epoch are made at its end, with the consensus that they have then. "
                "To ask at the ends of epochs only, return True from should_update for epoch_idx "
                "(EMAWeightAveraging: update_starting_at_epoch=0, update_every_n_steps=0)."
            )

    def make(self, engine: Engine, timer: StepTimer) -> None:
        """Make the updates that have been asked for, where all replicas are together (collective).

        Args:
            engine: finds the consensus.
            timer: of this rank's work, of which this is no part.

        Raises:
            DisagreementError: on every rank: callbacks have not asked alike on all of them.
        """
        with timer.waiting(exchange=True):
            if not self._agreed():
                return
            engine.hold(engine.evaluation_values(sanity_check=False))
            try:
                for updates in self._all:
                    updates.make()
            finally:
                engine.release()

    def finish(self) -> None:
        """Make the updates that are left, with the final values that all ranks hold, and share the averages.

        Collective.
        """
        if self._agreed():
            for updates in self._all:
                updates.make()
        for updates in self._all:
            broadcast_values(updates.average)  # also what does not travel between replicas

    def _agreed(self) -> bool:
        """Whether updates have been asked for, by all ranks alike (collective)."""
        counts = {updates.callback.state_key: updates.count for updates in self._all}
        if counts:
            check_equal("the updates that callbacks which average weights ask for (should_update)", counts)
        return any(counts.values())

    def measure_batch_norm(self, trainer: "pl.Trainer") -> bool:
        """Whether SWA has added the epoch that begins, to measure BatchNorm's statistics without optimizer steps."""
        swa = (u.callback for u in self._all if _is(u.callback, "StochasticWeightAveraging"))
        return any(measures_batch_norm(trainer, callback) for callback in swa)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint what has been asked for, and is not made yet."""
        if any(updates.count for updates in self._all):
            counts = {updates.callback.state_key: updates.count for updates in self._all}
            add_section(checkpoint, "updates", counts)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from :meth:`save`."""
        counts = section(checkpoint, "updates") or {}
        for updates in self._all:
            updates.count = counts.get(updates.callback.state_key, 0)

    def detach(self) -> None:
        """Give callbacks their own methods back; idempotent."""
        for updates in self._all:
            updates.detach()
