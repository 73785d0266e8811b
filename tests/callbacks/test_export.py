"""Exports of the monitor: the names of its metrics, the endpoint for Prometheus, TensorBoard's charts."""

import re
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from docs_pages import ROOT, rows
from lightning.pytorch.loggers import TensorBoardLogger
from ranks import attempt, run
from tasks import FAST, Memory, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import (
    DASOStrategy,
    DiLoCoAsyncStrategy,
    DiLoCoStrategy,
    EASGDStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
)
from lightning_hetero.callbacks.export import CHARTS, METRICS, PrometheusEndpoint
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.errors import ConfigurationError, DisagreementError
from lightning_hetero.strategies.recovery_policy import MembershipChange

KINDS: dict[type, dict[str, Any]] = {
    HeteroDDPStrategy: {},
    DASOStrategy: {"warmup": 2, "cooldown": 2, "ranks_per_node": 1},
    EASGDStrategy: {"tau": 4},
    DiLoCoStrategy: {"tau": "auto", "tau_max": 4},
    DiLoCoAsyncStrategy: {"tau": 4, "quorum": 1},
    GossipStrategy: {"every_n_steps": 2},
}


class Each(pl.Callback):
    """Calls a function after each batch."""

    def __init__(self, function: Callable[[pl.Trainer], None]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.function(trainer)


def _fit(strategy: Any, monitor: HeteroMonitor, logger: Any = False, *callbacks: pl.Callback, **options: Any) -> Any:
    settings = {**FAST, "logger": logger, "log_every_n_steps": 1, "max_epochs": 1, **options}
    trainer = pl.Trainer(strategy=strategy, **settings, callbacks=[*callbacks, monitor])
    trainer.fit(Net(), DataLoader(dataset(160), batch_size=4))
    return trainer


def _logged() -> dict[str, list[str]]:
    """The names that each strategy's fit has logged."""
    found = {}
    for kind, options in KINDS.items():
        logger = Memory()
        _fit(kind(rebalance_every_n_steps=4, balance="off", **options), HeteroMonitor(report=None), logger)
        found[kind.__name__] = sorted({name for _, row in logger.rows for name in row if name.startswith("hetero/")})
    return found


def _lost(trainer: pl.Trainer) -> None:
    if trainer.global_step == 3:
        trainer.strategy.recovery.losses.append(MembershipChange(1, {1: "died"}, 1, 1, 0.5, 4, 3))  # type: ignore[attr-defined]


def _after_a_loss() -> list[str]:
    logger = Memory()
    _fit(HeteroDDPStrategy(), HeteroMonitor(report=None), logger, Each(_lost))
    return sorted({name for _, row in logger.rows for name in row if name.startswith("hetero/")})


def generic(names: Any) -> set[str]:
    return {re.sub(r"(rank|replica)\d+$", r"\1{i}", name.removeprefix("hetero/")) for name in names}


def test_the_names_that_are_logged_are_those_that_are_documented() -> None:
    found = run(_logged, 2)[0]
    [after] = run(_after_a_loss, 1)
    assert generic(after) >= {"view", "stall_s", "lost_samples", "ranks", "replicas"}
    assert generic(name for names in [*found.values(), after] for name in names) == set(METRICS)
    page = [row[0] for row in rows(ROOT / "docs" / "monitoring.md") if row[0].startswith("`hetero/")]
    documented = [name for cell in page for name in re.findall(r"`hetero/([^`]+)`", cell)]
    assert len(documented) == len(METRICS)
    assert set(documented) == set(METRICS)


def test_every_chart_shows_a_metric() -> None:
    names = [f"hetero/{name}".replace("{i}", "0") for name in METRICS]
    for patterns in CHARTS.values():
        for pattern in patterns:
            assert any(re.match(pattern, name) for name in names), pattern


def _scraped(port: int) -> tuple[str, bool]:
    """The endpoint's text in a fit, by a real request; whether it is closed afterwards."""
    text = ""

    def scrape(trainer: pl.Trainer) -> None:
        nonlocal text
        if trainer.global_step == 18 and trainer.is_global_zero:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"http://127.0.0.1:{port}/metrics", timeout=30
            ) as answer:
                text = answer.read().decode()

    monitor = HeteroMonitor(report=None, prometheus_port=port)
    strategy = DASOStrategy(warmup=2, cooldown=2, ranks_per_node=1, rebalance_every_n_steps=4, balance="off")
    _fit(strategy, monitor, False, Each(scrape))
    with socket.socket() as probe:
        return text, probe.connect_ex(("127.0.0.1", port)) != 0


def test_prometheus_reads_what_loggers_get() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (text, closed), (other, _) = run(_scraped, 2, port)
    assert closed
    assert other == ""
    values = dict(re.findall(r"^(hetero_\S+) (\S+)$", text, re.MULTILINE))
    assert values['hetero_rank_share{rank="0"}'] == values['hetero_rank_share{rank="1"}'] == "4.0"
    assert values["hetero_ranks"] == values["hetero_replicas"] == "2.0"
    assert 0 <= float(values["hetero_waiting"]) <= 1
    assert float(values["hetero_bytes_sent"]) > 0
    assert "# TYPE hetero_rank_share gauge" in text
    assert "# HELP hetero_consensus_distance RMS distance" in text


def test_prometheus_reads_numbers_of_any_name() -> None:
    """As an algorithm of the user's may give them."""
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = PrometheusEndpoint("127.0.0.1", port)
    try:
        endpoint.update({"share/rank1": 4.0, "slow-loss": 0.5, "gap/inner": 2.0})
        found = {sample.name: (sample.labels, sample.value) for one in endpoint.collect() for sample in one.samples}
    finally:
        endpoint.close()
    assert found["hetero_rank_share"] == ({"rank": "1"}, 4.0)
    assert (found["hetero_slow_loss"], found["hetero_gap_inner"]) == (({}, 0.5), ({}, 2.0))


def _refused(port: int | None = None) -> None:
    if port is None:
        sys.modules["prometheus_client"] = None  # type: ignore[assignment]
    _fit(HeteroDDPStrategy(), HeteroMonitor(report=None, prometheus_port=port or 9400))


def test_a_port_that_is_taken_is_refused_on_every_rank() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, second = attempt(_refused, 2, port)
    assert isinstance(first.error, ConfigurationError), first.trace
    assert f"cannot listen at 127.0.0.1:{port}" in str(first.error)
    assert "Give a free port" in str(first.error)
    assert isinstance(second.error, DisagreementError), second.trace


def test_without_the_library_it_is_refused() -> None:
    [outcome] = attempt(_refused, 1)
    assert isinstance(outcome.error, ConfigurationError), outcome.trace
    assert "pip install 'lightning-hetero[prometheus]'" in str(outcome.error)


@pytest.mark.parametrize("port", [0, -1, 65536, True, "9400"])
def test_what_is_no_port_is_refused(port: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"prometheus_port=.*give a port from 1 to 65535"):
        HeteroMonitor(prometheus_port=port)


def _on_a_board(folder: str) -> None:
    _fit(HeteroDDPStrategy(rebalance_every_n_steps=4), HeteroMonitor(report=None), TensorBoardLogger(folder, name=""))


def test_tensorboard_has_the_charts(tmp_path: Path) -> None:
    """Read from the file that TensorBoard reads."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.custom_scalar import layout_pb2

    run(_on_a_board, 2, str(tmp_path))
    [file] = tmp_path.rglob("events.out.tfevents.*")
    values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    tags = {value.tag for value in values if value.tag.startswith("hetero/")}
    [config] = [value for value in values if value.tag == "custom_scalars__config__"]
    layout = layout_pb2.Layout.FromString(config.tensor.string_val[0])
    [category] = layout.category
    assert category.title == "lightning_hetero"
    assert {chart.title: list(chart.multiline.tag) for chart in category.chart} == CHARTS
    shown = [tag for tag in tags if any(re.match(p, tag) for patterns in CHARTS.values() for p in patterns)]
    assert len(shown) >= 9  # of two ranks: shares, times; and of the job
