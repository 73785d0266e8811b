"""Files in which ranks report their progress; without Lightning, so that torchft's environment can import it."""

import contextlib
import json
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Windows of text per rank and step at the beginning; the global batch stays what it is then.
BATCH = 2
#: Of AdamW.
RATE = 2e-3
#: Seconds after which a fault should have been noticed, and of the longest wait.
GRACE, TIMEOUT = 5.0, 60.0
#: Positions in the file of a process: samples that count (local steps do once they have been averaged), optimizer
#: steps, when the latest one ended, the longest stall (the time from the end of a step to the end of the next one, less
#: what the device takes for the samples of that one), the current rank, when the first step ended.
SAMPLES, STEPS, LATEST, PAUSE, RANK, FIRST = range(6)


@dataclass(frozen=True)
class Place:
    """Place and task of a process.

    Attributes:
        folder: to write to.
        number: of this process: those that are started again have new ones.
        strategy: its string.
        seed: of weights and data.
        steps: of the fit.
        step: seconds that a step takes while all ranks are there.
        save: seconds between two checkpoints.
        grace: the strategy's option.
        joins: whether processes that are started again join the running fit.
        variables: of its environment.
        space: network namespace, if it has one of its own.
        options: of the strategy, beside those that all have.
    """

    folder: str
    number: int
    strategy: str
    seed: int
    steps: int
    step: float
    save: float
    grace: float | str
    joins: bool
    variables: dict[str, str] = field(default_factory=dict)
    space: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def progress(folder: str, number: int) -> Any:
    """Progress of a process: numbers in a file, which stay when it is killed."""
    descriptor = os.open(Path(folder, f"progress{number}"), os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 6 * 8)
    numbers = memoryview(mmap.mmap(descriptor, 6 * 8)).cast("d")
    os.close(descriptor)
    return numbers


def ending(folder: str, number: int) -> Any:
    """Result of a process that has ended by itself; ``None`` if it has not."""
    path = Path(folder, f"end{number}")
    return json.loads(path.read_text()) if path.exists() else None


def write_ending(place: Place, result: dict[str, Any]) -> None:
    """Write down how a process has ended."""
    path = Path(place.folder, f"end{place.number}")
    with contextlib.suppress(OSError):  # the folder may be gone
        path.with_suffix(".new").write_text(json.dumps(result))
        path.with_suffix(".new").rename(path)
