"""Delayed Nesterov at a center: buffers that come from old centers, and values that are not finite."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hetero.algorithms.diloco_async import DelayedNesterov


def _views(flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [flats[0][:1]], [flats[0][1:]]  # a parameter and a buffer


def _center(value: float) -> list[Tensor]:
    zeros = [torch.zeros(2, dtype=torch.float64) for _ in range(3)]
    return [torch.full((2,), value, dtype=torch.float64), *zeros, torch.zeros(1, dtype=torch.float64)]


def _arrive(rule: DelayedNesterov, center: list[Tensor], change: float, buffer: float) -> float:
    values = [torch.tensor([change, buffer], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)]
    square = rule.measure(values, center)
    rule.move(values, center, 0.25, square)
    return square


def test_a_variance_stays_between_those_that_arrive() -> None:
    rule, center = DelayedNesterov(4, lr=1.0, momentum=0.0, views=_views), _center(1.0)
    differences = 1.0
    for _ in range(8):  # a fast replica, which begins anew from the center each time
        _arrive(rule, center, 0.0, 0.05)
        differences += 0.25 * (0.05 - differences)
    for _ in range(3):  # slow ones, which began from 1
        _arrive(rule, center, 0.0, 0.05)
        differences += 0.25 * (0.05 - 1.0)
    assert differences < 0  # the control: sums of differences
    assert 0.05 < center[0][1] < 0.1


def test_only_parameters_are_measured_and_buffers_must_be_finite() -> None:
    rule, center = DelayedNesterov(4, lr=1.0, momentum=0.0, views=_views), _center(1.0)
    assert _arrive(rule, center, 3.0, 100.0) == 9.0
    before = [value.clone() for value in center]
    assert math.isnan(_arrive(rule, center, 3.0, math.nan))
    assert torch.equal(center[0], before[0])
