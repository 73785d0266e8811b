"""Sections that this package adds to a checkpoint: the key, the format's number, and how they are read."""

from collections.abc import Mapping
from typing import Any

KEY = "lightning_hetero"


FORMAT = 1


def part_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section that this package has added; empty if there is none, or if this version cannot read it."""
    return {} if _unreadable(checkpoint) else checkpoint.get(KEY, {})


def _unreadable(checkpoint: Mapping[str, Any]) -> str | None:
    """Reason why this version cannot read another one's section; ``None`` if it can."""
    if KEY not in checkpoint or (number := checkpoint[KEY].get("format")) == FORMAT:
        return None
    return (
        f"The checkpoint was written by another version of lightning_hetero: its format is {number}, this version "
        f"reads {FORMAT}."
    )
