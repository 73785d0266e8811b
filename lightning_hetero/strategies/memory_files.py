"""Checkpoints in memory, for ranks that begin again at once."""

import io
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from typing_extensions import override


class MemoryFiles(CheckpointIO):
    """Keeps a checkpoint, and its shards, in the memory of this process.

    Args:
        path: of the checkpoint.
        usual: reads and writes all other files.

    Attributes:
        content: of each file, by its path.
    """

    def __init__(self, path: str, usual: CheckpointIO) -> None:
        self.path, self.usual = path, usual
        self.content: dict[str, bytes] = {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if not self._has(path):
            self.usual.save_checkpoint(checkpoint, path, storage_options)
            return
        file = io.BytesIO()
        torch.save(checkpoint, file)
        self.content[str(path)] = file.getvalue()

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not self._has(path):
            return self.usual.load_checkpoint(path, *args, **kwargs)
        if str(path) not in self.content:
            raise FileNotFoundError(str(path))
        return torch.load(io.BytesIO(self.content[str(path)]), "cpu", weights_only=False)  # this job's own

    @override
    def remove_checkpoint(self, path: Any) -> None:
        if self._has(path):
            self.content.pop(str(path), None)
        else:
            self.usual.remove_checkpoint(path)

    def _has(self, path: Any) -> bool:
        return str(path).startswith(self.path)
