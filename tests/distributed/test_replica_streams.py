"""Iterable datasets under strategies with replicas: no waits at every step, and one common end."""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from ranks import attempt, run
from tasks import EvaluatedNet, Net, dataset, error, one_process, parameters, rank, train
from torch.utils.data import DataLoader, IterableDataset, Subset

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


def indices(number: int, lengths: tuple[int, ...] = LENGTHS) -> list[int]:
    """Samples of a rank with so many batches."""
    first = BATCH * sum(lengths[:number])
    return list(range(first, first + BATCH * lengths[number]))


class Shard(IterableDataset):
    """The samples of each rank; with or without a length."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.data, self.lengths = dataset(BATCH * sum(lengths)), lengths

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in indices(rank(), self.lengths))


class SizedShard(Shard):
    def __len__(self) -> int:
        return len(indices(rank(), self.lengths))


class Steps(pl.Callback):
    """Keeps the parameters after each batch."""

    def __init__(self) -> None:
        self.after: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.after.append(parameters(module))


def _stream(kind: Any, options: dict[str, Any], data: Any, module: Any = Net, **more: Any) -> dict[str, Any]:
    net, steps = module(), Steps()
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # Lightning always warns
    strategy, loader = kind(**{**ONE_EACH, **options}), DataLoader(data, batch_size=BATCH)
    trainer = train(net, strategy, loader, **{"max_epochs": 2, "callbacks": [steps], **more})
    return {"seen": net.seen, "steps": trainer.global_step, "parameters": parameters(net), "after": steps.after}


# -- who has ended ---------------------------------------------------------------------


def test_a_replica_that_has_ended_stays_where_it_is_between_meetings() -> None:
    """Momentum and weight decay would move it, though it has no samples."""
    options = {"every_n_steps": None}
    ended, other = run(_stream, 2, NodeAverageStrategy, options, Shard(), module=partial(Net, "adamw"), max_epochs=1)
    for later in ended["after"][LENGTHS[0] : -1]:
        assert error(later, ended["after"][LENGTHS[0] - 1]) == 0.0
    assert error(other["after"][LENGTHS[0]], other["after"][LENGTHS[0] - 1]) > 0.0


class ByHand(Net):
    """Takes in two batches at a time, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_padding_does_not_hide_a_batch_before_it_from_an_optimizer() -> None:
    ended, _ = run(_stream, 2, NodeAverageStrategy, {"every_n_steps": None}, Shard(), module=ByHand, max_epochs=1)
    own = indices(0)
    batches = [own[i : i + BATCH] for i in range(0, len(own), BATCH)]
    truth = one_process(BATCH * sum(LENGTHS), batches, epochs=1, accumulate_grad_batches=2)
    assert error(ended["after"][3], truth) <= 1e-10
    assert error(ended["after"][5], ended["after"][3]) == 0.0


# -- against one process -----------------------------------------------------------------------------------------


def batches_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """The global batches; ranks that have ended have no part in them."""
    steps = [slice(BATCH * step, BATCH * (step + 1)) for step in range(max(lengths))]
    return [[i for number in range(len(lengths)) for i in indices(number, lengths)[step]] for step in steps]


#: The batches of two streams, with or without a length.
STREAMS = [(data, lengths) for data in (Shard, SizedShard) for lengths in ((3, 7), (7, 3), (4, 4))]


def _averaged() -> list[torch.Tensor]:
    options = {"every_n_steps": 1, "average_optimizer_state": True}
    return [_stream(NodeAverageStrategy, options, data(lengths))["parameters"] for data, lengths in STREAMS]


def test_averaging_at_every_step_is_one_process() -> None:
    """A rank that has ended weighs nothing from its first padding batch on."""
    for case, *results in zip(STREAMS, *run(_averaged, 2), strict=True):
        truth = one_process(BATCH * sum(case[1]), batches_of(case[1]))
        assert all(error(result, truth) <= 1e-10 for result in results), case


def _unlike_sizes() -> torch.Tensor:
    module, own = Net(), range(10) if rank() == 0 else range(10, 40)
    loader = DataLoader(Subset(dataset(40), own), batch_size=2 if rank() == 0 else 6)
    strategy = NodeAverageStrategy(every_n_steps=1, **ONE_EACH)
    train(module, strategy, loader, use_distributed_sampler=False, max_epochs=2)
    return parameters(module)


def test_replicas_weigh_by_the_batch_sizes_of_their_own_loaders() -> None:
    truth = one_process(40, [[2 * s, 2 * s + 1, *range(10 + 6 * s, 16 + 6 * s)] for s in range(5)])
    assert all(error(result, truth) <= 1e-10 for result in run(_unlike_sizes, 2))


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


LIMITS: list[dict[str, Any]] = [{"max_steps": 5, "max_epochs": -1}, {"limit_train_batches": 5, "max_epochs": 1}]


def _limited() -> list[dict[str, Any]]:
    kinds = (NodeAverageStrategy, GossipAsyncStrategy)
    found = [_stream(kind, {}, Shard(), **limit) for kind in kinds for limit in LIMITS]
    return [*found, _stream(DASOStrategy, {"ranks_per_node": 2}, Shard(), **LIMITS[1])]  # one node


def test_limits_end_all_at_once() -> None:
    first, second = run(_limited, 2)
    assert [result["steps"] for result in first + second] == [5] * 10
    assert torch.equal(first[-1]["parameters"], second[-1]["parameters"])
    assert not torch.equal(first[-1]["parameters"], parameters(Net()))


class Slow(EvaluatedNet):
    """Slows rank 1, which has more data: a rank that has ended must not go ahead to a validation."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def _validated() -> list[tuple[int, int]]:
    found, daso = [], {"warmup": 2, "cooldown": 2}
    for kind in (NodeAverageStrategy, DASOStrategy, GossipAsyncStrategy, GossipStrategy):
        module, strategy = Slow(), kind(**ONE_EACH, **(daso if kind is DASOStrategy else {}))
        data = DataLoader(Shard(), batch_size=BATCH), DataLoader(dataset(8), batch_size=BATCH)
        trainer = train(module, strategy, *data, val_check_interval=5, num_sanity_val_steps=0)
        found.append((trainer.global_step, len(module.evaluated)))
    return found


def test_all_validate_together_within_an_epoch() -> None:
    for one, other in zip(*run(_validated, 2), strict=True):
        assert (one[0], other[0], one[1] + other[1]) == (max(LENGTHS), max(LENGTHS), 8)


# -- what cannot be ----------------------------------------------------------------------------------------------


class Same(Shard):
    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(12))


def _same(kind: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _stream(kind, {}, Same())
    return [str(warning.message) for warning in caught if "same" in str(warning.message)]


def _all_same() -> list[list[str]]:
    return [_same(kind) for kind in (NodeAverageStrategy, GossipAsyncStrategy)]


def test_ranks_that_read_the_same_samples_are_told() -> None:
    for first, second in zip(*run(_all_same, 2), strict=True):
        assert len(first) == 1
        assert "The first batch is the same on ranks [0, 1]" in first[0]
        assert second == []  # one message for the job


class Long(Shard):
    """Has more steps than the warm-up of a fit of unknown length."""

    def __iter__(self) -> Iterator[Any]:
        return (self.data[(2 * i + rank()) % len(self.data)] for i in range(56 * BATCH))


def _phases(options: dict[str, Any]) -> tuple[torch.Tensor, list[str], list[str]]:
    net, messages, phases = Net(), list[str](), list[str]()

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            phases.append(trainer.strategy.averager.phase(trainer.global_step))

    strategy = DASOStrategy(**ONE_EACH, **options)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    train(net, strategy, DataLoader(Long(), batch_size=BATCH), max_epochs=2, callbacks=[Watch()])
    return parameters(net), phases, [text for text in messages if "nobody knows" in text]


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
