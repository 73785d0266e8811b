"""``torch.compile`` with batch sizes that change: no new compilation for them, and compiling does not count as slow.

The ranks' clocks are virtual, so that speeds are exact on a busy machine.
"""

import sys
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.strategies import base

COMPILING, STEPS = 2.0, 60  # seconds for each graph


class Compiled(Net):
    """Its network is compiled, by a backend that takes its time; the second rank's device is slow."""

    def __init__(self, slow: float) -> None:
        super().__init__()
        self.graphs = 0
        self.rank, self.slow = 0, slow
        self.compiled = torch.compile(self.net, backend=self._compile)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        time.sleep(COMPILING if self.rank == 0 else 0.0)
        return graph.forward

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rank = self.global_rank
        x, y, *_ = batch
        time.sleep(len(x) * (self.slow if self.rank == 0 and batch_idx < STEPS else 0.001))
        return torch.nn.functional.mse_loss(self.compiled(x), y)


class Sizes(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.seen.append(len(batch[0]))


def _fit(
    marks: bool, batch_size: int = 16, steps: int = STEPS, slow: float = 0.003, **options: Any
) -> tuple[int, list[int], float]:
    torch._dynamo.reset()
    if not marks:
        base.mark_sizes_dynamic = lambda batch: None  # type: ignore[assignment]
    module, sizes = Compiled(slow), Sizes()
    with virtual_time(sys.modules[__name__]):
        trainer = pl.Trainer(
            strategy=HeteroDDPStrategy(timeout=60, **options),
            max_steps=steps,
            max_epochs=-1,
            callbacks=[sizes],
            **FAST,
            devices=1,
        )
        trainer.fit(module, DataLoader(dataset(2 * batch_size * steps), batch_size=batch_size))
    return module.graphs, sizes.seen, trainer.strategy.accounting.cost.cost.fixed


def test_sizes_that_move_are_not_compiled_anew() -> None:
    found = run(_fit, 2, True, nodes=[1, 1])
    for graphs, sizes, _ in found:
        assert len(set(sizes)) > 1  # shares have moved
        assert graphs == 1
    slow, fast = (sizes for _, sizes, _ in found)
    assert sum(fast[-10:]) > 2 * sum(slow[-10:])  # three times as fast


@pytest.mark.parametrize("options", [{}, {"share_multiple": 16}])
def test_large_shares_that_move_are_multiples(options: dict[str, Any]) -> None:
    """The slow rank, 2.2 times as slow at first, is as fast as the other one from a step on."""
    found = run(_fit, 2, True, 128, 2 * STEPS, 0.0022, nodes=[1, 1], **options)
    for graphs, sizes, _ in found:
        assert graphs == 1
        assert not {size for size in sizes if size % options.get("share_multiple", 4)}, sizes
    slow, fast = (sizes for _, sizes, _ in found)
    assert {a + b for a, b in zip(slow, fast, strict=True)} == {256}
    assert (slow[0], slow[STEPS], slow[-1]) == (128, 80, 128)


def test_compiling_is_no_slowness() -> None:
    """A rank that compiles for two seconds, again when sizes change, does not count as slow: its shares stay."""
    (graphs, slow, fixed), _ = run(_fit, 2, False, nodes=[1, 1])
    assert graphs > 1  # without the marks
    assert fixed < 0.01
    moved = next(step for step, size in enumerate(slow) if size != slow[0])
    assert 5 <= min(slow[moved:]) <= max(slow[moved:]) <= 10  # a quarter of 32
