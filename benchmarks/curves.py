"""Time per step of two emulated devices that are no straight lines, by even shares, by a straight line, and by a curve.

The first pair: a device that takes 16 ms for up to 16 samples and then 4 ms each, beside one of 10 ms + 2 ms a sample;
32 samples a step. The second pair: 8 and 16 ms for each 8 samples, which are staircases; 48 samples a step. The best
splits, found by trying all, take 34 and 32 ms; the even ones 42 and 48. Delays use no core.

    python benchmarks/curves.py [--repeats 3] [--times 1]

With `--times 4` all devices take four times as long, so that a busy machine disturbs them less.
"""

import statistics
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import jobs
import torch
from jobs import pl
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import EmulatedSpeed, HeteroDDPStrategy
from lightning_hetero.workload.shape import Shape

STEPS, LAST = 240, 60
Device = Callable[[int], float]


def flat(times: int, samples: int) -> float:
    return times * (0.016 + 0.004 * max(0, samples - 16))


def line(times: int, samples: int) -> float:
    return times * (0.010 + 0.002 * samples)


def staircase(times: int, samples: int) -> float:
    return times * 0.008 * -(-samples // 8)


def slow_staircase(times: int, samples: int) -> float:
    return 2 * staircase(times, samples)


PAIRS: dict[str, tuple[list[Callable[[int, int], float]], int]] = {
    "flat until 16": ([flat, line], 32),
    "staircases of 8": ([staircase, slow_staircase], 48),
}


def step(devices: list[Device], shares: list[int]) -> float:
    """Seconds that a step takes by the devices' definition."""
    return max(device(n) for device, n in zip(devices, shares, strict=True))


class Linear(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Shares(pl.Callback):
    """The shares of every step."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        share = trainer.strategy.share
        self.seen.append(share.planner.shares(share.step - 1))


@contextmanager
def straight(only: bool) -> Any:
    """In this block there are no curves, if asked for."""
    curve = Shape.curve
    if only:
        Shape.curve = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Shape.curve = curve  # type: ignore[method-assign]


def fit(pair: str, times: int, balance: str, line_only: bool) -> dict[str, Any]:
    functions, total = PAIRS[pair]
    devices: list[Device] = [partial(function, times) for function in functions]
    clock, shares = jobs.Clock(), Shares()
    callbacks = [clock, shares, EmulatedSpeed(devices)]
    with straight(line_only):
        strategy = HeteroDDPStrategy(balance=balance)
        trainer = jobs.quiet_trainer(strategy=strategy, max_steps=STEPS, callbacks=callbacks)
        trainer.fit(Linear(), DataLoader(TensorDataset(torch.randn(total * STEPS, 16)), batch_size=total // 2))
    late = [step(devices, row) for row in shares.seen[-LAST:]]
    return {
        "measured": statistics.mean(clock.steps(STEPS - LAST)[0]),
        "by devices": statistics.mean(late),
        "shares": shares.seen[-1],
    }


def worker(repeats: int, times: int) -> dict[str, Any]:
    ways = {"even": ("off", False), "straight line": ("auto", True), "curve": ("auto", False)}
    fits = {f"{pair}: {way}": partial(fit, pair, times, *how) for pair in PAIRS for way, how in ways.items()}
    return jobs.alternate(repeats, fits)


def main() -> None:
    asked = jobs.options(__doc__, 3, times=1)
    results = jobs.launch(2, asked.repeats, asked.times)
    print(f"\n{asked.repeats} alternating runs of {STEPS} steps; {jobs.machine()}")
    print(f"the last {LAST} steps, median of the runs (and their range):")
    for name, runs in results.items():
        functions, total = PAIRS[name.split(":")[0]]
        devices: list[Device] = [partial(function, asked.times) for function in functions]
        best = min(step(devices, [n, total - n]) for n in range(1, total))
        ratios = [run["by devices"] / best for run in runs]
        measured = [1e3 * run["measured"] for run in runs]
        print(f"  {name:32s} by the devices over the best {jobs.spread(ratios)}, measured ms {jobs.spread(measured)}, ")
        print(f"  {'':32s} last shares {[run['shares'] for run in runs]}, best {1e3 * best:.0f} ms")


if __name__ == "__main__":
    jobs.start(main, worker)
