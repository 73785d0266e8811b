"""Iterable datasets under strategies with replicas: nobody waits at every step, and all end together."""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST, EvaluatedNet, Net, dataset, error, parameters
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import (
    DASOStrategy,
    GossipAsyncStrategy,
    GossipStrategy,
    NodeAverageStrategy,
)
from lightning_hetero.errors import CommunicationError

BATCH = 4
LENGTHS = (3, 7)  # batches of each rank
ONE_EACH = {"ranks_per_node": 1, "balance": "off"}


def indices(rank: int, lengths: tuple[int, ...] = LENGTHS) -> list[int]:
    """Samples of a rank: it has so many batches."""
    first = BATCH * sum(lengths[:rank])
    return list(range(first, first + BATCH * lengths[rank]))


class Shard(IterableDataset):
    """Every rank's own samples; with or without a length."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.data, self.lengths = dataset(BATCH * sum(lengths)), lengths

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in indices(int(os.environ.get("RANK", 0)), self.lengths))


class SizedShard(Shard):
    def __len__(self) -> int:
        return len(indices(int(os.environ.get("RANK", 0)), self.lengths))


class Steps(pl.Callback):
    """Steps and parameters after each batch."""

    def __init__(self) -> None:
        self.after: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.after.append(parameters(module))


def _fit(strategy: Any, data: Any, kind: Any = Net, **options: Any) -> dict[str, Any]:
    module, steps = kind(), Steps()
    settings = {**FAST, "max_epochs": 2, "callbacks": [steps], **options}
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # by Lightning, always
    trainer = pl.Trainer(strategy=strategy, **settings)
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return {
        "seen": module.seen,
        "steps": trainer.global_step,
        "parameters": parameters(module),
        "after": steps.after,
    }


def _stream(kind: Any, options: dict[str, Any], data: Any, module: Any = Net, **more: Any) -> dict[str, Any]:
    return _fit(kind(**{**ONE_EACH, **options}), data, module, **more)


# -- who has ended ---------------------------------------------------------------------


class AdamW(Net):
    def __init__(self) -> None:
        super().__init__("adamw")


def test_a_replica_that_has_ended_stays_where_it_is_between_meetings() -> None:
    """Momentum and weight decay would move it, though no sample does."""
    options = {"every_n_steps": None}
    ended, other = run(_stream, 2, NodeAverageStrategy, options, Shard(), module=AdamW, max_epochs=1)
    for later in ended["after"][LENGTHS[0] : -1]:
        assert error(later, ended["after"][LENGTHS[0] - 1]) == 0.0
    assert error(other["after"][LENGTHS[0]], other["after"][LENGTHS[0] - 1]) > 0.0


# -- against one process -----------------------------------------------------------------------------------------


@pytest.mark.long(after=1)
@pytest.mark.parametrize("data", [Shard, SizedShard])
@pytest.mark.parametrize("lengths", [(3, 7), (7, 3), (4, 4)])
def test_averaging_at_every_step_is_one_process(lengths: tuple[int, int], data: Any) -> None:
    """Who has ended weighs nothing from its first padding batch on."""
    options = {"every_n_steps": 1, "average_optimizer_state": True}
    results = run(_stream, 2, NodeAverageStrategy, options, data(lengths))
    batches = []
    for step in range(max(lengths)):
        own = [indices(rank, lengths)[BATCH * step : BATCH * (step + 1)] for rank in (0, 1)]
        batches.append(own[0] + own[1])
    module = Net()
    loader = DataLoader(dataset(BATCH * sum(lengths)), batch_sampler=batches)
    pl.Trainer(devices=1, **{**FAST, "max_epochs": 2}).fit(module, loader)
    for result in results:
        assert error(result["parameters"], parameters(module)) <= 1e-10


def _unlike_sizes() -> list[torch.Tensor]:
    rank = int(os.environ["RANK"])
    module, data = Net(), dataset(40)
    own = list(range(10)) if rank == 0 else list(range(10, 40))
    loader = DataLoader(torch.utils.data.Subset(data, own), batch_size=2 if rank == 0 else 6)
    strategy = NodeAverageStrategy(every_n_steps=1, **ONE_EACH)
    trainer = pl.Trainer(strategy=strategy, use_distributed_sampler=False, **{**FAST, "max_epochs": 2})
    trainer.fit(module, loader)
    return parameters(module)


def test_replicas_weigh_by_the_batch_sizes_of_their_own_loaders() -> None:
    batches = [[2 * s, 2 * s + 1, *range(10 + 6 * s, 16 + 6 * s)] for s in range(5)]
    module = Net()
    pl.Trainer(devices=1, **{**FAST, "max_epochs": 2}).fit(module, DataLoader(dataset(40), batch_sampler=batches))
    for result in run(_unlike_sizes, 2):
        assert error(result, parameters(module)) <= 1e-10


def test_nodes_of_several_ranks() -> None:
    """Within a node every rank has its own stream, too: three ranks on two nodes, of 2, 5 and 7 batches."""
    lengths = (2, 5, 7)
    options = {"every_n_steps": 1, "average_optimizer_state": True, "ranks_per_node": [2, 1]}
    results = run(_stream, 3, NodeAverageStrategy, options, Shard(lengths), max_epochs=1)
    assert [len(result["seen"]) for result in results] == [7, 7, 7]
    for result in results[1:]:
        assert error(result["parameters"], results[0]["parameters"]) <= 1e-12
    # The first node counts with 8 samples until both of its ranks have ended, though one ends earlier.
    assert error(results[0]["after"][5], results[2]["after"][5]) <= 1e-12


# -- limits, validation, other steps within an epoch -------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_steps": 5, "max_epochs": -1}, {"limit_train_batches": 5, "max_epochs": 1}])
@pytest.mark.parametrize("kind", [NodeAverageStrategy, GossipAsyncStrategy])
def test_limits_end_all_at_once(kind: Any, limit: dict[str, Any]) -> None:
    for result in run(_stream, 2, kind, {}, Shard(), **limit):
        assert result["steps"] == 5


class Slow(EvaluatedNet):
    """Rank 1, which has more data, takes its time: who has ended must not run ahead to a validation."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def _validated(kind: Any) -> tuple[int, int]:
    module = Slow()
    trainer = pl.Trainer(
        strategy=kind(**ONE_EACH), val_check_interval=5, **{**FAST, "max_epochs": 1, "num_sanity_val_steps": 0}
    )
    trainer.fit(module, DataLoader(Shard(), batch_size=BATCH), DataLoader(dataset(8), batch_size=BATCH))
    return trainer.global_step, len(module.evaluated)


@pytest.mark.parametrize("kind", [NodeAverageStrategy, DASOStrategy, GossipAsyncStrategy, GossipStrategy])
def test_all_validate_together_within_an_epoch(kind: Any) -> None:
    if kind is DASOStrategy:
        kind = _daso
    results = run(_validated, 2, kind)
    assert [steps for steps, _ in results] == [max(LENGTHS)] * 2
    assert sum(evaluated for _, evaluated in results) == 8


def _daso(**options: Any) -> DASOStrategy:
    return DASOStrategy(warmup=2, cooldown=2, **options)


# -- what cannot be ----------------------------------------------------------------------------------------------


class Same(Shard):
    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(12))


def _same(kind: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _stream(kind, {}, Same())
    return [str(warning.message) for warning in said if "same" in str(warning.message)]


@pytest.mark.parametrize("kind", [NodeAverageStrategy, GossipAsyncStrategy])
def test_ranks_that_read_the_same_samples_are_told(kind: Any) -> None:
    first, second = run(_same, 2, kind)
    assert len(first) == 1
    assert "The first batch is the same on ranks [0, 1]" in first[0]
    assert second == []  # one message for the job


class Long(Shard):
    """More steps than a warm-up of unknown part has."""

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ["RANK"])
        return (self.data[(2 * i + rank) % len(self.data)] for i in range(56 * BATCH))


def _phases(options: dict[str, Any]) -> tuple[torch.Tensor, list[str], list[str]]:
    net, told, phases = Net(), list[str](), list[str]()

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            phases.append(trainer.strategy.averager.phase(trainer.global_step))

    strategy = DASOStrategy(**ONE_EACH, **options)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, callbacks=[Watch()], **FAST)
    trainer.fit(net, DataLoader(Long(), batch_size=BATCH))
    return parameters(net), phases, [text for text in told if "nobody knows" in text]


def test_daso_with_its_defaults_on_a_stream_of_unknown_length() -> None:
    first, second = run(_phases, 2, {})
    given = run(_phases, 2, {"warmup": 100, "cooldown": 0})
    assert first[1] == second[1] == ["warm-up"] * 100 + ["cycling"] * 12
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], given[0][0])
    assert (len(first[2]), len(second[2]), len(given[0][2])) == (1, 0, 0)
    assert "100 optimizer steps" in first[2][0]


class Dies(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 5:
            os._exit(3)
        return super().training_step(batch, batch_idx)


class Stalls(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 5:
            time.sleep(8)
        return self.loss(batch)


def test_a_rank_that_has_ended_learns_that_another_has_died() -> None:
    first, _ = attempt(_stream, 2, GossipAsyncStrategy, {"timeout": 60}, Shard(), module=Dies)
    assert isinstance(first.error, CommunicationError), first.trace
    assert "rank 1" in str(first.error)


def test_a_rank_that_has_ended_waits_no_longer_than_the_timeout() -> None:
    first, _ = attempt(_stream, 2, GossipAsyncStrategy, {"timeout": 3}, Shard(), module=Stalls)
    assert isinstance(first.error, CommunicationError), first.trace
    assert "has waited 3 s" in str(first.error)
