"""Each rank's random states in a checkpoint: with dropout or augmentation a resumed run goes on as if never stopped."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_hetero.checkpoint_sections import add_section, section


def put(checkpoint: dict[str, Any], everyone: list[dict[str, Any]]) -> None:
    """Add the states of all ranks to a checkpoint, next to the plan."""
    add_section(checkpoint, "random", everyone)


def find(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """This rank's states; ``None``: the checkpoint holds none, or those of another number of ranks."""
    everyone = section(checkpoint, "random")
    return None if everyone is None or len(everyone) != dist.get_world_size() else everyone[dist.get_rank()]


def current(device: torch.device) -> dict[str, Any]:
    """The global random states of this rank; tensors and builtins.

    Args:
        device: on which it computes. No other kind of device is touched: to ask for the state of another one would
            claim memory of it, or fail.
    """
    source = _source(device)
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        **({} if source is None else {device.type: source.get_rng_state()}),
        "numpy": [name, torch.tensor(np.asarray(keys), dtype=torch.int64), *rest],
        "python": [version, list(numbers), gauss],
    }


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the global random states of this rank.

    Args:
        states: of :func:`current`, perhaps on another kind of device. A device whose state they lack keeps its own.
        device: on which this rank computes.
    """
    torch.set_rng_state(states["torch"])
    source = _source(device)
    if source is not None and device.type in states:
        source.set_rng_state(states[device.type])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))


def _source(device: torch.device) -> Any:
    """The random number generator of a device beside the CPU's; ``None``: there is none."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") else None


class LoaderSeedState:
    """The CPU random state of torch before a loader is first iterated over, which draws the seeds of its workers.

    Args:
        generator: the loader's own, if it has one.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._state = torch.get_rng_state()
        self._own = None if generator is None else (generator, generator.get_state())

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Iterate over the loader again in this block: it draws the same numbers. Then others go on where they were."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._state)
            if self._own is not None:
                generator, state = self._own
                generator.set_state(state)
            yield
