"""Asynchronous ranks get the remainder of a batch in turn, so that none falls behind."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from center_tasks import Line, fit
from oracles import SAMPLES
from ranks import run
from tasks import Save

from lightning_hetero import EASGDAsyncStrategy, GossipAsyncStrategy, GossipStrategy, NodeAverageStrategy

OF_ALL, BATCHES = 15, -(-SAMPLES // 15)


class Count(pl.Callback):
    """Keeps the samples of each step."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.weights: set[tuple[int, ...]] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append(len(batch[0]))
        self.weights.add(tuple(trainer.strategy.engine.samples_per_replica()))  # type: ignore[attr-defined]


def counted(kind: Any, resume: str | None = None, path: str = "", at: int = -1, epochs: int = 2, **options: Any) -> Any:
    count = Count()
    options |= {"balance": "off", "global_batch_size": OF_ALL, "resume": resume}
    fit(kind, Line(), epochs=epochs, trainer={"callbacks": [count, Save(path, at, False)]}, **options)
    assert len(count.weights) == 1  # otherwise pairs that average by weight would not keep the sum
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, count.samples)
    return everyone


def each(cases: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    return [counted(kind, **options) for kind, options in cases]


def test_ranks_at_their_own_pace_have_equal_parts_in_the_mean() -> None:
    kinds: list[Any] = [GossipAsyncStrategy, GossipStrategy, EASGDAsyncStrategy, NodeAverageStrategy]
    cases = [(kind, {"moving_rate": "auto"} if kind is EASGDAsyncStrategy else {}) for kind in kinds]
    *asynchronous, together = run(each, 2, cases, nodes=[1, 1])[0]
    for first, second in asynchronous:
        sums = [a + b for a, b in zip(first, second, strict=True)]
        assert sums == [*[OF_ALL] * (BATCHES - 1), SAMPLES % OF_ALL] * 2
        assert {7, 8} == set(first[: BATCHES - 1])
        assert abs(sum(first) - sum(second)) <= 4
    # If all meet after the same steps, their weights are the planned shares, which stay.
    assert set(together[0][: BATCHES - 1]) == {8}


def test_replicas_of_several_ranks_keep_their_shares() -> None:
    """Their ranks meet at every step, so that the best split of one step is the best of all."""
    [(first, *_)] = run(each, 4, [(GossipStrategy, {"replica": "node"})], nodes=[2, 2])[0]
    assert set(first[: BATCHES - 1]) == {4}


def stopped(path: str) -> Any:
    return counted(GossipStrategy, path=path, at=BATCHES + 3)


@pytest.mark.long(after=1)
def test_a_fit_that_goes_on_goes_on_with_the_same_turns(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole = run(stopped, 2, path, nodes=[1, 1])[0]
    rest = run(counted, 2, GossipStrategy, path, nodes=[1, 1])[0]
    assert rest == [samples[BATCHES + 3 :] for samples in whole]
