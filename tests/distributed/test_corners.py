"""Rare uses of a Trainer that work with Lightning's strategies: copies, profilers, arguments by position."""

import copy
import os
import socket
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from ranks import run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import (
    EASGDAsyncStrategy,
    GossipAsyncStrategy,
    HeteroDDPStrategy,
    HeteroMonitor,
    NodeAverageStrategy,
)
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError

BASE: dict[str, Any] = {"balance": "off", "timeout": 20}
COPIED: list[tuple[Any, dict[str, Any]]] = [
    (HeteroDDPStrategy, {}),
    (EASGDAsyncStrategy, {"moving_rate": "auto", "center": "thread", "tau": 1}),
    (GossipAsyncStrategy, {}),
]


def _trainer(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**FAST, "max_epochs": 1, **options})


def _data() -> DataLoader:
    return DataLoader(dataset(32), batch_size=4)


# -- copies --------------------------------------------------------------------------------------------------


class CopiesInside(pl.Callback):
    """Copies the Trainer and its callbacks while it trains."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            assert copy.deepcopy(trainer).global_step == 2
            copy.deepcopy(trainer.callbacks)


def _copied(kind: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    trained = []
    first = _trainer(kind(**BASE, **options), HeteroMonitor(report=None), CopiesInside())
    for trainer in (copy.deepcopy(first), first):
        module = Net()
        trainer.fit(module, _data())
        trained.append(parameters(module))
    again, module = copy.deepcopy(first), Net()
    again.fit_loop.epoch_progress.reset()
    again.fit_loop.max_epochs = 2
    again.fit(module, _data())
    assert again.strategy is not first.strategy
    assert first.strategy.cluster is not None  # the copied one is as it was
    return trained


@pytest.mark.parametrize(("kind", "options"), COPIED)
def test_a_trainer_and_its_callbacks_can_be_copied(kind: Any, options: dict[str, Any]) -> None:
    for one, other in run(_copied, 2, kind, options, nodes=[1, 1]):
        assert one.isfinite().all()
        assert kind is not HeteroDDPStrategy or torch.equal(one, other)


# -- profilers -----------------------------------------------------------------------------------------------


class Fetching(pl.Callback):
    """Notes how long batches took to fetch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, HeteroDDPStrategy):
            self.seconds.append(trainer.strategy.timer._data)


def _profiled(strategy: Any) -> tuple[int, list[float]]:
    profiler, fetching = SimpleProfiler(), Fetching()
    chosen, devices = (DDPStrategy(), 2) if strategy is DDPStrategy else (strategy(**BASE), 1)
    trainer = _trainer(chosen, fetching, profiler=profiler, max_epochs=2, devices=devices)
    trainer.fit(Net(), _data())
    return len(profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]), fetching.seconds


def test_lightnings_profiler_sees_every_batch_that_is_fetched() -> None:
    [theirs] = {fetched for fetched, _ in run(_profiled, 2, DDPStrategy)}
    for ours, seconds in run(_profiled, 2, HeteroDDPStrategy):
        assert ours == theirs == 8
        # The time until an epoch's first batch is no step's.
        assert [second > 0 for second in seconds] == [False, True, True, True] * 2


# -- arguments by position -----------------------------------------------------------------------------------


def test_positional_arguments_are_those_of_lightnings_strategy() -> None:
    accelerator, devices = CPUAccelerator(), [torch.device("cpu")]
    for kind in (DDPStrategy, HeteroDDPStrategy):
        strategy = kind(accelerator, devices)
        assert strategy.accelerator is accelerator
        assert strategy.parallel_devices == devices
    with pytest.raises(TypeError, match="'accelerator'"):
        HeteroDDPStrategy(accelerator, accelerator=accelerator)
    with pytest.raises(TypeError, match=r"positional|multiple values"):
        HeteroDDPStrategy(*[None] * 20)
    for balance in ("off", [3.0, 1.0]):
        with pytest.raises(ConfigurationError, match="by name: balance="):
            HeteroDDPStrategy(balance)


# -- data and gradients outside of a fit ---------------------------------------------------------------------


def _sets_data_up_outside() -> list[str]:
    trainer, messages = _trainer(HeteroDDPStrategy(**BASE)), []
    trainer.fit(Net(), _data())
    trainer.fit_loop._combined_loader = None
    for function in (trainer.fit_loop.setup_data, lambda: trainer.strategy.process_dataloader(_data())):
        try:
            function()
        except HeteroError as error:
            messages.append(str(error))
    return messages


def test_dataloaders_cannot_be_set_up_outside_of_a_run() -> None:
    for messages in run(_sets_data_up_outside, 2):
        assert len(messages) == 2
        assert all("no fit, validation, test or prediction is running" in text for text in messages)


@pytest.mark.parametrize("kind", [HeteroDDPStrategy, NodeAverageStrategy])
def test_dataloaders_cannot_be_set_up_before_the_ranks_have_met(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match="no fit, validation, test or prediction is running"):
        kind(**BASE).process_dataloader(_data())


def _listens() -> set[tuple[str, int]]:
    """Addresses at which this process listens on IPv4, as the kernel reports them."""
    mine = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found}


class Listens(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = _listens()


def _in_range(first: int) -> tuple[str, set[tuple[str, int]]]:
    options = {"interface": "lo", "ports": f"{first}-{first + 19}", "on_peer_loss": "continue"}
    strategy, listens = GossipAsyncStrategy(**BASE, **options), Listens()
    _trainer(strategy, listens).fit(Net(), _data())
    return os.environ["GLOO_SOCKET_IFNAME"], listens.found


def test_sockets_of_this_package_are_where_the_options_say() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    first = low - 100 if low > 2000 else high - 100  # where the system does not choose ports by itself
    for name, found in run(_in_range, 2, first):
        assert name == "lo"
        ours = {where for where in found if where[1] in range(first, first + 20)}
        assert len(ours) >= 2  # the membership, and gossip
        assert {host for host, _ in ours} == {"127.0.0.1"}
