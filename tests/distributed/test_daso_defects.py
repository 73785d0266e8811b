"""Defects of other implementations of DASO, none of which `hetero_daso` has."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import START, in_numpy, loader
from ranks import run
from test_daso_oracle import Linear, check, train

from lightning_hetero import DASOStrategy

MIXINGS = ("daso", "delta")
TWO, THREE = {"speeds": [7.0, 5.0]}, {"speeds": [6.0, 2.0, 4.0]}  # nodes of one rank


def each(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(**call) for call in calls]


def moved(result: dict[str, Any], truth: np.ndarray, start: np.ndarray) -> float:
    """Error of the final weights, relative to the distance that they have moved."""
    return np.linalg.norm(result["final"] - truth) / np.linalg.norm(truth - start)


# -- numbers -------------------------------------------------------------------------------------------------


class RoundsWeights(DASOStrategy):
    """Sends the weights themselves, and not the distance that they have moved."""

    def make_averager(self) -> Any:
        begin = self.engine.links.begin
        self.engine.links.begin = lambda own, *rest: begin(
            replace(own, reference=[torch.zeros_like(old) for old in own.reference]), *rest
        )
        return super().make_averager()


def near_one() -> Linear:
    return Linear(np.ones(8), lr=1e-5, dtype=torch.float32)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("mixing", MIXINGS)
def test_16_bits_do_not_swallow_small_steps(mixing: str) -> None:
    # Weights near 1, where numbers in bf16 are 2^-7 apart, that move by a hundredth of that at a step.
    common = {
        "make": near_one,
        "dtype": torch.float32,
        "epochs": 2,
        "warmup": 2,
        "cooldown": 2,
        "mixing": mixing,
        **TWO,
    }
    calls = [{**common, "wire": wire} for wire in ("fp32", "bf16")]
    calls.append({**common, "wire": "bf16", "strategy_class": RoundsWeights})
    results = run(each, 2, *calls, nodes=[1, 1])
    for exact, narrow, control in results:
        steps = np.abs(np.diff(exact["path"], axis=0)).mean()
        assert 2e-5 < steps < 2**-7 / 20
        truth = exact["final"]
        assert 0 < moved(narrow, truth, np.ones(8)) < 0.01
        assert moved(control, truth, np.ones(8)) > 0.05
    assert np.array_equal(results[0][1]["final"], results[1][1]["final"])


@pytest.mark.long
def test_wires_between_three_nodes() -> None:
    options = {"mixing": "delta", "global_every": 4, "wait": 2, "warmup": 3, "cooldown": 3, "patience": 99}
    truths = [in_numpy(**{**options, "mixing": mixing}, nodes=[1, 1, 1], epochs=2, **THREE) for mixing in MIXINGS]
    calls = [
        {**options, "mixing": mixing, "wire": wire, "epochs": 2, **THREE}
        for mixing in MIXINGS
        for wire in ("fp32", "fp16", "bf16")
    ]
    results = run(each, 3, *calls, nodes=[1, 1, 1])
    for i, truth in enumerate(truths):
        check([result[3 * i] for result in results], truth, [1, 1, 1])
        for result in results:
            half, brain = (moved(result[3 * i + k], truth.weights[-1, 0], START) for k in (1, 2))
            assert 0 < half < 1e-3 < 1e-2
            assert half < brain < 1e-2
            assert np.array_equal(result[3 * i + 2]["final"], results[0][3 * i + 2]["final"])


# -- when it is mixed ----------------------------------------------------------------------------------------


class Validated(Linear):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return loader(24)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("validate", [False, True])
def test_an_exchange_spans_the_end_of_an_epoch(mixing: str, validate: bool) -> None:
    # Epochs of 6 steps. Exchanges begin after steps 4, 8, 12, ..., and are mixed in after 7, 11, 15, ...
    options = {"mixing": mixing, "global_every": 4, "wait": 3, "warmup": 0, "cooldown": 1, "patience": 99}
    common = {**options, "epochs": 4, "samples": 72, "trainer": {"num_sanity_val_steps": 0}, **TWO}
    truth = in_numpy(**options, nodes=[1, 1], epochs=4, samples=72, **TWO)
    assert truth.begun == [4, 8, 12, 16, 20]
    check(run(train, 2, Validated if validate else Linear, nodes=[1, 1], **common), truth, [1, 1])


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("every", "wait", "look"), [(4, 3, 4), (8, 7, 5), (8, 2, 3), (6, 6, 4), (5, 0, 2)])
def test_no_exchange_is_lost_when_the_rates_change_while_it_is_under_way(every: int, wait: int, look: int) -> None:
    options = {
        "global_every": every, "wait": wait, "warmup": 0, "cooldown": 1, "patience": 1, "threshold": 0.9,
        "schedule_every_n_steps": look, "epochs": 2, **TWO,
    }  # fmt: skip
    truth = in_numpy("daso", **options, nodes=[1, 1])
    assert len(set(truth.rates)) >= 3
    check(run(train, 2, nodes=[1, 1], **options), truth, [1, 1])
