"""A step, an exchange or a collective that succeeds on one rank and fails on another: who missed it gets its result."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import attempt
from tasks import FAST
from test_survival import Module, Numbered
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.algorithms.periodic import PeriodicAverager
from lightning_hetero.errors import CommunicationError

STEP = 5
SOON = 0.5  # seconds in which the others have done what this rank is made to miss


class Missed(pl.Callback):
    """Rank 1 loses the result of something at a step, and rank 2 is killed right after it."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rank = trainer.global_rank
        if self.what == "exchange" and self.rank > 0:
            averager = trainer.strategy.averager
            whole = PeriodicAverager.meet

            def meet(context: Any) -> Any:
                if trainer.strategy.world_size == 3 and context.step == STEP + 1:
                    averager.average(context)
                    self._fail()
                return whole(averager, context)

            averager.meet = meet

    def _fail(self) -> None:
        time.sleep(SOON)
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 1:
            raise CommunicationError("the connection has broken")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.what == "step" and trainer.global_step == STEP and trainer.world_size == 3:
            self._fail()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.what == "collective" and trainer.global_step == STEP and trainer.world_size == 3:
            if self.rank == 1:
                reduce = dist.all_reduce

                def failing(*args: Any, **kwargs: Any) -> None:
                    dist.all_reduce = reduce
                    reduce(*args, **kwargs)
                    self._fail()

                dist.all_reduce = failing
            self.sum = trainer.strategy.reduce(torch.tensor(10.0**self.rank), reduce_op="sum").item()
            if self.rank == 2:
                self._fail()


def _fit(kind: Any, options: dict[str, Any], what: str) -> Any:
    module, missed = Module(), Missed(what)
    strategy = kind(on_peer_loss="continue", timeout=60, balance="off", **options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[missed], **{**FAST, "max_epochs": 2})
    trainer.fit(module, DataLoader(Numbered(), batch_size=4, shuffle=True))
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return weights, trainer.global_step, getattr(missed, "sum", None), module.taken, strategy.survival.losses


def _both(kind: Any, options: dict[str, Any], what: str) -> Any:
    outcomes = attempt(_fit, 3, kind, options, what, nodes=None if kind is HeteroDDPStrategy else [1, 1, 1])
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    first, second = (outcome.value for outcome in outcomes[:2])
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == 16
    assert [len(losses) for *_, losses in (first, second)] == [1, 1]
    return first, second


def test_a_step_that_one_rank_has_missed_is_copied() -> None:
    """The step at which the third rank died counts with its samples, since rank 0 has taken it with them."""
    (weights, _, _, taken, losses), (*_, others, _) = _both(HeteroDDPStrategy, {}, "step")
    assert losses[0].step == STEP + 1
    data, module = Numbered(), Module()
    optimizer = module.configure_optimizers()
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
    order = list(sampler)
    for step in range(16):
        samples = order[12 * step : 12 * step + 12] if step <= STEP else sorted({*taken[step], *others[step]})
        # In the step of the loss, the third rank's samples are missing if the batch had been drawn before.
        assert len(samples) in ((8, 12) if step == STEP + 1 else (12,))
        loss = torch.nn.functional.mse_loss(module.net(data.x[samples].double()), data.y[samples].double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (weights - torch.cat([p.detach().reshape(-1) for p in module.parameters()])).abs().max() < 1e-10


def test_an_exchange_that_one_replica_has_missed_is_copied() -> None:
    first, second = _both(NodeAverageStrategy, {"every_n_steps": 3}, "exchange")
    assert first[4][0].replicas == second[4][0].replicas == 2


@pytest.mark.parametrize("kind", [HeteroDDPStrategy, NodeAverageStrategy])
def test_a_collective_that_one_rank_has_missed_is_not_repeated(kind: Any) -> None:
    first, second = _both(kind, {}, "collective")
    assert first[2] == second[2] == 111.0  # with the part of the rank that has died since
