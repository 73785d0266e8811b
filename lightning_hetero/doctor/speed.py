"""How fast a rank is on its own: forward, backward and an optimizer's step, without waiting for others."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_hetero.config.lightning_cli import lightning_cli
from lightning_hetero.errors import ConfigurationError, UnsupportedError
from lightning_hetero.workload.shares import Cost

#: Rounds into which the measurements of a rank are divided, to see how far they are apart.
ROUNDS = 5


class Speed(NamedTuple):
    """What a rank's steps have taken.

    Attributes:
        cost: fitted.
        rounds: seconds of a step on the given batch in each round, the median of it.
    """

    cost: Cost
    rounds: tuple[float, ...]

    @property
    def spread(self) -> float:
        """How far the rounds are apart, as a fraction of their median."""
        return (max(self.rounds) - min(self.rounds)) / median(self.rounds)


@dataclass
class Work:
    """What is measured.

    Attributes:
        name: for the report.
        module: the model.
        loss: of the model on a batch.
        batch: of ``samples`` samples.
        samples: in the batch.
    """

    name: str
    module: nn.Module
    loss: Callable[[Any], Tensor]
    batch: Any
    samples: int

    @property
    def size(self) -> int:
        """Bytes of the gradients, which are those of the trainable parameters."""
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad)


def built_in(samples: int) -> Work:
    """A perceptron of 1.9 million parameters on random numbers."""
    module = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return Work("a built-in perceptron", module, lambda x: module(x).square().mean(), torch.rand(samples, 784), samples)


def of_config(path: Path, prepare: bool, wait: Callable[[], object]) -> Work:
    """The model of a YAML file as for ``fit``, with the first batch of its training data.

    Args:
        path: the file.
        prepare: whether this rank prepares the data.
        wait: for those who do.

    Raises:
        SystemExit: the file cannot be used; the reason has been printed.
        UnsupportedError: a model with manual optimization; only a Trainer can take its steps.
        ConfigurationError: when a step is measured: `training_step` returned no loss.
    """
    cli = lightning_cli(["-c", str(path)], run=False, save_config_callback=None)
    module: LightningModule = cli.model
    if not module.automatic_optimization:
        raise UnsupportedError(f"-c {path}: {type(module).__name__} optimizes manually; measure the built-in model.")
    data = cli.datamodule if cli.datamodule is not None else module
    if prepare:
        data.prepare_data()
    wait()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    samples = extract_batch_size(batch)

    def loss(some: Any) -> Tensor:
        output = module.training_step(some, 0)
        value = output["loss"] if isinstance(output, dict) else output
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"-c {path}: {type(module).__name__}.training_step returned {value!r}. Return the loss, a tensor, or a "
                "dictionary with one under 'loss'; else measure the built-in model."
            )
        return value

    return Work(type(module).__name__, module, loss, batch, samples)


def measure(work: Work, device: torch.device, seconds: float = 2.0, least: int = 3) -> Speed:
    """Fit ``a + k n`` to steps on batches of the given size, half and a quarter of it.

    Args:
        work: a copy of the model is not taken: its weights stay, except for buffers that each forward pass changes.
        device: to measure on.
        seconds: for about how long.
        least: steps to take of each size, however long they take.
    """
    work.module.to(device).train()
    batch = move_data_to_device(work.batch, device)
    optimizer = torch.optim.SGD([p for p in work.module.parameters() if p.requires_grad], lr=0.0)

    def step(samples: int) -> None:
        def first(tensor: Tensor) -> Tensor:
            return tensor[:samples] if tensor.ndim and len(tensor) == work.samples else tensor

        optimizer.zero_grad()
        work.loss(apply_to_collection(batch, Tensor, first)).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # self.log has no Trainer here
        return fit(step, work.samples, seconds, least)


def fit(step: Callable[[int], None], samples: int, seconds: float, least: int) -> Speed:
    """Fit ``a + k n`` to the time of ``step(n)``, for several n up to ``samples``."""
    sizes = sorted({max(1, samples // part) for part in (1, 2, 4)})
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for n in sizes[-2:]:
        step(n)  # the first ones make what later ones find
    ends = time.perf_counter() + seconds
    while len(times[samples]) < least or time.perf_counter() < ends:
        for n in sizes:
            began = time.perf_counter()
            step(n)
            times[n].append(max(time.perf_counter() - began, 1e-9))
    whole = times[samples]
    rounds = min(ROUNDS, len(whole))
    cuts = [len(whole) * i // rounds for i in range(rounds + 1)]
    typical = [median(times[n]) for n in sizes]
    fixed = linear_regression(sizes, typical).intercept if len(sizes) > 1 else 0.0
    fixed = min(max(fixed, 0.0), 0.999 * typical[-1])
    cost = Cost(fixed, (typical[-1] - fixed) / samples)  # exact at the given size
    return Speed(cost, tuple(median(whole[begin:end]) for begin, end in pairwise(cuts)))
