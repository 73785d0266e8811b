"""Steps, exchanges and collectives that succeed on one rank and fail on another, which then gets the result."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from events import BATCH, EPOCH, ROWS, STEPS, Model, Record, fit, one_process, order
from ranks import attempt

from lightning_hetero.algorithms.periodic import PeriodicAverager
from lightning_hetero.errors import CommunicationError

STEP = 5
SOON = 2.0  # seconds after which the others have the result that this rank misses


class Missed(pl.Callback):
    """Lets a rank miss the result of an operation at a step; rank 2 is killed right after it."""

    def __init__(self, what: str, behind: int) -> None:
        self.what, self.behind = what, behind

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
        if self.what == "report" and self.rank == 0:
            share = trainer.strategy.accounting
            send = share.send_report

            def broken() -> None:
                if share.step == STEP + 1:
                    share.send_report = send
                    time.sleep(SOON)
                    raise CommunicationError("the connection has broken")
                send()

            share.send_report = broken

    def _fail(self) -> None:
        time.sleep(SOON)
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == self.behind:
            raise CommunicationError("the connection has broken")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.what in ("step", "report") and trainer.global_step == STEP and trainer.world_size == 3:
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


def _fit(name: str, what: str, behind: int) -> tuple[Record, float | None]:
    missed, model = Missed(what, behind), Model(ROWS[name], scheduled=False)
    record = fit(name, missed, model=model, options={"on_peer_loss": "continue", "balance": "off"})
    return record, getattr(missed, "sum", None)


def _both(name: str, what: str, behind: int = 1) -> list[tuple[Record, float | None]]:
    outcomes = attempt(_fit, 3, name, what, behind, nodes=[1, 1, 1])
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    both = [outcome.value for outcome in outcomes[:2]]
    for record, _ in both:
        assert torch.equal(record.weights, both[0][0].weights)
        assert record.error is None
        assert record.steps == STEPS
        assert len(record.losses) == 1
    return both


@pytest.mark.parametrize(("what", "behind"), [("step", 1), ("step", 0), ("report", 1)])
def test_a_step_that_one_rank_has_missed_is_copied(what: str, behind: int) -> None:
    """The step at which the third rank died counts with its samples, since another rank has taken the step with them.

    This holds also if rank 0 has taken the step, but not sent its report of it, when it learns of the loss.
    """
    both = [record for record, _ in _both("hetero_ddp", what, behind)]
    first, second = both
    assert both[1 - behind].losses[0].step == STEP + (what == "step")  # as Lightning counts them: at the end of a step
    batches = []
    for step in range(STEPS):
        whole = order(step // EPOCH)[BATCH * (step % EPOCH) :][:BATCH]
        batches.append(whole if step <= STEP else [*first.rows[step], *second.rows[step]])
        # In the step of the loss, the third rank's samples are missing if the batch had been drawn before.
        assert len(set(batches[-1])) in ((8, 12) if step == STEP + 1 else (12,))
    assert (first.weights - one_process(batches)).abs().max() < 1e-10


def test_an_exchange_that_one_replica_has_missed_is_copied() -> None:
    (first, _), (second, _) = _both("hetero_node", "exchange")
    assert first.losses[0].replicas == second.losses[0].replicas == 2


@pytest.mark.parametrize("name", ["hetero_ddp", "hetero_node"])
def test_a_collective_that_one_rank_has_missed_is_not_repeated(name: str) -> None:
    (_, first), (_, second) = _both(name, "collective")
    assert first == second == 111.0  # with the part of the rank that has died since
