"""Peers of a gossip in one process, and a network between them that can fail at any message."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from test_gossip_channel import HEADER

from lightning_hetero.comm.gossip import ANY, PairTransport, _State
from lightning_hetero.comm.gossip_peers import PeerTransport, Session
from lightning_hetero.comm.transport import connect

TOKEN = bytes(range(16))
NAMES = {
    "asks": {1: "ASK", 4: "SWAP", 5: "COMMIT", 7: "PUSH", 8: "COUNTED"},
    "answers": {2: "YES", 3: "NO", 4: "BACK", 6: "DONE"},
}
Judge = Callable[[str, bytes], "bytes | None"]


def read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError
        found += part
    return found


def call(peers: PeerTransport, me: int = 1) -> socket.socket:
    """A connection to a peer, from a caller who knows the job's secret."""
    return connect(peers.address, peers._greeting, me, 5.0)


class Proxy:
    """Network before a peer. ``judge`` gets each message's name and bytes, and returns the bytes that go on.

    If it returns ``None``, the connection is closed. ``greet`` gets the listener's random bytes.
    """

    def __init__(self, target: tuple[str, int], judge: Judge, greet: Any = lambda drawn: drawn) -> None:
        self.target, self.judge, self.greet = target, judge, greet
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        self.open: list[socket.socket] = [self.listener]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                try:
                    called = socket.create_connection(self.target, 5)
                except OSError:
                    caller.close()
                    continue
                called.settimeout(None)
                self.open += [caller, called]
                threading.Thread(target=self._answers, args=(called, caller), daemon=True).start()
                threading.Thread(target=self._carry, args=("asks", caller, called), daemon=True).start()

    def _answers(self, called: socket.socket, caller: socket.socket) -> None:
        with suppress(OSError):
            caller.sendall(self.greet(read(called, 16)))
            return self._carry("answers", called, caller)
        hang_up(called, caller)

    def _carry(self, side: str, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while side == "asks" and (byte := read(source, 1)) != b"\n":  # the first line
                to.sendall(byte)
            if side == "asks":
                to.sendall(b"\n")
            while True:
                header = read(source, HEADER.size)
                kind, count, size = (HEADER.unpack(header)[i] for i in (1, 3, 4))
                passed = self.judge(NAMES[side].get(kind, "?"), header + read(source, 8 * count + size))
                if passed is None:
                    break
                to.sendall(passed)
        hang_up(source, to)

    def close(self) -> None:
        hang_up(*self.open)


def hang_up(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class Member:
    """A peer with values, and the exchanges that move them."""

    def __init__(
        self, index: int, weight: float, limit: float, size: int = 3, token: bytes = TOKEN, interface: str = "127.0.0.1"
    ) -> None:
        self.x, self.weight, self.met = torch.zeros(size, dtype=torch.float64), weight, 0
        self.pairing = PairTransport(index, Session(token, limit), interface, [self.x])
        self.path = self.pairing.outbox.path

    @property
    def is_open(self) -> bool:
        """Whether something is offered that has not been exchanged."""
        return self.pairing._state is not _State.CLOSED

    def offer(self, whom: Sequence[int], turn: float = ANY) -> None:
        self.own = self.x.clone()
        self.pairing.outbox.vectors[0].copy_(self.x)
        self.pairing.offer(self.weight, whom, turn)

    def take(self, wait: float) -> bool:
        swap = self.pairing.result(wait) or self.pairing.withdraw()
        if swap is None:
            return False
        self.x += swap.weight / (swap.weight + self.weight) * (swap.vectors[0] - self.own)
        self.met += 1
        return True


@contextmanager
def team(
    weights: Sequence[float], limit: float = 5.0, boxes: bool = False, proxy: Judge | None = None, **more: Any
) -> Iterator[list[Member]]:
    """Peers that know each other, maybe each behind a proxy."""
    members = [Member(i, weight, limit, **more) for i, weight in enumerate(weights)]
    proxies = [Proxy(m.pairing.address, proxy) for m in members] if proxy else []
    for i, member in enumerate(members):
        member.pairing.know({j: (proxies or [m.pairing for m in members])[j].address
                                   for j, m in enumerate(members) if j != i})  # fmt: skip
        if boxes:
            member.pairing.set_outboxes({j: m.path for j, m in enumerate(members) if j != i})
    for member in members:
        member.pairing.outbox.hide()
    try:
        yield members
    finally:
        for member in members:
            member.pairing.close()
        for one in proxies:
            one.close()


def total(members: Sequence[Member]) -> torch.Tensor:
    return sum(member.weight * member.x for member in members)


def meet(one: Member, other: Member, turn: float = 1.0, wait: float = 10.0) -> tuple[bool, bool]:
    a, b = one.pairing.me, other.pairing.me
    one.offer([b], turn)
    other.offer([a], turn)
    return one.take(wait), other.take(wait)
