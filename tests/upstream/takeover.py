"""A pytest plugin (`-p takeover`) under which Lightning's own tests run on `HeteroDDPStrategy`.

`run.py` starts pytest with it. Environment variables control it:

* `UPSTREAM_SIDE`: `ours` puts `HeteroDDPStrategy` in the place of Lightning's `DDPStrategy`, and under all of the names
  that Lightning has for it; and in the place of `ModelParallelStrategy`, whose default is to split layers over all
  ranks of a node. `stock` leaves Lightning as it is.
* `UPSTREAM_EVERYWHERE`: if set, a Trainer that is not told any strategy takes `ddp` on one device, too.
* `UPSTREAM_RESULTS`: the file to which the outcome of each test goes, one JSON object per line.
"""

import functools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch.strategies as strategies
import lightning.pytorch.strategies.ddp as ddp_module
import pytest
import torch
from expected import EXPECTED
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

_made = 0  # how many strategies of DDP this process has made


def _take_over() -> None:
    """Put `HeteroDDPStrategy` in the place of `DDPStrategy`; before Lightning's tests are imported."""
    from lightning_hetero import HeteroDDPStrategy

    for name in [name for name in StrategyRegistry.available_strategies() if name.startswith("ddp")]:
        entry = StrategyRegistry[name]
        StrategyRegistry.remove(name)
        StrategyRegistry.register(name, HeteroDDPStrategy, entry["description"], **entry["init_params"])
    # Tests import the class from the package, and name the module when they replace a method of it.
    strategies.DDPStrategy = ddp_module.DDPStrategy = HeteroDDPStrategy  # type: ignore[misc]

    class ModelParallel(HeteroDDPStrategy):
        def __init__(self, *, tensor_parallel_size: Any = "auto", **options: Any) -> None:
            self._splits_layers_over_all = tensor_parallel_size == "auto"
            super().__init__(
                tensor_parallel_size=1 if self._splits_layers_over_all else tensor_parallel_size, **options
            )

        def setup_environment(self) -> None:
            if self._splits_layers_over_all:
                self.options = replace(self.options, tensor_parallel_size=len(self.parallel_devices or ()))
            super().setup_environment()

        @contextmanager
        def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
            # Theirs makes such models without memory; with ours torch.device("meta") does so.
            with super().tensor_init_context(), torch.device("meta") if empty_init else nullcontext():
                yield

    strategies.ModelParallelStrategy = ModelParallel  # type: ignore[misc]


def _count() -> None:
    """Count the strategies that are made; ours call the constructor of Lightning's, too."""
    init = DDPStrategy.__init__

    @functools.wraps(init)
    def counting(self: DDPStrategy, *args: Any, **kwargs: Any) -> None:
        global _made
        _made += 1
        init(self, *args, **kwargs)

    DDPStrategy.__init__ = counting  # type: ignore[method-assign]


def _everywhere() -> None:
    """Let a Trainer on one CPU choose `ddp`, where it would choose a strategy for one device."""
    choose = _AcceleratorConnector._choose_strategy

    def choose_ddp(self: _AcceleratorConnector) -> Any:
        chosen = choose(self)
        alone = type(chosen) is SingleDeviceStrategy and chosen.root_device.type == "cpu"
        return "ddp" if alone else chosen

    _AcceleratorConnector._choose_strategy = choose_ddp  # type: ignore[method-assign]


class _Results:
    """Writes the outcome of each test as it ends, so that earlier ones are known after a crash."""

    def __init__(self, path: str) -> None:
        self._path, self._reports, self._made = path, list[pytest.TestReport](), 0

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a") as file:
            print(json.dumps(line), file=file)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": [item.nodeid for item in session.items]})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "why": str(report.longrepr)[-2000:], "ddp": False})

    def pytest_runtest_logstart(self) -> None:
        self._reports, self._made = [], _made

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # by pytest-rerunfailures
            self._reports = []
        else:
            self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        by_severity = [r for outcome in ("failed", "skipped", "passed") for r in self._reports if r.outcome == outcome]
        worst = by_severity[0] if by_severity else None  # a failed test, rather than its teardown
        ended = any(report.when == "call" for report in self._reports)
        if worst is not None and (ended or worst.outcome != "passed"):
            why = worst.longrepr[-1] if isinstance(worst.longrepr, tuple) else str(worst.longrepr or "")
            line = {"test": nodeid, "outcome": worst.outcome, "why": why[-2000:], "ddp": _made > self._made}
            self._write(line | {"seconds": round(sum(report.duration for report in self._reports), 2)})


class _Ours:
    """Keeps the names of tests, and ends threads and processes that outlive them, as Lightning's tests do."""

    def pytest_make_parametrize_id(self, val: Any) -> str | None:
        return "DDPStrategy" if val is strategies.DDPStrategy else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid.removeprefix("tests/tests_pytorch/") in EXPECTED:  # another attempt is useless
                item.own_markers = [mark for mark in item.own_markers if mark.name != "flaky"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        from lightning_hetero.comm import failures

        for watch in (failures._membership, failures._waits):
            if watch is not None:
                watch.close()
        for thread in threading.enumerate():
            if thread.name in ("hetero-membership", "hetero-waits", "rank-observer"):
                thread.join(30.0)  # the last one ends with the other ranks' processes


def pytest_configure(config: pytest.Config) -> None:
    _count()
    if os.environ.get("UPSTREAM_SIDE") == "ours":
        from lightning_hetero.launch import observer

        _take_over()
        observer._starter()  # this thread lasts as long as the process: it begins before the tests
        config.pluginmanager.register(_Ours(), "upstream-ours")
    if os.environ.get("UPSTREAM_EVERYWHERE"):
        _everywhere()
    path = os.environ.get("UPSTREAM_RESULTS")
    if path and "LOCAL_RANK" not in os.environ:  # other ranks run the same tests beside this process
        config.pluginmanager.register(_Results(path), "upstream-results")
