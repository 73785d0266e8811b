"""Data that users have split between ranks: their samplers, their shards, their streams."""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, Net, dataset, error, parameters
from test_data import WORLD, _env, counts
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
)
from virtual_time import virtual_time

from lightning_hetero import DASOStrategy, HeteroDDPStrategy


def _sharded_by_user(how: str) -> dict[str, Any]:
    data, module = dataset(93), Net()
    rank, world = int(_env("RANK")), int(_env("WORLD_SIZE"))
    trainer = {**FAST, "max_epochs": 2}
    if how == "distributed sampler":
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank, shuffle=False))
    else:  # parts of 9, 31 and 53 samples: the shorter ones repeat with weight 0
        edges = [0, 9, 40, 93]
        part = Subset(data, range(edges[rank], edges[rank + 1]))
        loader = DataLoader(part, batch_size=4)
        trainer["use_distributed_sampler"] = False
    strategy = HeteroDDPStrategy()
    pl.Trainer(strategy=strategy, **trainer).fit(module, loader)
    return {"parameters": parameters(module), "seen": module.seen}


def test_own_distributed_sampler() -> None:
    results = run(_sharded_by_user, WORLD, "distributed sampler")
    assert counts(results) == Counter(dict.fromkeys(range(93), 2))
    assert error(results[0]["parameters"], results[2]["parameters"]) <= 1e-12


def test_own_shards_of_unequal_size() -> None:
    results = run(_sharded_by_user, WORLD, "subsets")
    assert {len(result["seen"]) for result in results} == {2 * 14}
    # Against one process on the same global batches, which get smaller as shards end.
    edges, data, module = [0, 9, 40, 93], dataset(93), Net()
    batches = [[i for a, b in itertools.pairwise(edges) for i in range(a, b)[4 * s : 4 * s + 4]] for s in range(14)]
    loader = DataLoader(data, batch_sampler=batches)
    pl.Trainer(devices=1, **{**FAST, "max_epochs": 2}).fit(module, loader)
    for result in results:
        assert error(result["parameters"], parameters(module)) <= 1e-10


class Shard(IterableDataset):
    """Every third sample; each rank's shard has its own length."""

    def __init__(self, samples: int, endless: bool = False) -> None:
        self.data, self.samples, self.endless = dataset(samples), samples, endless

    def __iter__(self) -> Iterator[Any]:
        rank, world = int(_env("RANK")), int(_env("WORLD_SIZE"))
        info = torch.utils.data.get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        while True:
            for i in range(rank * workers + worker, self.samples, world * workers):
                if rank < 2 or i % 2 == 0 or self.endless:  # rank 2 has about half as many
                    yield self.data[i]
            if not self.endless:
                return


def _iterable(endless: bool, workers: int, balance: Any, **options: Any) -> dict[str, Any]:
    module = Net()
    loader = DataLoader(Shard(60, endless), batch_size=4, num_workers=workers)
    strategy = HeteroDDPStrategy(balance=balance, **options)
    limits = {"max_steps": 12} if endless else {"max_epochs": 2}
    pl.Trainer(strategy=strategy, **{**FAST, **limits}).fit(module, loader)
    assert loader.batch_sampler.batch_size == 4  # the user's loader stays as it was
    return {"parameters": parameters(module), "seen": module.seen}


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_unequal_length(workers: int) -> None:
    results = run(_iterable, WORLD, False, workers, "off")
    assert len({len(result["seen"]) for result in results}) == 1
    expected = {i for i in range(60) if i % 3 < 2 or i % 2 == 0} if workers == 0 else None
    if expected is not None:
        assert set(counts(results)) == expected
        assert set(counts(results[:2]).values()) == {2}  # rank 2 repeats its last batch with weight 0
    assert error(results[0]["parameters"], results[2]["parameters"]) <= 1e-12


def test_streams_weigh_by_samples() -> None:
    results = run(_iterable, WORLD, False, 0, "off")
    data, module = dataset(60), Net()
    shards = [[i for i in range(r, 60, 3) if r < 2 or i % 2 == 0] for r in range(3)]
    batches = [[i for shard in shards for i in shard[4 * s : 4 * s + 4]] for s in range(5)]
    pl.Trainer(devices=1, **{**FAST, "max_epochs": 2}).fit(module, DataLoader(data, batch_sampler=batches))
    for result in results:
        assert error(result["parameters"], parameters(module)) <= 1e-10


def test_endless_streams_take_measured_shares() -> None:
    results = run(_iterable, WORLD, True, 0, "auto", balance_iterable=True)
    assert {len(result["seen"]) for result in results} == {12}
    for step in range(12):
        assert sum(len(result["seen"][step]) for result in results) == 12


class Half(IterableDataset):
    """Every rank's half of the samples."""

    def __init__(self, samples: int) -> None:
        self.data = dataset(samples)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(int(_env("RANK")), len(self.data), 2))


class Scheduled(Net):
    """Takes steps in a schedule; rank 1 is much slower."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01 + 0.01 * self.global_rank * len(batch[0]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _unlike(batch_size: int, **options: Any) -> dict[str, Any]:
    with virtual_time(sys.modules[__name__]):
        module, strategy = Scheduled(), HeteroDDPStrategy(rebalance_every_n_steps=2, **options)
        trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2})
        trainer.fit(module, DataLoader(Half(208), batch_size=batch_size))
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        return {"seen": module.seen, "steps": trainer.global_step, "lr": lr}


def test_shares_of_shards_are_even_and_epochs_as_long_as_with_ddp() -> None:
    for batch_size, options in ((4, {}), (2, {"global_batch_size": 8})):
        results = run(_unlike, 2, batch_size, **options)
        assert [result["steps"] for result in results] == [2 * 26] * 2
        assert {len(batch) for result in results for batch in result["seen"]} == {4}
        assert results[0]["lr"] == pytest.approx(0.05 * 0.1**5)


def test_shares_over_shards_move_where_the_user_wants_it() -> None:
    fast, slow = run(_unlike, 2, 4, balance_iterable=True)
    assert max(map(len, fast["seen"])) > 4 > min(map(len, slow["seen"]))


def _stream_alone() -> torch.Tensor:
    module = Net()
    strategy = DASOStrategy(balance="off")
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1, "limit_train_batches": 4})
    trainer.fit(module, DataLoader(Shard(60), batch_size=4))
    return parameters(module)


def test_one_node_takes_streams_too() -> None:
    first, second = run(_stream_alone, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, parameters(Net()))
