"""What `loss_by_bytes.py` trains: two overlaid digits to be read, or text to be continued; and bytes by theory."""

import math
import sys
from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_hetero.comm.compression import bytes_sent
from lightning_hetero.comm.gradients import rank_of

sys.path[:0] = [str(Path(__file__).parent / "cluster"), str(Path(__file__).parents[1] / "examples")]


class Task(pl.LightningModule):
    """Trains with a learning rate that rises and falls once, and notes what has been sent.

    Attributes:
        batch: samples per rank and step.
        rate: the highest learning rate.
        unit: of the loss.
        sent: bytes that this replica has sent, without the last average when the fit ends.
    """

    batch: int
    rate: float
    unit: str
    sent: int = 0

    @abstractmethod
    def samples(self, training: bool) -> Dataset:
        """To train on, or to test on."""

    @abstractmethod
    def loss(self, batch: Any) -> torch.Tensor:
        """Of a batch."""

    def loader(self, steps: int, ranks: int) -> DataLoader:
        """An epoch of so many steps."""
        data: Any = self.samples(True)
        order = torch.arange(steps * self.batch * ranks) % len(data)
        self.steps = steps
        return DataLoader(Subset(data, order.tolist()), batch_size=self.batch, shuffle=True)

    @torch.no_grad()
    def tested(self) -> float:
        """The loss on test data."""
        [batch] = DataLoader(self.samples(False), batch_size=2048)
        return self.loss(batch).item()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        traffic = getattr(self.trainer.strategy, "traffic", None)
        self.sent = traffic.bytes if traffic else 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.rate, total_steps=self.steps + 1, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Overlaid(Task):
    """Reads two digits on top of each other: 38 thousand parameters."""

    batch, rate, unit = 16, 2e-3, "test loss, nats"

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 100)
        self.net = nn.Sequential(nn.Flatten(), *layers)

    def samples(self, training: bool) -> Dataset:
        from learn import overlaid

        return overlaid(training, 8192 if training else 2048)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Text(Task):
    """The small GPT of `examples/daso_char_gpt.py` on Python's source code: 130 thousand parameters."""

    batch, rate, unit = 4, 3e-3, "bits per character of test text"
    characters, context = 3_000_000, 64

    def __init__(self) -> None:
        super().__init__()
        from daso_char_gpt import CharGPT

        self.net = CharGPT(self.context, width=64, layers=2, lr=self.rate)

    def samples(self, training: bool) -> Dataset:
        windows = text(self.characters).unfold(0, self.context + 1, self.context)
        return TensorDataset(windows[:-1024] if training else windows[-1024:])

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net.bits(batch)


@cache
def text(characters: int) -> torch.Tensor:
    """Codes of the first characters of Python's source code."""
    from daso_char_gpt import encode, source_code

    return encode(source_code(characters))


TASKS: dict[str, type[Task]] = {"digits": Overlaid, "text": Text}


def by_theory(name: str, wire: str, module: nn.Module, ranks: int) -> float:
    """Bytes that a rank sends in a step for the gradients of all ranks, which nobody counts; else 0.

    Args:
        name: of the strategy.
        wire: of its gradients.
        module: the model.
        ranks: how many.
    """
    if name not in ("ddp", "hetero_ddp"):
        return 0.0
    rank = rank_of(wire)
    shapes = [p.shape for p in module.parameters()]
    if rank is None:
        return float(bytes_sent(sum(map(math.prod, shapes)), 4, wire, ranks))
    values = 0
    for shape in shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        least = min(rank, rows, columns) * (rows + columns)
        values += min(least, rows * columns) if len(shape) > 1 else columns
    return float(bytes_sent(values, 4, "fp32", ranks))
