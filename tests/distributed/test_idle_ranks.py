"""A rank that makes every step longer gets no samples, and some again once it has become faster."""

import itertools
import logging
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from oracles import oracle
from ranks import attempt, run
from tasks import FAST, Killed, Save, dataset, error, parameters
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from virtual_time import VirtualTime, virtual_time

from lightning_hetero import EmulatedSpeed, HeteroDDPStrategy, HeteroMonitor, SharedStream
from lightning_hetero.batching.idle_ranks import IdleRanks
from lightning_hetero.batching.shares import Cost, makespan, split

TOTAL = 32  # samples of all ranks in a step
#: Speeds 1 : 0.6 : 0.05. The two fast ranks do 143 samples/s; the slow one, which needs 0.264 s for one, allows 121.
SPEEDS = [(0.04, 0.0092), (0.04, 0.0092 / 0.6), (0.08, 0.184)]
SLOWER = [*SPEEDS[:2], (0.24, 0.184)]
FAST_AGAIN = [*SPEEDS[:2], (0.04, 0.012)]


class Plain(pl.LightningModule):
    """A small regression with BatchNorm's buffers, trained with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.register_buffer("batches", torch.zeros(()))
        self.see = list[tuple[int, int]]().append  # a rank's steps and samples; hidden from the state

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, *_ = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.see((self.trainer.fit_loop.epoch_loop.total_batch_idx, len(batch[3])))
        self.batches += 1
        loss = self.loss(batch)
        self.log("train", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Tokens(Plain):
    """A mean over tokens."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, length, _ = batch
        return (length * (self.net(x) - y) ** 2).sum() / length.sum()

    def batch_weight(self, batch: Any) -> torch.Tensor:
        return batch[2].sum()


class Epochs(Plain):
    """Logs means over all samples of an epoch, one of them by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric().double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach(), weight=len(batch[3]))
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("synced", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Changing(Epochs):
    """Logs other names once the slow rank has no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.late = MeanMetric().double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch < 2:
            self.log("early", 2 * loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss
        self.late(loss.detach(), weight=len(batch[3]))
        self.log("late metric", self.late, on_step=False, on_epoch=True)
        self.log("late", 3 * loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Clock(pl.Callback):
    """Keeps the end of each batch, by this rank's virtual clock."""

    def __init__(self, clock: VirtualTime) -> None:
        self.clock, self.ends = clock, [0.0]

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(self.clock.now)


def _fit(
    make: Callable[[], pl.LightningModule],
    costs: Any = SPEEDS,
    change: dict[int, Any] | None = None,
    samples: int = TOTAL * 20 + 7,
    report: Path | None = None,
    callbacks: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    stream: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    module, messages = make(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    with virtual_time() as clock:
        ends = Clock(clock)
        strategy = HeteroDDPStrategy(global_batch_size=TOTAL, timeout=60, **(options or {}))
        more = [] if report is None else [HeteroMonitor(report=report)]
        chosen = {**FAST, "callbacks": [EmulatedSpeed(costs, change), ends, *more, *callbacks], **trainer}
        path, data = chosen.pop("path", None), dataset(samples)
        loader = (
            DataLoader(SharedStream(Stream(data)), batch_size=8)
            if stream
            else DataLoader(data, batch_size=8, shuffle=True)
        )
        instance = pl.Trainer(strategy=strategy, **chosen)
        instance.fit(module, loader, ckpt_path=path)
    return {
        "parameters": parameters(module),
        "seen": module.see.__self__,
        "seconds": [after - before for before, after in itertools.pairwise(ends.ends)],
        "messages": [line for line in messages if " on rank " in line and "samples" in line],
        "metrics": {name: float(value) for name, value in instance.callback_metrics.items()},
        "idle": [plan.idle for plan in strategy.accounting.planner.plans],
    }


class Stream(torch.utils.data.IterableDataset):
    """The samples of a dataset, in their order."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self.data)))


def best(costs: list[tuple[float, float]]) -> float:
    """Seconds of the best split."""
    lines = [Cost(*cost) for cost in costs]
    return makespan(split(TOTAL, lines, [1] * len(lines)), lines)


def idle_steps(result: dict[str, Any], steps: int) -> set[int]:
    """Steps in which a rank did not run its training step."""
    return set(range(steps)) - {step for step, _ in result["seen"]}


def test_the_job_is_as_fast_as_without_the_slow_rank_its_probes_included(tmp_path: Path) -> None:
    steps = 280
    results = run(_fit, 3, Plain, report=tmp_path, max_steps=steps, max_epochs=-1, samples=TOTAL * 100)
    idle = idle_steps(results[2], steps)
    first = min(idle)
    assert first < 60
    assert not idle_steps(results[0], steps) | idle_steps(results[1], steps)
    probes = [step for step in range(first, steps) if step not in idle]
    assert 3 <= len(probes) <= 5  # the rank is measured again
    taken = [max(result["seconds"][step] for result in results) for step in range(first, steps)]
    speed, without, with_it = TOTAL / (sum(taken) / len(taken)), TOTAL / best(SPEEDS[:2]), TOTAL / best(SPEEDS)
    assert (round(without), round(with_it)) == (143, 121)
    assert speed >= 0.99 * without
    (line,), *others = [result["messages"] for result in results]
    assert others == [[], []]
    for words in (line, (tmp_path / "report.html").read_text()):
        assert re.search(r"Without rank 2 the job is 1.1[78] times as fast \(14[23] samples/s against 121\)", words)
        assert "So it gets no samples" in words


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (Plain, {}),
    "accumulation": (Plain, {"accumulate_grad_batches": 2}),
    "clipping": (Plain, {"gradient_clip_val": 0.05}),
    "tokens": (Tokens, {}),
    "logs of epochs": (Epochs, {}),
}


def _case(name: str, epochs: int) -> dict[str, Any]:
    make, options = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IdleRanks, "PROBE_STEPS", 8)  # sooner
        patch.setattr(IdleRanks, "PROBE_PART", 0.1)
        return _fit(make, SLOWER, {60: FAST_AGAIN}, max_epochs=epochs, **options)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process_while_a_rank_is_idle_and_when_it_is_back(name: str) -> None:
    epochs = 8  # of 21 batches, the last of 7 samples
    results = run(_case, 3, name, epochs)
    make, options = CASES[name]
    alone = oracle(make, TOTAL, TOTAL * 20 + 7, max_epochs=epochs, **options)
    truth = parameters(alone)
    assert all(error(result["parameters"], truth) <= 1e-10 for result in results)
    idle = idle_steps(results[2], 21 * epochs)
    assert len(idle) > 25
    assert max(idle) < 21 * epochs - 40  # it is back
    messages = results[0]["messages"]
    assert ["gets no samples" in line for line in messages] == [True, False]
    assert "gets samples again" in messages[1]
    assert all("train" in result["metrics"] for result in results)
    if make is Epochs:
        for result in results:
            for value in ("metric", "synced"):
                assert result["metrics"][value] == pytest.approx(float(alone.trainer.callback_metrics[value]))


class ByLoss(Plain):
    """Its optimizer goes by the loss, which an idle rank has not."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_an_optimizer_that_goes_by_the_loss_while_a_rank_is_idle() -> None:
    results = run(_fit, 3, ByLoss, samples=TOTAL, max_epochs=42)  # all samples in each step: else it amplifies rounding
    truth = parameters(oracle(ByLoss, TOTAL, TOTAL, max_epochs=42))
    assert len(idle_steps(results[2], 42)) > 10
    assert all(error(result["parameters"], truth) <= 1e-10 for result in results)


@pytest.mark.parametrize("make", [Epochs, Changing])
def test_means_over_an_epoch_in_which_a_rank_has_had_no_sample(make: Any) -> None:
    results = run(_fit, 3, make, max_epochs=4)
    assert {*range(64, 84)} <= idle_steps(results[2], 84) | {64}  # all of the last epoch, but a probe
    truth = oracle(make, TOTAL, TOTAL * 20 + 7, max_epochs=4).trainer.callback_metrics
    assert {"metric", "synced"} <= truth.keys()
    for result in results:
        for name in truth.keys() - {"train"}:
            assert result["metrics"][name] == pytest.approx(float(truth[name])), name


def test_a_stream_gives_an_idle_rank_nothing() -> None:
    results = run(_fit, 3, Plain, stream=True, max_epochs=4)
    assert len(idle_steps(results[2], 84)) > 40
    counts: dict[int, int] = {}
    for step, samples in itertools.chain(*(result["seen"] for result in results)):
        counts[step] = counts.get(step, 0) + samples
    assert all(counts[step] == (7 if step % 21 == 20 else TOTAL) for step in range(84))
    assert all(torch.equal(result["parameters"], results[0]["parameters"]) for result in results)


class Counting(Plain):
    """Counts its steps: a rank that leaves some out has another count."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


class Meter(Plain):
    """Counts steps in an object that is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = SimpleNamespace(counts={"steps": 0})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.meter.counts["steps"] += 1
        return super().training_step(batch, batch_idx)


class Synced(Plain):
    """Logs a value over all ranks in some steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 20 == 0:
            self.log("synced", loss, sync_dist=True)
        return loss


class Target(Plain):
    """Moves a second network towards the first one within the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 16).double().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.target.weight.mul_(0.9).add_(self.net[0].weight, alpha=0.1)
        return super().training_step(batch, batch_idx)


class Outputs(Plain):
    """Keeps its results for the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        torch.stack(self.outputs).mean()
        self.outputs.clear()


class Dictionary(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": batch[0]}


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "changes attributes": (Counting, {}),
    "changes attributes or": (Target, {}),
    "changes attributes or frozen": (Outputs, {}),
    "changes attributes or frozen parameters": (Meter, {}),
    "ranks meet in training_step": (Synced, {}),
    "returns more than a loss": (Dictionary, {}),
    "optimization is manual": (Manual, {}),
    "min_batch_size is given": (Plain, {"min_batch_size": 1}),
    "find_unused_parameters": (Plain, {"find_unused_parameters": True}),
    "static_graph": (Plain, {"static_graph": True}),
    "broadcast_buffers=False": (Plain, {"broadcast_buffers": False}),
    "it is the first rank": (Plain, {}),
}


def _refused(reason: str) -> dict[str, Any]:
    make, options = REFUSED[reason]
    warnings.filterwarnings("ignore", ".*broadcast_buffers")  # has another name in new versions
    costs = [SPEEDS[2], *SPEEDS[:2]] if make is Plain and not options else SPEEDS
    messages = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    result = _fit(make, costs, max_epochs=3, options=options)
    return {**result, "messages": [line for line in messages if "least share: " in line]}


@pytest.mark.long(after=1)
@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
@pytest.mark.parametrize("reason", REFUSED)
def test_a_rank_keeps_its_least_share_where_its_steps_cannot_be_left_out(reason: str) -> None:
    results = run(_refused, 3, reason)
    assert [len(result["seen"]) for result in results] == [63, 63, 63]
    (line,) = results[0]["messages"]
    assert reason in line
    assert "the job is 1.1" in line


class Meeting(Plain):
    """Gathers over all ranks at one step, which no rank can know before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 40:
            self.all_gather(loss.detach())
        return loss


def test_a_meeting_that_was_not_to_be_seen_is_an_error() -> None:
    outcomes = attempt(_fit, 3, Meeting, max_epochs=5)
    assert "which gets no samples because it is too slow, does not run it" in str(outcomes[0].error)
    assert all(outcome.error is not None for outcome in outcomes)


def test_a_loss_while_a_rank_is_idle() -> None:
    """The idle rank gets samples at once, as it may be the only one left."""
    outcomes = attempt(_fit, 3, Plain, max_epochs=5, callbacks=(Killed(1, 50),), options={"on_peer_loss": "continue"})
    assert outcomes[1].exitcode == -signal.SIGKILL
    rest = [outcomes[rank].value for rank in (0, 2)]
    assert all(rest), "\n".join(outcome.trace for outcome in outcomes)
    assert torch.equal(rest[0]["parameters"], rest[1]["parameters"])
    idle = idle_steps(rest[1], 105)
    assert {45, 49} <= idle
    assert not {53, 54, 55, 56} & idle
    counts: dict[int, int] = {}
    for step, samples in rest[0]["seen"] + rest[1]["seen"]:
        counts[step] = counts.get(step, 0) + samples
    assert all(counts[step] == (7 if step % 21 == 20 else TOTAL) for step in range(53, 105))


def _resume(path: str) -> list[dict[str, Any]]:
    first = _fit(Plain, max_epochs=5, callbacks=(Save(path, 50, stop=True),))
    return [first, _fit(Plain, max_epochs=5, path=path)]


def test_a_run_that_was_saved_while_a_rank_was_idle_resumes(tmp_path: Path) -> None:
    results = run(_resume, 3, os.fspath(tmp_path / "saved.ckpt"))
    truth = parameters(oracle(Plain, TOTAL, TOTAL * 20 + 7, max_epochs=5))
    for first, second in results:
        assert error(second["parameters"], truth) <= 1e-10
        assert first["idle"][-1] == (2,)
    again = {step for step, _ in results[2][1]["seen"]}
    assert 50 in again  # measured once more first
    assert set(range(95, 105)) - again  # and then left out again
