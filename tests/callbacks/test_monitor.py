"""HeteroMonitor: it logs the reports of ranks, once, on all alike; its records of a long fit are bounded."""

import os
import pickle
import random
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from ranks import run
from tasks import FAST, Memory, Net, dataset
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import DASOStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.batching.timer import StepTiming
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.callbacks.monitor_data import (
    ExchangeRecord,
    Record,
    StepHistory,
    StepSpan,
    coarsen,
    merge_spans,
    thin,
)
from lightning_hetero.errors import ConfigurationError, UnsupportedError


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        data = dataset(10**3)
        return (data[i] for i in range(int(os.environ["RANK"]), len(data), 2))


def _fit(strategy: Any = None, data: Any = None, epochs: int = 1, fits: int = 1, **options: Any) -> dict[str, Any]:
    """Records of a monitor after a fit, or after several."""
    monitor, logger, bar = HeteroMonitor(report=None), Memory(), TQDMProgressBar()
    settings = {**FAST, "enable_progress_bar": True, "logger": logger, "callbacks": [monitor, bar]}
    settings |= {"log_every_n_steps": 1, "max_epochs": epochs, **options}
    kind, given = strategy or (HeteroDDPStrategy, {})
    for _ in range(fits):
        trainer = pl.Trainer(strategy=kind(**{"rebalance_every_n_steps": 4, **given}), **settings)
        trainer.fit(Net(), DataLoader(dataset(160) if data is None else data, batch_size=4))
    return {
        "history": [tuple(record) for record in monitor.history],
        "exchanges": [tuple(record) for record in monitor.exchanges],
        "rows": logger.rows,
        "bar": dict(bar.get_metrics(trainer, trainer.lightning_module)),
        "values": sum(p.numel() for p in trainer.lightning_module.parameters()),
    }


def rows_with(found: dict[str, Any], name: str) -> list[tuple[int, dict[str, float]]]:
    return [row for row in found["rows"] if name in row[1]]


def ddp(**options: Any) -> tuple[type, dict[str, Any]]:
    return HeteroDDPStrategy, options


def test_all_ranks_keep_the_same_history_and_rank_zero_logs_it() -> None:
    first, *others = run(_fit, 2, ddp(balance=[3.0, 1.0]))
    history = [Record(*row) for row in first["history"]]
    # 20 steps: the reports of steps 4, 8, 12 and 16 arrive one step later; those of step 20 after the last batch.
    assert [record.step for record in history] == [5, 9, 13, 17]
    for record in history:
        assert record.shares == (6, 2)
        assert record.samples == (6.0, 2.0)
        assert min(record.compute) > 0
        assert min(record.wait) >= 0
    assert all(other["history"] == first["history"] for other in others)
    rows = rows_with(first, "hetero/waiting")
    assert [step for step, _ in rows] == [4, 8, 12, 16]  # optimizer steps before this one, as Lightning counts
    record, (_, metrics) = history[1], rows[1]
    assert set(metrics) == {
        f"hetero/{name}/rank{i}" for name in ("share", "samples_per_s", "compute_s", "wait_s") for i in (0, 1)
    } | {f"hetero/{name}" for name in ("samples_per_s", "waiting", "ranks", "replicas")}
    assert metrics["hetero/share/rank0"] == 6
    assert metrics["hetero/samples_per_s/rank1"] == pytest.approx(2 / record.compute[1])
    step = (sum(record.compute) + sum(record.wait)) / 2
    assert metrics["hetero/samples_per_s"] == pytest.approx(8 / step)
    assert metrics["hetero/waiting"] == pytest.approx(sum(record.wait) / 2 / step)
    assert first["bar"]["shares"] == "6 2"
    assert int(first["bar"]["samples/s"]) > 0
    assert 0 <= int(first["bar"]["waiting"].removesuffix("%")) <= 100


def _fits() -> dict[str, dict[str, Any]]:
    return {
        "padding": _fit(ddp(balance=[1.0, 0.0])),
        "epochs": _fit(ddp(rebalance_every_n_steps=8), epochs=3),
        "accumulation": _fit(accumulate_grad_batches=2),
        "a stream": _fit(ddp(balance="off"), Endless(), limit_train_batches=6),
    }


def test_what_is_kept_and_logged_whatever_the_fit() -> None:
    first, _ = run(_fits, 2)
    # The shares are those of the plan, even for a rank that only repeats a sample; a stream has what ranks process.
    assert first["padding"]["history"][0][1:3] == ((8, 0), (8.0, 1.0))
    assert first["a stream"]["history"][0][1] == (4, 4)
    assert [row[0] for row in first["epochs"]["history"]] == [3, 4, 8, 16, 25, 33, 41, 49, 57]  # once, of 60 steps
    # Batches are counted; what is logged is logged at optimizer steps.
    assert [row[0] for row in first["accumulation"]["history"]] == [3, 4, 8, 13, 16]
    assert [step for step, _ in rows_with(first["accumulation"], "hetero/waiting")] == [1, 3, 6, 7]


def test_other_strategies_are_refused() -> None:
    trainer = pl.Trainer(devices=1, max_steps=1, callbacks=[HeteroMonitor(report=None)], **FAST)
    with pytest.raises(UnsupportedError, match=r"SingleDeviceStrategy does not do.*hetero_ddp"):
        trainer.fit(Net(), DataLoader(dataset(), batch_size=4))
    with pytest.raises(ConfigurationError, match="report=3: give a folder, or None"):
        HeteroMonitor(report=3)


@pytest.mark.parametrize(("every", "logged"), [(8, [4, 12]), (50, [4]), (0, [])])
def test_loggers_get_it_as_often_as_lightnings_own_metrics(every: int, logged: list[int]) -> None:
    [found] = run(_fit, 1, ddp(balance="off"), log_every_n_steps=every)
    assert [record[0] for record in found["history"]] == [5, 9, 13, 17, 21, 25, 29, 33, 37]
    assert found["history"][0][1] == (4,)
    assert [step for step, _ in rows_with(found, "hetero/waiting")][:2] == logged


DASO = DASOStrategy, {"warmup": 2, "cooldown": 2, "ranks_per_node": 1, "balance": "off", "wire": "bf16"}
NODE = NodeAverageStrategy, {"every_n_steps": 5, "ranks_per_node": 1, "balance": "off"}


def test_exchanges_of_daso() -> None:
    first, second = run(_fit, 2, DASO)
    records = [ExchangeRecord(*row) for row in first["exchanges"]]
    # 20 steps: two of the warm-up; of the cycling phase, those begun after steps 6, 10, 14 and 18 and mixed in a step
    # later, the last of them together with the first of the cool-down.
    assert [(r.step, r.exchanges) for r in records] == [(1, 1), (2, 2), (7, 3), (11, 4), (15, 5), (19, 7), (20, 8)]
    assert [r.status["phase"] for r in records] == ["warm-up"] * 2 + ["cycling"] * 3 + ["cool-down"] * 2
    assert records[0].status | {"phase": ""} == {"phase": "", "global_every": 4, "wait": 1}
    # An all-reduce between two sends a vector once: float64 while blocking, two bytes a value in the background.
    size = first["values"]
    assert records[1].bytes == 2 * 8 * size
    assert [b.bytes - a.bytes for a, b in pairwise(records[1:5])] == [2 * size] * 3
    assert all(a.exposed <= b.exposed and a.hidden <= b.hidden for a, b in pairwise(records))
    assert records[1].exposed > 0 == records[1].hidden  # blocking
    assert records[4].distance > 0
    assert [row[:3] + row[5:6] for row in second["exchanges"]] == [row[:3] + row[5:6] for row in first["exchanges"]]
    step, metrics = rows_with(first, "hetero/exchanges")[2]
    assert (step, metrics["hetero/global_every"], metrics["hetero/wait"]) == (6, 4, 1)
    assert metrics["hetero/bytes_sent"] == records[2].bytes
    assert {"hetero/hidden_s", "hetero/exposed_s", "hetero/consensus_distance"} < set(metrics)
    assert first["bar"]["phase"] == "cool-down"


def test_another_fit_is_not_compared_with_the_one_before() -> None:
    for found in run(_fit, 2, NODE, fits=2):
        assert [row[:2] for row in found["exchanges"]] == 2 * [(5, 1), (10, 2), (15, 3), (20, 4)]
        paces = [row["hetero/exchanges_per_s"] for _, row in rows_with(found, "hetero/exchanges_per_s")]
        assert len(paces) in (0, 6)  # of rank 0: between two exchanges of a fit
        assert all(pace > 0 for pace in paces)
        assert all(row[5] > 0 for row in found["exchanges"])


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
