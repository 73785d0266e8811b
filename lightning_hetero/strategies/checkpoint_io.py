"""Writes checkpoints so that a file under its final name is always whole."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_hetero.errors import CheckpointError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to save, but a local file gets its final name only when it is complete and on the disk.

    Lightning writes to the system's temporary folder and then moves the file. To another file system a move is a copy:
    if the disk is full, or the process ends, a part of a checkpoint is left under the final name, and the checkpoint
    that was there before is lost. Here the new file is written next to the final name (``saving-*.tmp``) and renamed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        file_system, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(file_system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with replacing(Path(local)) as file:
                torch.save(checkpoint, file)
        except OSError as error:
            raise CheckpointError(
                f"{path} could not be saved: {error}. A file that was there before is unchanged. Make room, or save to "
                "another place."
            ) from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` once the block is left without an error; else nothing is left of it.

    Args:
        path: in a local file system; missing folders are made.

    Yields:
        The file to write to.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not named after `path`: Lightning takes any file with "hpc_ckpt_" or "last" in its name for a checkpoint. Except
    # for shards, which bear the name of their save: so it is known whose one is that will never be complete.
    whose = f"{path.stem}-" if path.name.startswith("replica-") else ""
    beside = path.with_name(f"saving-{whose}{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(beside, "xb") as raw:
            file = _Remembering(raw)
            try:
                yield file  # type: ignore[misc]
            except Exception:
                if file.error is not None:  # torch.save raises another one that does not tell the cause
                    raise file.error from None
                raise
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    with suppress(OSError):  # not every file system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _Remembering:
    """Remembers why writing failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()
