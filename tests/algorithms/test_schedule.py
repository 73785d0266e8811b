"""DASO's schedule as a pure state machine, and its mixing rules by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.algorithms.daso import mix
from lightning_hetero.algorithms.schedules import RateSchedule, phase
from lightning_hetero.comm.all_reduce import Average
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.vectors import Replica


def course(schedule: RateSchedule, losses: list[float]) -> list[tuple[int, int]]:
    seen = [(schedule.every, schedule.wait)]
    for loss in losses:
        schedule.observe_loss(loss)
        if (schedule.every, schedule.wait) != seen[-1]:
            seen.append((schedule.every, schedule.wait))
    return seen


def test_on_a_flat_loss() -> None:
    expected = [(4, 1), (2, 1), (1, 1), (8, 2), (4, 1), (2, 1), (1, 1), (8, 2)]
    assert course(RateSchedule(), [1.0] * 15) == expected


def test_a_loss_that_falls_changes_nothing() -> None:
    assert course(RateSchedule(), [0.9**i for i in range(40)]) == [(4, 1)]


def test_a_fall_within_the_threshold_is_none() -> None:
    assert len(course(RateSchedule(threshold=0.05), [0.96 if i else 1.0 for i in range(3)])) == 2
    assert len(course(RateSchedule(threshold=0.03), [0.96 if i else 1.0 for i in range(3)])) == 1


def test_a_metric_below_zero_falls_too() -> None:
    assert len(course(RateSchedule(threshold=0.05), [-1.0, -0.97, -1.04])) == 2
    assert len(course(RateSchedule(threshold=0.05), [-1.0, -1.06, -1.13])) == 1


@given(
    st.integers(1, 16), st.integers(0, 16), st.integers(1, 16), st.integers(1, 4),
    st.lists(st.floats(0.01, 10), max_size=60),
)  # fmt: skip
def test_the_rates_stay_sane(every: int, wait: int, largest: int, patience: int, losses: list[float]) -> None:
    schedule = RateSchedule(every, min(wait, every), largest, patience)
    for loss in losses:
        schedule.observe_loss(loss)
        assert 1 <= schedule.every <= max(every, largest)
        assert 0 <= schedule.wait <= schedule.every


def test_it_goes_on_where_it_was_saved() -> None:
    losses = [1.0, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5]
    whole, first, second = RateSchedule(), RateSchedule(), RateSchedule()
    for loss in losses:
        whole.observe_loss(loss)
    for loss in losses[:4]:
        first.observe_loss(loss)
    second.load_state_dict(first.state_dict())
    for loss in losses[4:]:
        second.observe_loss(loss)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"wait": 5},
        {"wait": "soon"},
        {"wait": True},
        {"wait": -1},
        {"every": 0},
        {"max_every": 0},
        {"patience": 0},
        {"threshold": 1.0},
        {"every": 2.5},
        {"every": True},
        {"threshold": "0.1"},
    ],
)
def test_what_cannot_be(options: dict) -> None:
    with pytest.raises(ConfigurationError):
        RateSchedule(**options)


def test_phases() -> None:
    assert [phase(step, 10, 3, 2) for step in range(1, 11)] == ["warm-up"] * 3 + ["cycling"] * 5 + ["cool-down"] * 2


def test_an_automatic_wait_is_the_smallest_that_hides_the_exchange() -> None:
    schedule = RateSchedule(every=4, wait="auto", max_every=8, patience=1)
    assert schedule.wait == 4  # nothing measured yet
    schedule.measured([math.nan, math.nan])
    assert schedule.wait == 4
    schedule.measured([3.4, 2.1])  # the first waited for the second
    assert schedule.wait == 3
    for _ in range(3):
        schedule.measured([1.0, 0.9])
    assert schedule.wait == 1
    for _ in range(5):
        schedule.measured([6.5, 7.0])
    assert schedule.wait == 4  # at most B
    rates = []
    for _ in range(4):
        schedule.observe_loss(1.0)
        rates.append((schedule.every, schedule.wait))
    assert rates == [(4, 4), (2, 2), (1, 1), (8, 7)]
    other = RateSchedule(every=4, wait="auto")
    other.load_state_dict(schedule.state_dict())
    assert (other.every, other.wait) == (8, 7)


def mixed(rule: str, value: torch.Tensor, mean: torch.Tensor, snapshot: torch.Tensor, stale: int, count: int):
    module = torch.nn.ParameterList([torch.nn.Parameter(value.clone())])
    mix(rule, Replica(module), Average([mean], [], [mean - snapshot], [True] * count, 0.0, 0.0, []), stale, count)
    return module[0].detach()


def test_the_mixing_value() -> None:
    # x = (1, 2), S = 1, P = 2: 1.25 and 1.75.
    mean = torch.tensor([1.5])
    assert mixed("daso", torch.tensor([1.0]), mean, torch.tensor([1.0]), 1, 2).item() == 1.25
    assert mixed("daso", torch.tensor([2.0]), mean, torch.tensor([2.0]), 1, 2).item() == 1.75
    # The other rule agrees while nothing has moved, and keeps what has moved since.
    assert mixed("delta", torch.tensor([1.0]), mean, torch.tensor([1.0]), 1, 2).item() == 1.25
    assert mixed("delta", torch.tensor([1.5]), mean, torch.tensor([1.0]), 1, 2).item() == 1.75
    assert mixed("daso", torch.tensor([1.5]), mean, torch.tensor([1.0]), 1, 2).item() == 1.5


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.integers(0, 5), st.sampled_from(["daso", "delta"]))
def test_replicas_that_agree_stay_and_all_stay_within_their_range(values: list[float], stale: int, rule: str) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    count = len(values)
    after = mixed(rule, x, x.mean().expand(count).clone(), x, stale, count)
    assert math.isclose(after.sum().item(), x.sum().item(), abs_tol=1e-9)  # the mean is kept
    assert after.min() >= x.min() - 1e-9
    assert after.max() <= x.max() + 1e-9
    same = torch.full_like(x, values[0])
    assert torch.allclose(mixed(rule, same, same, same, stale, count), same)
