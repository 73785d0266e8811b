"""A stream that all ranks read alike: each sample once, shares that move, and a resumed run at the right sample."""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, Net, Save, dataset, error, parameters
from torch.utils.data import DataLoader, IterableDataset
from virtual_time import virtual_time

from lightning_hetero import (
    HeteroDDPStrategy,
    NodeAverageStrategy,
    SharedStream,
)

SAMPLES, BATCH = 50, 4  # of 2 ranks: six batches of 8 samples, and one of 2
KINDS = [(HeteroDDPStrategy, {}), (NodeAverageStrategy, {"ranks_per_node": 1, "every_n_steps": 2})]
NAMES = [kind.__name__ for kind, _ in KINDS]


class Plain(IterableDataset):
    """In another order in each epoch."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.data, self.epoch = dataset(samples), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in self.order())


class Jumping(Plain):
    def iter_from(self, index: int) -> Iterator[Any]:
        return (self.data[i] for i in self.order()[index:])


class Sized(Plain):
    def __len__(self) -> int:
        return len(self.data)


def orders(epochs: int) -> list[list[int]]:
    """The global batches of all epochs."""
    data, batches = Plain(), []
    for epoch in range(epochs):
        data.set_epoch(epoch)
        order = iter(data.order())
        while batch := list(islice(order, 2 * BATCH)):
            batches.append(batch)
    return batches


def _fit(kind: Any, options: Any, data: Any, workers: int = 0, path: Any = None, **more: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # by Lightning, always
    module = Net()
    loader = DataLoader(SharedStream(data), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)
    trainer = pl.Trainer(strategy=kind(**{"balance": [3, 1], **options}), **{**FAST, "max_epochs": 2, **more})
    trainer.fit(module, loader, ckpt_path=path)
    return {"seen": module.seen, "parameters": parameters(module), "steps": trainer.global_step}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Plain, Jumping, Sized])
def test_the_global_batches_are_those_of_one_process(data: Any, workers: int) -> None:
    results = run(_fit, 2, HeteroDDPStrategy, {}, data(), workers)
    module = Net()
    loader = DataLoader(dataset(SAMPLES), batch_sampler=orders(2))
    trainer = pl.Trainer(devices=1, **{**FAST, "max_epochs": 1})
    trainer.fit(module, loader)
    for step, batch in enumerate(orders(2)):
        seen = [i for result in results for i in result["seen"][step]]
        assert Counter(seen) == Counter(batch) if len(batch) > 2 else set(seen) == set(batch)
    assert {len(batch) for batch in results[0]["seen"][:6]} == {6}  # three quarters of 8
    for result in results:
        assert error(result["parameters"], parameters(module)) <= 1e-10


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01 + 0.01 * (1 + 3 * self.global_rank) * len(batch[0]))
        return super().training_step(batch, batch_idx)


def _measured() -> dict[str, Any]:
    module = Slow()
    with virtual_time(sys.modules[__name__]):
        strategy = HeteroDDPStrategy(rebalance_every_n_steps=2)
        trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1})
        trainer.fit(module, DataLoader(SharedStream(Plain(640)), batch_size=8))
    return {"seen": module.seen}


def test_shares_follow_measured_speeds() -> None:
    results = run(_measured, 2)
    fast, slow = ([len(batch) for batch in result["seen"]] for result in results)
    assert {a + b for a, b in zip(fast, slow, strict=True)} == {16}
    assert (fast[0], slow[0]) == (8, 8)
    assert 12 <= fast[-1] <= 14  # 13 and 3 by hand
    assert Counter(i for result in results for batch in result["seen"] for i in batch) == Counter(range(640))


# -- resuming ----------------------------------------------------------------------------------------------------


def _resumed(
    kind: Any, options: Any, folder: Any, data: Any, workers: int, steps: int = 10
) -> tuple[dict[str, Any], dict[str, Any]]:
    path = f"{folder}/{kind.__name__}.ckpt"
    whole = _fit(kind, options, data(), workers, callbacks=[Save(path, steps, False)])
    return whole, _fit(kind, options, data(), workers, path=path)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("data", [Plain, Sized])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=NAMES)
def test_a_run_that_stops_with_the_last_batch_of_an_epoch_goes_on_with_the_next_epoch(
    kind: Any, options: Any, data: Any, tmp_path: Any
) -> None:
    for whole, rest in run(_resumed, 2, kind, options, tmp_path, data, 0, 7):
        assert rest["seen"] == whole["seen"][7:]
        assert torch.equal(rest["parameters"], whole["parameters"])


def test_and_with_workers_and_jumps(tmp_path: Any) -> None:
    for whole, rest in run(_resumed, 2, HeteroDDPStrategy, {}, tmp_path, Jumping, 2):
        assert rest["seen"] == whole["seen"][10:]
        assert torch.equal(rest["parameters"], whole["parameters"])


# -- elsewhere, and what cannot be -------------------------------------------------------------------------------


def _under_ddp(workers: int) -> list[int]:
    module = Net()
    trainer = pl.Trainer(strategy="ddp", devices=2, **{**FAST, "max_epochs": 1})
    trainer.fit(module, DataLoader(SharedStream(Plain(48)), batch_size=BATCH, num_workers=workers))
    return [i for batch in module.seen for i in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_under_ddp_ranks_take_turns(workers: int) -> None:
    first, second = run(_under_ddp, 2, workers)
    assert len(first) == len(second) == 24
    assert Counter(first + second) == Counter(range(48))
