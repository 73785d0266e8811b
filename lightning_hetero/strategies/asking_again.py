"""A process that could not join because of others, which came at the same moment, asks the job again."""

from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_hetero.comm import failures
from lightning_hetero.comm.deadline import of_communication
from lightning_hetero.errors import CommunicationError, HeteroError
from lightning_hetero.strategies.entering import Entry, find

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy

MOST = 5  # times that a process asks again; others may be started again and again, and be wrong each time


def wrong_are_others(entry: Entry, error: Exception) -> bool:
    """Whether a process could not join because of others that came with it; they end.

    Args:
        entry: of this process, which is new.
        error: with which the fit could not begin.
    """
    if not isinstance(error, HeteroError) or not error.of_ranks:
        return of_communication(error)  # some rank has ended, with an error of its own or without a word
    _, rank, _, before, _ = entry.admission
    return rank not in error.of_ranks and max(error.of_ranks) >= before


def ask_again(strategy: "HeteroStrategy", error: Exception) -> Entry:
    """Ask the job once more to let this process in, as if it had just been started.

    Args:
        strategy: of this process, which has left the fit.
        error: with which that could not begin.

    Raises:
        JoinRefusedError: the job has come to its end, or does not take this process.
        CommunicationError: the job is gone.
    """
    entry, strategy.entry = strategy.entry, None
    assert entry is not None
    strategy.checkpoint_io = entry.files.usual
    failures.forget()
    if dist.is_initialized():
        dist.destroy_process_group()
    what = str(error).strip().split("\n")[0]
    print(f"lightning_hetero: this process could not join because of others, and asks the job again ({what}).")
    found = find(strategy)
    if found is None:
        raise CommunicationError(
            "this process could not join a job because of others that came at the same moment, and when it asked again "
            f"the job was gone. Start it again to begin a job. Before: {error}"
        ) from error
    return found
