"""A job that resumes with fewer or more ranks: same global batches, each sample once, each replica's optimizer."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from saved import replicas_of
from tasks import FAST, Net, dataset
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_hetero import (
    DASOStrategy,
    DiLoCoStrategy,
    HeteroDDPStrategy,
    SharedStream,
)
from lightning_hetero.algorithms.diloco import OuterAverager
from lightning_hetero.callbacks.resumable import ResumableCheckpoint

AT = 10  # the step of the checkpoint; never the last of an epoch
DASO = {"warmup": 1, "cooldown": 0, "global_every": 4, "wait": 1, "schedule_every_n_steps": 5}
APART = [(DiLoCoStrategy, {"tau": 4}), (DASOStrategy, DASO)]


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        data = dataset(96)
        return (data[i] for i in range(len(data)))


class Begun(pl.Callback):
    """Keeps the momenta and the schedule's best loss when training starts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.momenta = _momenta(trainer.optimizers[0])
        averager = getattr(trainer.strategy, "averager", None)
        outer = averager.outer_steps.of_fragments[0].optimizer if isinstance(averager, OuterAverager) else None
        self.outer = [] if outer is None else _momenta(outer)
        self.best = averager.schedule.best if hasattr(averager, "schedule") else None


def _momenta(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["momentum_buffer"].clone() for state in optimizer.state_dict()["state"].values()]


def _loader(data: str, size: int) -> DataLoader:
    if data == "batch sampler":
        return DataLoader(dataset(96), batch_sampler=BatchSampler(SequentialSampler(range(96)), size, False))
    return (
        DataLoader(SharedStream(Numbers()), size) if data == "stream" else DataLoader(dataset(96), size, shuffle=True)
    )


def _train(folder: str, kind: Any, data: str = "list", size: int = 3, **limits: Any) -> Any:
    warnings.simplefilter("ignore")
    strategy, options = kind
    begun, keeps = Begun(), ResumableCheckpoint(folder, every_n_steps=AT, background=False)
    settings = {**FAST, "max_epochs": 3, "enable_checkpointing": True, "callbacks": [begun, keeps], **limits}
    path, resumes = Path(folder, f"step={AT}.ckpt"), limits.pop("max_steps", None) is None
    trainer = pl.Trainer(strategy=strategy(balance="off", ranks_per_node=1, **options), **settings)
    module = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, _loader(data, size), ckpt_path=str(path) if resumes else None)
    sizes = [str(one.message) for one in caught if "The position counts batches" in str(one.message)]
    return module.seen, begun.momenta, begun.outer, begun.best, sizes, trainer.strategy.accounting.planner.total


def _moved(folder: str, before: int, after: int, kind: Any, **options: Any) -> tuple[Any, Any]:
    first = run(_train, before, folder, kind, nodes=[1] * before, max_steps=AT, **options)
    return first, run(_train, after, folder, kind, nodes=[1] * after, **options)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("data", ["stream", "batch sampler"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_no_sample_comes_twice_and_none_is_lost(tmp_path: Path, before: int, after: int, data: str) -> None:
    first, second = _moved(str(tmp_path), before, after, (HeteroDDPStrategy, {}), data=data)
    steps = 96 // (3 * before)
    done, left = AT % steps, steps - AT % steps
    epoch = [i for seen, *_ in first for batch in seen[AT - done :] for i in batch]
    epoch += [i for seen, *_ in second for batch in seen[:left] for i in batch]
    assert sorted(epoch) == list(range(96))
    rest = [i for seen, *_ in second for batch in seen[left:] for i in batch]
    assert sorted(rest) == sorted(list(range(96)) * (3 - 1 - AT // steps))
    for step in range(left):
        assert sum(len(seen[step]) for seen, *_ in second) == 3 * before


def test_another_batch_size_of_the_users_counts(tmp_path: Path) -> None:
    run(_train, 4, str(tmp_path), (HeteroDDPStrategy, {}), max_steps=AT)
    for kept, size, options in ((12, 3, {}), (16, 8, {}), (10, 3, {"global_batch_size": 10})):
        first, other = run(_train, 2, str(tmp_path), (HeteroDDPStrategy, options), size=size, max_epochs=2)
        *_, sizes, total = first
        assert (total, len(sizes), other[-2]) == (kept, kept != 12, [])  # two batches into the second epoch
        assert all(
            f"after 2 batches of an epoch, when a step of all ranks took 12 samples; now it takes {kept}" in text
            for text in sizes
        )


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", APART, ids=lambda kind: kind[0].__name__)
def test_every_replica_has_its_own_or_the_nearest_algorithms_state(tmp_path: Path, kind: Any) -> None:
    for before, after in ((3, 2), (2, 3)) if kind[0] is DiLoCoStrategy else ((2, 3),):
        folder = tmp_path / f"{before}"
        _, second = _moved(str(folder), before, after, kind)
        saved = replicas_of(folder / f"step={AT}.ckpt")
        momenta = [[state["momentum_buffer"] for state in r["optimizers"][0]["state"].values()] for r in saved]
        assert not torch.equal(momenta[0][0], momenta[1][0])
        for replica, (_, found, outer, best, *_) in enumerate(second):
            near = min(replica, before - 1)
            assert len(found) == 4
            assert all(torch.equal(a, b) for a, b in zip(found, momenta[near], strict=True))
            if kind[0] is DiLoCoStrategy:
                states = saved[near]["algorithm"]["outer_steps"][0]["state"].values()
                assert all(torch.equal(a, b["momentum_buffer"]) for a, b in zip(outer, states, strict=True))
                assert outer[0].any()
            if kind[0] is DASOStrategy:
                assert best == saved[near]["algorithm"]["schedule"]["best"] < float("inf")
