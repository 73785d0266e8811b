"""`tau="auto"`: the rule, with virtual times."""

import math

import pytest

from lightning_hetero.algorithms.schedules import TauSchedule, smallest_tau


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
    if 1 < tau < 500:  # one less would not do
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
