"""The trained weights are those of one process on the whole batch, whatever the split."""

import math
from functools import partial

import pytest
import torch
from oracles import oracle
from ranks import run
from tasks import GanLike, Net, TokenNet, error, fit, fits, parameters

WORLD = 3
CASES = {
    "even": {},
    "uneven": {"strategy": {"balance": [3.0, 1.0, 2.0]}},
    "a rank with zero samples": {"strategy": {"balance": [3.0, 0.0, 1.0]}},
    "measured": {"strategy": {"balance": "auto", "rebalance_every_n_steps": 1}},
    "changed mid-run": {"changes": {3: [5.0, 1.0, 1.0], 10: [0.0, 1.0, 4.0], 17: [1.0, 8.0, 1.0]}},
    "limits": {"strategy": {"balance": [9.0, 1.0, 1.0], "min_batch_size": 2, "max_batch_size": [6, 12, 12]}},
}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_any_split_is_one_process(optimizer: str) -> None:
    # 101 samples in batches of 12: the last one has 5, which leaves ranks with few or none.
    make = partial(Net, optimizer)
    truth = parameters(oracle(make, 12))
    for results in run(fits, WORLD, {name: {"make": make, "batch_size": 12, **case} for name, case in CASES.items()}):
        assert set(results) == set(CASES)
        for case, result in results.items():
            assert error(result["parameters"], truth) <= 1e-10, case
            assert result["steps"] == 3 * math.ceil(101 / 12), case


@pytest.mark.long(after=1)
@pytest.mark.parametrize("samples", [101, 98])  # a last window that is short, and a last batch of 2 for 3 ranks
def test_accumulation_and_clipping(samples: int) -> None:
    truths, calls, common = {}, {}, {"make": Net, "batch_size": 12, "samples": samples}
    for k in (1, 2, 3):
        options = {"accumulate_grad_batches": k, "gradient_clip_val": 0.1}
        truths[f"{k} batches"] = truth = parameters(oracle(**common, **options))
        unclipped = oracle(**common, accumulate_grad_batches=k)
        assert error(parameters(unclipped), truth) > 1e-3  # or clipping would show nothing
        calls[f"{k} batches"] = {**common, **options, "changes": {2: [4.0, 1.0, 2.0], 12: [1.0, 0.0, 1.0]}}
    for results in run(fits, WORLD, calls):
        for case, truth in truths.items():
            assert error(results[case]["parameters"], truth) <= 1e-10, case


def test_token_weights() -> None:
    calls = {f"{k} batches": {"make": TokenNet, "batch_size": 12, "accumulate_grad_batches": k} for k in (1, 2)}
    truths = {case: parameters(oracle(**call)) for case, call in calls.items()}
    for results in run(
        fits, WORLD, {k: {**call, "strategy": {"balance": [3.0, 1.0, 2.0]}} for k, call in calls.items()}
    ):
        for case, truth in truths.items():
            assert error(results[case]["parameters"], truth) <= 1e-10, case


def test_two_optimizers_by_hand() -> None:
    truth = oracle(GanLike, 12)
    unused = {"find_unused_parameters": True}  # each backward pass leaves the other network out
    results = run(fit, WORLD, GanLike, 12, strategy=unused, changes={1: [4.0, 1.0, 2.0], 12: [1.0, 0.0, 1.0]})
    for result in results:
        assert error(result["parameters"], parameters(truth)) <= 1e-10


def test_float32() -> None:
    make = partial(Net, dtype=torch.float32)
    truth = oracle(make, 12, dtype=torch.float32)
    results = run(fit, WORLD, make, 12, dtype=torch.float32, strategy={"balance": [3.0, 1.0, 2.0]})
    for result in results:
        assert error(result["parameters"], parameters(truth)) <= 1e-5


def test_dropping_the_tail() -> None:
    truth = oracle(Net, 12, drop_last=True)
    results = run(fit, WORLD, Net, 12, strategy={"balance": [3.0, 1.0, 2.0]}, loader={"drop_last": True})
    for result in results:
        assert error(result["parameters"], parameters(truth)) <= 1e-10
        assert result["steps"] == 3 * (101 // 12)


def test_what_is_logged_is_of_all_samples() -> None:
    # Values logged with sync_dist count by samples: those of a batch, and those of an epoch; padding does not.
    import lightning.pytorch as pl

    steps: list[float] = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            steps.append(trainer.callback_metrics["train_step"].item())

    oracle(Net, 12, 98, max_epochs=1, callbacks=[Record()])
    truth = oracle(Net, 12, 98, max_epochs=1)
    results = run(fit, WORLD, Net, 12, 98, strategy={"balance": [7.0, 1.0, 1.0]}, max_epochs=1)
    expected = {name: value.item() for name, value in truth.trainer.callback_metrics.items()}
    for result in results:
        assert result["metrics"] == pytest.approx(expected, rel=1e-12)
        assert result["metrics"]["train_step"] == pytest.approx(steps[-1], rel=1e-12)
