"""Folder of a run's checkpoints: its newest complete one, and the removal of those that are not kept."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetero.checkpoint import directory, shards
from lightning_hetero.checkpoint.format import explain_unreadable, save_name, shard_names
from lightning_hetero.checkpoint.writer import AtomicCheckpointIO
from lightning_hetero.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy

_NAME = re.compile(r"step=\d+(-stopped|-complete)?\.ckpt")


class FoundCheckpoint(NamedTuple):
    """Checkpoint as one rank finds it.

    Attributes:
        problem: why it is not whole, in words.
        summary: tells whether ranks see the same one.
        wanted: names of the shards of replicas that it needs.
        found: names of those that this rank can read.
    """

    problem: str | None
    summary: tuple[Any, ...] = ()
    wanted: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


def checkpoint_path(folder: str, step: int, moment: Literal["", "-stopped", "-complete"] = "") -> str:
    """Path of the checkpoint of a step.

    Args:
        folder: of the checkpoints.
        step: of the optimizer.
        moment: whether the job was asked to stop there, or was complete.
    """
    return os.path.join(folder, f"step={step}{moment}.ckpt")


def newest_first(folder: str, more: str | None = None) -> list[str]:
    """The checkpoints of :func:`checkpoint_path` in a folder, by the time at which they were written.

    Args:
        folder: need not exist.
        more: another checkpoint, which takes its place among them.
    """
    file_system, local = _fresh(folder)
    found = file_system.ls(local, detail=False) if file_system.exists(local) else []
    paths = [os.path.join(folder, name) for name in map(os.path.basename, found) if _NAME.fullmatch(name)]
    return sorted(paths + ([more] if more else []), key=_written, reverse=True)


def newest_complete(io: CheckpointIO, paths: Sequence[str]) -> str | None:
    """The first checkpoint that is whole; those that are passed over are named in a warning (collective).

    Args:
        io: reads checkpoints.
        paths: the same on every rank.

    Raises:
        CheckpointError: on every rank, if a file cannot be read for a reason that has nothing to do with its content.
    """
    for path in paths:
        look, error = None, None
        try:
            look = _inspect(io, path)
        except Exception as broken:
            error = broken
        problem = _problem(shards.gather_or_raise(look, error, "which checkpoints are whole"), path)
        if problem is None:
            return path
        rank_zero_warn(f"{path} is passed over: {problem}")
    return None


def remove_partial(folder: str, paths: Sequence[str]) -> None:
    """Remove what a job that was killed has left half written, in a local folder, where nobody writes now.

    Args:
        folder: of the checkpoints.
        paths: those that rank 0 has found in it; shards of others belong to none.
    """
    names = {os.path.basename(path) for path in paths}
    halves = _matching(Path(folder), "saving-*.tmp")
    for beside in (directory.half_of, directory.former_of):
        for half in _matching(Path(folder), beside("step=*.ckpt").name):
            shutil.rmtree(half, ignore_errors=True)
    for shard_folder in _matching(Path(folder), "step=*.ckpt.shards"):
        if shard_folder.stem in names:
            halves += _matching(shard_folder, "saving-*.tmp")
        else:
            shutil.rmtree(shard_folder, ignore_errors=True)
    for half in halves:
        with suppress(OSError):  # another host has been faster
            half.unlink()


def _matching(folder: Path, pattern: str) -> list[Path]:
    with suppress(FileNotFoundError):  # another host has removed the folder, or something in it
        return list(folder.glob(pattern))
    return []


def _inspect(io: Any, path: str) -> FoundCheckpoint:
    if directory.is_directory(path) and (name := directory.lacking(path)) is not None:
        return FoundCheckpoint(f"{name} in it is missing, or was cut off while it was written or copied.")
    try:
        checkpoint = _read(io, path)
    except FileNotFoundError:
        return FoundCheckpoint("it is not there.")
    except CheckpointError as error:
        return FoundCheckpoint(
            f"it was cut off while it was written or copied, or is something else ({error.__cause__})."
        )
    save, wanted = save_name(checkpoint), shard_names(checkpoint)
    found = tuple(name for name in wanted if _readable(io, shards.shard_path(path, name, str(save))))
    return FoundCheckpoint(None, (checkpoint.get("global_step"), save), wanted, found)


def _readable(io: Any, path: str) -> bool:
    try:
        _read(io, path)
    except (FileNotFoundError, CheckpointError):
        return False
    return True


def _read(io: Any, path: str) -> dict[str, Any]:
    """A checkpoint. What this package writes to a local disk is not read as a whole, but its end is looked for."""
    with explain_unreadable(path):
        if directory.is_directory(path):
            return directory.read(path, weights_only=False)
        if type(io) is AtomicCheckpointIO and isinstance(url_to_fs(path)[0], LocalFileSystem):
            if not os.path.getsize(path):
                raise EOFError("it is empty")
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)  # the user's own, as Lightning
        return io.load_checkpoint(path)


def _problem(looks: Sequence[FoundCheckpoint], path: str) -> str | None:
    for rank, look in enumerate(looks):
        if look.problem is not None:
            return look.problem if rank == 0 else f"on rank {rank}, {look.problem}"
    if len({look.summary for look in looks}) > 1:
        return "under this name ranks find different checkpoints."
    lost = sorted(set(looks[0].wanted) - {id for look in looks for id in look.found})
    if lost:
        return (
            f"in {shards.shard_folder(path)} the state of replica(s) {', '.join(map(str, lost))} is missing or cut off."
        )
    return None


def _written(path: str) -> tuple[float, int]:
    """The time at which a checkpoint was written; steps decide where the clock is too coarse."""
    file_system, local = url_to_fs(path)
    steps = re.findall(r"\d+", os.path.basename(path))
    return file_system.modified(local).timestamp(), int(steps[0]) if steps else 0


def _exists(path: str) -> bool:
    file_system, local = _fresh(path)
    return file_system.exists(local)


def _fresh(path: str) -> tuple[Any, str]:
    """The file system of a path as it is now, and the path in it."""
    file_system, local = url_to_fs(path)
    file_system.invalidate_cache()
    return file_system, local


class RetentionPolicy:
    """The checkpoints of a run that are kept, by the order in which they were begun.

    One that was interrupted, because a rank was lost, is not there; only its shards may be, some of them half written.
    Whether it is there the first rank sees once a newer one is complete, when nobody writes.

    Args:
        most: how many to keep.
        paths: those from which a run that goes on has chosen, the oldest first.
    """

    def __init__(self, most: int, paths: Iterable[str] = ()) -> None:
        self._most = most
        self._known = dict.fromkeys(paths, True)  # by path, whether it is known that the checkpoint has come about

    def begin(self, path: str) -> dict[str, bool]:
        """A checkpoint is begun.

        Returns:
            Those before it, the oldest first, and of each whether it is known that it has come about.
        """
        self._known.pop(path, None)
        older, self._known[path] = dict(self._known), False
        return older

    def complete(self, path: str) -> None:
        """A checkpoint is complete on all ranks, and the first one has removed what is not kept beside it."""
        self._known[path] = True
        known = [path for path, there in self._known.items() if there]
        if len(known) >= self._most:  # whatever is older is gone
            paths = list(self._known)
            self._known = {path: self._known[path] for path in paths[paths.index(known[-self._most]) :]}

    def remove(self, strategy: "HeteroStrategy", older: Mapping[str, bool]) -> None:
        """A checkpoint is complete on all ranks: remove what is not kept beside it; on the first rank.

        Args:
            strategy: removes.
            older: of :meth:`begin`.
        """
        there = [path for path, known in older.items() if known or _exists(path)]
        kept = there[max(0, len(there) - self._most + 1) :]
        for path in older:
            if path not in there:
                strategy._shards.unfinished(strategy.checkpoint_io, path)
                shutil.rmtree(directory.half_of(path), ignore_errors=True)
            elif path not in kept:
                strategy.remove_checkpoint(path)
