"""Steps, exchanges and collectives that succeed on one rank and fail on another, which then gets the result."""

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from events import BATCH, EPOCH, ROWS, STEPS, Model, Record, fit, one_process, order
from ranks import attempt
from tasks import FAST, parameters
from test_survival import LR, Numbered, Windows
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import HeteroDDPStrategy
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


# -- another rank is lost later ----------------------------------------------------------------------


class BehindOnce(pl.Callback):
    """Rank 1 misses the result of an exchange, after which rank 3 is killed. Rank 2 is killed some steps later."""

    def __init__(self) -> None:
        self.brought: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # to exchanges: step, weights, after that step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rank, averager, whole = trainer.global_rank, trainer.strategy.averager, PeriodicAverager.meet

        def meet(context: Any) -> Any:
            if trainer.world_size == 4 and context.step == STEP + 1 and self.rank in (1, 3):
                averager.average(context)
                time.sleep(SOON)
                if self.rank == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise CommunicationError("the connection has broken")
            self.brought.append((context.step, parameters(pl_module), self.latest))
            return whole(averager, context)

        averager.meet = meet
        trainer.optimizers[0].register_step_post_hook(lambda *_: setattr(self, "latest", parameters(pl_module)))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.rank == 2 and trainer.world_size == 3 and trainer.global_step == STEP + 5:
            os.kill(os.getpid(), signal.SIGKILL)


def _twice() -> tuple[Record, list[tuple[int, torch.Tensor, torch.Tensor]]]:
    behind, model = BehindOnce(), Model(ROWS["hetero_node"], scheduled=False)
    seen = fit("hetero_node", behind, model=model, options={"on_peer_loss": "continue", "balance": "off"})
    return seen, behind.brought


def test_who_has_missed_an_exchange_does_not_miss_the_next_one() -> None:
    """When another rank is lost it keeps what it has learned since, and brings it to the exchange."""
    outcomes = attempt(_twice, 4, nodes=[1, 1, 1, 1], timeout=120)
    assert [outcome.exitcode for outcome in outcomes[2:]] == [-signal.SIGKILL] * 2
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    (first, brought), (second, others) = (outcome.value for outcome in outcomes[:2])
    assert torch.equal(first.weights, second.weights)
    assert [list(loss.lost) for loss in second.losses] == [[3], [2]]
    assert list(dict.fromkeys(step for step, *_ in others)) == [3, 9, 12, 15]
    assert all(torch.equal(weights, learned) for _, weights, learned in (*brought, *others))


class ByHand(Windows):
    """Two optimizers by hand. Rank 1 misses the first one's step in batch 2, in which rank 3 is killed.

    Rank 2 is killed in batch 4, and leaves a file with the samples of its batches.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(True, two=True, killed=False)
        self.file, self.mine = file, -1
        self.taken_in: dict[int, list[int]] = {}

    def on_train_start(self) -> None:
        self.mine = self.global_rank

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, index = batch
        self.taken_in[batch_idx] = index.tolist()
        if (self.mine, batch_idx) == (2, 4):
            self.file.write_text(json.dumps(list(self.taken_in.values())))
            os.kill(os.getpid(), signal.SIGKILL)
        for number, optimizer in enumerate(self.optimizers()):
            self.manual_backward(nn.functional.mse_loss(self.net(x.double()), y.double()))
            if (batch_idx, number, self.trainer.world_size) == (2, 0, 4) and self.mine in (1, 3):
                time.sleep(SOON)
                if self.mine == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise CommunicationError("the connection has broken")
            optimizer.step()
            self.zero_grad()


def _fit_by_hand(file: Path) -> tuple[torch.Tensor, dict[int, list[int]], int]:
    module = ByHand(file)
    strategy = HeteroDDPStrategy(on_peer_loss="continue", balance="off", timeout=60)
    trainer = pl.Trainer(strategy=strategy, limit_train_batches=6, **{**FAST, "max_epochs": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(Numbered(), batch_size=4, shuffle=True))
    return parameters(module), module.taken_in, trainer.global_step


def test_who_has_missed_an_optimizers_step_by_hand_takes_the_next_ones(tmp_path: Path) -> None:
    """Ranks count these steps alike: when another one is lost, nobody takes itself to be behind."""
    outcomes = attempt(_fit_by_hand, 4, file := tmp_path / "of-rank-2", timeout=120)
    assert [outcome.exitcode for outcome in outcomes[2:]] == [-signal.SIGKILL] * 2
    assert all(outcome.value for outcome in outcomes[:2]), "\n".join(outcome.trace for outcome in outcomes)
    (weights, taken, steps), (others, taken_too, steps_too) = (outcome.value for outcome in outcomes[:2])
    assert torch.equal(weights, others)
    assert steps == steps_too == 11  # two of each batch, and one of batch 2
    order = list(DistributedSampler(Numbered(), num_replicas=1, rank=0, shuffle=True, seed=0))
    data, module = Numbered(), Windows(True, two=True)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=LR, momentum=0.9) for layer in (module.net[0], module.net[2])]
    of_two = json.loads(file.read_text())
    for batch in range(6):
        rows = order[16 * batch : 16 * batch + 16]
        if batch > 2:
            rows = [*taken[batch], *taken_too[batch], *(of_two[batch] if batch == 3 else ())]
        for optimizer in optimizers[: 1 if batch == 2 else 2]:
            module.zero_grad()
            nn.functional.mse_loss(module.net(data.x[rows].double()), data.y[rows].double()).backward()
            optimizer.step()
    assert (weights - parameters(module)).abs().max() < 1e-10
