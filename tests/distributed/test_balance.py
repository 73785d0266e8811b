"""Shares follow measured speeds, which are exact: the ranks' clocks are virtual."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from ranks import run
from tasks import Net, dataset, rank, train
from test_batch_samplers import Lists
from test_shared_stream import Plain
from torch.utils.data import DataLoader, IterableDataset
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy, SharedStream
from lightning_hetero.batching.shares import Cost, makespan, split

FIXED, PER_SAMPLE = 0.010, (0.002, 0.002, 0.004, 0.008)  # seconds, seconds per sample
CHANGED = (0.002, 0.008, 0.004, 0.002)


class Emulated(Net):
    """Takes the time that its rank's device would need, by a schedule over steps."""

    def __init__(self, per_sample: dict[int, tuple[float, ...]]) -> None:
        super().__init__()
        self.per_sample = per_sample

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        k = next(ks for step, ks in reversed(self.per_sample.items()) if step <= self.global_step)
        time.sleep(FIXED + k[self.global_rank] * len(batch[0]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _train(
    per_sample: dict[int, tuple[float, ...]], options: dict[str, Any], data: Any = None, kind: Any = None, **more: Any
) -> dict[str, Any]:
    with virtual_time(sys.modules[__name__]):
        module, strategy = Emulated(per_sample), (kind or HeteroDDPStrategy)(**options)
        data = DataLoader(dataset(64 * 20), batch_size=16, shuffle=True) if data is None else data
        trainer = train(module, strategy, data, **more)
    shares = strategy.accounting.planner.shares(strategy.accounting.step)
    return {"seen": module.seen, "lr": trainer.optimizers[0].param_groups[0]["lr"], "shares": shares}


def _steps(*args: Any, steps: int, **more: Any) -> list[list[int]]:
    """The shares of four ranks in each step."""
    results = run(_train, 4, *args, max_steps=steps, max_epochs=-1, **more)
    return [[len(part) for part in parts] for parts in zip(*(result["seen"] for result in results), strict=True)]


def slowdown(shares: list[int], per_sample: tuple[float, ...]) -> float:
    """Time of a step with the shares, relative to that with the best ones, by the emulated costs."""
    costs = [Cost(FIXED, k) for k in per_sample]
    return makespan(shares, costs) / makespan(split(64, costs), costs)


def test_from_an_even_start_to_the_optimum() -> None:
    steps = _steps({0: PER_SAMPLE}, {}, steps=24)
    assert steps[0] == [16, 16, 16, 16]
    assert all(sum(shares) == 64 for shares in steps)
    assert slowdown(steps[0], PER_SAMPLE) > 2.3
    assert min(slowdown(shares, PER_SAMPLE) for shares in steps[-6:]) < 1.1


@pytest.mark.long
def test_back_on_the_optimum_after_a_change_of_speed() -> None:
    steps = _steps({0: PER_SAMPLE, 24: CHANGED}, {"rebalance_every_n_steps": 2}, steps=72)
    assert slowdown(steps[24], CHANGED) > 2
    assert min(slowdown(shares, CHANGED) for shares in steps[24:]) < 1.1


def test_replicas_that_meet_every_few_steps_adapt_too() -> None:
    options = {"every_n_steps": 4, "ranks_per_node": 1}
    steps = _steps({0: PER_SAMPLE}, options, kind=NodeAverageStrategy, steps=60)
    assert all(sum(shares) == 64 for shares in steps)
    assert min(slowdown(shares, PER_SAMPLE) for shares in steps[-8:]) < 1.1


def test_limits_hold_while_shares_adapt() -> None:
    for shares in _steps({0: PER_SAMPLE}, {"min_batch_size": 8, "max_batch_size": [20, 64, 64, 64]}, steps=24):
        assert min(shares) >= 8
        assert shares[0] <= 20
        assert sum(shares) == 64


# -- whatever the data ---------------------------------------------------------------------------------------

SLOW = {0: (0.01, 0.04)}  # 16 samples take the same time on both ranks where they are split into 13 and 3
SAMPLES, MOVES = 640, {"rebalance_every_n_steps": 2}


class Half(IterableDataset):
    """Every rank's half of the samples, perhaps again and again."""

    def __init__(self, samples: int = SAMPLES, endless: bool = False) -> None:
        self.data, self.endless = dataset(samples), endless

    def __iter__(self) -> Iterator[Any]:
        for _ in count() if self.endless else (0,):
            yield from (self.data[i] for i in range(rank(), len(self.data), 2))


def _workers() -> DataLoader:
    return DataLoader(dataset(SAMPLES), 8, num_workers=2, persistent_workers=True, prefetch_factor=3)


def _everywhere() -> dict[str, dict[str, Any]]:
    shared, wanted = DataLoader(SharedStream(Plain(SAMPLES)), batch_size=8), {**MOVES, "balance_iterable": True}
    endless = DataLoader(Half(endless=True), batch_size=8)
    return {
        "workers that prefetch": _train(SLOW, MOVES, _workers()),
        "a shared stream": _train(SLOW, MOVES, shared),
        "shards": _train(SLOW, wanted, DataLoader(Half(), batch_size=8)),
        "endless shards": _train(SLOW, wanted, endless, max_steps=24, max_epochs=-1),
        "batches of unknown sizes": _train(SLOW, MOVES, DataLoader(dataset(50), batch_sampler=Lists()), max_epochs=8),
    }


def test_shares_move_whatever_the_data() -> None:
    one, other = run(_everywhere, 2)
    for name in one:
        fast, slow = ([len(batch) for batch in each[name]["seen"]] for each in (one, other))
        if name == "batches of unknown sizes":
            assert sum(one[name]["shares"]) == sum(other[name]["shares"]) in (7, 8)  # learned: 50 samples in 7 steps
            assert sum(fast) > 2 * sum(slow)
        else:
            together = [a + b for a, b in zip(fast, slow, strict=True)]
            assert (fast[0], slow[0], set(together[:24])) == (8, 8, {16}), name
            assert 12 <= fast[23] <= 14, name
        if "shards" not in name:
            times = 8 if "sizes" in name else 1
            seen = Counter(i for each in (one, other) for batch in each[name]["seen"] for i in batch)
            assert seen == Counter(dict.fromkeys(seen, times)), name
            assert len(seen) == (50 if "sizes" in name else SAMPLES), name


def _unasked() -> list[dict[str, Any]]:
    fixed = {"balance": [3.0, 1.0], "global_batch_size": 16}
    return [
        _train(SLOW, MOVES, DataLoader(Half(208), batch_size=4), max_epochs=2),
        _train(SLOW, {**MOVES, "global_batch_size": 8}, DataLoader(Half(208), batch_size=2), max_epochs=2),
        _train(SLOW, fixed, DataLoader(Half(endless=True), batch_size=4), max_steps=4, max_epochs=-1),
    ]


def test_shards_keep_their_shares_and_epochs_their_length() -> None:
    for number, (*even, fixed) in enumerate(run(_unasked, 2)):
        for found in even:
            assert [len(batch) for batch in found["seen"]] == [4] * 2 * 26
            assert found["lr"] == pytest.approx(0.05 * 0.1**5)
        assert [len(batch) for batch in fixed["seen"]] == [(12, 4)[number]] * 4
