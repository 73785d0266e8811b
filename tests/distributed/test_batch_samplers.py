"""Batch samplers of the user: used as they are, every sample once, and shares that move although sizes are unknown."""

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from ranks import run
from tasks import FAST, EvaluatedNet, Net, dataset, error, parameters
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy

SAMPLES = 50


class Lists:
    """No subclass of torch's: lists of 3 and 4 indices by turns, and one of 5 at the end."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        for index in range(len(self)):
            first = 7 * (index // 2) + 3 * (index % 2)
            yield order[first : first + 3 + index % 2] if index < 13 else order[first:]

    def __len__(self) -> int:
        return 14


class Buckets(BatchSampler):
    """A subclass with a constructor of its own, which Lightning cannot call."""

    def __init__(self, borders: list[int]) -> None:
        self.borders = borders

    def __iter__(self) -> Iterator[list[int]]:
        for first, last in zip([0, *self.borders], [*self.borders, SAMPLES], strict=True):
            yield list(range(first, last))

    def __len__(self) -> int:
        return len(self.borders) + 1


class Own(BatchSampler):
    """A subclass that shards by itself."""

    def __init__(self, data: Any, rank: int, world: int) -> None:
        super().__init__(DistributedSampler(data, world, rank, shuffle=False), 5, drop_last=False)


def _sampler(kind: str, data: Any) -> Any:
    if kind == "lists":
        return Lists()
    if kind == "buckets":
        return Buckets([4, 9, 15, 22, 26, 33, 41, 44])
    if kind == "own shards":
        return Own(data, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    order = RandomSampler(data) if kind == "random" else SequentialSampler(data)
    return BatchSampler(order, 4, drop_last=False)


class Whole(Dataset):
    """Takes the indices of a batch, and makes all of it at once."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, indices: list[int]) -> Any:
        assert isinstance(indices, list)
        return [tensor[indices] for tensor in self.data.tensors]


#: Two forms of a DataLoader with a sampler of batches: the dataset makes samples, or whole batches.
FORMS = {
    "samples": lambda data, sampler, **options: DataLoader(data, batch_sampler=sampler, **options),
    "batches": lambda data, sampler, **options: DataLoader(Whole(data), sampler=sampler, batch_size=None, **options),
}


def _pairs(batches: list[list[int]]) -> list[list[int]]:
    return [list(itertools.chain(*batches[i : i + 2])) for i in range(0, len(batches), 2)]


class Indices(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.pairs: list[tuple[list[int], list[int]]] = []

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.pairs = list(zip(batch_indices[0], predictions, strict=True))


def _fit(kinds: list[str], form: str) -> dict[str, dict[str, Any]]:
    """One fit per kind, in one job."""
    torch.manual_seed(int(os.environ["RANK"]))
    return {kind: _fit_one(kind, form) for kind in kinds}


def _fit_one(kind: str, form: str, workers: int = 0) -> dict[str, Any]:
    data, module, writer = dataset(SAMPLES), EvaluatedNet(), Indices()
    sampler = _sampler(kind, data)
    loader = FORMS[form](data, sampler, num_workers=workers)
    strategy = HeteroDDPStrategy(balance="auto" if kind == "own shards" else [2.0, 1.0])
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, "callbacks": [writer]})
    trainer.fit(module, loader, DataLoader(data, batch_size=5))
    assert sampler in (loader.batch_sampler, loader.sampler)  # the user's loader stays as it was
    result = {"seen": module.seen, "parameters": parameters(module), "steps": trainer.global_step}
    if kind != "own shards":
        module.evaluated = []
        # Two lists at a time are a global batch: the last has one sample, too few for two ranks.
        batches = [[*range(47)], [47, 48], [49]] if kind == "lists" else _sampler(kind, data)
        evaluation = FORMS[form](data, batches)
        trainer.test(module, evaluation, verbose=False)
        result["tested"] = module.evaluated
        trainer.predict(module, evaluation)
        result["predicted"] = writer.pairs
    return result


@pytest.mark.parametrize("form", FORMS)
def test_any_batch_sampler_is_used_as_it_is(form: str) -> None:
    jobs = run(_fit, 2, ["lists", "buckets", "sequential", "own shards"], form)
    for kind in jobs[0]:
        results = [job[kind] for job in jobs]
        seen = [result["seen"] for result in results]
        assert Counter(i for batches in seen for batch in batches for i in batch) == Counter(
            dict.fromkeys(range(SAMPLES), 2)
        ), kind
        assert error(results[0]["parameters"], results[1]["parameters"]) <= 1e-12
        if kind == "own shards":
            assert all(i % 2 == rank for rank, batches in enumerate(seen) for batch in batches for i in batch)
            continue
        assert Counter(i for result in results for i in result["tested"]) == Counter(range(SAMPLES)), kind
        pairs = [pair for result in results for pair in result["predicted"]]
        assert all(indices == predicted for indices, predicted in pairs)
        assert Counter(i for indices, _ in pairs for i in indices) == Counter(range(SAMPLES)), kind
    # The sampler's own batches, two at a time, are the global ones.
    buckets = list(Buckets([4, 9, 15, 22, 26, 33, 41, 44]))
    together = [[*mine, *other] for mine, other in zip(*(job["buckets"]["seen"] for job in jobs), strict=True)]
    assert together == 2 * _pairs(buckets)
    assert jobs[0]["lists"]["steps"] == 2 * 7


@pytest.mark.parametrize(("form", "workers"), [("samples", 0), ("batches", 0), ("batches", 1)])
def test_the_weights_are_those_of_one_process_on_the_same_batches(form: str, workers: int) -> None:
    results = run(_fit_one, 2, "buckets", form, workers)
    buckets = list(Buckets([4, 9, 15, 22, 26, 33, 41, 44]))
    batches = _pairs(buckets)
    module = Net()
    loader = DataLoader(dataset(SAMPLES), batch_sampler=batches)
    pl.Trainer(devices=1, **{**FAST, "max_epochs": 2}).fit(module, loader)
    assert error(results[0]["parameters"], parameters(module)) <= 1e-10


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01 + 0.01 * self.global_rank * len(batch[0]))
        return super().training_step(batch, batch_idx)


def _as_ddp(strategy: str) -> list[list[int]]:
    data, module = dataset(48), Net()
    loader = FORMS["batches"](data, BatchSampler(SequentialSampler(data), 8, drop_last=False))
    pl.Trainer(strategy=strategy, devices=2, **{**FAST, "max_epochs": 1}).fit(module, loader)
    return module.seen


def test_batches_go_to_the_ranks_as_under_ddp() -> None:
    pl.seed_everything(0)
    ours, stock = run(_as_ddp, 2, "hetero_ddp"), run(_as_ddp, 2, "ddp")
    lists = [[*range(first, first + 8)] for first in range(0, 48, 8)]
    assert sorted(ours[0] + ours[1]) == sorted(stock[0] + stock[1]) == lists  # ddp in an order of its own
    assert ours == [lists[0::2], lists[1::2]]


def _measured() -> dict[str, Any]:
    module = Slow()
    with virtual_time(sys.modules[__name__]):
        strategy = HeteroDDPStrategy(rebalance_every_n_steps=2)
        trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 8})
        trainer.fit(module, DataLoader(dataset(SAMPLES), batch_sampler=Lists()))
    return {"seen": module.seen, "shares": strategy.accounting.planner.shares(strategy.accounting.step)}


def test_shares_move_although_sizes_are_unknown() -> None:
    fast, slow = run(_measured, 2)
    assert Counter(i for r in (fast, slow) for batch in r["seen"] for i in batch) == Counter(
        dict.fromkeys(range(SAMPLES), 8)
    )
    assert sum(fast["shares"]) == sum(slow["shares"]) in (7, 8)  # learned: 50 samples in 7 steps
    assert sum(map(len, fast["seen"])) > 2 * sum(map(len, slow["seen"]))
