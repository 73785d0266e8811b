"""If a rank is killed or fails, the error of every other rank names it, for any strategy."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.errors import CommunicationError
from lightning_hetero.strategies.table import ENTRIES

#: Which rank is killed: each in turn, the center's host among them.
KILL = {entry.name: number % 3 for number, entry in enumerate(ENTRIES)}


class Ends(Net):
    """One rank is killed."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == self.rank and batch_idx == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        nesterov = "eamsgd" in str(type(self.trainer.strategy).__name__).lower()
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, nesterov=nesterov)


def _train(name: str, rank: int) -> None:
    [entry] = [entry for entry in ENTRIES if entry.name == name]
    options: dict[str, Any] = {"balance": "off", "timeout": 25}
    options |= {"tau": 2} if "easgd" in name or "eamsgd" in name or "diloco" in name else {}
    options |= {"deadline": 2} if "gossip" in name else {}
    options |= {"every_n_steps": 2} if name == "hetero_node" else {}
    strategy = entry.strategy(**options)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1})
    trainer.fit(Ends(rank), DataLoader(dataset(96), batch_size=4, num_workers=int(name == "hetero_ddp")))


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", KILL)
def test_a_rank_that_is_killed_is_named_by_all_others(name: str) -> None:
    nodes, rank = [2, 1] if name in ("hetero_node", "hetero_daso") else [1, 1, 1], KILL[name]
    outcomes = attempt(_train, 3, name, rank, nodes=nodes, timeout=60)
    assert outcomes.pop(rank).exitcode == -signal.SIGKILL, "\n".join(outcome.trace for outcome in outcomes)
    for outcome in outcomes:
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert f"rank {rank} has ended without an error message" in str(outcome.error)


# -- under hetero_ddp ----------------------------------------------------------------------------------------


def _under_ddp(module: Any, timeout_of_strategy: float = 1800) -> None:
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(timeout=timeout_of_strategy), **{**FAST, "max_epochs": 1})
    trainer.fit(module(), DataLoader(dataset(96), batch_size=4))


class BreaksBackward(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx).detach()


def test_an_error_in_backward_is_not_taken_for_a_lost_rank() -> None:
    for outcome in attempt(_under_ddp, 2, BreaksBackward):
        assert type(outcome.error) is RuntimeError, outcome.trace
        assert "does not require grad" in str(outcome.error)


class Stalls(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            time.sleep(9)
        return super().training_step(batch, batch_idx)


def test_a_rank_that_stalls_ends_the_others_within_the_timeout() -> None:
    outcome = attempt(_under_ddp, 2, Stalls, timeout_of_strategy=4)[0]
    assert isinstance(outcome.error, CommunicationError), outcome.trace
    assert "timeout" in str(outcome.error)
