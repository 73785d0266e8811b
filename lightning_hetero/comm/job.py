"""Job membership of a process: it joins, gets groups and stores, and announces why it ends."""

import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_hetero.comm import device_exit, failures
from lightning_hetero.comm.agreement import check_equal, gather
from lightning_hetero.comm.all_reduce import Between, DeviceAllReduce
from lightning_hetero.comm.failures import deadline, is_communication_error
from lightning_hetero.comm.groups import (
    Groups,
    LastingGroup,
    MixedGroup,
    Within,
    begin_world,
    default_store,
    end_unused,
)
from lightning_hetero.comm.threads import Background, record_sockets
from lightning_hetero.comm.topology import Place, Topology, discover, interface_towards
from lightning_hetero.comm.transport import free_port
from lightning_hetero.comm.view import View
from lightning_hetero.errors import CommunicationError, MembershipLostError, UnsupportedError, not_none

#: Names of a mesh's dimensions, as Lightning's ``ModelParallelStrategy`` has them.
DATA, TENSOR = "data_parallel", "tensor_parallel"
#: Of this process, by device, size of tensor parallelism and ranks, with their groups: PyTorch takes equal meshes for
#: the same one.
_meshes: dict[tuple[str, int, tuple[int, ...]], tuple[DeviceMesh | None, list[LastingGroup]]] = {}
_NEWS = 3.0  # seconds to wait for news of a rank that has ended


class ViewSuccession(NamedTuple):
    """Origin of a rank in a view that follows another one.

    Attributes:
        view: its number.
        launch: names the launcher's job that the process was started in.
        replica: id of the replica to which the rank belonged before; ``None`` if it is new.
        entry: place of the rank in lists that the user gave, one entry per rank; ``None`` if it is new.
    """

    view: int
    launch: str
    replica: int | None
    entry: int | None


class Job:
    """The job that this process takes part in (made by all ranks together).

    Args:
        view: who takes part.
        timeout: longest wait for another rank.
        within: how ranks of one node exchange long vectors.

    Attributes:
        groups: makes process groups when they are first needed; they end with this object.
    """

    def __init__(self, view: View, timeout: timedelta, within: Within = "auto") -> None:
        self.view, self.timeout, self.within = view, timeout, within
        nodes = [(place.host, place.node) for place in view.places]
        self.groups = Groups.open(timeout, nodes, within)
        self._mixed: MixedGroup | None = None  # of this rank's replica

    @classmethod
    def join(
        cls,
        place: Place,
        ranks_per_node: int | Sequence[int] | None,
        replicas: Callable[[Topology], Sequence[Sequence[int]]],
        options: Mapping[str, Any],
        timeout: timedelta,
        follows: ViewSuccession | None = None,
    ) -> "Job":
        """Learn who takes part (collective over all ranks, after they have met).

        Args:
            place: where this rank lives.
            ranks_per_node: sizes of nodes, if not as launched.
            replicas: says which ranks make a replica.
            options: must be the same on every rank; ``within`` among them.
            timeout: longest wait for another rank.
            follows: how this rank comes into a view with more ranks than the one before. Default: it is the first view.

        Raises:
            ConfigurationError: ``ranks_per_node`` does not fit.
            DisagreementError: ranks have different options.
        """
        everyone = gather(follows, "where ranks come from")
        if follows is not None:
            # Each launcher counts its nodes from 0.
            own = place.host, follows.launch, place.node
            place = place._replace(node=list(dict.fromkeys(gather(own, "the nodes"))).index(own))
        entries = _entries([other.entry for other in everyone]) if follows is not None else ()
        topology = discover(place, ranks_per_node, entries)
        end_unused()
        check_equal("the strategy's options", options)
        numbers = tuple(map(failures.number, range(topology.world)))
        view = replace(View.first(topology, replicas(topology)), ids=numbers)
        if follows is not None:
            view = replace(view.grown(follows.view, [other.replica for other in everyone]), entries=entries)
        return cls(view, timeout, options["within"])

    def for_survivors(self, number: int, ids: Sequence[int], store: dist.Store) -> "Job":
        """Join the ranks that remain after others were lost; connections are broken already (collective over them).

        Args:
            number: of the new view.
            ids: of the ranks that remain; see :class:`~lightning_hetero.comm.view.View`.
            store: of the new view.

        Raises:
            CommunicationError: one more rank was lost.
        """
        view = self.view.for_survivors(number, ids)
        with deadline("join the ranks that remain"):
            if dist.is_initialized():
                dist.destroy_process_group()
            begin_world(store, number, view.rank, view.world, self.timeout)
            return Job(view, self.timeout, self.within)

    def data_group(self) -> dist.ProcessGroup | None:
        """The group in which this rank's replica averages gradients; ``None`` for one rank (collective over it)."""
        ranks, topology = self.view.replica.ranks, self.view.topology
        if (backend := topology.backend(ranks)) is not None:
            return self.groups.get("gradients", ranks, backend)
        if self._mixed is None and len(ranks) > 1:
            self._mixed = MixedGroup(self.groups, ranks, topology.islands(ranks), self.view.rank)
            weakref.finalize(self, self._mixed.close).atexit = False
        return self._mixed

    def device_mesh(self, tensor_parallel: int, former: DeviceMesh | None = None) -> DeviceMesh | None:
        """The devices of this rank's replica as a mesh, for a model that shards itself (collective over the replica).

        Args:
            tensor_parallel: number of consecutive ranks that split each layer among them.
            former: the mesh over which the model is sharded already, which goes on. Default: that of these ranks.

        Returns:
            A mesh with the dimensions ``"data_parallel"`` and ``"tensor_parallel"``; ``None``: no backend connects its
            devices.
        """
        ranks, topology = self.view.replica.ranks, self.view.topology
        device = topology.places[self.view.rank].device.split(":")[0]
        backend = topology.backend(ranks) or ("nccl" if len(ranks) == 1 and device == "cuda" else None)
        if backend is None:
            return None
        places = torch.tensor(ranks).view(-1, tensor_parallel)
        [[row, column]] = (places == self.view.rank).nonzero().tolist()
        lines = {DATA: places[:, column].tolist(), TENSOR: places[row].tolist()}
        known = (key for key, (mesh, _) in _meshes.items() if mesh is former is not None)
        mesh, lasting = _meshes.pop(next(known, (device, tensor_parallel, tuple(ranks))), (None, []))
        if mesh is None:
            lasting = [
                LastingGroup(f"{name} {line}, {device}", line.index(self.view.rank), len(line))
                for name, line in lines.items()
            ]
        for group, (name, line) in zip(lasting, lines.items(), strict=True):
            group.connect(not_none(self.groups.get(name, line, backend, alone=True), "a group"), backend)
        groups: list[Any] = [*lasting]
        mesh = mesh or DeviceMesh.from_group(groups, device, mesh=places, mesh_dim_names=tuple(lines))
        _meshes[device, tensor_parallel, tuple(ranks)] = mesh, lasting
        return mesh

    def devices_of_all(self) -> dist.ProcessGroup | None:
        """A group of all ranks for values that are logged, if all have GPUs that NCCL connects, in a single replica.

        It is not that of the gradients: a rank that logs one value more than others would mix both up.
        """
        return self.groups.get("logged values", self.view.replica.ranks, "nccl") if self._connects_all else None

    @cached_property
    def _connects_all(self) -> bool:
        """Whether NCCL connects all ranks, in a single replica; asked for each value that is logged."""
        return self.view.count == 1 and self.view.topology.backend(self.view.replica.ranks) == "nccl"

    def on_devices(self, between: Between, device: torch.device) -> DeviceAllReduce | None:
        """All-reduce over one GPU of each replica; ``None``: there is none (collective over all ranks).

        Args:
            between: how replicas are to exchange.
            device: of this rank.

        Raises:
            UnsupportedError: they are to exchange over NCCL, which does not connect them.
        """
        members = [ranks[0] for ranks in self.view.ranks]
        if between == "gloo" or len(members) == 1:
            return None
        if self.view.topology.backend(members) != "nccl":
            if between == "auto":
                return None
            raise UnsupportedError(
                f"between='nccl': NCCL does not connect the first ranks of the replicas, {members}. Their way is "
                f"{self.view.topology.route(members)}. Give each of them a GPU of its own, all of one kind; or leave "
                "between='auto'."
            )
        if self.view.rank not in members:
            return None
        group = self.groups.get("averages on devices", members, "nccl")
        return None if group is None else DeviceAllReduce(group, device, measure=between == "auto")

    def small_group(self, tensor_parallel: int = 1) -> dist.ProcessGroup | None:
        """The group of this rank's replica for small CPU tensors; ``None`` for one rank (collective over it).

        Args:
            tensor_parallel: so many consecutive ranks have the same samples; the group has one of each.
        """
        return self.groups.get("small tensors", self.data_parallel_ranks(tensor_parallel))

    def data_parallel_ranks(self, tensor_parallel: int) -> list[int]:
        """The ranks of this one's replica that have other samples, and this one."""
        ranks = self.view.replica.ranks
        return list(ranks[ranks.index(self.view.rank) % tensor_parallel :: tensor_parallel])

    def report_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks for their reports; ``None`` for one rank (collective over all ranks)."""
        return self.groups.get("reports", range(self.view.world))

    def await_all(self, what: str, enough: Callable[[], bool]) -> None:
        """Wait until all ranks have come to the same point, at most 5 s; connections may be broken already.

        Args:
            what: names the point.
            enough: ends the wait.
        """
        until, keys = time.monotonic() + 5.0, [str(rank) for rank in range(self.view.world)]
        with suppress(dist.DistError):
            store = self.store(what)
            store.set(keys[self.view.rank], "")
            while not (store.check(keys) or enough() or time.monotonic() > until):
                time.sleep(0.01)

    def others_skip(self, step: int, seconds: float, limit: float) -> list[int]:
        """Say that this rank skips what its replica does together at a step, and wait until the others say the same.

        A rank that does not skip says nothing, since that would cost it a message at every step.

        Args:
            step: the batch, counted alike on all ranks.
            seconds: after which it is looked, again and again, whether the others wait for this rank.
            limit: seconds after which this rank waits no longer.

        Returns:
            The ranks that have not said it, and wait for others: for this one, since they are in no step after it. Or
            those that are still busy at the limit.

        Raises:
            CommunicationError: another rank has failed meanwhile.
        """
        began, stuck = time.monotonic(), False
        look = began + seconds
        silent = [rank for rank in self.view.replica.ranks if rank != self.view.rank]
        with deadline("learn which ranks skip a backward pass"):
            store = self.store("skips")
            store.set(str(self.view.rank), str(step))
            while silent := [rank for rank in silent if not _reached(store, rank, step)]:
                if time.monotonic() > began + limit:
                    break
                if time.monotonic() > look:
                    if (waits := set(silent) <= failures.waiting()) and stuck:  # not only in passing
                        break
                    look, stuck = time.monotonic() + 1.0, waits
                if (lost := failures.first_failure(0.0)) is not None:
                    raise CommunicationError(f"rank {self.view.rank} waited for the others of its replica: {lost}.")
                time.sleep(0.01)
        return silent

    def store(self, purpose: str) -> dist.Store:
        """The store of the job, with keys of its own for a purpose."""
        return self.groups.store(purpose)


def _entries(former: Sequence[int | None]) -> tuple[int, ...]:
    """Places of ranks in the user's lists: those that they had; of new ranks (``None``) the lowest that are free."""
    free = (entry for entry in count() if entry not in former)
    return tuple(next(free) if entry is None else entry for entry in former)


def _reached(store: dist.Store, rank: int, step: int) -> bool:
    """Whether a rank has said in a store that it has come to a step."""
    return store.check([str(rank)]) and int(store.get(str(rank))) >= step


def open_store(interface: str, timeout: timedelta) -> tuple[dist.Store, tuple[str, int]]:
    """Open a store for a new view on this rank, and say where.

    Args:
        interface: address of this machine on the network of the job.
        timeout: longest wait for a value.
    """
    with record_sockets(of_all=True):
        port = free_port(interface)
        store = dist.TCPStore(interface, port, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, (interface, store.port)


def announce_failure(exception: BaseException) -> None:
    """Let all ranks know why this one ends; if it ends because of another, let the error say because of which."""
    device_exit.this_one_failed(exception)
    echo = is_communication_error(exception)
    failures.announce("echo" if echo else "failed", in_words(exception))
    if not echo:
        return
    if isinstance(exception, MembershipLostError):
        return  # it says who was lost; what this rank has heard of others may be of their ends, long after
    places = failures.places()
    # Of a collective of the user's, nobody has waited for news yet.
    first = failures.first_failure(0.0 if isinstance(exception, CommunicationError) else _NEWS)
    if first is not None and str(first) not in str(exception):  # of one of the user's own collectives
        exception.args = (f"{exception} The rank that failed first: {first}.",)
    elif first is None and places and places not in str(exception):
        exception.args = (f"{exception} {places}",)


def in_words(exception: BaseException) -> str:
    """An error with which a rank ends, in words that complete "rank 2 ..."."""
    if isinstance(exception, KeyboardInterrupt):
        return "was interrupted (Ctrl-C)"
    what = str(exception).strip().split("\n")[0]
    return f"failed with {type(exception).__name__}{what and f': {what}'}"


_LOOK = 0.5  # seconds from one look at the other processes to the next, while they join
_LONG = 15.0  # seconds after which a process says that it waits


class RendezvousAddress(NamedTuple):
    """Address of the ranks' rendezvous, as the launcher says.

    Attributes:
        host: of rank 0.
        port: at which rank 0 listens.
        rank: this process.
        world: number of ranks.
        interface: this process's address in the network of the job. Default: the one from which it reaches ``host``.
    """

    host: str
    port: int
    rank: int
    world: int
    interface: str = ""

    @classmethod
    def of(cls, environment: Any, interface: str) -> "RendezvousAddress":
        """As an environment of the launcher's says."""
        rank, world = environment.global_rank(), environment.world_size()
        return cls(environment.main_address, environment.main_port, rank, world, interface)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def not_joined(self, why: str) -> CommunicationError:
        """The error of this process if it could not join; why completes "rank 1 of 4 could not join the job"."""
        return CommunicationError(f"rank {self.rank} of {self.world} could not join the job{why}")


def join_world(
    connect: Callable[[], None],
    address: RendezvousAddress,
    timeout: timedelta,
    ended: Callable[[], str | None] = lambda: None,
    hint: str = "",
    began: float | None = None,
) -> None:
    """Join the world's process group, and listen for other ranks' failures (collective).

    Args:
        connect: makes the process group. On a thread, since PyTorch waits without a limit for a program that accepts
            the connection and then says nothing.
        address: where ranks meet.
        timeout: longest wait for the others.
        ended: says which other process has ended before it could join, if it is known that one has.
        hint: what else to say where this process waits for long.
        began: when this process began to wait for its job, by ``time.monotonic()``. Default: now.

    Raises:
        CommunicationError: not all ranks have come in time, or another job's have.
    """
    seconds, made = timeout.total_seconds(), dist.is_initialized()
    with deadline("join the job"):
        try:
            began = time.monotonic() if began is None else began
            _await(Background(connect), began, seconds, ended, lambda: _log_waiting(address, seconds, hint))
        except _EndedError as error:
            raise address.not_joined(
                f": {error} before it had joined, so that not all can come. Its own error, if it had one, is above."
            ) from None
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                if address.rank == 0:
                    raise
                raise address.not_joined(
                    f" at {address}: who holds that port is not this job's rank 0, or has ended. Look for an error of "
                    "rank 0. If another job of this machine holds the port, set MASTER_PORT to a free one, the same "
                    "for all ranks."
                ) from error
            raise address.not_joined(
                f": another program of this machine, or another job, holds port {address.port}. Set MASTER_PORT to a "
                "free one, the same for all ranks."
            ) from error
        except TimeoutError as error:
            if address.rank == 0:
                why = (
                    f"not all of the others have come to {address}. Look for an error of theirs, and check that they "
                    "can reach this address. If this process was started again, the job seems to have ended: start "
                    "all of its processes again."
                )
            elif not _listened_to(address):
                why = (
                    f"nobody listens at {address}. The job seems to have ended, or its rank 0 was not started, or has "
                    "failed: look for an error of rank 0, and start all processes of the job again."
                )
            else:
                why = (
                    f"rank 0 did not let it in at {address}. Look for an error of rank 0. If there is none, another "
                    "job, or another program, may hold that port: set MASTER_PORT to a free one, the same for all "
                    "ranks."
                )
            raise address.not_joined(f" within {seconds:g} s (the strategy's `timeout`): {why}") from error
    if not made:
        _claim_rank(address)
    with deadline("learn where failures are told"):
        failures.watch_ranks(address.interface or interface_towards(address.host), seconds)


def _claim_rank(address: RendezvousAddress) -> None:
    """Enter this process as its rank. A store lets in whoever comes, also ranks of a second job at the same port."""
    mine = f"process {os.getpid()} of {socket.gethostname()}"
    with deadline("take its place in the job"):
        theirs = default_store().compare_set(f"rank {address.rank} is", "", mine).decode()
    if theirs != mine:
        raise address.not_joined(
            f" at {address}: rank {address.rank} there is {theirs}, and this is {mine}. So another job holds that "
            "port. Set MASTER_PORT to a free one, the same for all ranks."
        )


def _listened_to(address: RendezvousAddress) -> bool:
    """Whether there is a program at an address."""
    try:
        socket.create_connection((address.host, address.port), _LOOK).close()
    except TimeoutError:
        return True  # it may be
    except OSError:
        return False
    return True


class _EndedError(Exception):
    """A process has ended before it could join."""


def _log_waiting(address: RendezvousAddress, seconds: float, hint: str) -> None:
    who = "rank 0" if address.rank else "the other ranks"
    print(
        f"lightning_hetero: rank {address.rank} of {address.world} has waited for {_LONG:g} s to meet {who} at "
        f"{address}, and waits for up to {seconds:g} s (the strategy's `timeout`). {hint}".rstrip(),
        flush=True,
    )


def _await(
    joining: Background[None],
    began: float,
    seconds: float,
    ended: Callable[[], str | None],
    waits: Callable[[], None],
) -> None:
    told, until = time.monotonic() - began > _LONG, began + seconds
    while (left := until - time.monotonic()) > _LOOK:
        if not told and time.monotonic() - began > _LONG:
            told = True
            waits()
        try:
            return joining.result(_LOOK)
        except TimeoutError:
            if joining.running and (which := ended()) is not None:
                raise _EndedError(which) from None
            if not joining.running and isinstance(joining.error, TimeoutError):
                raise
    return joining.result(max(left, 0.0))
