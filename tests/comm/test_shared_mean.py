"""Averages in shared memory against sums over gloo and NumPy, and the files that are left when ranks end."""

import os
import signal
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run

from lightning_hetero.comm import shared_memory
from lightning_hetero.comm.shared_memory import SharedMean, slice_of

SIZES = [7, 1, 1000, 64, 4097]


def _begin(size: int, seconds: float = 60.0) -> SharedMean:
    dist.init_process_group("gloo")
    _note_names()
    return SharedMean(shared_memory.share_memory(dist.group.WORLD, size, timedelta(seconds=seconds)))


def _note_names() -> None:
    """Write down the names of all files that this process makes."""
    names_file, own = os.environ.get("TESTS_NOTED"), (tempfile.mkdtemp, tempfile.mkstemp)
    if names_file is None:
        return

    def made(number: int, **options: Any) -> Any:
        result = own[number](**options)
        with open(names_file, "a") as file:
            file.write(f"{result if number == 0 else result[1]}\n")
        return result

    tempfile.mkdtemp, tempfile.mkstemp = partial(made, 0), partial(made, 1)  # type: ignore[assignment]


def _nothing_left(names_file: Path) -> None:
    names = names_file.read_text().split()
    assert names
    assert not [name for name in names if Path(name).exists()]


def _values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def _means(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    shared = _begin(sum(8 * size + 64 for size in SIZES))
    results = []
    for _ in range(2):  # the second pass uses the same memory again
        for dtype in dtypes:
            several = [shared.mean(_values(dist.get_rank(), size, dtype), first=i == 0) for i, size in enumerate(SIZES)]
            results += [mean.clone() for mean in several]  # all of a pass lie in memory together
    shared.close()
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_means_are_exact_and_the_same_on_all_ranks(world: int) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    first, *others = run(_means, world, dtypes)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    expected = [
        np.mean([_values(rank, size, dtype).double().numpy() for rank in range(world)], axis=0)
        for _ in range(2)
        for dtype in dtypes
        for size in SIZES
    ]
    bound = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 2e-2}
    for mean, truth in zip(first, expected, strict=True):
        assert np.abs(mean.double().numpy() - truth).max() < bound[mean.dtype]


@pytest.mark.parametrize(("length", "ranks"), [(0, 2), (1, 3), (16, 3), (1000, 4), (4097, 7)])
def test_slices_cover_all(length: int, ranks: int) -> None:
    covered = [i for rank in range(ranks) for i in range(length)[slice_of(length, rank, ranks, 16)]]
    assert covered == list(range(length))


def _trained(shares: bool) -> list[torch.Tensor]:
    """Gradients of some steps, in several buckets."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6))).double()
    embedding = torch.nn.Embedding(9, 40, sparse=True).double()
    model = torch.nn.Sequential(embedding, net)
    shared = _begin(sum(p.numel() * 8 + 64 for p in model.parameters()))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    if shares:
        ddp.register_comm_hook(dist.group.WORLD, shared.hook)
    seen = []
    for step in range(4):
        words = torch.randint(9, (5,), generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))
        ddp.zero_grad()
        ddp(words).square().sum().backward()
        seen += [p.grad.to_dense().clone() for p in model.parameters()]
    shared.close()
    return seen


def test_ddp_gets_the_gradients_that_it_gets_over_gloo() -> None:
    for truth, seen in zip(run(_trained, 3, False), run(_trained, 3, True), strict=True):
        assert len(truth) == 4 * 13
        assert max((a - b).abs().max().item() for a, b in zip(truth, seen, strict=True)) < 1e-12


def _dies(how: str) -> str:
    shared = _begin(4096, seconds=2.0)
    values = torch.ones(1000)
    shared.mean(values, first=True)
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)
        return ""
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="Connection closed") as raised:
        shared.mean(values, first=True)
    assert time.monotonic() - began < 30
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", "Connection closed by rank 1"),
        ("silent", "rank 1 was silent for 2 s"),
    ],
)
def test_nobody_waits_for_a_rank_that_is_lost(how: str, words: str, tmp_path: Path) -> None:
    outcomes = attempt(_dies, 3, how, env={"TESTS_NOTED": str(tmp_path / "noted")})
    assert words in outcomes[0].value
    _nothing_left(tmp_path / "noted")


def _no_room(maker: str) -> str:
    dist.init_process_group("gloo")
    _note_names()
    if dist.get_rank() == 1:
        setattr(*MAKERS[maker], _refuse)
    with pytest.raises(OSError, match="rank 1: no room") as raised:
        SharedMean(shared_memory.share_memory(dist.group.WORLD, 100, timedelta(seconds=60)))
    assert threading.active_count() == 1
    return str(raised.value)


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError("no room")


MAKERS = {"memory": (shared_memory, "MappedVectors"), "folder": (tempfile, "mkdtemp")}


@pytest.mark.parametrize("maker", MAKERS)
def test_all_learn_that_one_cannot_take_part(maker: str, tmp_path: Path) -> None:
    assert len(set(run(_no_room, 2, maker, env={"TESTS_NOTED": str(tmp_path / "noted")}))) == 1
    _nothing_left(tmp_path / "noted")


def _many() -> tuple[int, int]:
    dist.init_process_group("gloo")
    counts = []
    for _ in range(3):
        for _ in range(20):
            shared = SharedMean(shared_memory.share_memory(dist.group.WORLD, 4096, timedelta(seconds=60)))
            shared.mean(torch.ones(10), first=True)
            del shared
        until = time.monotonic() + 20
        while threading.active_count() > 1 and time.monotonic() < until:
            time.sleep(0.01)  # the last thread is about to end
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return counts[0], counts[-1]


def test_what_is_not_used_any_more_is_given_back() -> None:
    for first, last in run(_many, 2):
        assert last[0] <= first[0] + 1  # descriptors
        assert last[1] == first[1] == 1  # threads


def test_a_file_that_was_not_hidden_ends_with_its_object() -> None:
    memory = shared_memory.MappedVectors([torch.zeros(3)])
    path, other = Path(memory.path), shared_memory.MappedVectors([torch.zeros(3)], memory.path)
    del other
    assert path.exists()
    del memory
    assert not path.exists()
