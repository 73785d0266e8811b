"""Registry of the sections that this package adds to a checkpoint, which any strategy can load without them."""

from collections.abc import Mapping
from typing import Any

KEY = "lightning_hetero"  #: Of a checkpoint, under which the sections are.
FORMAT = 1
#: Of each section, what it holds.
SECTIONS = {
    "planner": "the plan of shares",
    "fits": "the measurements of each rank",
    "choice": "the choice of hetero_auto",
    "random": "random states of each rank",
    "capacity": "limits that max_batch_size='auto' has found",
    "gradients": "residuals of the wire of hetero_ddp, of each rank",
    "global_batches": "samples of a step, of each loader",
    "loaders": "where loaders with a state_dict stand, of each rank",
    "ended": "which ranks had come to the end of their data",
    "updates": "how many updates of averaged weights are pending",
    "trainable": "by name, whether a parameter was trainable",
    "replicas": "a description of the replicas, each of which has a shard of its own",
}


def add_section(checkpoint: dict[str, Any], name: str, state: Any) -> None:
    """Add a section to a checkpoint.

    Args:
        checkpoint: to add to.
        name: one of :data:`SECTIONS`.
        state: tensors and builtins only, so that the file can be loaded without running code.
    """
    assert name in SECTIONS, f"{name!r} is not registered in SECTIONS"
    checkpoint.setdefault(KEY, {"format": FORMAT})[name] = state


def section(checkpoint: Mapping[str, Any], name: str) -> Any | None:
    """A section of a checkpoint; ``None`` if it has none, or if this version cannot read it."""
    return None if unreadable(checkpoint) else checkpoint.get(KEY, {}).get(name)


def unreadable(checkpoint: Mapping[str, Any]) -> str | None:
    """Reason why this version cannot read another one's sections; ``None`` if it can."""
    if KEY not in checkpoint or (number := checkpoint[KEY].get("format")) == FORMAT:
        return None
    return (
        f"The checkpoint was written by another version of lightning_hetero: its format is {number}, this version "
        f"reads {FORMAT}."
    )
