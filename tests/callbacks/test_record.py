"""What the monitor keeps of a long fit: bounded, and the sums are exact."""

import pickle
import random

import pytest

from lightning_hetero.batching.timer import StepTiming
from lightning_hetero.callbacks.monitor_data import StepHistory, StepSpan, coarsen, merge_spans, thin


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1000, 40_000])
def test_sums_survive_whatever_the_length(count: int) -> None:
    draw, record, began = random.Random(count), StepHistory(start=100.0), 100.0
    laps = []
    for _ in range(count):
        work, wait = draw.random(), draw.random()
        laps.append(StepTiming(draw.randrange(1, 9), work, wait, work / 4, wait / 2, began))
        record.add(laps[-1])
        began += work + wait
    whole = merge_spans(record.stretches)
    assert (whole.first, whole.steps, whole.began) == (0, count, 0.0)
    assert whole.samples == sum(lap.samples for lap in laps)
    assert whole.data == pytest.approx(sum(lap.data for lap in laps))
    assert whole.data + whole.compute == pytest.approx(sum(lap.work for lap in laps))
    assert whole.wait == pytest.approx(whole.exchange)
    assert whole.seconds == pytest.approx(began - 100.0)
    assert len(record.stretches) <= 512
    assert [s.first for s in record.stretches[1:]] == [s.first + s.steps for s in record.stretches[:-1]]
    ends = [StepSpan.of(lap, i, 100.0) for i, lap in enumerate(laps)]
    assert record.beginning == ends[:64]
    assert record.end == ends[-64:]
    assert len(pickle.dumps((record.stretches, record.beginning, record.end))) < 100_000


def test_a_padding_batch_is_no_sample() -> None:
    lap = StepTiming(1, 3.0, 1.0, 0.5, 0.0, 12.0, padding=True)
    assert StepSpan.of(lap, 7, 10.0) == StepSpan(7, 1, 2.0, 0, 0.5, 2.5, 1.0, 0.0)


def test_work_in_the_background_is_kept_near_both_ends() -> None:
    record = StepHistory(start=10.0)
    for i in range(1000):
        record.hidden(10.0 + i, 10.5 + i)
    assert record.background[0] == (0.0, 0.5)
    assert record.background[-1] == (999.0, 999.5)
    assert len(record.background) == 128


def test_coarser_and_thin() -> None:
    steps = [StepSpan(i, 1, float(i), 2, 0, 1, 0, 0) for i in range(10)]
    assert [(s.first, s.steps, s.samples) for s in coarsen(steps, 4)] == [(0, 3, 6), (3, 3, 6), (6, 3, 6), (9, 1, 2)]
    assert coarsen(steps, 10) == steps
    records = list(range(8))
    thin(records, most=9)
    assert records == list(range(8))
    thin(records, most=8)
    assert records == [0, 2, 4, 6, 7]
