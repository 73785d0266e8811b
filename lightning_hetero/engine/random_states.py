"""Each rank's random states in a checkpoint: with dropout or augmentation a resumed run goes on as if never stopped."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from lightning_hetero.comm.agreement import gather
from lightning_hetero.engine.checkpoint import FORMAT, KEY, part_of

_NAME = "random"


def gather_into(checkpoint: dict[str, Any]) -> None:
    """Add the states of all ranks to rank 0's checkpoint, next to the plan (collective)."""
    # As arrays: to pickle a tensor calls `torch.save`, which is for files, and slow.
    everyone = gather(tree_map_only(torch.Tensor, torch.Tensor.numpy, current()), "random states to save")
    if dist.get_rank() == 0:
        checkpoint.setdefault(KEY, {"format": FORMAT})[_NAME] = tree_map_only(np.ndarray, torch.from_numpy, everyone)


def find(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """This rank's states; ``None``: the checkpoint holds none, or those of another number of ranks."""
    everyone = part_of(checkpoint).get(_NAME)
    return None if everyone is None or len(everyone) != dist.get_world_size() else everyone[dist.get_rank()]


def current() -> dict[str, Any]:
    """The global random states of this rank; tensors and builtins."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [name, torch.tensor(np.asarray(keys), dtype=torch.int64), *rest],
        "python": [version, list(numbers), gauss],
    }


def restore(states: Mapping[str, Any]) -> None:
    """Set the global random states of this rank."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))


class Moment:
    """The CPU random state of torch before a loader is first iterated over, which draws the seeds of its workers.

    Args:
        generator: the loader's own, if it has one.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._state = torch.get_rng_state()
        self._own = None if generator is None else (generator, generator.get_state())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Iterate over the loader anew in this block: it draws the same numbers. Then others go on where they were."""
        now = torch.get_rng_state()
        torch.set_rng_state(self._state)
        if self._own is not None:
            generator, state = self._own
            generator.set_state(state)
        try:
            yield
        finally:
            torch.set_rng_state(now)
