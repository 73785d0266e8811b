"""Batches of any type, from data that each rank has for itself: weighed by their samples, or as `ddp` weighs them."""

import itertools
import warnings
from collections import UserDict, UserList
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from ranks import attempt, run
from tasks import error, parameters, rank, train
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy
from lightning_hetero.errors import DataError

WORLD, STEPS = 2, 5


@dataclass
class Points:
    x: Tensor
    name: str = "points"


class Opaque:
    """Holds its tensor in an attribute that nobody looks at."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *args: Any, **kwargs: Any) -> "Opaque":
        return Opaque(self.x.to(*args, **kwargs))


def firsts(rows: list[Tensor]) -> Tensor:
    return torch.stack([row[0] for row in rows])


COLLATE: dict[str, Callable[[list[Tensor]], Any]] = {
    "a mapping": lambda rows: UserDict(x=firsts(rows)),
    "a dataclass": lambda rows: Points(firsts(rows)),
    "nested": lambda rows: UserDict(inner=[Points(firsts(rows))], scale=torch.tensor(2.0)),
    "a sequence": lambda rows: UserList([firsts(rows), "names"]),
    "ragged": lambda rows: {"x": torch.cat(rows), "lengths": torch.tensor([len(row) for row in rows])},
    "tensors": lambda rows: rows,
    "opaque": lambda rows: Opaque(torch.cat(rows)),
}


def tensor_of(batch: Any) -> Tensor:
    if isinstance(batch, UserDict):
        return batch["x"] if "x" in batch else tensor_of(batch["inner"][0])
    if isinstance(batch, dict):
        return batch["x"]
    if isinstance(batch, UserList):
        return batch[0]
    return torch.cat(batch) if isinstance(batch, list) else batch.x


def samples() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(2 + i % 3, 2, generator=draw, dtype=torch.float64) for i in range(80)]


class Shard(IterableDataset):
    """Samples of two to four rows, which differ between ranks."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from samples()[rank() :: WORLD]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(2, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(tensor_of(batch)) - 1.0).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WeighedNet(Net):
    def batch_weight(self, batch: Any) -> int:
        return len(tensor_of(batch))


def _fit(strategy: Any, collate: str, sizes: tuple[int, ...], module: Any = Net) -> tuple[Tensor, list[str], int]:
    net = module()
    loader = DataLoader(Shard(), batch_size=sizes[rank()], collate_fn=COLLATE[collate])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = train(net, strategy(), loader, devices=WORLD, max_steps=STEPS, max_epochs=-1)
    messages = [str(w.message) for w in caught if "batch_weight" in str(w.message)]
    return parameters(net), messages, trainer.global_step


def _fits(*cases: Any) -> list[Any]:
    return [_fit(*case) for case in cases]


def whole(collate: str, sizes: tuple[int, ...]) -> Tensor:
    """Train in one process on the samples of all ranks."""
    rows, net = samples(), Net()
    optimizer = net.configure_optimizers()
    for step in range(STEPS):
        parts = (rows[first::WORLD][step * n : (step + 1) * n] for first, n in enumerate(sizes))
        optimizer.zero_grad()
        net.training_step(COLLATE[collate](list(itertools.chain(*parts))), step).backward()
        optimizer.step()
    return parameters(net)


def test_a_batch_counts_by_its_tensors_wherever_they_are_or_by_the_weight_that_is_given() -> None:
    cases: list[Any] = [(collate, Net) for collate in ("a mapping", "a dataclass", "nested", "a sequence")]
    cases += [("ragged", WeighedNet), ("tensors", WeighedNet)]
    ranks = run(_fits, WORLD, *((HeteroDDPStrategy, collate, (6, 2), module) for collate, module in cases))
    for (collate, _), *results in zip(cases, *ranks, strict=True):
        truth = whole(collate, (6, 2))
        for own, messages, _ in results:
            assert error(own, truth) <= 1e-12, collate
            assert not messages


def test_a_batch_of_unknown_size_counts_as_under_ddp() -> None:
    cases = [(collate, (4, 4)) for collate in ("ragged", "tensors", "opaque")]
    truths = run(_fits, WORLD, *((DDPStrategy, *case) for case in cases))[0]
    ranks = run(_fits, WORLD, *((HeteroDDPStrategy, *case) for case in cases), (DiLoCoStrategy, "ragged", (4, 4)))
    assert [results[-1][2] for results in ranks] == [STEPS] * WORLD  # replicas
    for case, (truth, *_), *results in zip(cases, truths, *(results[:-1] for results in ranks), strict=True):
        for own, _, steps in results:
            assert error(own, truth) <= 1e-12, case
            assert steps == STEPS
        assert [len(messages) for _, messages, _ in results] == [1, 0]
        assert "count the same" in results[0][1][0]
        assert case[0] != "tensors" or "first dimensions [2, 3, 4]" in results[0][1][0]


def test_ranks_that_have_come_to_their_end_do_not_count_where_sizes_are_unknown() -> None:
    """Rank 0 has three batches and rank 1 has one: the later steps are rank 0's alone."""
    lone = run(_ends, WORLD)
    assert error(lone[0][0], lone[1][0]) <= 1e-15
    assert [steps for _, steps in lone] == [3, 3]
    assert error(lone[0][0], _ends_alone()) <= 1e-12


class Short(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from SHORT[rank()]


_DRAW = torch.Generator().manual_seed(4)
SHORT = [[torch.randn(1 + i % 2, 2, generator=_DRAW, dtype=torch.float64) for i in range(n)] for n in (6, 2)]


def _ends() -> tuple[Tensor, int]:
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = train(net, HeteroDDPStrategy(), DataLoader(Short(), batch_size=2, collate_fn=COLLATE["ragged"]))
    return parameters(net), trainer.global_step


def _ends_alone() -> Tensor:
    net = Net()
    optimizer = net.configure_optimizers()
    for step in range(3):
        parts = [part[2 * step : 2 * step + 2] for part in SHORT]
        losses = [net.training_step(COLLATE["ragged"](part), step) for part in parts if part]
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    return parameters(net)


@pytest.mark.parametrize("options", [{}, {"balance": [3.0, 1.0], "global_batch_size": 8}])
def test_batches_of_unknown_and_unequal_size_are_refused(options: dict[str, Any]) -> None:
    sizes = (4, 4) if options else (6, 2)
    for outcome in attempt(_fit, WORLD, partial(HeteroDDPStrategy, **options), "ragged", sizes):
        assert isinstance(outcome.error, DataError), outcome.trace
        assert "batch_weight" in str(outcome.error)
