"""Which checkpoints of a run there are, and which of them go when a newer one is complete."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fsspec.core import url_to_fs

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


class Kept:
    """The checkpoints of a run, by the order in which they were begun.

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
            elif path not in kept:
                strategy.remove_checkpoint(path)


def _exists(path: str) -> bool:
    file_system, local = url_to_fs(path)
    file_system.invalidate_cache()
    return file_system.exists(local)
