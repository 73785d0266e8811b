"""A checkpoint under its final name is whole, whatever happens while it is written."""

import ctypes
import os
import re
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.errors import CheckpointError


def _small_disk(folder: str) -> None:
    """Let a folder be a file system of 256 KiB, in this process."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    private = 1 << 14 | 1 << 18  # MS_REC, MS_PRIVATE
    for result in (
        libc.unshare(0x20000),  # CLONE_NEWNS
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=256k"),
    ):
        if result:
            raise OSError(ctypes.get_errno(), "no file system of its own")


class Saves(pl.Callback):
    """Saves twice under one name; the second checkpoint does not fit on the disk."""

    def __init__(self, path: str, full: str) -> None:
        self.path, self.full = path, full

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero and self.full == "disk":
            _small_disk(os.path.dirname(self.path))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 3:
            module.ballast = torch.zeros(100_000)
            if trainer.is_global_zero and self.full == "quota":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            trainer.save_checkpoint(self.path)


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(1))


def _saves(path: str, kind: Any, full: str, plugins: Any) -> tuple[str, int, list[str]]:
    options = {**FAST, "max_epochs": 2, "callbacks": [Saves(path, full)], "plugins": plugins}
    trainer = pl.Trainer(strategy=kind(balance="off"), **options)
    with pytest.raises((CheckpointError, OSError)) as raised:
        trainer.fit(Wide(), DataLoader(dataset(96), batch_size=4))
    if not trainer.is_global_zero:
        return f"{raised.type.__name__} {raised.value}", 2, ["saved.ckpt"]
    kept = torch.load(path, weights_only=True)["global_step"]
    return f"{raised.type.__name__} {raised.value}", kept, os.listdir(os.path.dirname(path))


@pytest.mark.parametrize(
    ("kind", "full", "cause", "file"),
    [
        pytest.param(
            HeteroDDPStrategy,
            "disk",
            "[Errno 28] No space left on device",
            "saved.ckpt",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root"),
        ),
        (NodeAverageStrategy, "quota", "[Errno 27] File too large", "saved.ckpt.shards/replica-0-SAVE.pt"),
    ],
)
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, kind: Any, full: str, cause: str, file: str) -> None:
    path = str(tmp_path / "saved.ckpt")
    results = run(_saves, 2, path, kind, full, [], nodes=[1, 1], timeout=60)
    messages = [re.sub("replica-0-[0-9a-f]+", "replica-0-SAVE", text) for text, _, _ in results]
    assert messages[0].startswith(f"CheckpointError {tmp_path}/{file} could not be saved: {cause}")
    assert messages[1].startswith(
        f"CheckpointError rank 0 could not save: {tmp_path}/{file} could not be saved: {cause}"
    )
    for _, kept, names in results:
        assert kept == 2
        assert [name for name in names if name != "saved.ckpt.shards"] == ["saved.ckpt"]


class Noting(TorchCheckpointIO):
    """A plugin of the user's."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.names.append(Path(path).name)


class SaveOnce(pl.Callback):
    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            for path in self.paths:
                trainer.save_checkpoint(path)


def _plugins(folder: str) -> Any:
    found = []
    for i, plugin in enumerate((Noting(), AsyncCheckpointIO(), AsyncCheckpointIO(Noting()))):
        callbacks = [SaveOnce(f"{folder}/{i}/new/a.ckpt", "memory://there/b.ckpt")]
        options = {**FAST, "max_epochs": 1, "callbacks": callbacks, "plugins": [plugin]}
        trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance="off"), **options)
        trainer.fit(Net(), DataLoader(dataset(96), batch_size=4))
        io = trainer.strategy.checkpoint_io
        remote = trainer.strategy.load_checkpoint("memory://there/b.ckpt") if trainer.is_global_zero else {}
        base = getattr(io, "checkpoint_io", io)
        found.append((type(io).__name__, type(base).__name__, getattr(base, "names", []), remote.get("global_step")))
    return found


def test_plugins_and_remote_paths_work(tmp_path: Path) -> None:
    found = run(_plugins, 2, str(tmp_path))[0]
    assert found == [
        ("Noting", "Noting", ["a.ckpt", "b.ckpt"], 2),
        ("AsyncCheckpointIO", "AtomicCheckpointIO", [], 2),
        ("AsyncCheckpointIO", "Noting", ["a.ckpt", "b.ckpt"], 2),
    ]
    for i in range(3):
        assert os.listdir(tmp_path / str(i) / "new") == ["a.ckpt"]
        assert torch.load(tmp_path / str(i) / "new" / "a.ckpt", weights_only=True)["global_step"] == 2


def test_a_write_in_the_background_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    [(error, kept, names)] = run(_saves, 1, path, HeteroDDPStrategy, "quota", [AsyncCheckpointIO()])
    assert "could not be saved: [Errno 27] File too large" in error
    assert kept == 2
    assert names == ["saved.ckpt"]
