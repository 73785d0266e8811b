"""Rates of `hetero_daso`: exchanges per batch and steps of waiting, never stuck and never out of bounds."""

import numpy as np
import pytest

from lightning_hetero.algorithms.schedules import RateSchedule

# -- the schedule --------------------------------------------------------------------------------------------


class Naive(RateSchedule):
    """The control: starts over only if both arrive at 1 together."""

    def observe_loss(self, loss: float) -> None:
        if self.every == self.wait == 1:
            self.every, self.wait = self.max_every, self.max_every // 4
        else:
            self.every, self.wait = self.every // 2, self.wait // 2


def cycle(schedule: RateSchedule, plateaus: int = 40) -> list[tuple[int, int]]:
    rates = []
    schedule.observe_loss(1.0)
    for _ in range(plateaus):
        schedule.observe_loss(1.0)
        rates.append((schedule.every, schedule.wait))
    return rates


@pytest.mark.parametrize("every", [3, 5, 7])
@pytest.mark.parametrize("largest", [3, 8, 12])
def test_rates_never_stick_at_0(every: int, largest: int) -> None:
    rates = [b for b, _ in cycle(RateSchedule(every, 1, largest, patience=1))]
    assert min(rates) == 1
    ones = [i for i, b in enumerate(rates[:-1]) if b == 1]
    assert len(ones) > 5
    assert all(rates[i + 1] == largest for i in ones)
    assert cycle(Naive(every, 1, largest, patience=1))[-1] == (0, 0)


def test_an_exchange_waits_neither_less_than_0_nor_more_than_b_steps() -> None:
    for every in range(1, 13):
        for largest in range(1, 13):
            for wait in range(every + 1):
                for b, w in cycle(RateSchedule(every, wait, largest, patience=1), 12):
                    assert 0 <= w <= b
                    assert b >= 1
                    assert w > 0 or wait == 0  # what is in the background stays there


def test_an_automatic_wait_lies_between_1_and_b() -> None:
    draw = np.random.default_rng(0)
    for every in range(1, 13):
        for largest in (1, 3, 8, 13):
            schedule = RateSchedule(every, "auto", largest, patience=1)
            for _ in range(60):
                if draw.random() < 0.5:
                    schedule.measured(draw.choice([0.0, 0.01, 1.0, 2.5, 7.9, 100.0, np.nan, np.inf], 3).tolist())
                else:
                    schedule.observe_loss(1.0)
                assert 1 <= schedule.wait <= schedule.every
