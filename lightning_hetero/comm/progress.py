"""Progress tracker of replicas with data of their own, for those that have come to the end of theirs."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from lightning_hetero.comm import failures
from lightning_hetero.comm.failures import deadline
from lightning_hetero.errors import CommunicationError


class DataProgress(NamedTuple):
    """Progress of a replica in a pass over its data.

    Attributes:
        batches: drawn so far.
        ended: whether there are no more.
    """

    batches: int
    ended: bool


class DataProgressTracker:
    """Progress tracker: replicas write how many batches they have drawn, and read who has more.

    To write costs some microseconds: it is a message without an answer. Only a replica that has no more data reads.

    Args:
        store: of the job, with keys that nobody else writes.
        replicas: ids of all replicas.
        own: id of this one.
        seconds: longest wait for another replica.
    """

    #: Seconds between two looks at the board, at first and at most.
    SOON, LATE = 0.002, 0.02

    def __init__(self, store: dist.Store, replicas: Sequence[int], own: int, seconds: float) -> None:
        self._store, self._replicas, self._own, self._seconds = store, replicas, own, seconds
        self._passes = 0
        self._written: dict[int, DataProgress] = {}  # of this pass and the one before, by their numbers
        self._most = 0  # batches that some replica is known to have drawn in this pass

    def begin(self, number: int) -> None:
        """A new pass over the data begins.

        Args:
            number: of the pass, from 1; all replicas count passes alike.
        """
        self._passes, self._most = number, 0
        self._written = {one: count for one, count in self._written.items() if one >= number - 1}
        self.write(DataProgress(0, False))
        if number > 2:
            self._store.delete_key(self._key(number - 2, self._own))  # all have read it

    def continue_from(self, former: "DataProgressTracker") -> None:
        """Go on in another store where an earlier one has stopped: some replicas were lost.

        Others may know of more batches of a lost replica, or of fewer. So this one says that it draws as many as it
        knows of: all remaining replicas run as many as the one that knows of most.
        """
        self._passes, self._written = former._passes, dict(former._written)
        if (last := self._written.get(self._passes)) is not None:
            self._written[self._passes] = last._replace(batches=max(last.batches, former._most))
        for number, count in self._written.items():
            self._write(number, count)

    def write(self, count: DataProgress) -> None:
        """Let the others know what this replica has drawn."""
        self._written[self._passes] = count  # first: it counts also if this breaks
        self._write(self._passes, count)

    def _write(self, number: int, count: DataProgress) -> None:
        with deadline("tell other replicas how many batches it has drawn"):
            self._store.set(self._key(number, self._own), f"{count.batches} {int(count.ended)}")

    def beyond(self, batches: int) -> bool:
        """Whether any replica draws more than so many batches in this pass; waits until that is known.

        Args:
            batches: that this replica has trained on, padding batches included.

        Raises:
            CommunicationError: another rank has failed, or no replica has drawn another batch in time.
        """
        began, pause = time.monotonic(), self.SOON
        while self._most <= batches:
            counts = self._read()
            self._most = max(count.batches for count in counts)
            if self._most <= batches and all(count.ended for count in counts):
                return False
            if self._most <= batches:
                self._check(time.monotonic() - began, counts)
                time.sleep(pause)
                pause = min(2 * pause, self.LATE)
        return True

    def _read(self) -> list[DataProgress]:
        keys = [self._key(self._passes, replica) for replica in self._replicas]
        with deadline("learn which replicas have more data"):
            values = self._store.multi_get(keys)
        return [DataProgress(int(batches), ended == "1") for batches, ended in (v.decode().split() for v in values)]

    def _check(self, waited: float, counts: Sequence[DataProgress]) -> None:
        if (failure := failures.first_failure(0.0)) is not None:
            raise CommunicationError(f"This rank has come to the end of its data and waits for others: {failure}.")
        if waited > self._seconds:
            late = {r: c.batches for r, c in zip(self._replicas, counts, strict=True) if not c.ended}
            raise CommunicationError(
                f"This rank has come to the end of its data and has waited {self._seconds:g} s (the strategy's "
                f"`timeout`) for replicas that have more. They have not drawn another batch (replica: batches): {late}."
            )

    @staticmethod
    def _key(number: int, replica: int) -> str:
        return f"pass {number} of replica {replica}"
