"""Every kind of dataloader: each sample counts exactly once, and the weights are those of one process."""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from oracles import oracle
from ranks import run
from tasks import FAST, EvaluatedNet, Net, dataset, error, fit, parameters
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy

WORLD = 3
UNEVEN = [5.0, 1.0, 2.0]


def counts(results: list[dict[str, Any]], key: str = "seen") -> Counter:
    return Counter(i for result in results for batch in result[key] for i in batch)


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_every_index_once_per_epoch_while_shares_change(workers: int) -> None:
    # 96 samples in batches of 12: no padding batches, so that what ranks saw is exactly what counted.
    changes = {2: [4.0, 1.0, 1.0], 9: [1.0, 1.0, 4.0], 20: [1.0, 4.0, 1.0]}
    loader = {"num_workers": workers, "persistent_workers": workers > 0}
    results = run(fit, WORLD, Net, 12, 96, changes=changes, loader=loader)
    assert counts(results) == Counter(dict.fromkeys(range(96), 3))
    assert {len(result["seen"]) for result in results} == {3 * 8}
    assert len({len(batch) for batch in results[0]["seen"]}) > 1


def test_measured_shares_with_prefetching_workers() -> None:
    strategy = {"balance": "auto", "rebalance_every_n_steps": 2}
    loader = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    results = run(_slow_ranks, WORLD, strategy, loader)
    assert counts(results) == Counter(dict.fromkeys(range(96), 3))
    assert results[0]["shares"][0] > results[0]["shares"][2]  # rank 2 is made slower


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.004 * (1 + self.global_rank) * len(batch[0]))
        return super().training_step(batch, batch_idx)


def _slow_ranks(strategy: dict[str, Any], loader: dict[str, Any]) -> dict[str, Any]:
    with virtual_time(sys.modules[__name__]):
        return fit(Slow, 12, 96, strategy=strategy, loader=loader)


@pytest.mark.parametrize("limit", [{"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"overfit_batches": 2}])
def test_limited_batches(limit: dict[str, Any]) -> None:
    results = run(_limited, WORLD, limit)
    single = run(_limited, 1, limit)[0]
    steps = len(single["seen"])
    assert {len(result["seen"]) for result in results} == {steps}
    for step in range(steps):  # the same global batches as one rank, in the same order
        parts = [i for result in results for i in result["seen"][step]]
        assert sorted(parts) == sorted(single["seen"][step])
    for result in results:
        assert error(result["parameters"], single["parameters"]) <= 1e-10


def _limited(limit: dict[str, Any]) -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore", "You requested to overfit")  # Lightning's own, as with any strategy
    return fit(Net, 12, 96, max_epochs=2, **limit)


class Curriculum:
    """A sampler of the user's: its own order, some samples twice, and random."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(self.samples, (self.samples,)).tolist())


def _custom(kind: str) -> dict[str, Any]:
    data, module = dataset(90), Net()
    if kind == "weighted":
        loader = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 45 + [3.0] * 45, 90))
    elif kind == "curriculum":
        loader = DataLoader(data, batch_size=4, sampler=Curriculum(90))
    else:
        loader = DataLoader(data, batch_sampler=Pairs(RandomSampler(data), 4, False))
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 5)
    strategy = HeteroDDPStrategy(balance=UNEVEN if int(_env("WORLD_SIZE")) > 1 else [1.0])
    pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2}).fit(module, loader)
    return {"parameters": parameters(module), "seen": module.seen}


def _env(name: str) -> str:
    import os

    return os.environ[name]


class Pairs(BatchSampler):
    """A batch sampler of the user's: batches of alternating sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        while order:
            size = self.batch_size + (len(order) % 2)
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return sum(1 for _ in iter(self))


@pytest.mark.parametrize("kind", ["weighted", "curriculum", "batch sampler"])
def test_samplers_of_the_user(kind: str) -> None:
    results = run(_custom, WORLD, kind)
    assert len({len(result["seen"]) for result in results}) == 1
    assert error(results[1]["parameters"], results[0]["parameters"]) <= 1e-12
    total = sum(len(batch) for result in results for batch in result["seen"])
    assert 2 * 90 <= total <= 2 * 90 + WORLD * 2  # padding batches only in the tails
    if kind == "batch sampler":
        assert set(counts(results)) == set(range(90))
    else:
        single = run(_custom, 1, kind)[0]  # batches of 4, not 12: but the order must be the sampler's own
        ours = [i for step in zip(*(r["seen"] for r in results), strict=True) for part in step for i in part]
        theirs = [i for batch in single["seen"] for i in batch]
        assert ours[:84] == theirs[:84]


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


# -- several loaders at once ---------------------------------------------------------------------------------


class TwoSources(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        a, b = batch["a"], batch["b"]
        self.seen.append(a[3].tolist())
        loss = self.loss(a) if a is not None else 0.0
        return loss + 0.5 * self.loss(b) if b is not None else loss


def _combined(mode: str, sizes: tuple[int, int], batch_sizes: tuple[int, int], balance: Any) -> dict[str, Any]:
    module, strategy = TwoSources(), HeteroDDPStrategy(balance=balance)
    world = int(_env("WORLD_SIZE"))
    loaders = {
        name: DataLoader(dataset(n), batch_size=b * 3 // world, shuffle=True)
        for name, n, b in zip("ab", sizes, batch_sizes, strict=True)
    }
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2})
    trainer.fit(module, CombinedLoader(loaders, mode))
    return {"parameters": parameters(module), "seen": module.seen}


@pytest.mark.parametrize(
    ("mode", "sizes", "batch_sizes"),
    [
        ("max_size_cycle", (96, 96), (4, 4)),
        ("max_size_cycle", (96, 36), (4, 2)),  # the shorter one starts over
        ("min_size", (90, 48), (4, 2)),
        ("max_size", (60, 36), (4, 4)),
    ],
)
def test_combined_loaders(mode: str, sizes: tuple[int, int], batch_sizes: tuple[int, int]) -> None:
    single = run(_combined, 1, mode, sizes, batch_sizes, [1.0])[0]
    results = run(_combined, WORLD, mode, sizes, batch_sizes, UNEVEN)
    for result in results:
        assert error(result["parameters"], single["parameters"]) <= 1e-10
    assert counts(results) == counts([single])


# -- evaluation ----------------------------------------------------------------------------------------------


def _evaluate(samples: int, batch_size: int, balance: Any) -> dict[str, Any]:
    module = EvaluatedNet()
    strategy = HeteroDDPStrategy(balance=balance)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1, "num_sanity_val_steps": 0})
    loader = DataLoader(dataset(samples), batch_size=batch_size)
    trainer.fit(module, DataLoader(dataset(30), batch_size=4), loader)
    result = {"val": module.evaluated, "metrics": {k: v.item() for k, v in trainer.callback_metrics.items()}}
    module.evaluated = []
    result["metrics"] |= trainer.test(module, loader, verbose=False)[0]
    result["test"] = module.evaluated
    with torch.no_grad():
        result["truth"] = module.loss(dataset(samples)[:]).item()
    result["predict"] = [i for batch in trainer.predict(module, loader) for i in batch]
    return result


@pytest.mark.parametrize("balance", ["auto", UNEVEN, [1.0, 0.0, 1.0]])
@pytest.mark.parametrize(("samples", "batch_size"), [(101, 4), (7, 4), (10, 1), (12, 4)])
def test_evaluation_sees_every_sample_once(samples: int, batch_size: int, balance: Any) -> None:
    results = run(_evaluate, WORLD, samples, batch_size, balance)
    for stage in ("val", "test", "predict"):
        assert Counter(i for r in results for i in r[stage]) == Counter(range(samples)), stage
    for result in results:  # the mean over samples, however they were split
        assert result["metrics"]["val"] == pytest.approx(result["truth"], rel=1e-12)
        assert result["metrics"]["test"] == pytest.approx(result["truth"], rel=1e-12)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.pairs: list[tuple[list[int], list[int]]] = []

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.pairs = list(zip(batch_indices[0], predictions, strict=True))


def _predict() -> list[tuple[list[int], list[int]]]:
    writer = Writer()
    strategy = HeteroDDPStrategy(balance=UNEVEN)
    trainer = pl.Trainer(strategy=strategy, callbacks=[writer], **FAST)
    trainer.predict(EvaluatedNet(), DataLoader(dataset(50), batch_size=4))
    return writer.pairs


def test_prediction_writers_get_the_right_indices() -> None:
    pairs = [pair for result in run(_predict, WORLD) for pair in result]
    assert all(indices == predicted for indices, predicted in pairs)
    assert Counter(i for indices, _ in pairs for i in indices) == Counter(range(50))


class Normed(EvaluatedNet):
    """BatchNorm: its statistics must be the same on all ranks when they validate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.used: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.used.append(self.net[1].running_mean.sum().item())
        super().validation_step(batch, batch_idx)


def _normed() -> list[float]:
    module, strategy = Normed(), HeteroDDPStrategy(balance=UNEVEN)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, "num_sanity_val_steps": 0})
    trainer.fit(module, DataLoader(dataset(96), batch_size=8), DataLoader(dataset(101), batch_size=4))
    return module.used


def test_all_ranks_validate_with_the_same_buffers() -> None:
    results = run(_normed, WORLD)
    assert results[0] == results[1] == results[2]
    assert results[0][0] != results[0][-1]  # or nothing was learned between


def test_oracle_differs_from_an_untrained_model() -> None:
    # The control of this file's comparisons: they tell weights apart.
    assert error(parameters(oracle(Net, 12, 96)), parameters(partial(Net)())) > 1e-2
