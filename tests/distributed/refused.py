"""Models, data and settings that strategies refuse, for the table of ``test_refusals``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from tasks import GanLike, Net, TokenNet, dataset, rank
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset
from torchmetrics import MeanMetric

from lightning_hetero import Averager, SharedStream, StepContext, strategy_for
from lightning_hetero.algorithms.easgd_async import AsyncElasticAverager
from lightning_hetero.strategies.replica import ReplicaStrategy, with_options_of

HEAVY = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


# -- data ----------------------------------------------------------------------------------------------------


class Costly(Dataset):
    """96 samples with costs."""

    def __init__(self, **costs: Any) -> None:
        self.data = dataset(96)
        vars(self).update(costs)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def by_rank() -> Costly:
    return Costly(sample_cost=lambda index: 1 + index * (rank() + 1))


# -- models --------------------------------------------------------------------------------------------------


class Optimized(Net):
    """Trains with an optimizer of a given kind."""

    def __init__(self, make: Callable[..., Any] = HEAVY) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Twice(torch.optim.SGD):
    """Calls its closure twice in a step, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class TwoLoaders(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch["a"]) + self.loss(batch["b"])


class FetchesItself(Net):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return self.loss(batch)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


class Synced(Net):
    """Has PyTorch's own layer, which needs GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.SyncBatchNorm(16).double())


class TrainsItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SyncedMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric(dist_sync_on_step=True)


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.all_gather(batch[0].sum())
        return super().training_step(batch, batch_idx)


class Reduces(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1))
        return super().training_step(batch, batch_idx)


class Nothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        return None


class Whole(Dataset):
    """Makes whole batches of lists of indices."""

    def __len__(self) -> int:
        return 96

    def __getitems__(self, indices: list[int]) -> dict[str, list[int]]:
        return {"samples": indices}


class FailsAlone(Net):
    """Asks for the other ranks on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if rank() == 1:
            dist.all_reduce(torch.zeros(1))
        return super().training_step(batch, batch_idx)


class BadWeight(TokenNet):
    def batch_weight(self, batch: Any) -> float:
        return -1.0 if self.global_rank == 1 else 1.0


class ByRank(Net):
    """Its width depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        width = 16 + 4 * rank()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)).double()


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex128))


class LateBackward(GanLike):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.net(batch[0]).mean())


class Backboned(Net):
    """The first layer is a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Logs(Net):
    """Logs a number in each step of an evaluation, or gathers one."""

    def __init__(self, **log: Any) -> None:
        super().__init__()
        self.log_options, self.steps = {"sync_dist": True, **log}, 0

    def evaluate(self, batch: Any) -> None:
        self.steps += 1
        if self.log_options.get("gather"):
            self.all_gather(batch[0][:1])
        else:
            self.log("number", batch[3].double().mean(), **self.log_options)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        self.steps += 1
        return batch[3].tolist()


# -- what becomes trainable, or frozen -----------------------------------------------------------------------


class OnOneRank(pl.Callback):
    """Freezes the first layer on the last rank only."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.current_epoch == 0 or trainer.global_rank == 0)


class InMidEpoch(pl.Callback):
    """Freezes the first layer after some steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.global_step < 5)


@dataclass
class OwnAverager(Averager):
    """Has vectors without a role."""

    def prepare(self) -> None:
        self.velocity = [torch.zeros_like(vector) for vector in self.reference]

    def due(self, context: StepContext) -> bool:
        return context.step % 2 == 0


OwnStrategy = strategy_for(OwnAverager, "of_the_table")


@dataclass
class Unlocked(AsyncElasticAverager):
    """Asks for a center without a lock, wherever it lives."""

    locked = False


@with_options_of(Unlocked, replica="rank")
class UnlockedStrategy(ReplicaStrategy):
    """The strategy of that averager."""


# -- data ----------------------------------------------------------------------------------------------------


class Rows(IterableDataset):
    """Batches of strings, of unknown size."""

    def __iter__(self) -> Iterator[str]:
        yield from ("text" for _ in range(8))


class Stream(IterableDataset):
    """Some samples; by default this rank's half."""

    def __init__(self, samples: range | None = None) -> None:
        self.data, self.samples = dataset(), range(rank(), 96, 2) if samples is None else samples

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in self.samples)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


def on_rank_1(kind: type[Stream]) -> Stream:
    """Nothing on rank 0."""
    return kind(range(12 * rank()))


def parts(kind: str, sizes: list[int]) -> DataLoader:
    """Data with so many samples on each rank, as a "stream" or "sized"."""
    samples = range(50 * rank(), 50 * rank() + sizes[rank()])
    return DataLoader(Stream(samples) if kind == "stream" else Subset(dataset(), samples), batch_size=4)


def shared(samples: int = 96) -> SharedStream:
    return SharedStream(Stream(range(samples)))


class Unending:
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0, 1]


def own_batches() -> DataLoader:
    return DataLoader(dataset(96), batch_sampler=[[0, 1], [2, 3, 4], [5, 6]])


def own_sampler() -> DataLoader:
    return DataLoader(dataset(96), batch_size=4, sampler=DistributedSampler(dataset(96), 2, rank()))


def two_streams() -> dict[str, DataLoader]:
    return {"a": DataLoader(Stream(), batch_size=8), "b": DataLoader(Stream(), batch_size=4)}


def two(first: Any, second: Any, size: int) -> dict[str, DataLoader]:
    return {"a": DataLoader(first, batch_size=size), "b": DataLoader(second, batch_size=size)}


# -- settings of the Trainer ---------------------------------------------------------------------------------


def settings_of_rank() -> dict[str, Any]:
    """As when one rank is on a CPU, where 16-mixed silently becomes bf16-mixed."""
    return {"precision": ["32-true", "bf16-mixed"][rank()], "accumulate_grad_batches": 1 + rank()}
