"""Saves in the background when ranks are lost: all ranks leave out a save that only some have begun."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run

from lightning_hetero.checkpoint.writer import AtomicCheckpointIO, BackgroundWriter
from lightning_hetero.errors import CheckpointError
from lightning_hetero.strategies.saving import retry_on_peer_loss


def _some_had_begun(folder: str) -> tuple[bool, bool, bool]:
    """Rank 1 has begun the first save when ranks change, rank 0 has not; then both save again."""
    dist.init_process_group("gloo")
    root, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    writer = BackgroundWriter(AtomicCheckpointIO(), dist.PrefixStore("before", root), limit=5.0)
    begun = []

    def save(name: str) -> None:
        writer.save_checkpoint({"value": torch.ones(2)}, f"{folder}/{name}-{rank}.ckpt")
        begun.append(writer.launch(lambda: None))
        writer.complete()

    if rank == 1:
        save("first")
    writer.move(dist.PrefixStore("after", root), None)
    if rank == 0:
        save("first")
    save("second")
    return begun[0], begun[1], writer.agree()


def test_a_save_that_some_had_begun_is_left_out(tmp_path: Path) -> None:
    assert run(_some_had_begun, 2, str(tmp_path), timeout=60) == [(False, True, False), (True, True, False)]
    assert not (tmp_path / "first-0.ckpt").exists()
    assert (tmp_path / "second-0.ckpt").exists()


def _saved_again(folder: str) -> int:
    """A rank is lost while all save, so that they save once more; then it is written."""
    dist.init_process_group("gloo")
    rank, attempts = dist.get_rank(), list[int]()
    store = dist.PrefixStore("saves", dist.distributed_c10d._get_default_store())
    writer = BackgroundWriter(AtomicCheckpointIO(), store, limit=5.0)
    recovery: Any = SimpleNamespace(view_number=0)

    def save() -> None:
        attempts.append(len(attempts) + 1)
        writer.save_checkpoint({"value": torch.ones(2)}, f"{folder}/shard-{rank}-{attempts[-1]}.ckpt")
        if rank == 0:
            writer.save_checkpoint({"attempt": attempts[-1]}, f"{folder}/all.ckpt")
        recovery.view_number = 1

    retry_on_peer_loss(recovery, writer, save)
    writer.launch(lambda: None)
    writer.complete()
    assert not writer.agree()
    return len(attempts)


def test_a_save_that_is_made_once_more_is_written_once(tmp_path: Path) -> None:
    """Else the first attempt's checkpoint would be there before the shards of all ranks are."""
    assert run(_saved_again, 2, str(tmp_path), timeout=60) == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.ckpt", "shard-0-2.ckpt", "shard-1-2.ckpt"]
    assert torch.load(tmp_path / "all.ckpt", weights_only=True) == {"attempt": 2}


class _SlowDisk(AtomicCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(2.0)
        super().save_checkpoint(*args, **kwargs)


class _Disconnected(AtomicCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise dist.DistNetworkError("a connection has ended")


def _saves_badly(folder: str, files: list[type[AtomicCheckpointIO]], limit: float) -> str:
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.PrefixStore("saves", dist.distributed_c10d._get_default_store())
    writer = BackgroundWriter(files[rank](), store, limit)
    writer.save_checkpoint({"value": torch.ones(2)}, f"{folder}/part-{rank}.ckpt")
    writer.launch(lambda: None)
    writer.complete()
    with pytest.raises((CheckpointError, dist.DistError)) as raised:
        writer.agree()
    return str(raised.value)


def test_a_broken_connection_while_nobody_is_lost_is_an_error_on_every_rank(tmp_path: Path) -> None:
    errors = run(_saves_badly, 3, str(tmp_path), [_Disconnected, _Disconnected, AtomicCheckpointIO], 5.0, timeout=60)
    assert all("a connection has ended" in error for error in errors), errors


def test_a_rank_that_writes_for_too_long_is_an_error_on_every_rank(tmp_path: Path) -> None:
    errors = run(_saves_badly, 2, str(tmp_path), [AtomicCheckpointIO, _SlowDisk], 0.5, timeout=60)
    assert all("another rank has not written its part" in error for error in errors), errors
