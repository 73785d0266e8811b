"""Ranks of one node average gradients in shared memory, with the same result as over sockets."""

import gc
import os
import warnings
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from leftovers import nothing_left_in_memory
from ranks import run
from tasks import FAST, Net, dataset, error, parameters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.comm import shared_memory
from lightning_hetero.comm.shared_memory import ALIGNED, SharedMean
from lightning_hetero.errors import UnsupportedError


def _fit(within: str, room: float = 1e12, **options: Any) -> tuple[torch.Tensor, int, list[str]]:
    """Weights after a fit, the number of buckets that were averaged in shared memory, and warnings."""
    calls, mean = [], SharedMean.mean

    def counted(self: SharedMean, *args: Any) -> torch.Tensor:
        calls.append(args)
        return mean(self, *args)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(SharedMean, "mean", counted)
        patch.setattr(shared_memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=room))  # type: ignore[attr-defined]
        module = Net()
        strategy = HeteroDDPStrategy(within=within, balance=[3.0, 1.0, 2.0], timeout=120, **options)
        trainer = pl.Trainer(strategy=strategy, max_epochs=2, **FAST)
        trainer.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))
    return parameters(module), len(calls), [str(one.message) for one in caught]


def _all() -> list[Any]:
    row = 8 * sum(p.numel() for p in Net().parameters()) + 4 * ALIGNED
    needed = 4 * -(-row // ALIGNED) * ALIGNED  # for three rows and the result
    auto, sockets, no_room = _fit("auto", 2 * needed + 2), _fit("gloo"), _fit("auto", 2 * needed - 2)
    assert _fit("shm", needed)[1] == 18
    hooked = _fit("auto", ddp_comm_hook=allreduce_hook)
    with pytest.raises(UnsupportedError, match="within='shm', but ddp_comm_hook averages the gradients"):
        _fit("shm", ddp_comm_hook=allreduce_hook)
    with pytest.raises(UnsupportedError, match=r"within='shm', but .* \(rank 0: .* are free in"):
        _fit("shm", needed - 2)
    return [auto, sockets, no_room, hooked]


def test_shared_memory_is_used_where_it_can_be() -> None:
    results = run(_all, 3)
    for auto, sockets, no_room, hooked in results:
        assert auto[1] == 18  # a bucket for each step
        assert sockets[1] == no_room[1] == hooked[1] == 0
        for other in (sockets, no_room, hooked):
            assert error(auto[0], other[0]) < 1e-12
    for number in range(4):
        assert all(torch.equal(one[number][0], results[0][number][0]) for one in results)
    *_, messages = results[0][2]
    assert sum("Gradients are averaged over sockets: the memory cannot be shared" in text for text in messages) == 1


def _refused_between_nodes() -> tuple[int, str]:
    with pytest.raises(UnsupportedError) as refused:
        _fit("shm")
    return _fit("auto")[1], str(refused.value)


def test_ranks_of_several_nodes_use_sockets() -> None:
    for calls, refused in run(_refused_between_nodes, 3, nodes=[2, 1]):
        assert calls == 0
        assert "ranks [0, 1, 2], which average gradients, are on several nodes" in refused


def _many(fits: int) -> tuple[list[int], list[int]]:
    """Mapped segments and open files of this process after each of many fits, of two strategies in turn."""
    maps, files = [], []
    for number in range(fits):
        strategy = ("hetero_ddp", "hetero_node")[number % 2]
        trainer = pl.Trainer(strategy=strategy, max_steps=2, **FAST)
        trainer.fit(Net(), DataLoader(dataset(), batch_size=4))
        del trainer
        gc.collect()
        with open("/proc/self/maps") as lines:
            maps.append(sum("lightning-hetero" in line for line in lines))
        files.append(len(os.listdir("/proc/self/fd")))
    return maps, files


@pytest.mark.long
def test_many_fits_leave_no_memory_and_no_file_behind() -> None:
    with nothing_left_in_memory():
        found = run(_many, 2, int(os.environ.get("MANY_FITS", "40")))
    for maps, files in found:
        assert max(maps) <= 4  # of a fit before, which the next one ends, and of this one
        assert max(files[20:]) <= max(files[8:20]) + 2
