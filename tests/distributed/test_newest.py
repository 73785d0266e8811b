"""Checkpoint from which a job that is started again goes on: the newest one that is whole on all ranks."""

import os
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from ranks import run

from lightning_hetero.callbacks.checkpoint_folder import newest_complete, newest_first, remove_partial
from lightning_hetero.checkpoint.writer import AtomicCheckpointIO
from lightning_hetero.errors import CheckpointError


def _write(folder: Path, name: str, age: float, shards: tuple[int, ...] = (), save: str = "abc") -> Path:
    """Write a checkpoint of this age, with these shards of replicas 0 and 1."""
    part = {"format": 1, "replicas": {"save": save, "ids": [0, 1]}} if shards else {"format": 1}
    path = folder / name
    torch.save({"global_step": 3, "lightning_hetero": part, "state_dict": {"w": torch.ones(1000)}}, path)
    for replica in shards:
        shard = Path(f"{path}.shards", f"replica-{replica}-{save}.pt")
        shard.parent.mkdir(exist_ok=True)
        torch.save({"state": {"values": [torch.ones(1000)]}}, shard)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_newest_first(tmp_path: Path) -> None:
    assert newest_first(str(tmp_path / "none")) == []
    for name, age in (
        ("step=9.ckpt", 20),
        ("step=100.ckpt", 10),
        ("step=40-stopped.ckpt", 5),
        ("step=41.ckpt", 5),
        ("step=50-complete.ckpt", 1),
    ):
        _write(tmp_path, name, age)
    for name in ("best.ckpt", "step=7.ckpt.shards", "saving-123.tmp", "step=x.ckpt", "hpc_ckpt_1.ckpt"):
        (tmp_path / name).touch()
    slurm = str(_write(tmp_path, "hpc_ckpt_2.ckpt", 7))
    names = [
        "step=50-complete.ckpt",
        "step=41.ckpt",
        "step=40-stopped.ckpt",
        "hpc_ckpt_2.ckpt",
        "step=100.ckpt",
        "step=9.ckpt",
    ]
    assert newest_first(str(tmp_path), slurm) == [str(tmp_path / name) for name in names]


def _chosen(folders: list[str], io: Any) -> list[Any]:
    """The chosen checkpoint of each folder, and the warnings of this rank."""
    dist.init_process_group("gloo")
    rank_zero_only.rank = dist.get_rank()
    results: list[Any] = []
    for folder in folders:
        own = folder.replace("RANK", str(dist.get_rank()))
        names = [os.path.basename(path) for path in newest_first(folder.replace("RANK", "0"))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                path = newest_complete(io, [os.path.join(own, name) for name in names])
                found = path and os.path.basename(path)
            except (CheckpointError, OSError) as error:
                found = f"{type(error).__name__} {error}"
        results.append((found, [str(w.message) for w in caught]))
    return results


def test_what_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    both = (0, 1)
    cases: dict[str, tuple[str | None, list[str]]] = {
        "whole": ("step=3.ckpt", []),
        "cut": ("step=2.ckpt", ["it was cut off while it was written or copied"]),
        "empty": ("step=2.ckpt", ["it was cut off while it was written or copied"]),
        "shard missing": ("step=2.ckpt", ["the state of replica(s) 1 is missing or cut off"]),
        "shard cut": ("step=2.ckpt", ["the state of replica(s) 0 is missing or cut off"]),
        "shard of another save": ("step=2.ckpt", ["the state of replica(s) 1 is missing or cut off"]),
        "two cut": ("step=1.ckpt", ["it was cut off", "it was cut off"]),
        "all cut": (None, ["it was cut off"] * 3),
        "nothing": (None, []),
        "own-RANK": ("step=2.ckpt", ["on rank 1, it is not there"]),
        "unlike-RANK": ("step=2.ckpt", ["ranks find different checkpoints"]),
        "shards-RANK": ("step=3.ckpt", []),  # without a shared file system each host has shards of its own
    }
    for case in cases:
        for rank in both if "RANK" in case else (0,):
            folder = tmp_path / case.replace("RANK", str(rank))
            folder.mkdir()
            for number in (1, 2, 3) if case != "nothing" else ():
                _write(folder, f"step={number}.ckpt", 10.0 - number, both)
    _cut(tmp_path / "cut" / "step=3.ckpt")
    (tmp_path / "empty" / "step=3.ckpt").write_bytes(b"")
    os.utime(tmp_path / "empty" / "step=3.ckpt")
    (tmp_path / "shard missing" / "step=3.ckpt.shards" / "replica-1-abc.pt").unlink()
    _cut(tmp_path / "shard cut" / "step=3.ckpt.shards" / "replica-0-abc.pt")
    other = tmp_path / "shard of another save" / "step=3.ckpt.shards"
    (other / "replica-1-abc.pt").rename(other / "replica-1-def.pt")
    for case, numbers in (("two cut", (2, 3)), ("all cut", (1, 2, 3))):
        for number in numbers:
            _cut(tmp_path / case / f"step={number}.ckpt")
    (tmp_path / "own-1" / "step=3.ckpt").unlink()
    _write(tmp_path / "unlike-1", "step=3.ckpt", 0.0, both, "def")
    for rank in both:
        (tmp_path / f"shards-{rank}" / "step=3.ckpt.shards" / f"replica-{1 - rank}-abc.pt").unlink()

    folders = [str(tmp_path / case) for case in cases]
    for io in (AtomicCheckpointIO(), TorchCheckpointIO()):  # the second one reads whole files, as users' plugins may
        for rank, results in enumerate(run(_chosen, 2, folders, io)):
            for (case, (name, words)), (found, messages) in zip(cases.items(), results, strict=True):
                assert found == name, case
                expected = words if rank == 0 else []
                assert len(messages) == len(expected), (case, messages)
                for text, part in zip(messages, expected, strict=True):
                    assert f"{tmp_path / case.replace('RANK', '0')}/step=" in text, case
                    assert part in text, case


def test_a_file_that_may_not_be_read_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    _write(tmp_path, "step=1.ckpt", 5.0)
    (tmp_path / "step=2.ckpt").mkdir()  # an error of the file system, and not of the contents
    first, second = run(_chosen, 2, [str(tmp_path)], TorchCheckpointIO())
    assert first[0][0].startswith("IsADirectoryError")
    assert second[0][0].startswith("IsADirectoryError")


def test_what_a_killed_job_has_left_is_removed(tmp_path: Path) -> None:
    _write(tmp_path, "step=1.ckpt", 5.0, (0, 1))
    _write(tmp_path, "step=2.ckpt", 4.0, (0, 1)).unlink()  # killed before the checkpoint itself was written
    for name in ("saving-1.tmp", "step=1.ckpt.shards/saving-2.tmp", "best.ckpt"):
        (tmp_path / name).touch()
    (tmp_path / "best.ckpt.shards").mkdir()
    remove_partial(str(tmp_path), newest_first(str(tmp_path)))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["best.ckpt", "best.ckpt.shards", "step=1.ckpt", "step=1.ckpt.shards"]
    assert len(list((tmp_path / "step=1.ckpt.shards").iterdir())) == 2
    remove_partial(str(tmp_path / "none"), [])
    shutil.rmtree(tmp_path)


def test_hosts_clean_up_one_folder_at_the_same_time(tmp_path: Path) -> None:
    """It is no error if another host has removed a file in the meantime."""
    for _ in range(4):
        for step in range(10):
            shards = tmp_path / f"step={step}.ckpt.shards"
            shards.mkdir()
            (shards / "saving-1.tmp").touch()
        begin = threading.Barrier(4)

        def host(begin: threading.Barrier = begin) -> None:
            begin.wait()
            remove_partial(str(tmp_path), [str(tmp_path / "step=3.ckpt")])

        with ThreadPoolExecutor(4) as hosts:
            for done in [hosts.submit(host) for _ in range(4)]:
                done.result()
        assert [path.name for path in tmp_path.rglob("*")] == ["step=3.ckpt.shards"]
        (tmp_path / "step=3.ckpt.shards").rmdir()
