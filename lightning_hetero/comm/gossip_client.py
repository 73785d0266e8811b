"""Gossip of a replica: its leader exchanges with other leaders, and its other ranks get what has come."""

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_hetero.comm.all_reduce import ReplicaLinks, in_chunks
from lightning_hetero.comm.compression import DTYPES
from lightning_hetero.comm.gossip import (
    ANY,
    PairsInColumns,
    PairTransport,
    PushTransport,
    ReceivedPush,
    part_of_the_way,
)
from lightning_hetero.comm.gossip_peers import Session
from lightning_hetero.comm.object_collectives import finite
from lightning_hetero.comm.transport import KEY_BYTES, HostPort
from lightning_hetero.errors import ConfigurationError, DisagreementError, HeteroError, NotFiniteError

T = TypeVar("T", PairTransport, PushTransport)
log = logging.getLogger("lightning_hetero")


class Endpoint(NamedTuple):
    """Address of a peer.

    Attributes:
        interface: address to listen on, of the network between the peers.
        host: name of the machine. Peers with the same one can share memory.
        deadline: seconds within which a message must be answered.
    """

    interface: str
    host: str
    deadline: float


class PeerClient(Generic[T]):
    """Exchanges of a replica with its peers (made by all ranks of all replicas together).

    Args:
        links: of this replica.
        transport: on leaders; elsewhere ``None``.
        origin: vectors that are the same on all replicas. On a wire narrower than them, differences from them travel.
        wire: number format.
        deadline: seconds within which a message must be answered.
        met: completed exchanges with each peer, which are counted here.
        missed: those that were not completed.

    Attributes:
        links: of this replica.
        transport: on leaders; elsewhere ``None``.
        outgoing: what is laid out to be sent, in the format of the wire.
        distance: from the latest peer, where replicas exchange in pairs.
    """

    def __init__(
        self,
        links: ReplicaLinks,
        transport: T | None,
        origin: Sequence[Tensor],
        wire: str,
        deadline: float,
        met: Counter[int],
        missed: Counter[int],
    ) -> None:
        self.links, self.met, self.missed, self.distance = links, met, missed, 0.0
        self._origin, self._narrow, self._deadline = origin, DTYPES[wire], deadline
        self.transport: T | None = transport
        # The leader, who sends it, lays it out straight where it is sent from.
        self.outgoing: Sequence[Tensor] = _like(origin, wire) if transport is None else transport.outgoing

    def lay_out(self, values: Sequence[Tensor], origins: float = 1.0, divisor: int = 1) -> None:
        """Write values where they are sent from, in the format of the wire.

        Args:
            values: vectors like the origin.
            origins: how much of the origin is in what is sent.
            divisor: by which the values are divided.

        Raises:
            NotFiniteError: they are too large for the wire: fp16 holds numbers up to 65504 only.
        """
        for place, value, origin in in_chunks(self.outgoing, values, self._origin):
            own = value.to(origin.dtype) if divisor == 1 else value.to(origin.dtype) / divisor
            place.copy_(own if self._narrow is None else own - origins * origin)
        if self._narrow is torch.float16 and not finite(self.outgoing):
            raise NotFiniteError([self.links.index])

    def broadcast(self, numbers: Sequence[float], vectors: Sequence[Tensor]) -> list[float]:
        """Give all ranks of the replica what its leader has: numbers, and vectors unless the first number is 0."""
        table = torch.tensor(numbers, dtype=torch.float64)
        self.links.broadcast(table)
        if table[0]:
            for vector in vectors:
                self.links.broadcast(vector)
        return table.tolist()

    def miss(self, peer: int) -> None:
        """Count an exchange with a peer that was not completed."""
        self.missed[peer] += 1
        level = logging.WARNING if self.missed[peer] == 1 else logging.INFO
        log.log(level, "Replica %d missed replica %d: late, frozen, dead or unreachable.", self.links.index, peer)

    def lose(self, peers: Sequence[int], links: ReplicaLinks) -> None:
        """Go on without some peers, over the links of those that remain."""
        self.links = links
        if self.transport is not None:
            for peer in peers:
                self.transport.lose(peer)

    def close(self) -> None:
        """Close all connections; idempotent."""
        if self.transport is not None:
            self.transport.close()


class PairClient(PeerClient[PairTransport]):
    """Exchanges both ways, with one peer at a time.

    Attributes:
        offered: whether something is offered and has not been exchanged, as far as the replica knows.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.offered = False
        # Where other ranks than the leader get a peer's values:
        self._theirs = [] if self.transport is not None else [torch.empty_like(own) for own in self.outgoing]

    def offer(
        self,
        values: Sequence[Tensor],
        weight: float,
        whom: Sequence[int],
        round_number: float = ANY,
        origins: float = 1.0,
    ) -> None:
        """Offer values to some peers.

        Args:
            values: vectors like the origin.
            weight: of this replica.
            whom: peers to ask.
            round_number: only a peer that offers for the same round will do.
            origins: how much of the origin is in the values.

        Raises:
            NotFiniteError: they are too large for the wire.
        """
        self.lay_out(values, origins)
        self._weight, self._whom, self.offered, self._began = weight, whom, True, time.perf_counter()
        if self.transport is not None:
            self.transport.offer(weight, whom, round_number)

    def meet(self, out: list[Tensor]) -> tuple[list[Tensor], float] | None:
        """The result of the offer, if there is one, within the deadline; if there is none the peer is missed.

        Collective over the replica.

        Args:
            out: where to write the difference: vectors like the origin, which stay as they are without a result.

        Returns:
            The difference of the peer's values from those that were offered, and the part of the way to go.
        """
        offered, found = self.offered, self._result(self._deadline, out, withdraw=True)
        if self.transport is not None:
            self.transport.take_misses()  # one exchange counts once, here
        if offered and found is None:
            self.miss(self._whom[0])
        return found

    def poll(self, out: list[Tensor], withdraw: bool = False) -> tuple[list[Tensor], float] | None:
        """The result of the offer by now, as :meth:`meet` gives it (collective over the replica).

        Args:
            out: see :meth:`meet`.
            withdraw: the offer, if it has brought nothing.
        """
        for peer in [] if self.transport is None else self.transport.take_misses():
            self.miss(peer)
        return self._result(0.0, out, withdraw)

    def _result(self, wait: float, out: list[Tensor], withdraw: bool) -> tuple[list[Tensor], float] | None:
        if not self.offered:
            return None
        began, swap, vectors = time.perf_counter(), None, self._theirs
        if self.transport is not None:
            swap = self.transport.result(wait) or (self.transport.withdraw() if withdraw else None)
        if swap is not None:
            vectors = list(swap.vectors)
        numbers = (0.0, 0.0, 0.0, 0.0) if swap is None else (1.0, swap.peer, swap.weight, swap.sent)
        well, peer, weight, sent = self.broadcast(numbers, vectors)
        self.offered, now, traffic = not (well or withdraw), time.perf_counter(), self.links.traffic
        traffic.exposed += now - began if wait else 0.0
        if not well:
            return None
        self.met[int(peer)] += 1
        traffic.add(int(sent), now - self._began, 0.0)
        for place, their, own in in_chunks(out, vectors, self.outgoing):
            torch.sub(their.to(place.dtype), own.to(place.dtype), out=place)
        self.distance = math.sqrt(sum(float(vector.dot(vector)) for vector in out))
        if isinstance(self.transport, PairsInColumns):
            return out, self.transport.scale(out, self._weight)
        return out, part_of_the_way(weight, self._weight)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exchange nothing meanwhile, so that all that one of a pair has counted the other has, too (collective)."""
        if self.transport is not None:
            self.transport.pause()
        try:
            yield
            self.links.gather(None)  # all have seen what they have, before anything changes
        finally:
            if self.transport is not None:
                self.transport.resume()


class PushClient(PeerClient[PushTransport]):
    """Exchanges one way: sends to some peers in each round, and takes what has come from others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free: list[list[Tensor]] = []  # where other ranks than the leader get pushes

    def send(self, peer: int, round_number: int, weight: float) -> bool:
        """Send what is laid out; whether it has gone (collective over the replica)."""
        with self._exposed():
            sent = None if self.transport is None else self.transport.push(peer, round_number, weight)
            gone, bytes_sent = self.broadcast([sent is not None, sent or 0], ())
        if not gone:
            self.miss(peer)
            return False
        self.met[peer] += 1
        self.links.traffic.add(int(bytes_sent), 0.0, 0.0)  # the seconds are counted already
        return True

    @contextmanager
    def receiving(self, round_number: int, sources: Sequence[int]) -> Iterator[list[ReceivedPush]]:
        """Pushes of a round, waiting for some peers (collective over the replica); valid within the block."""
        with self._exposed():
            pushes = []
            if self.transport is not None:
                pushes = self.transport.collect(round_number, sources, self._deadline)
            try:
                taken = self._shared(pushes)
            except BaseException:  # a loss has broken it, and it is called again
                self.restore(pushes)
                raise
        for peer in set(sources) - {push.peer for push in taken if push.round_number == round_number}:
            self.miss(peer)
        yield taken
        if self.transport is not None:
            self.transport.recycle(pushes)
        else:
            self._free += [push.vectors for push in taken if push.vectors]

    def waiting(self, remove: bool = False) -> list[ReceivedPush]:
        """Pushes that have come and have not been taken (collective over the replica).

        Args:
            remove: whether they are taken now.
        """
        return self._shared([] if self.transport is None else self.transport.waiting(remove))

    def restore(self, pushes: Iterable[ReceivedPush]) -> None:
        """Let these have come, as in a checkpoint."""
        if self.transport is not None:
            self.transport.put(pushes)

    def _shared(self, pushes: Sequence[ReceivedPush]) -> list[ReceivedPush]:
        """The leader's pushes, on all ranks of the replica (collective over it)."""
        shared = []
        for i in range(int(self.broadcast([len(pushes)], ())[0])):
            push = pushes[i] if pushes else ReceivedPush(0, 0, 0.0, self._memory())
            weight, peer, then = self.broadcast([push.weight, push.peer, push.round_number], push.vectors)
            shared.append(ReceivedPush(int(peer), int(then), weight, push.vectors if weight else []))
            if not (pushes or weight):
                self._free.append(push.vectors)
        return shared

    def _memory(self) -> list[Tensor]:
        return self._free.pop() if self._free else [torch.empty_like(sent) for sent in self.outgoing]

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        """Count the time within this block: training waits for it."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.links.traffic.seconds += seconds
        self.links.traffic.exposed += seconds


def pair_client(
    endpoint: Endpoint,
    links: ReplicaLinks,
    origin: Sequence[Tensor],
    wire: str,
    met: Counter[int],
    missed: Counter[int],
) -> PairClient:
    """The client of a replica that meets others in pairs, connected to them (collective over all ranks).

    Args:
        endpoint: this rank's.
        links: of this replica.
        origin: see :class:`PeerClient`; so are the others.
        wire: number format.
        met: completed exchanges with each peer.
        missed: those that were not completed.

    Raises:
        HeteroError: on every rank: some peers cannot be reached, or have another model.
    """
    like, cut = _like(origin, wire), links.in_columns
    connected: list[PairTransport] = _connected(PairTransport, endpoint, links, like)
    transport: Any = next(iter(connected), None) if cut is None else PairsInColumns(connected, like, cut)
    return PairClient(links, transport, origin, wire, endpoint.deadline, met, missed)


class PushClients(list[PushClient]):
    """Clients of a replica that gives to others, connected to them: one for each column (collective over all ranks).

    Args:
        endpoint: this rank's.
        links: of this replica.
        origin: see :class:`PeerClient`; so are the others.
        wire: number format.
        met: completed exchanges with each peer, of the first column.
        missed: those that were not completed.

    Raises:
        HeteroError: on every rank: some peers cannot be reached, or have another model.

    Attributes:
        cut: of vectors into parts for the columns; ``None``: there is one.
        distance: is not known.
    """

    distance = 0.0

    def __init__(
        self,
        endpoint: Endpoint,
        links: ReplicaLinks,
        origin: Sequence[Tensor],
        wire: str,
        met: Counter[int],
        missed: Counter[int],
    ) -> None:
        self._links, self.cut = links, links.in_columns
        connected: list[Any] = _connected(PushTransport, endpoint, links, _like(origin, wire)) or [None]
        self._columns = range(len(connected))
        counters = [met, *(Counter[int]() for _ in connected[1:])]
        super().__init__(
            PushClient(links, transport, own, wire, endpoint.deadline, counter, missed)
            for transport, own, counter in zip(connected, self.parts(origin), counters, strict=True)
        )

    def parts(self, vectors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Of each column its parts of vectors: new memory, unless there is one column."""
        cut = self.cut
        return [list(vectors)] if cut is None else [cut.parts(vectors, number) for number in self._columns]

    def whole(self, parts: Sequence[Sequence[Tensor]], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Vectors from parts like those of :meth:`parts`.

        Args:
            parts: of all columns.
            out: where to write them, unless there is one column. Default: new memory.
        """
        return list(parts[0]) if self.cut is None else self.cut.put(parts, out)

    def waiting(self, remove: bool = False) -> list[list[ReceivedPush]]:
        """Of each column the pushes that have come, once nothing is on its way any more (collective over all ranks).

        Args:
            remove: whether they are taken now.
        """
        self._links.gather(None)
        return [client.waiting(remove) for client in self]

    def restore(self, pushes: Iterable[tuple[int, ReceivedPush]]) -> None:
        """Let these have come, as in a checkpoint, each after the number of its column."""
        for number, push in pushes:
            self[number].restore([push])

    def lose(self, peers: Sequence[int], links: ReplicaLinks) -> None:
        """Go on without some peers, over the links of those that remain."""
        self._links = links
        for client in self:
            client.lose(peers, links)

    def close(self) -> None:
        """Close all connections; idempotent."""
        for client in self:
            client.close()


def _like(origin: Sequence[Tensor], wire: str) -> list[Tensor]:
    """Memory for vectors in the format of the wire."""
    return [torch.empty(old.numel(), dtype=DTYPES[wire] or old.dtype) for old in origin]


def _connected(kind: type[T], endpoint: Endpoint, links: ReplicaLinks, like: Sequence[Tensor]) -> list[T]:
    """Let the ranks that exchange, one of each replica, know where to reach each other (collective over all ranks).

    Args:
        kind: class of the transport.
        endpoint: this rank's.
        links: of this replica. The number of the replica is that of the peer.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Returns:
        The transport of each column of this rank; none where it does not exchange.
    """
    token, layout = links.gather(secrets.token_bytes(KEY_BYTES))[0], links.in_columns
    session, mine = Session(token, endpoint.deadline), dict[tuple[int, ...], T]()
    with ExitStack() as opened:
        for number, ranks in enumerate(links.columns):
            parts = like if layout is None else layout.parts(like, number)
            mine[ranks] = kind(links.index, session, endpoint.interface, parts)
            opened.callback(mine[ranks].close)
        own = {ranks: (one.address, endpoint.host, one.outbox.path) for ranks, one in mine.items()}
        everyone = links.gather(own)
        problem = _unreachable([(host, address) for cards in everyone for address, host, _ in cards.values()])
        for ranks, one in mine.items() if problem is None else ():
            cards = {peer: everyone[rank][ranks] for peer, rank in enumerate(ranks)}
            one.know({peer: address for peer, (address, *_) in cards.items()})
            paths = {peer: path for peer, (_, host, path) in cards.items() if host == endpoint.host}
            del paths[links.index]
            try:
                one.set_outboxes(paths)
            except HeteroError as error:
                problem = error
        problems = links.gather(None if problem is None else str(problem))  # all have opened what they need
        for one in mine.values():
            one.outbox.hide()
        if any(problems):
            raise problem or DisagreementError(next(text for text in problems if text))
        opened.pop_all()  # and stays so
    return list(mine.values())


def _unreachable(places: Sequence[tuple[str, HostPort]]) -> HeteroError | None:
    """Reason why peers of several hosts could not reach each other; ``None``: no reason is known."""
    inner = [f"{host} ({address[0]})" for host, address in places if address[0].startswith("127.")]
    if len({host for host, _ in places}) == 1 or not inner:
        return None
    return ConfigurationError(
        f"peers on {', '.join(inner)} would listen where other hosts cannot reach them: the job's main address is "
        "their loopback. Give MASTER_ADDR as an IP address of the network between the hosts."
    )
