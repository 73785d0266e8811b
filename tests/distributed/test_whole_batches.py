"""Whole batches of a user's sampler: ranks take several in a step, or none; the weights are those of one process."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import (
    ChangePlan,
    EvaluatedNet,
    Killed,
    Net,
    Save,
    TokenNet,
    dataset,
    error,
    one_process,
    parameters,
    train,
)
from test_batch_samplers import FORMS
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy, HeteroMonitor, NodeAverageStrategy
from lightning_hetero.batching.passes import batches_of

SAMPLES, BUDGET = 101, 60
LENGTHS = [3 + 7 * i % 17 for i in range(SAMPLES)]


class Budget:
    """Batches with a limit of tokens, of samples of similar length, in another order in each epoch."""

    def __init__(self) -> None:
        self.epoch, self.batches = 0, [list[int]()]
        for index in sorted(range(SAMPLES), key=LENGTHS.__getitem__):
            if (len(self.batches[-1]) + 1) * LENGTHS[index] > BUDGET:
                self.batches.append([])
            self.batches[-1].append(index)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch))
        return iter([self.batches[i] for i in order.tolist()])

    def __len__(self) -> int:
        return len(self.batches)


def steps_of(number: int, epochs: int) -> list[list[list[int]]]:
    """The sampler's batches in each step."""
    sampler, found = Budget(), list[list[list[int]]]()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        found += [batches[i : i + number] for i in range(0, len(batches), number)]
    return found


def truth(number: int, epochs: int = 2, make: Any = Net, **options: Any) -> torch.Tensor:
    """Train in one process that takes the batches of each step together."""
    merged = [sum(batches, list[int]()) for batches in steps_of(number, epochs)]
    return one_process(SAMPLES, merged, epochs=1, make=make, **options)


class Counts(pl.Callback):
    """Counts this rank's batches in each step; a batch of one sample is padding."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.counts.append(sum(len(one[3]) > 1 for one in batches_of(batch)))


class AdamW(Net):
    def __init__(self) -> None:
        super().__init__("adamw")


#: Options of the strategy, the model, options of both fits, and options of ours.
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], dict[str, Any]]] = {
    "1:4": ({"balance": [1.0, 4.0], "whole_batches": 5}, Net, {}, {}),
    "a rank without batches": ({"balance": [0.0, 1.0], "whole_batches": 3}, Net, {}, {}),
    "as many as ranks": ({"whole_batches": True}, Net, {}, {}),
    "measured, workers": ({"whole_batches": 6, "rebalance_every_n_steps": 1}, Net, {}, {"workers": 1}),
    "changed mid-run": ({"whole_batches": 4}, AdamW, {}, {"changes": {2: [5.0, 1.0], 5: [1.0, 8.0]}}),
    "accumulated, clipped": (
        {"balance": [1.0, 3.0], "whole_batches": 4}, Net, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {}
    ),
    "tokens": ({"balance": [1.0, 2.0], "whole_batches": 4, "on_nan": "skip"}, TokenNet, {}, {}),
    "by cost": ({"balance": [1.0, 2.0], "whole_batches": 5, "sample_cost": LENGTHS}, TokenNet, {}, {}),
    "by length": ({"whole_batches": 5, "sample_cost": LENGTHS, "cost": "padded"}, Net, {}, {}),
    "by samples": ({"whole_batches": 5, "cost": "samples", "balance": "off"}, Net, {}, {}),
    "whole by the dataset": ({"balance": [1.0, 4.0], "whole_batches": 5}, Net, {}, {"form": "batches"}),
}  # fmt: skip


def _fits() -> dict[str, tuple[torch.Tensor, list[list[int]], list[int]]]:
    found = {}
    for name, (options, make, both, ours) in CASES.items():
        module, counts = make(), Counts()
        callbacks = [counts, *([ChangePlan(ours["changes"])] if "changes" in ours else [])]
        loader = FORMS[ours.get("form", "samples")](dataset(SAMPLES), Budget(), num_workers=ours.get("workers", 0))
        train(module, HeteroDDPStrategy(**options), loader, max_epochs=2, callbacks=callbacks, **both)
        found[name] = parameters(module), module.seen, counts.counts
    return found


def test_whole_batches_come_to_what_one_process_comes_to() -> None:
    assert min(map(len, Budget().batches)) > 1  # one sample is padding
    ranks = run(_fits, 2)
    for name, (options, make, both, _) in CASES.items():
        number = 2 if options["whole_batches"] is True else options["whole_batches"]
        expected = truth(number, make=make, **both)
        assert error(expected, parameters(make())) > 1e-3, name
        for results in ranks:
            assert error(results[name][0], expected) <= 1e-10, name
        taken = [part for results in ranks for part in results[name][1] if len(part) > 1]
        assert sorted(taken) == sorted(2 * Budget().batches), name  # none is cut, none is merged, each once per epoch
    assert [results["1:4"][2] for results in ranks] == [[1, 1, 1, 1, 0] * 2, [4, 4, 4, 4, 1] * 2]
    assert all(len(part) == 1 for part in ranks[0]["a rank without batches"][1])


# -- speeds --------------------------------------------------------------------------------------------------

FIXED, PER_TOKEN, CHANGE = 0.010, 0.001, 24  # seconds, seconds, steps
SLOW = [(3.0, 1.0), (1.0, 3.0)]  # slowdown of each rank, at first and after the change


class Emulated(Net):
    """Takes the time that its rank's device would need for the tokens of a batch, padding included."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        indices = batch[3].tolist()
        seconds = FIXED + PER_TOKEN * len(indices) * max(LENGTHS[i] for i in indices)
        time.sleep(seconds * SLOW[self.trainer.global_step >= CHANGE][self.global_rank])
        return super().training_step(batch, batch_idx)


def _balanced(report: str, number: int, epochs: int) -> Any:
    module, counts, monitor = Emulated(), Counts(), HeteroMonitor(report=report)
    options: dict[str, Any] = {"whole_batches": number, "rebalance_every_n_steps": 2}
    with virtual_time(sys.modules[__name__]):
        loader = DataLoader(dataset(SAMPLES), batch_sampler=Budget())
        train(module, HeteroDDPStrategy(**options), loader, max_epochs=epochs, callbacks=[counts, monitor])
    return counts.counts, monitor.summary and monitor.summary.verdict


@pytest.mark.parametrize(("number", "slow", "fast"), [(8, 2, 6), (2, 0, 2)])
def test_a_fast_rank_takes_more_and_batches_are_dealt_again_when_speeds_change(
    tmp_path: Path, number: int, slow: int, fast: int
) -> None:
    """Clocks are virtual: only the emulated devices take time."""
    (one, verdict), (other, _) = run(_balanced, 2, str(tmp_path), number, 3 * number)
    steps = steps_of(number, 3 * number)
    assert [sum(both) for both in zip(one, other, strict=True)] == [len(batches) for batches in steps]
    taken = [n if len(batches) == number else None for batches, n in zip(steps, one, strict=True)]
    assert {*taken[CHANGE - 6 : CHANGE]} - {None} == {slow}
    assert {*taken[-6:]} - {None} == {fast}
    assert verdict is not None


# -- resuming, replicas, losses, evaluation ------------------------------------------------------------------


def _resumed(path: str) -> Any:
    def fit(ckpt: str | None, *callbacks: Any) -> Net:
        module = Net()
        strategy = HeteroDDPStrategy(whole_batches=5, balance=[3.0, 1.0])
        data = DataLoader(dataset(SAMPLES), batch_sampler=Budget())
        train(module, strategy, data, path=ckpt, max_epochs=3, callbacks=list(callbacks))
        return module

    whole, resumed = fit(None, Save(path, 6, stop=False)), fit(path)
    return parameters(whole), parameters(resumed), whole.seen, resumed.seen


def test_a_run_of_whole_batches_resumes_in_mid_epoch(tmp_path: Path) -> None:
    steps = len(steps_of(5, 1))
    assert 6 % steps
    for whole, resumed, seen, rest in run(_resumed, 2, str(tmp_path / "saved.ckpt")):
        assert error(resumed, whole) <= 1e-10
        assert rest == seen[-len(rest) :]
        assert len(rest) < len(seen)


def _survivors() -> Any:
    module, counts = Net(), Counts()
    strategy = HeteroDDPStrategy(whole_batches=6, balance="off", on_peer_loss="continue")
    loader = DataLoader(dataset(SAMPLES), batch_sampler=Budget())
    train(module, strategy, loader, max_epochs=3, callbacks=[Killed(2, 4), counts])
    return counts.counts, parameters(module)


def test_ranks_that_remain_share_the_batches() -> None:
    one, other, _ = attempt(_survivors, 3)
    (counts, weights), (rest, same) = one.value, other.value
    assert torch.equal(weights, same)
    assert counts[0] == rest[0] == 2
    assert [a + b for a, b in zip(counts[-4:], rest[-4:], strict=True)] == [6, 6, 6, 3]


class Held(EvaluatedNet):
    """Fails if a batch has more tokens than the budget."""

    def loss(self, batch: Any) -> torch.Tensor:
        assert len(batch[3]) * max(LENGTHS[i] for i in batch[3].tolist()) <= BUDGET
        return super().loss(batch)


def _elsewhere() -> Any:
    module, budget = Held(), DataLoader(dataset(SAMPLES), batch_sampler=Budget())
    train(module, HeteroDDPStrategy(whole_batches=4), budget, budget, num_sanity_val_steps=0)
    node, fixed = Net(), DataLoader(dataset(50), batch_sampler=BatchSampler(SequentialSampler(range(50)), 4, False))
    train(node, NodeAverageStrategy(whole_batches=True, every_n_steps=2, ranks_per_node=1), fixed)
    return module.evaluated, node.seen, parameters(node)


def test_an_evaluation_keeps_batches_whole_and_so_do_replicas() -> None:
    (evaluated, seen, weights), (also, others, same) = run(_elsewhere, 2)
    assert sorted(evaluated + also) == list(range(SAMPLES))
    assert sorted(part for part in seen + others if len(part) > 1) == [
        list(range(first, min(first + 4, 50))) for first in range(0, 50, 4)
    ]
    assert torch.equal(weights, same)
