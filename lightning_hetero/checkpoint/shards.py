"""Shards: files with a replica's own state, next to the checkpoint that all replicas share.

The shards of ``NAME.ckpt`` are ``NAME.ckpt.shards/replica-ID-SAVE.pt``. ``SAVE`` is a random name that the checkpoint
holds too: shards of another save under the same name are never taken for its own, and the old ones can stay until the
new checkpoint is complete. Each replica's leader writes its shard beside its own path, so that hosts without a shared
file system keep their own ones.
"""

import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO

from lightning_hetero.comm.agreement import gather, value_of_rank
from lightning_hetero.errors import CheckpointError


def shard_folder(path: Any) -> str:
    """The folder with the shards of a checkpoint.

    Lightning takes names with ``hpc_ckpt_`` in them for checkpoints, so that is left out.
    """
    name = os.path.basename(str(path))
    return f"{str(path)[: -len(name)]}{name.replace('hpc_ckpt_', 'hpc-')}.shards"


def shard_path(path: Any, replica: str, save: str) -> str:
    """The file with a replica's own state, or with a rank's part of it where models are sharded.

    Args:
        path: of the checkpoint.
        replica: its id; and the rank's place in it.
        save: the name of the save.
    """
    return f"{shard_folder(path)}/replica-{replica}-{save}.pt"


class RemovedCheckpoint(NamedTuple):
    """Checkpoint that rank 0 has removed.

    Attributes:
        path: of a checkpoint.
        saves: that have left shards there and nothing else, by their names; ``None``: the checkpoint is gone, and its
            shards are to go, whoever has saved them.
    """

    path: str
    saves: frozenset[str] | None = None


class Shards:
    """Shards of a strategy's checkpoints: their names, and the removal of those that nothing refers to any more."""

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}  # by the path of a checkpoint, the name of its latest save
        self._saves: dict[str, set[str]] = {}  # by path, of this job, those of which something may be there
        self._gone: list[RemovedCheckpoint] = []  # what rank 0 has removed since it has last told the others

    @contextmanager
    def saving(self, files: CheckpointIO, path: Any, is_leader: bool, background: bool) -> Iterator[str]:
        """Save in the block, which succeeds or fails on all ranks alike (collective).

        Args:
            files: removes the shards that are not needed any more.
            path: of the checkpoint.
            is_leader: whether this rank writes a shard.
            background: whether files may be written later than they are given. Then the checkpoint that is there may
                still be that of the save before, so that one's shards stay.

        Yields:
            The name of the save.
        """
        save = self.clean(files, is_leader)
        self._saves.setdefault(str(path), set()).add(save)
        try:
            yield save
        except Exception:
            if is_leader and not background:
                _prune(files, path, lambda other: other != save)
            raise
        before, self._latest[str(path)] = self._latest.get(str(path)), save
        if not (background and before is None):
            kept = {save, before if background and before else save}
            dropped = self._saves[str(path)] - kept
            self._saves[str(path)] &= kept
            if is_leader:
                _prune(files, path, kept.__contains__, dropped)

    def clean(self, files: CheckpointIO, is_leader: bool) -> str:
        """Remove the shards of checkpoints that rank 0 has removed, where rank 0 cannot (collective).

        Returns:
            A name for a save, the same on all ranks.
        """
        removed, self._gone = self._gone, []  # a thread may remove more meanwhile
        save, told = value_of_rank((secrets.token_hex(6), removed), 0)
        for gone in told:
            self._clear(files, gone, is_leader, save)  # another leader may already write to the same folder
        return save

    def removed(self, files: CheckpointIO, path: Any) -> None:
        """Remove the shards of a checkpoint that has just been removed; on rank 0."""
        self._gone.append(gone := RemovedCheckpoint(str(path)))
        self._clear(files, gone)

    def unfinished(self, files: CheckpointIO, path: Any) -> None:
        """Remove what saves of this job have left of a checkpoint that has not come about; on rank 0.

        No rank writes to it any more. What has not been saved in this fit, or by this job, stays.
        """
        if saves := self._saves.get(str(path)):
            self._gone.append(gone := RemovedCheckpoint(str(path), frozenset(saves)))
            self._clear(files, gone)

    def _clear(
        self, files: CheckpointIO, gone: RemovedCheckpoint, is_leader: bool = True, present: str | None = None
    ) -> None:
        """Forget what is gone, and remove what this rank can of it, but for the present save."""
        self._latest.pop(gone.path, None)
        own = self._saves.pop(gone.path, set()) if gone.saves is None else gone.saves
        self._saves.pop(gone.path, None)
        if is_leader:
            keeps = (lambda other: other == present) if gone.saves is None else (lambda other: other not in own)
            _prune(files, gone.path, keeps, own)


def read(load: Callable[[str], dict[str, Any]], path: Any, replica: str, save: str) -> dict[str, Any] | None:
    """A replica's own state; ``None`` if its shard is not there.

    Args:
        load: reads a file; raises ``FileNotFoundError`` if there is none.
        path: of the checkpoint, or a link to it.
        replica: its id; and the rank's place in it.
        save: the name of the save.
    """
    local = isinstance(url_to_fs(str(path))[0], LocalFileSystem)
    for place in dict.fromkeys((str(path), os.path.realpath(path) if local else str(path))):
        with suppress(FileNotFoundError):
            return load(shard_path(place, replica, save))["state"]
    return None


def gather_or_raise(value: Any, error: Exception | None, what: str, doing: str = "resume") -> list[Any]:
    """One value per rank, unless some rank had an error, which is raised on all (collective).

    Args:
        value: this rank's.
        error: of this rank, if it had one.
        what: completes "rank 1 of 4 could not gather ..." in an error.
        doing: what ranks could not do for such an error: "save" or "resume".

    Raises:
        CheckpointError: another rank's error. This rank's own is raised as it is.
    """
    everyone = gather((value, None if error is None else str(error)), what)
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise CheckpointError(f"rank {rank} could not {doing}: {text}")
    return [value for value, _ in everyone]


def _prune(files: CheckpointIO, path: Any, keeps: Callable[[str], bool], halves: Collection[str] = ()) -> None:
    """Remove shards of a checkpoint but those of saves that stay, and what ``halves`` have left half written."""
    with suppress(OSError):
        file_system, folder = url_to_fs(shard_folder(path))
        file_system.invalidate_cache()
        names = [os.path.basename(name) for name in file_system.ls(folder, detail=False)]
        gone = [name for name in names if name.startswith("replica-") and not keeps(_save_of(name))]
        gone += [name for name in names if name.startswith("saving-replica-") and _save_of_half(name) in halves]
        for name in gone:
            with suppress(FileNotFoundError):  # another leader has been faster
                files.remove_checkpoint(f"{shard_folder(path)}/{name}")
        if len(gone) == len(names):
            file_system.rmdir(folder)


def _save_of(name: str) -> str:
    """The name of the save in that of a shard."""
    return os.path.splitext(name)[0].rpartition("-")[2]


def _save_of_half(name: str) -> str:
    """The same for a shard that is being written: ``saving-replica-ID-SAVE-RANDOM.tmp``."""
    return name.split("-")[-2]
