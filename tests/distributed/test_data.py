"""Every kind of dataloader: each sample counts exactly once, and the weights are those of one process."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from ranks import run
from tasks import FAST, Net, dataset, error, fit, parameters
from torch.utils.data import (
    DataLoader,
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
    else:
        loader = DataLoader(data, batch_size=4, sampler=Curriculum(90))
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 5)
    strategy = HeteroDDPStrategy(balance=UNEVEN if int(_env("WORLD_SIZE")) > 1 else [1.0])
    pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2}).fit(module, loader)
    return {"parameters": parameters(module), "seen": module.seen}


def _env(name: str) -> str:
    import os

    return os.environ[name]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", ["weighted", "curriculum"])
def test_samplers_of_the_user(kind: str) -> None:
    results = run(_custom, WORLD, kind)
    assert len({len(result["seen"]) for result in results}) == 1
    assert error(results[1]["parameters"], results[0]["parameters"]) <= 1e-12
    total = sum(len(batch) for result in results for batch in result["seen"])
    assert 2 * 90 <= total <= 2 * 90 + WORLD * 2  # padding batches only in the tails
    single = run(_custom, 1, kind)[0]  # batches of 4, not 12: but the order must be the sampler's own
    ours = [i for step in zip(*(r["seen"] for r in results), strict=True) for part in step for i in part]
    theirs = [i for batch in single["seen"] for i in batch]
    assert ours[:84] == theirs[:84]


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


@pytest.mark.long(after=1)
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
