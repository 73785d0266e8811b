"""The elastic kernel without a network: its conserved sums, its fixed points, its limits, and when it diverges."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hetero.algorithms import easgd
from lightning_hetero.algorithms.base import StepContext
from lightning_hetero.algorithms.easgd import ElasticAverager, stability
from lightning_hetero.comm.all_reduce import Average, Contribution, Traffic
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.vectors import Replica


class Table:
    """Rendezvous of threads that stand for replicas."""

    def __init__(self, count: int) -> None:
        self.barrier, self.slots = threading.Barrier(count, timeout=30), [()] * count


class TableLinks:
    """Stands for ReplicaLinks, and exchanges over a table."""

    def __init__(self, table: Table, index: int) -> None:
        self.table, self.index, self.count = table, index, len(table.slots)
        self.traffic = Traffic()

    def lay_out(self, layout: object) -> None: ...

    def feedback(self, wire: str, lengths: list[int]) -> None:
        """Do nothing: values are not rounded here."""

    def exchange(self, own: Contribution, *_: Any, **__: Any) -> Average:
        self.table.slots[self.index] = (*(flat.clone() for flat in own.values), own.payload)
        self.table.barrier.wait()
        everyone = list(self.table.slots)
        self.table.barrier.wait()
        total = sum(own.weights)
        parts = [
            sum(w / total * (other[i] - old) for w, other in zip(own.weights, everyone, strict=True))
            for i, old in enumerate(own.reference)
        ]
        return Average([], parts, [], [True] * self.count, 0.0, 0.0, [other[-1] for other in everyone])


class Course(NamedTuple):
    """Positions before the first step and after each: of replicas (steps, replicas, values), of the center."""

    x: np.ndarray
    c: np.ndarray

    def sums(self, alpha: float, beta: float, weights: list[float]) -> np.ndarray:
        """The sums that the kernel conserves without gradients, after each step."""
        return alpha * self.c + beta * np.einsum("i,sin->sn", np.array(weights) / sum(weights), self.x)


def train(
    pull: dict[str, Any],
    starts: list[float],
    weights: list[float],
    steps: int,
    tau: int = 1,
    kind: type[ElasticAverager] = ElasticAverager,
    step: Callable[[int, torch.Tensor], torch.Tensor] = lambda i, x: x,
    center: float = 0.0,
) -> Course:
    """Train replicas that take steps of their own, ``x <- step(i, x)``, and meet."""
    table = Table(len(starts))

    def replica(index: int) -> list[tuple[float, float]]:
        module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.fill_(center)
        averager = kind(tau, **pull)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        averager.setup(Replica(module), TableLinks(table, index), lambda: [optimizer])  # type: ignore[arg-type]
        path = []
        with torch.no_grad():
            module.weight.fill_(starts[index])
            for number in range(steps):
                path.append((module.weight.item(), averager.center[0].item()))
                averager.before_step(StepContext(number, False, weights))
                module.weight.copy_(step(index, module.weight))
                averager.after_step(StepContext(number + 1, False, weights))
            path.append((module.weight.item(), averager.center[0].item()))
        return path

    with ThreadPoolExecutor(len(starts)) as pool:
        paths = np.array(list(pool.map(replica, range(len(starts)))))
    for path in paths:
        assert np.array_equal(path[:, 1], paths[0][:, 1])  # all hold the same center
    return Course(paths[:, :, :1].transpose(1, 0, 2), paths[0][:, 1:])


class OwnAlpha(ElasticAverager):
    """The mutant: each replica is pulled in proportion to its weight."""

    def move(self, own: Any, average: Average) -> None:
        weights = [3.0, 1.0, 2.0]
        beta = self.strength_of_center(average.payloads[0])
        self.replica.add(own, -beta * weights[self.links.index] / sum(weights))
        for c, mean in zip(self.center, average.difference, strict=True):
            c.add_(mean, alpha=beta)


numbers = st.floats(-10, 10, allow_subnormal=False)
rates = st.floats(0.01, 0.99)  # both rates 1 would be unstable, and is refused


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(numbers, st.floats(0.1, 10)), min_size=1, max_size=4), rates, rates, st.integers(1, 3))
def test_without_gradients_a_sum_is_conserved_and_the_hull_is_not_left(
    replicas: list[tuple[float, float]], alpha: float, beta: float, tau: int
) -> None:
    starts, weights = [start for start, _ in replicas], [weight for _, weight in replicas]
    course = train({"moving_rate": alpha, "beta": beta}, starts, weights, 9, tau)
    sums = course.sums(alpha, beta, weights)
    assert np.abs(sums - sums[0]).max() <= 1e-12 * 20
    low, high = min(0.0, *starts) - 1e-12, max(0.0, *starts) + 1e-12
    assert low <= course.x.min() <= course.x.max() <= high
    assert low <= course.c.min() <= course.c.max() <= high


def test_neither_holds_of_mutants() -> None:
    starts, weights = [1.0, -2.0, 4.0], [3.0, 1.0, 2.0]
    sums = train({"moving_rate": 0.3, "beta": 0.9}, starts, weights, 9, kind=OwnAlpha).sums(0.3, 0.9, weights)
    assert np.abs(sums - sums[0]).max() > 1e-2
    assert train({"moving_rate": 1.8, "beta": 0.1}, starts, weights, 9).x.min() < -2.1  # swings past the center


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("alpha", "beta", "stays"), [(0.5, 1.49, True), (1.1, 0.89, True), (0.5, 1.51, False)])
def test_the_bound_on_alpha_and_beta(alpha: float, beta: float, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not stays:
        with pytest.raises(ConfigurationError, match="alpha \\+ beta less than 2"):
            stability(alpha, beta)
        monkeypatch.setattr(easgd, "stability", lambda alpha, beta: None)
    course = train({"moving_rate": alpha, "beta": beta}, [1.0, -2.0, 4.0], [3.0, 1.0, 2.0], 800)
    distances = np.abs(course.x - course.c[:, None]).max(axis=(1, 2))
    assert distances[-1] < 1e-3 * distances[0] if stays else distances[-1] > 1e3 * distances[0]


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.0, 2.0), (2.0, 0.0), (-0.1, 0.5), (0.5, -0.1)])
def test_unstable_settings_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ConfigurationError, match=f"alpha={alpha:g} .* and beta={beta:g} .*: unstable"):
        stability(alpha, beta)


def test_between_one_and_the_bound_there_is_a_warning() -> None:
    assert "swing past each other" in (stability(1.2, 0.5) or "")
    assert "swing past each other" in (stability(0.5, 1.2) or "")
    assert stability(1.0, 0.99) is stability(0.3, 0.9) is stability(0.0, 1.0) is None


def optimizers(*lrs: float) -> list[torch.optim.Optimizer]:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return [torch.optim.SGD(groups, lr=1.0), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=7.0)]


@pytest.mark.parametrize(
    ("pull", "alpha", "beta"),
    [
        ({"moving_rate": "auto"}, 0.9 / 4, 0.9),
        ({"moving_rate": "auto", "beta": 0.5}, 0.5 / 4, 0.5),
        ({}, 0.9 / 4, 0.9),
        ({"beta": 0.5}, 0.5 / 4, 0.5),
        ({"moving_rate": 0.1}, 0.1, 0.4),
        ({"moving_rate": 0.1, "beta": 0.9}, 0.1, 0.9),
        ({"rho": 2.0}, 0.1, 0.4),  # with the lr of the first group of the first optimizer
        ({"rho": 2.0, "beta": 0.3}, 0.1, 0.3),
        ({"moving_rate": 0}, 0.0, 0.0),
    ],
)
def test_alpha_and_beta(pull: dict[str, Any], alpha: float, beta: float) -> None:
    averager = ElasticAverager(1, **pull)
    averager._optimizers, averager.links = lambda: optimizers(0.05, 3.0), SimpleNamespace(count=4)  # type: ignore[assignment]
    assert averager.strength() == pytest.approx((alpha, beta))
