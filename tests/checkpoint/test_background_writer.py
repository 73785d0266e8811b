"""Saves in the background when ranks are lost: all ranks leave out a save that only some have begun."""

from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run

from lightning_hetero.checkpoint.writer import AtomicCheckpointIO, BackgroundWriter


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
