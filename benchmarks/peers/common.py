"""Common parts of all peers: the task, the end of a run, the record of a fit, the test of weights.

Needs torch and NumPy only, so that each peer can have an environment of its own.
"""

import mmap
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import network
import torch
from text import gpt, loss_of, windows
from torch import nn

Weights = dict[int, torch.Tensor]
LAST = -1  # the key of the weights that a fit leaves


@dataclass(frozen=True)
class Task:
    """Task of a fit, and its length.

    Attributes:
        steps: of each rank, at most.
        batch: samples per rank and step.
        costs: ``(a, k)`` of each rank: a step of ``n`` samples takes its device ``a + k * n`` seconds at least.
        seed: of the first weights and of the data's order.
        limit: seconds after which a fit ends.
        every: steps between two copies of the weights, to be tested later.
    """

    steps: int
    batch: int
    costs: list[list[float]]
    seed: int
    limit: float
    every: int = 16


class Board:
    """Board on which ranks post their steps, and rank 0 the last one: a file, so that no link carries it.

    Args:
        file: the same for all ranks, and not used by another fit before.
        task: says how many steps, and how long.
        together: all ranks end at the same step; else each one when its own time is up.
    """

    MARGIN = 2  # steps from the foremost rank's to the last one: nobody shall have begun it already

    def __init__(self, file: Path, task: Task, together: bool = True) -> None:
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._task, self._together = task, together
        self._began: float | None = None
        size = 8 * (self._world + 1)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, size)
        self._slots = memoryview(mmap.mmap(descriptor, size)).cast("q")
        os.close(descriptor)

    def go_on(self, step: int) -> bool:
        """Whether to take a step, counted from 0; all before it are done."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        late = now - self._began >= self._task.limit
        if not self._together:
            return step < self._task.steps and not late
        self._slots[self._rank] = step
        if late and self._rank == 0 and not self._slots[self._world]:
            self._slots[self._world] = max(self._slots[: self._world].tolist()) + self.MARGIN
        return step < min(self._task.steps, self._slots[self._world] or self._task.steps)


class Record:
    """Record of a fit, on one rank.

    Args:
        every: steps between two copies of the weights; they are taken while the device would compute.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.figures: dict[str, list[Any]] = {"times": [], "losses": [], "sent": [], "samples": []}
        self.weights: Weights = {}

    def begin(self, net: nn.Module, samples: int) -> None:
        """A step begins."""
        step = len(self.figures["samples"])
        self.times_and_bytes()
        self.figures["samples"].append(samples)
        if step % self.every == 0:
            self.weights[step] = flat(net)

    def loss(self, loss: torch.Tensor) -> None:
        """The step's loss."""
        self.figures["losses"].append(loss.item())

    def times_and_bytes(self) -> None:
        """The time, and what the node has sent by now; also once after the last step."""
        self.figures["times"].append(time.perf_counter())  # one clock for all processes of the machine
        self.figures["sent"].append(network.bytes_sent())

    def leave(self, net: nn.Module, folder: Path) -> None:
        """Write the weights down; those of now are what the fit leaves."""
        self.weights[LAST] = flat(net)
        torch.save(self.weights, folder / f"weights-{os.environ['RANK']}.pt")


def flat(net: nn.Module) -> torch.Tensor:
    """A copy of all parameters."""
    with torch.no_grad():
        return nn.utils.parameters_to_vector(net.parameters())


def tested(folder: Path, world: int) -> dict[str, Any]:
    """The loss on text that nobody trains on: of the mean of all ranks' weights, and of rank 0's own, by steps."""
    files = [folder / f"weights-{rank}.pt" for rank in range(world)]
    ranks: list[Weights] = [torch.load(file) for file in files]
    net, (_, text) = gpt(), windows()

    def loss(weights: torch.Tensor) -> float:
        nn.utils.vector_to_parameters(weights, net.parameters())
        with torch.no_grad():
            return loss_of(net, text).item()

    steps = set.intersection(*(set(rank) for rank in ranks))
    course = {step: (loss(torch.stack([rank[step] for rank in ranks]).mean(0)), loss(ranks[0][step])) for step in steps}
    for file in files:
        file.unlink()
    left = course.pop(LAST)
    return {"course": sorted(course.items()), "left": left}
