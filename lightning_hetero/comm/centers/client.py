"""Client of a parameter center, and the center's three homes: shared memory, a thread of one rank, an MPI window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_hetero.comm.agreement import raise_on_all
from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.comm.centers.base import Center, CenterLayout, CenterPart, PushPull, RoundRule
from lightning_hetero.comm.centers.mpi import MPICenter, mpi_missing
from lightning_hetero.comm.centers.shared import SharedCenter
from lightning_hetero.comm.centers.thread import ThreadCenter
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.threads import Background
from lightning_hetero.comm.topology import Topology
from lightning_hetero.errors import UnsupportedError

Home = Literal["auto", "shared_memory", "thread", "mpi"]


@dataclass(frozen=True)
class CenterOptions:
    """Options of a center.

    Attributes:
        home: where it lives. ``"auto"``: in shared memory if all leaders are on one host, else in a thread.
        locked: whether clients wait for each other. Only a center in shared memory works without.
        in_turn: whether replicas are served in their order, over and over. Only a thread can do this.
        wire: number format of what clients send and get. Only a thread has a choice.
        parts: that are exchanged one by one, and by which rule. A window of MPI knows the default only.
    """

    home: Home = "auto"
    locked: bool = True
    in_turn: bool = False
    wire: str = "fp32"
    parts: Sequence[CenterPart] = (CenterPart(),)


def open_center(
    options: CenterOptions, topology: Topology, layout: CenterLayout, groups: Groups, interface: str
) -> Center:
    """Make a center (collective over all ranks).

    Args:
        options: what is asked for.
        topology: where ranks live.
        layout: which ranks use it.
        groups: makes process groups.
        interface: this process's address on the network between the replicas.

    Raises:
        UnsupportedError: on every rank: the options do not go together, or cannot be had here.
    """
    home, locked, in_turn, wire = options.home, options.locked, options.in_turn, options.wire
    hosts = {topology.places[rank].host for rank in layout.leaders}
    if home == "auto" and not locked:
        home = "shared_memory"
    if home == "auto":
        needs_thread = in_turn or wire != "fp32" or any(isinstance(part.rule, RoundRule) for part in options.parts)
        home = "thread" if needs_thread or len(hosts) > 1 else "shared_memory"
    if home == "shared_memory" and len(hosts) > 1:
        raise UnsupportedError(
            f"a center in shared memory serves one host, and the replicas' first ranks {list(layout.leaders)} live on "
            f"{', '.join(sorted(hosts))}. Use center='thread', or 'mpi' if mpiexec has launched the job."
        )
    if not locked and home != "shared_memory":
        raise UnsupportedError(
            f"locked=False with center={home!r}: only a center in shared memory works without a lock. Use "
            "center='shared_memory', or leave locked=False out."
        )
    if home == "mpi":
        raise_on_all(mpi_missing(layout.world), "the MPI center")
        return MPICenter(layout, across=len(hosts) > 1)
    if home == "shared_memory":
        return SharedCenter(layout, locked, options.parts)
    return ThreadCenter(layout, groups, interface, in_turn, wire, options.parts)


class CenterClient:
    """Exchanges with a center in the background, one push-pull at a time (made by all ranks of the replica together).

    Args:
        center: open to this replica's leader.
        links: of this replica.
    """

    def __init__(self, center: Center, links: ReplicaLinks) -> None:
        self.center, self._links = center, links
        self._broadcast = links.broadcaster("the center")

    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0, turn: int = 0) -> Callable[[], PushPull]:
        """Begin a push-pull (collective over the replica).

        Args:
            values: this replica's, of the center's sizes and dtypes. On every rank of the replica they are overwritten
                with the answer.
            push: how much of the difference the center moves by.
            part: number of the part of the center.
            turn: number of the round for which this is, by a rule that has rounds.

        Returns:
            A function that waits for the result. Call it once, before the next push-pull.
        """

        def work() -> PushPull:
            table = torch.zeros(2 + len(self.center.layout.leaders), dtype=torch.float64)
            if self.center.layout.is_client:
                learned = self.center.push_pull(values, push, part, turn)
                table = torch.tensor([learned.square, learned.sent, *learned.counts], dtype=torch.float64)
            with deadline("share what the center has answered with the other ranks of its replica"):
                for tensor in (table, *values):
                    self._broadcast(tensor)
            square, sent, *counts = table.tolist()
            return PushPull(square, [int(count) for count in counts], int(sent))

        background = Background(work)

        def result() -> PushPull:
            learned = background.result()
            self._links.traffic.add(learned.sent, background.seconds, background.waited)
            return learned

        return result

    def read(self, out: Sequence[Tensor]) -> list[int]:
        """Write the center into vectors, and return the counts: the same on every rank (collective over all ranks)."""
        self._links.gather(None)  # no push-pull is under way any more
        layout = self.center.layout
        counts = torch.zeros(len(layout.leaders), dtype=torch.int64)
        if layout.is_host:
            _, seen = self.center.read(out)
            counts.copy_(torch.tensor(seen))

        def received() -> list[Tensor]:
            self._links.broadcast_from_first([counts])
            self._links.broadcast_from_first(out, self.center.cut)
            return [counts, *out]

        counts, *center = collective("receive the center", received)
        for own, value in zip(out, center, strict=True):
            if own is not value:  # another rank had it already, when this one had lost its connection
                own.copy_(value)
        return counts.tolist()

    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Set the center and the counts (collective over all ranks)."""
        if self.center.layout.is_client:
            self.center.write(values, counts)
        self._links.gather(None)
