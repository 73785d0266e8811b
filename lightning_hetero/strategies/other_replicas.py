"""Goes on from a checkpoint that was saved by other replicas than there are now."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hetero.engine import optimizer_states
from lightning_hetero.engine.checkpoint import COMMON

if TYPE_CHECKING:
    from lightning_hetero.strategies.replica import ReplicaStrategy


def restore_precision(strategy: "ReplicaStrategy", state: dict[str, Any]) -> None:
    """Let the precision plugin go on from what a replica has saved of its own.

    Under ``"16-mixed"`` only GPUs scale losses. A replica that was on a CPU has saved nothing of that: a scaler begins
    anew.

    Args:
        strategy: that goes on.
        state: of a plugin's ``state_dict()``.
    """
    if state:
        strategy.precision_plugin.load_state_dict(state)


def common_of(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the nearest replica in a checkpoint that was made for others to join; ``None``: it holds none."""
    if COMMON not in checkpoint:
        return None
    return {"optimizers": checkpoint["optimizer_states"], "precision": {}, "algorithm": checkpoint[COMMON]}


def start_alike(strategy: "ReplicaStrategy", near: dict[str, Any] | None, why: str) -> None:
    """Let all replicas start from the checkpoint's weights, which the model holds.

    Args:
        strategy: that goes on.
        near: the state of the saved replica that is nearest to this one; ``None``: there is none that fits.
        why: replicas cannot go on where they have stopped.
    """
    start, trainer = f"{why} All replicas start from the checkpoint's weights,", strategy.trainer
    tell = rank_zero_warn if strategy.entry is None else rank_zero_info  # that others have joined is no surprise
    if near is None:
        tell(f"{start} with its optimizers' state.")
    else:
        tell(f"{start} each with its own optimizers' state, a new one with that of the nearest number.")
        assert strategy.averager is not None
        for optimizer, saved in zip(strategy.optimizers, near["optimizers"], strict=True):
            optimizer_states.restore(optimizer, saved)
        restore_precision(strategy, near["precision"])
        strategy.averager.load_common(near["algorithm"])
    progress = trainer.fit_loop.epoch_loop.batch_progress.total
    by_hand = not strategy.lightning_module.automatic_optimization  # type: ignore[union-attr]
    strategy.engine.resume(progress.processed if by_hand else trainer.global_step)  # type: ignore[attr-defined]
