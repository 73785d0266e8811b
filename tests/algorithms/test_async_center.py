"""Exchanges with a center in virtual time: rates of the clients, and the value at which the center settles."""

import heapq
import json
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.algorithms.async_center import ExchangeRates
from lightning_hetero.algorithms.base import ReplicaLoss, StepContext
from lightning_hetero.algorithms.diloco_async import OuterAsyncAverager
from lightning_hetero.algorithms.easgd_async import AsyncElasticAverager
from lightning_hetero.algorithms.outer_rules import DelayedNesterov, RoundStep
from lightning_hetero.comm.all_reduce import Traffic
from lightning_hetero.comm.centers import client
from lightning_hetero.comm.centers.base import Center, CenterLayout, PushPull, push_center, subtract_center
from lightning_hetero.comm.centers.rounds import Quorum
from lightning_hetero.replicas.vectors import Replica

PERIODS, TARGETS = [1.0, 1.0, 4.0], [0.0, 0.0, 1.0]  # the third worker comes four times more rarely


class Memory:
    """State that the clients of one center share."""

    def __init__(self, count: int) -> None:
        self.values: list[Tensor] = []
        self.counts = [0] * count


class MemoryCenter(Center):
    def __init__(self, layout: CenterLayout, memory: Memory) -> None:
        super().__init__(layout)
        self.memory = memory

    def open(self, values: Sequence[Tensor]) -> None:
        self.memory.values = self.memory.values or [value.clone() for value in values]

    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0, turn: int = 0) -> PushPull:
        square = subtract_center(values, self.memory.values)
        push_center(values, self.memory.values, push, square)
        self.memory.counts[self.layout.replica] += 1
        return PushPull(square, list(self.memory.counts))

    def read(self) -> tuple[list[Tensor], list[int]]:
        return self.memory.values, self.memory.counts

    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class NoLinks:
    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.traffic = index, count, Traffic()

    def lay_out(self, layout: object) -> None: ...

    def broadcaster(self, purpose: str) -> Callable[[Tensor], None]:
        return lambda tensor: None


class Inline:
    """Runs the exchange of ``Background`` at once: virtual time needs no threads."""

    seconds = waited = 0.0

    def __init__(self, function: Callable[[], PushPull]) -> None:
        self._exchange = function()

    def result(self) -> PushPull:
        return self._exchange


class InMemory(AsyncElasticAverager):
    """Exchanges with a center in memory."""

    overlap = False
    _memory: Memory

    def make_center(self) -> Center:
        index, count = self.links.index, self.links.count
        layout = CenterLayout(index, count, tuple(range(count)), index, timedelta(seconds=9))
        return MemoryCenter(layout, self._memory)


class BothSides(InMemory):
    """The mutant: a rare client is also pulled more strongly."""

    def _end(self, exchange: Any, alpha: float, healthy: bool) -> Any:
        return super()._end(exchange, alpha * (self._rates.factor if self.debias else 1.0), healthy)


def center_of(kind: type[InMemory], debias: bool, events: int) -> float:
    """Mean of the center over the last round of all; quadratics with minima at 0, 0 and 1, eta h tau = 0.01."""
    count, memory = len(PERIODS), Memory(len(PERIODS))
    workers = []
    for index in range(count):
        module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(module.weight)
        averager = kind(1, "auto", debias=debias)
        averager._memory = memory
        averager.setup(Replica(module), NoLinks(index, count), list)  # type: ignore[arg-type]
        workers.append((module, averager))
    times, seen = [(period, i) for i, period in enumerate(PERIODS)], []
    heapq.heapify(times)
    for _ in range(events):
        now, index = heapq.heappop(times)
        heapq.heappush(times, (now + PERIODS[index], index))
        module, averager = workers[index]
        number = memory.counts[index]
        averager.before_step(StepContext(number, False, [1, 1, 1]))
        with torch.no_grad():
            module.weight.sub_(0.01 * (module.weight - TARGETS[index]))
        averager.after_step(StepContext(number + 1, False, [1, 1, 1]))
        seen.append(memory.values[0].item())
    return sum(seen[-9:]) / 9


def test_a_rare_client_counts_as_much_as_others_if_debiased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Background", Inline)
    assert center_of(InMemory, False, 2000) == pytest.approx(0.108, abs=0.02)
    assert center_of(InMemory, True, 2000) == pytest.approx(0.33, abs=0.02)
    assert center_of(BothSides, True, 2000) == pytest.approx(0.113, abs=0.02)


def test_rates() -> None:
    rates = ExchangeRates(2)
    assert rates.factor == 1.0
    assert rates.per_second() == []
    rates.observe([3, 5, 1])
    assert rates.factor == 1.0  # one exchange gives no rate
    rates.observe([7, 9, 2])
    assert rates.factor == pytest.approx((4 + 4 + 1) / 3)
    rates.observe([9, 13, 4])
    assert rates.factor == pytest.approx((6 + 8 + 3) / 3 / 3)
    assert len(rates.per_second()) == 3
    fast = ExchangeRates(0)
    fast.observe([1, 0])
    fast.observe([5, 1])
    assert fast.factor == pytest.approx(5 / 2 / 4)


def test_rates_look_back_a_window() -> None:
    rates = ExchangeRates(0, window=3)
    for own in range(10):
        rates.observe([own, 0])  # the other has stopped
    for own in range(10, 14):
        rates.observe([own, 2 * (own - 10)])  # and is twice as fast now
    assert rates.factor == pytest.approx(1.5)


def test_rates_go_on_in_a_resumed_run() -> None:
    rates, resumed = ExchangeRates(1), ExchangeRates(1)
    for counts in ([2, 1, 1], [5, 2, 3], [9, 3, 6]):
        rates.observe(counts)
    resumed.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    assert resumed.per_second() == pytest.approx(
        rates.per_second(), rel=0.01
    )  # the time between fits is none of theirs
    assert resumed.factor == rates.factor == pytest.approx((7 + 2 + 5) / 3 / 2)
    for each in (rates, resumed):
        each.observe([11, 4, 7])
    assert resumed.factor == rates.factor


def _views(flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [flats[0][:1]], [flats[0][1:]]  # a parameter and a buffer


def _center(value: float) -> list[Tensor]:
    zeros = [torch.zeros(2, dtype=torch.float64) for _ in range(4)]
    return [torch.full((2,), value, dtype=torch.float64), *zeros, *torch.zeros(2, 1, dtype=torch.float64)]


def _arrive(rule: DelayedNesterov, center: list[Tensor], change: float, buffer: float) -> float:
    values = [torch.tensor([change, buffer], dtype=torch.float64), *torch.eye(2, dtype=torch.float64)]
    square = rule.measure(values, center)
    rule.move(values, center, 0.25, square)
    return square


def test_a_variance_stays_between_those_that_arrive() -> None:
    rule, center = DelayedNesterov(4, lr=1.0, momentum=0.0, views=_views), _center(1.0)
    differences = 1.0
    for _ in range(8):  # a fast replica, which begins again from the center each time
        _arrive(rule, center, 0.0, 0.05)
        differences += 0.25 * (0.05 - differences)
    for _ in range(3):  # slow ones, which began from 1
        _arrive(rule, center, 0.0, 0.05)
        differences += 0.25 * (0.05 - 1.0)
    assert differences < 0  # the control: sums of differences
    assert 0.05 < center[0][1] < 0.1


@pytest.mark.parametrize("arrivals", [2, 4, 5])
def test_a_round_gives_buffers_the_mean_of_its_arrivals(arrivals: int) -> None:
    rule, center = RoundStep(Quorum(2, 0.0), 4, 1.0, 0.0, _views), _center(1.0)
    for _ in range(2):  # nothing of a round is left in the next one
        before, brought = float(center[0][1]), [0.1 * (i + 1) for i in range(arrivals)]
        for buffer in brought:
            _arrive(rule, center, 0.0, buffer)
        rule.close(center)
        weights = [0.25 * max(4 - arrivals, 0), *[0.25] * arrivals]  # of five one was late
        assert float(center[0][1]) == pytest.approx(np.average([before, *brought], weights=weights), abs=1e-12)


class AfterLoss(NoLinks):
    def gather_of_replicas(self, value: int) -> list[int]:
        return [value + 5, value]


@pytest.mark.parametrize("answered", [True, False])
def test_what_a_visit_has_brought_counts_once_if_only_its_answer_was_lost(answered: bool) -> None:
    averager, module = OuterAsyncAverager(tau=4, fragments=2), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    averager.replica, averager.links = averager.make_replica(module), AfterLoss(1, 2)  # type: ignore[assignment]
    averager._parts = [(vectors, averager.replica.part(vectors)) for vectors in averager.replica.fragments]
    averager.begun_from = [value - 1 for value in averager.replica.pack()]
    averager.visits, averager.visits_before, averager.commits, averager.counts = 4, 0, 0, [9, 4 if answered else 5]
    averager.rule, averager.local_steps = averager.rule_name, 4
    averager.reference, tables = [], torch.zeros(2)
    averager.speeds, averager.late, averager.arrivals, averager.closed_rounds = tables, tables, tables, tables
    averager.momentum, averager.gradient_sum = [], []
    averager._rates = ExchangeRates(1)
    for counts in ([3, 0, 1], [7, 0, 2]):  # the one that was lost had this number, and had not come
        averager._rates.observe(counts)
    written: list[Sequence[int]] = []
    averager._client = SimpleNamespace(write=lambda values, counts: written.append(counts))  # type: ignore[assignment]
    averager.after_restore(ReplicaLoss({}, [0, 1], StepContext(16, False, [1, 1])))
    to_bring = [float((x - c).mean()) for x, c in zip(averager.replica.pack(), averager.begun_from, strict=True)]
    assert to_bring == [1.0, 1.0 if answered else 0.0]  # of the first fragment, and of the one whose turn it was
    assert averager.counts == [9, 4]
    assert written == [[9, 4]]
    assert averager._rates.factor == 1.0  # which begins anew
    for counts in ([12, 8], [13, 10]):
        averager._rates.observe(counts)
    assert averager._rates.factor == pytest.approx(3 / 2 / 2)


def test_only_parameters_are_measured_and_buffers_must_be_finite() -> None:
    rule, center = DelayedNesterov(4, lr=1.0, momentum=0.0, views=_views), _center(1.0)
    assert _arrive(rule, center, 3.0, 100.0) == 9.0
    before = [value.clone() for value in center]
    assert math.isnan(_arrive(rule, center, 3.0, math.nan))
    assert torch.equal(center[0], before[0])
