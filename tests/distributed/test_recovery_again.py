"""Recovery where a replica has several ranks and buffers, and where another rank is lost while the others recover."""

import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt
from tasks import FAST, Net, dataset, parameters
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy, NodeAverageStrategy
from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.errors import NotFiniteError
from lightning_hetero.strategies.job import JobStrategy


class Buffered(Net):
    """A net whose buffers replicas exchange, as those of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).double()


class Killed(pl.Callback):
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if (
            trainer.global_step == self.step
            and trainer.strategy.job.view.number == 0
            and trainer.global_rank == self.rank
        ):
            os.kill(os.getpid(), signal.SIGKILL)


def _buffered() -> torch.Tensor:
    module = Buffered()
    strategy = NodeAverageStrategy(on_peer_loss="continue", every_n_steps=3, timeout=60)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(3, 4)], max_steps=8, **FAST)
    trainer.fit(module, DataLoader(dataset(200), batch_size=6))
    return parameters(module)


def test_a_replica_of_several_ranks_with_buffers_goes_on() -> None:
    first, second, *_ = attempt(_buffered, 4, nodes=[2, 1, 1])
    assert first.value is not None, first.trace
    assert torch.equal(first.value, second.value)


class Broken(Net):
    """Its loss is not a number from a step on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if self.trainer.global_step >= 6 else 1.0)


def _broken() -> None:
    strategy = DASOStrategy(on_peer_loss="continue", warmup=0, cooldown=0, timeout=60)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(1, 3)], max_steps=10, **FAST)
    trainer.fit(Broken(), DataLoader(dataset(200), batch_size=6))


def test_the_replica_that_is_left_alone_sees_that_its_loss_is_not_finite() -> None:
    alone, _ = attempt(_broken, 2, nodes=[1, 1])
    assert isinstance(alone.error, NotFiniteError), alone.trace


class Reference(pl.Callback):
    """What the replicas have in common, after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        averager = trainer.strategy.averager
        self.seen = [*self.seen, (averager.commits, torch.cat([vector.flatten() for vector in averager.reference]))]


def _lost_twice(owner: Any, method: str, call: int) -> list[tuple[int, torch.Tensor]]:
    rank, usual, calls, reference = int(os.environ["RANK"]), getattr(owner, method), [], Reference()

    def called(self: Any) -> Any:
        calls.append(self)
        if rank == 2 and len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, called)
        strategy = DASOStrategy(
            on_peer_loss="continue", warmup=0, cooldown=0, global_every=3, wait=1, timeout=60, min_replicas=2
        )
        trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(3, 5), reference], max_steps=6, **FAST)
        trainer.fit(Net(), DataLoader(dataset(400), batch_size=6))
    return reference.seen


@pytest.mark.parametrize(
    ("owner", "method", "call"), [(ReplicaLinks, "prepare", 2), (JobStrategy, "wrap_in_view", 1)], ids=["late", "early"]
)
def test_a_loss_while_ranks_recover_leaves_the_state_as_it_was(owner: Any, method: str, call: int) -> None:
    """The second rank is lost when averagers have begun again, or before."""
    first, second, *lost = attempt(_lost_twice, 4, owner, method, call, nodes=[1, 1, 1, 1])
    assert [outcome.exitcode for outcome in lost] == [-signal.SIGKILL] * 2
    assert first.value is not None, first.trace
    for (commits, reference), (its_commits, its_reference) in zip(first.value, second.value, strict=True):
        assert commits == its_commits
        assert torch.equal(reference, its_reference)
    (before, old), (after, new) = first.value[4:6]
    assert after == before > 0
    assert torch.equal(old, new)
