"""HeteroMonitor: what it logs is what the ranks reported, once, on all ranks alike."""

import os
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import Logger
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import DASOStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.callbacks.monitor_data import ExchangeRecord, Record
from lightning_hetero.errors import ConfigurationError, UnsupportedError


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        data = dataset(10**3)
        return (data[i] for i in range(int(os.environ["RANK"]), len(data), 2))


def _fit(balance: Any = "auto", every: int = 4, data: Any = None, epochs: int = 1, **options: Any) -> dict[str, Any]:
    monitor, logger, bar = HeteroMonitor(report=None), Memory(), TQDMProgressBar()
    strategy = HeteroDDPStrategy(balance=balance, rebalance_every_n_steps=every)
    settings = {**FAST, "enable_progress_bar": True, "logger": logger, "callbacks": [monitor, bar]}
    settings |= {"log_every_n_steps": 1, **options}
    trainer = pl.Trainer(strategy=strategy, max_epochs=epochs, **settings)
    trainer.fit(Net(), DataLoader(dataset(160) if data is None else data, batch_size=4))
    return {
        "history": [tuple(record) for record in monitor.history],
        "rows": [row for row in logger.rows if "hetero/waiting" in row[1]],
        "bar": dict(bar.get_metrics(trainer, trainer.lightning_module)),
    }


def test_all_ranks_keep_the_same_history_and_rank_zero_logs_it() -> None:
    first, *others = run(_fit, 2, balance=[3.0, 1.0])
    history = [Record(*row) for row in first["history"]]
    # 20 steps: the reports of steps 4, 8, 12 and 16 arrive one step later; those of step 20 after the last batch.
    assert [record.step for record in history] == [5, 9, 13, 17]
    for record in history:
        assert record.shares == (6, 2)
        assert record.samples == (6.0, 2.0)
        assert min(record.compute) > 0
        assert min(record.wait) >= 0
    assert all(other["history"] == first["history"] for other in others)
    assert [step for step, _ in first["rows"]] == [4, 8, 12, 16]  # optimizer steps before this one, as Lightning counts

    record, (_, metrics) = history[1], first["rows"][1]
    assert set(metrics) == {
        f"hetero/{name}/rank{i}" for name in ("share", "samples_per_s", "compute_s", "wait_s") for i in (0, 1)
    } | {"hetero/samples_per_s", "hetero/waiting"}
    assert metrics["hetero/share/rank0"] == 6
    assert metrics["hetero/samples_per_s/rank1"] == pytest.approx(2 / record.compute[1])
    step = (sum(record.compute) + sum(record.wait)) / 2
    assert metrics["hetero/samples_per_s"] == pytest.approx(8 / step)
    assert metrics["hetero/waiting"] == pytest.approx(sum(record.wait) / 2 / step)


def test_the_progress_bar_shows_speed_waiting_and_shares() -> None:
    first, _ = run(_fit, 2, balance=[3.0, 1.0])
    assert first["bar"]["shares"] == "6 2"
    assert int(first["bar"]["samples/s"]) > 0
    assert 0 <= int(first["bar"]["waiting"].removesuffix("%")) <= 100


def test_the_shares_are_those_of_the_plan_even_for_a_rank_that_only_repeats_a_sample() -> None:
    first, _ = run(_fit, 2, balance=[1.0, 0.0])
    assert first["history"][0][1] == (8, 0)
    assert first["history"][0][2] == (8.0, 1.0)


def test_reports_are_logged_once_across_epochs() -> None:
    first, _ = run(_fit, 2, every=8, epochs=3)  # 60 steps
    assert [row[0] for row in first["history"]] == [9, 17, 25, 33, 41, 49, 57]


def test_accumulation_counts_batches_and_logs_at_optimizer_steps() -> None:
    first, _ = run(_fit, 2, accumulate_grad_batches=2)
    assert [row[0] for row in first["history"]] == [5, 9, 13, 17]
    assert [step for step, _ in first["rows"]] == [2, 4, 6, 8]


def test_streams_show_what_each_rank_processed() -> None:
    first, _ = run(_fit, 2, data=Endless(), balance="off", limit_train_batches=6)
    assert first["history"][0][1] == (4, 4)


def test_one_rank() -> None:
    [only] = run(_fit, 1)
    assert [row[1] for row in only["history"]] == [(4,)] * 9
    assert only["bar"]["shares"] == "4"


def test_other_strategies_are_refused() -> None:
    trainer = pl.Trainer(devices=1, max_steps=1, callbacks=[HeteroMonitor(report=None)], **FAST)
    with pytest.raises(UnsupportedError, match=r"SingleDeviceStrategy does not do.*hetero_ddp"):
        trainer.fit(Net(), DataLoader(dataset(), batch_size=4))


@pytest.mark.parametrize(("every", "logged"), [(8, [4, 12]), (50, [4]), (0, [])])
def test_loggers_get_it_as_often_as_lightnings_own_metrics(every: int, logged: list[int]) -> None:
    [found] = run(_fit, 1, balance="off", log_every_n_steps=every)
    assert [record[0] for record in found["history"]] == [5, 9, 13, 17, 21, 25, 29, 33, 37]
    assert [step for step, _ in found["rows"]][:2] == logged


def test_derived_numbers() -> None:
    record = Record(5, (6, 2), (6.0, 2.0), compute=(0.2, 0.1), wait=(0.0, 0.1))
    assert record.samples_per_s == pytest.approx((30.0, 20.0))
    assert record.throughput == pytest.approx(40.0)
    assert record.waiting == pytest.approx(0.25)


def _fit_replicas(strategy: Any) -> dict[str, Any]:
    monitor, logger, bar = HeteroMonitor(report=None), Memory(), TQDMProgressBar()
    settings = {**FAST, "enable_progress_bar": True, "logger": logger, "callbacks": [monitor, bar]}
    trainer = pl.Trainer(strategy=strategy(), max_epochs=1, log_every_n_steps=1, **settings)
    trainer.fit(Net(), DataLoader(dataset(160), batch_size=4))
    return {
        "exchanges": [tuple(record) for record in monitor.exchanges],
        "rows": [row for row in logger.rows if "hetero/exchanges" in row[1]],
        "bar": dict(bar.get_metrics(trainer, trainer.lightning_module)),
        "values": sum(p.numel() for p in trainer.lightning_module.parameters()),
    }


def _daso() -> DASOStrategy:
    return DASOStrategy(warmup=2, cooldown=2, ranks_per_node=1, balance="off", wire="bf16")


def _node() -> NodeAverageStrategy:
    return NodeAverageStrategy(every_n_steps=5, ranks_per_node=1, balance="off")


def test_exchanges_of_daso() -> None:
    first, second = run(_fit_replicas, 2, _daso)
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
    step, metrics = first["rows"][2]
    assert (step, metrics["hetero/global_every"], metrics["hetero/wait"]) == (6, 4, 1)
    assert metrics["hetero/bytes_sent"] == records[2].bytes
    assert {"hetero/hidden_s", "hetero/exposed_s", "hetero/consensus_distance"} < set(metrics)
    assert first["bar"]["phase"] == "cool-down"


def test_exchanges_of_nodes_and_their_distance() -> None:
    first, _ = run(_fit_replicas, 2, _node)
    assert [row[0] for row in first["exchanges"]] == [5, 10, 15, 20]
    assert all(row[5] > 0 for row in first["exchanges"])


def _fit_twice() -> tuple[list[tuple[int, int]], list[float]]:
    monitor, logger = HeteroMonitor(report=None), Memory()
    for _ in range(2):
        settings = {**FAST, "logger": logger, "log_every_n_steps": 1, "callbacks": [monitor]}
        trainer = pl.Trainer(strategy=_node(), max_epochs=1, **settings)
        trainer.fit(Net(), DataLoader(dataset(160), batch_size=4))
    paces = [row[1]["hetero/exchanges_per_s"] for row in logger.rows if "hetero/exchanges_per_s" in row[1]]
    return [(record.step, record.exchanges) for record in monitor.exchanges], paces


def test_another_fit_is_not_compared_with_the_one_before() -> None:
    for exchanges, paces in run(_fit_twice, 2):
        assert exchanges == 2 * [(5, 1), (10, 2), (15, 3), (20, 4)]
        assert len(paces) in (0, 6)  # of rank 0: between two exchanges of a fit
        assert all(pace > 0 for pace in paces)


def test_a_report_that_is_no_folder() -> None:
    with pytest.raises(ConfigurationError, match="report=3: give a folder, or None"):
        HeteroMonitor(report=3)
