"""How a process that is started later finds a job that runs, and how all ranks of a larger job meet."""

import math
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hetero import _lightning
from lightning_hetero.comm import garbage
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.groups import begin_world
from lightning_hetero.comm.replica import share
from lightning_hetero.comm.stores import store_at
from lightning_hetero.engine.join_requests import Admission, JobGoneError, answers, ask, other_job
from lightning_hetero.errors import CommunicationError, JoinRefusedError, UnsupportedError
from lightning_hetero.launch.job_address import AddressFile, JobAddress, LauncherStore
from lightning_hetero.strategies import regrouping
from lightning_hetero.strategies.join_card import card
from lightning_hetero.strategies.snapshot import MemoryFiles
from lightning_hetero.strategies.survival import Loss

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy

PATH = "the state in which the job grows.ckpt"  # of the checkpoint in memory
_SUCCESSION = 10.0  # seconds in which the next rank takes over when the first one is lost
_HERE = timedelta(seconds=15)  # in which all newcomers come to the new store


class Entry(NamedTuple):
    """How this rank begins a fit that more ranks take part in than before.

    Attributes:
        admission: its place.
        files: with the checkpoint.
        replica: id of the replica to which this rank belonged; ``None`` if it is new.
        since: when this rank stopped training, or was admitted, by ``time.monotonic()``.
        lost: ranks that were lost since then, each with the reason.
    """

    admission: Admission
    files: MemoryFiles
    replica: int | None
    since: float
    lost: Mapping[int, str] = MappingProxyType({})


# -- a process that is started later ---------------------------------------------------------------


def addresses(strategy: "HeteroStrategy", came_later: bool = False) -> list[JobAddress]:
    """Where a running job says how it is reached.

    Args:
        strategy: of this process.
        came_later: whether the process has joined: even if its launcher has given it rank 0, it hosts no store there.
    """
    cluster, file = regrouping.launched(strategy), strategy.options.join_file
    found: list[JobAddress] = [] if file is None else [AddressFile(file)]
    # The store of a torchrun agent stays when its ranks start anew: what is in it may be of a job that has ended.
    if cluster.world_size() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        hosted = cluster.global_rank() == 0 and not came_later
        found.append(LauncherStore(cluster.main_address, cluster.main_port, hosted))
    return found


def find(strategy: "HeteroStrategy") -> Entry | None:
    """Join a job that runs, and wait until it lets this process in; ``None``: there is none.

    Raises:
        JoinRefusedError: this process does not fit the job.
        UnsupportedError: there is a job, but this process does not train.
        CommunicationError: the job was there, and is gone.
    """
    if strategy.options.on_peer_loss != "continue":
        return None
    trainer = _lightning.trainer_of(strategy.lightning_module)
    for place in addresses(strategy):
        address = _living(place, strategy.options.limit)
        if address is None:
            continue
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            raise UnsupportedError(
                f"a job runs already, as {place} says, and this process would join it, but it does not call fit() "
                "first. Start a process that trains, or give this one no join_file."
            )
        admission = _admitted(strategy, place, address)
        return Entry(admission, MemoryFiles(PATH, strategy.checkpoint_io), None, time.monotonic())
    return None


def _living(place: JobAddress, limit: timedelta) -> Any:
    """The address of a job that runs, if there is one; if its first rank has just been lost, that of the next one."""
    address, until = place.read(limit), math.inf
    while address is not None and not answers(address):
        before, address = address, place.read(min(limit, timedelta(seconds=_SUCCESSION)))
        until = min(until, time.monotonic() + _SUCCESSION) if address == before else math.inf
        if time.monotonic() > until:
            if address is not None and other_job(address):
                raise JoinRefusedError(
                    f"{place} names a job at {address[0]}:{address[1]}. A job runs there, but not with the secret that "
                    "stands in the place: it was changed, or it is left from an earlier job. If that job is yours, let "
                    "this process read what it has written; if not, delete what is left, and this process begins a job."
                )
            rank_zero_info(f"{place} names a job that does not run any more.")
            return None
        time.sleep(0.2)
    return address


def _admitted(strategy: "HeteroStrategy", place: JobAddress, address: Any) -> Admission:
    limit = strategy.options.limit

    def waits() -> None:
        print(f"lightning_hetero: a job runs at {address[0]}:{address[1]}, as {place} says; this process joins it.")
        garbage.leave_out()  # while the ranks of the job agree on a step

    own = card(strategy)
    while True:
        try:
            return ask(address, own, limit, waits)
        except JobGoneError as error:
            if (address := _living(place, min(limit, timedelta(seconds=_SUCCESSION)))) is None:
                raise CommunicationError(f"this process could not join the job that {place} names: {error}") from error


# -- all ranks -------------------------------------------------------------------------------------


def enter(strategy: "HeteroStrategy", entry: Entry, store: dist.Store | None) -> None:
    """Meet all ranks of the new view, and get the checkpoint (collective over them).

    Args:
        strategy: in a fit.
        entry: how this rank enters it.
        store: with which the ranks meet, if this rank has it already.

    Raises:
        CommunicationError: not all have come.
    """
    view, rank, *_ = entry.admission
    limit = strategy.options.limit
    with deadline("join the job"):
        if dist.is_initialized():
            dist.destroy_process_group()
        store = store or store_at(entry.admission.store, limit)
        here = _wait_for_newcomers(dist.PrefixStore(f"view-{view}", store), entry, limit)
        if rank >= here:
            raise CommunicationError("this process was too late: the job has gone on without it.")
        begin_world(store, view, rank, here, limit)
    entry = entry._replace(admission=entry.admission._replace(world=here))
    regrouping.renumber(strategy, rank, here)
    entry.files.share(rank, entry.admission.before, here)
    strategy.entry = entry


def _wait_for_newcomers(store: dist.Store, entry: Entry, limit: timedelta) -> int:
    """The number of ranks in the new view: all, or those before if a newcomer has ended in the meantime."""
    _, rank, world, *_ = entry.admission
    if rank >= entry.admission.before:
        store.set(f"here/{rank}", "1")
    if rank == 0:
        come = True
        try:
            for other in range(entry.admission.before, world):
                store.wait([f"here/{other}"], _HERE)
        except dist.DistError:
            come = False
        store.set("world", str(world if come else entry.admission.before))
    store.wait(["world"], limit)
    return int(store.get("world"))


def resume(strategy: "HeteroStrategy") -> None:
    """Let the Trainer go on from the checkpoint with which this rank has entered, if it has."""
    if strategy.entry is not None:
        strategy.checkpoint_io = strategy.entry.files
        _lightning.resume_by(strategy.trainer, lambda *_: PATH)


def share_rest(strategy: "HeteroStrategy") -> None:
    """Where this rank has entered, give all ranks rank 0's values of what the checkpoint lacks (collective)."""
    if strategy.entry is None:
        return
    assert strategy.lightning_module is not None
    loaded, module = strategy.entry.files.loaded, strategy.lightning_module
    values = (*module.named_parameters(), *module.named_buffers())
    share(value.data for name, value in values if name not in loaded)


def entered(strategy: "HeteroStrategy") -> Loss | None:
    """Training begins: from now on files are files again; returns the change, if this rank has entered."""
    entry = strategy.entry
    if entry is None:
        return None
    assert strategy.job is not None
    strategy.checkpoint_io, strategy.entry = entry.files.usual, None
    entry.files.clear()
    view, seconds = strategy.job.view, time.monotonic() - entry.since
    joined, lost = tuple(range(entry.admission.before, view.world)), dict(entry.lost)
    if not joined and not lost:
        return None
    return Loss(view.number, lost, view.world, len(view.units), seconds, 0, strategy.trainer.global_step, joined)
