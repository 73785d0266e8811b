"""Processes that are started later take part in a fit that runs."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from growing import JOINS_AT, LATE, fit, grow, values
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from ranks import attempt
from test_survival import BATCH, Module, Numbered
from torch import nn


def one_process(epochs: int, batch: int, accumulated: int = 1, frozen: int = 0) -> torch.Tensor:
    """The weights of one process that takes the same global batches; the first layer is frozen for some epochs."""
    data, module = Numbered(), Module()
    optimizer: Any = module.configure_optimizers()
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        module.net[0].requires_grad_(epoch >= frozen)
        order = list(sampler)
        for number, start in enumerate(range(0, len(order), batch), start=1):
            chosen = torch.tensor(order[start : start + batch])
            loss = nn.functional.mse_loss(module.net(data.x[chosen].double()), data.y[chosen].double())
            (loss / accumulated).backward()
            if number % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize(("first", "late"), [(1, 1), (2, 2)])
def test_a_job_that_grows_is_exact(first: int, late: int, tmp_path: Path) -> None:
    """No sample is taken twice or left out where others join: the weights are those of one process."""
    records = values(grow(first, late, fit, "HeteroDDPStrategy", {"balance": "off"}, str(tmp_path / "job"), late))
    world = first + late
    for rank, one in enumerate(records):
        assert torch.equal(one.weights, records[0].weights)
        assert [(now, size) for _, now, size in one.starts[-1:]] == [(one.starts[-1][1], world)]
        assert len(one.starts) == (2 if rank < first else 1)
    assert sorted(one.starts[-1][1] for one in records) == list(range(world))
    steps = {one.starts[-1][0] for one in records}
    assert len(steps) == 1
    assert steps.pop() >= JOINS_AT
    assert (records[0].weights - one_process(epochs=3, batch=first * BATCH)).abs().max() < 1e-10
    assert not (tmp_path / "job").exists()  # the job is over


class Dies(pl.Callback):
    """The process of rank 1 of the first start is killed."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if os.environ["RANK"] == "1" and not os.environ.get(LATE) and trainer.global_step == JOINS_AT - 2:
            os.kill(os.getpid(), signal.SIGKILL)


def _again(dead: str) -> Any:
    if os.environ.get(LATE):  # the same command, once more
        until = time.monotonic() + 120
        while Path(f"/proc/{Path(dead).read_text()}").exists() and time.monotonic() < until:
            time.sleep(0.02)
    elif os.environ["RANK"] == "1":
        Path(dead).write_text(str(os.getpid()))
    else:
        while not Path(dead).exists():
            time.sleep(0.02)
    return fit("HeteroDDPStrategy", {"balance": "off"}, None, 1, [Dies])


def test_a_killed_rank_that_is_started_again_is_back(tmp_path: Path) -> None:
    """The restarted rank has the same command and no more: it finds the job where the launcher's ranks met."""
    (tmp_path / "dead").write_text(str(os.getpid()))

    def env_of(rank: int) -> dict[str, str]:
        same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(min(rank, 1)), "LOCAL_RANK": str(min(rank, 1))}
        return {**same, LATE: "1"} if rank == 2 else same

    outcomes = attempt(_again, 3, str(tmp_path / "dead"), env_of=env_of)
    assert outcomes[1].exitcode == -signal.SIGKILL
    records = values([outcomes[0], outcomes[2]])
    assert [one.starts[-1][1:] for one in records] == [(0, 2), (1, 2)]
    assert torch.equal(records[0].weights, records[1].weights)


class FirstDies(pl.Callback):
    """The process of rank 0 is killed."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if os.environ["RANK"] == "0" and not os.environ.get(LATE) and trainer.global_step == JOINS_AT - 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_successor_of_rank_zero_takes_newcomers_in(tmp_path: Path) -> None:
    outcomes = grow(3, 1, fit, "HeteroDDPStrategy", {"balance": "off"}, str(tmp_path / "job"), 1, [FirstDies])
    assert outcomes[0].exitcode == -signal.SIGKILL
    records = values(outcomes[1:])
    assert [one.starts[-1][1:] for one in records] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(one.weights, records[0].weights) for one in records)


@pytest.mark.parametrize("strategy", ["DASOStrategy", "NodeAverageStrategy"])
def test_replicas_join_a_run_that_ends_by_its_steps(strategy: str, tmp_path: Path) -> None:
    """A newcomer asks for its data when the others do; they have asked before, without epochs to count."""
    file = str(tmp_path / "job")
    records = values(grow(2, 1, fit, strategy, {"ranks_per_node": 1}, file, 1, epochs=-1, steps=40))
    assert {one.starts[-1][2] for one in records} == {3}
    assert all(torch.equal(one.weights, records[0].weights) for one in records)


def test_who_is_started_again_has_the_free_entries_of_lists(tmp_path: Path) -> None:
    """Ranks have new numbers then; those that remained keep their own entries."""
    options = {"balance": [3.0, 2.0, 1.0]}
    outcomes = grow(3, 1, fit, "HeteroDDPStrategy", options, str(tmp_path / "job"), 1, [FirstDies])
    assert outcomes[0].exitcode == -signal.SIGKILL
    records = values(outcomes[1:])
    assert [one.starts[-1][1:] for one in records] == [(0, 3), (1, 3), (2, 3)]
    assert [len(one.taken[max(one.taken)]) for one in records] == [4, 2, 6]
    assert all(torch.equal(one.weights, records[0].weights) for one in records)


class Frozen(Module):
    """Trains its first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def test_a_process_joins_after_hooks_have_changed_the_trainer_and_the_model(tmp_path: Path) -> None:
    """In mid-epoch, where they do not do so again."""
    file, callbacks = str(tmp_path / "job"), [partial(GradientAccumulationScheduler, {0: 2})]
    records = values(grow(2, 1, fit, "HeteroDDPStrategy", {"balance": "off"}, file, 1, callbacks, Frozen, epochs=4))
    assert {one.starts[-1][2] for one in records} == {3}
    whole = one_process(epochs=4, batch=2 * BATCH, accumulated=2, frozen=1)
    assert all((one.weights - whole).abs().max() < 1e-10 for one in records)
