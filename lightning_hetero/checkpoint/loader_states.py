"""Positions of each rank's dataloaders in a checkpoint; loaders that can tell theirs go on there."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.streams import Stream
from lightning_hetero.checkpoint_sections import add_section, section


def current(accounting: BatchAccounting) -> list[Any]:
    """Positions of this rank's loaders, as far as they can tell."""
    return [source.position() if isinstance(source, Stream) else None for source in accounting.loaders.sources()]


def put(checkpoint: dict[str, Any], everyone: Sequence[Sequence[Any]], ended: Sequence[bool]) -> None:
    """Add where the loaders of all ranks stand to a checkpoint.

    Args:
        checkpoint: to add to.
        everyone: of each rank, :func:`current`.
        ended: which ranks have come to the end of their data.
    """
    if any(state is not None for states in everyone for state in states):
        add_section(checkpoint, "loaders", everyone)
        add_section(checkpoint, "ended", list(ended))


def ended(checkpoint: Mapping[str, Any], accounting: BatchAccounting) -> list[bool] | None:
    """Ranks that had come to the end of their data; ``None`` if the loaders do not go on within an epoch."""
    within = any(isinstance(source, Stream) and source.another_batch for source in accounting.loaders.sources())
    return section(checkpoint, "ended") if within else None


def restore(checkpoint: Mapping[str, Any], sources: Sequence[Any]) -> bool:
    """Let this rank's loaders go on where a checkpoint says, once they are iterated over again.

    Args:
        checkpoint: as loaded.
        sources: of the training batches' parts, one per loader.

    Returns:
        Whether a loader does.
    """
    everyone = section(checkpoint, "loaders")
    if everyone is None:
        return False
    if len(everyone) != dist.get_world_size():
        rank_zero_warn(
            f"The checkpoint says where the dataloaders of {len(everyone)} ranks stood; this job has "
            f"{dist.get_world_size()} ranks. All of them begin their epoch again: samples may come twice."
        )
        return False
    states = everyone[dist.get_rank()]
    if len(states) != len(sources):
        rank_zero_warn(
            f"The checkpoint says where {len(states)} training dataloader(s) stood; now there are {len(sources)}. All "
            "of them begin their epoch again, so that samples of this epoch may come twice."
        )
        return False
    resumed = False
    for source, state in zip(sources, states, strict=True):
        if state is not None and isinstance(source, Stream) and source.stateful:
            source.go_on_from(state)
            resumed = True
    return resumed
