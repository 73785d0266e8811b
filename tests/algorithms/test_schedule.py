"""Schedules by hand: DASO's rates and its mixing, and `tau="auto"`."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.algorithms.daso import mix
from lightning_hetero.algorithms.schedules import Phases, RateSchedule, TauSchedule, smallest_tau
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


@pytest.mark.parametrize(
    ("options", "losses", "rates"),
    [
        ({"threshold": 0.01}, [1.0] * 15, [(4, 1), (2, 1), (1, 1), (8, 2), (4, 1), (2, 1), (1, 1), (8, 2)]),
        ({"threshold": 0.01}, [0.9**i for i in range(40)], [(4, 1)]),
        ({"threshold": 0.05}, [1.0, 0.96, 0.96], [(4, 1), (2, 1)]),  # a fall within the threshold does not count
        ({"threshold": 0.03}, [1.0, 0.96, 0.96], [(4, 1)]),
        ({"threshold": 0.05}, [-1.0, -0.97, -1.04], [(4, 1), (2, 1)]),  # a metric below zero falls, too
        ({"threshold": 0.05}, [-1.0, -1.06, -1.13], [(4, 1)]),
        # What blocks stays blocking. NaN is no progress, and no mark to measure progress by; the first 1.0 is.
        (
            {"wait": 0, "patience": 1},
            [math.nan, *[1.0] * 6],
            [(4, 0), (2, 0), (1, 0), (8, 0), (4, 0), (2, 0), (1, 0)],
        ),
    ],
)
def test_rates_follow_the_loss(options: dict, losses: list[float], rates: list[tuple[int, int]]) -> None:
    assert course(RateSchedule(**options), losses) == rates


@pytest.mark.parametrize("options", [{"wait": True}, {"wait": -1}, {"patience": 0}, {"every": 2.5}, {"threshold": "1"}])
def test_what_cannot_be(options: dict) -> None:
    with pytest.raises(ConfigurationError):
        RateSchedule(**options)


@given(
    st.integers(1, 16), st.integers(0, 16), st.integers(1, 16), st.integers(1, 4),
    st.lists(st.floats(0.01, 10), max_size=60),
)  # fmt: skip
def test_the_rates_stay_sane(every: int, wait: int, largest: int, patience: int, losses: list[float]) -> None:
    schedule = RateSchedule(every, min(wait, every), largest, patience)
    for loss in losses:
        schedule.observe_loss(loss)
        assert 1 <= schedule.every <= max(every, largest)
        assert (min(wait, every) > 0) <= schedule.wait <= schedule.every  # an exchange in the background stays there


def test_phases() -> None:
    phases = [Phases(10, warmup=3, cooldown=2).of_step(step) for step in range(1, 11)]
    assert phases == ["warm-up"] * 3 + ["cycling"] * 5 + ["cool-down"] * 2


def test_rates_are_resumed_unless_the_user_has_changed_them() -> None:
    saved = RateSchedule(every=8, wait=2, patience=1)
    course(saved, [1.0, 1.0])
    assert (saved.every, saved.wait) == (4, 1)
    for options, rates in (({"every": 8, "wait": 2}, (4, 1)), ({"every": 2, "wait": 0}, (2, 0))):
        resumed = RateSchedule(**options)
        resumed.load_state_dict(saved.state_dict())
        assert (resumed.every, resumed.wait) == rates
        assert resumed.best == saved.best


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
    # The other rule gives the same if the values have not moved since, and otherwise keeps their movement.
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


@pytest.mark.parametrize(
    ("exchanges", "delay", "tau"),
    [
        ([0.5], 0, 10),  # half a step in ten
        ([0.1, 0.2, 0.2], 0, 10),  # the same, in fragments
        ([0.0], 0, 1),
        ([100.0], 0, 500),  # would need 2000
        ([3.0], 4, 5),  # hidden; the delay is less than tau
        ([3.0, 3.0, 3.0], 4, 9),  # hidden, one after another
        ([5.0], 4, 20),  # replicas wait for one step in twenty
    ],
)
def test_the_smallest_tau(exchanges: list[float], delay: int, tau: int) -> None:
    assert smallest_tau(exchanges, delay, 500) == tau
    waited = sum(max(0.0, each - delay) for each in exchanges)
    if tau < 500:
        assert waited <= 0.05 * tau + 1e-9
    if 1 < tau < 500:  # one step less would not be enough
        assert waited > 0.05 * (tau - 1) or tau - 1 <= delay or sum(exchanges) > tau - 1


def test_tau_follows_what_is_measured_at_the_ends_of_rounds() -> None:
    rhythm = TauSchedule("auto", 0, 500, 2)
    assert [rhythm.beginning(step) for step in (1, 4, 8, 12)] == [[], [1], [0], [1]]
    rhythm.measured(0, [math.nan, math.nan])
    assert rhythm.settle(8) is None  # nothing is known
    rhythm.measured(0, [0.5, 3.0])  # the second one has waited for the first
    rhythm.measured(1, [0.5, math.nan])
    assert rhythm.settle(12) is None  # in mid-round
    assert "tau=20, until now 8: an exchange of the whole model lasts 1 steps" in (rhythm.settle(16) or "")
    assert [rhythm.beginning(step) for step in (16, 26, 36)] == [[0], [1], [0]]
    other = TauSchedule("auto", 0, 500, 2)
    other.load_state_dict(rhythm.state_dict())
    assert other.beginning(26) == [1]
    rhythm.measured(0, [0.55])
    assert rhythm.settle(36) is None  # it would change by less than a tenth
    assert TauSchedule(6, 2, 500, 1).settle(6) is None
