"""Vectors in memory that the processes of one host share."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_ALIGNED = 64  # bytes; vectors begin at a cache line


class Mapped:
    """Vectors in a mapped file, in ``/dev/shm`` where there is one.

    The file loses its name once all processes have opened it (:meth:`hide`). So nothing is left of a job that dies.

    Args:
        like: vectors of the sizes and dtypes to come.
        path: a file that another process has made. Default: make a file, full of zeros.

    Raises:
        OSError: the file cannot be found, or there is no room for it.
        ValueError: the file has another size.

    Attributes:
        path: of the file, until :meth:`hide`.
        vectors: the vectors in it.
    """

    def __init__(self, like: Sequence[Tensor], path: str | None = None) -> None:
        sizes = [value.nbytes for value in like]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        size = max(starts[-1], _ALIGNED)
        self.path = path or _make(size)
        if (there := os.stat(self.path).st_size) != size:  # raises if there is none; mapping would make one
            raise ValueError(f"{self.path} has {there} bytes, not {size}")
        memory = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self.vectors = [part.view(value.dtype) for part, value in zip(parts, like, strict=True)]

    def hide(self) -> None:
        """Remove the file's name, once all have opened it: the file then ends with the last process that uses it."""
        os.unlink(self.path)


def _make(size: int) -> str:
    shared = Path("/dev/shm")
    file, path = tempfile.mkstemp(prefix="lightning-hetero-", dir=shared if shared.is_dir() else None)
    try:
        os.posix_fallocate(file, 0, size)  # now rather than a bus error later
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path
