"""The messages of one exchange between two peers: both count it, or neither does."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.gossip.message import Channel, Kind, RefusedError, nowhere
from lightning_hetero.comm.gossip.outbox import others_boxes
from lightning_hetero.comm.gossip.peer_selector import ANY
from lightning_hetero.comm.gossip.peers import Peers
from lightning_hetero.comm.mapped import Mapped


class Swap(NamedTuple):
    """What an exchange has brought.

    Attributes:
        peer: the other peer.
        weight: its weight.
        vectors: its values, as it offered them. Use them before the next offer.
        sent: bytes sent over the network.
    """

    peer: int
    weight: float
    vectors: Sequence[Tensor]
    sent: int


class GoneOnError(Exception):
    """The peer that was asked has gone on to a later round."""


class Swapping:
    """Exchanges values with a peer, in six messages: ``ASK, YES; SWAP, SWAP; COMMIT, DONE``.

    The two in the middle travel at the same time. The peer that was asked counts the exchange when ``COMMIT`` comes, if
    that is in time. The one that asked counts it when ``DONE`` comes. If ``DONE`` does not come, it connects again and
    asks whether the exchange has counted. So both count it or neither does. Only a peer that dies in this moment, or is
    frozen for longer than that, may leave the other with a wrong answer.

    Peers of one host write their values into shared memory. The messages are the same, without vectors.

    Args:
        peers: connections to the others.
        outbox: where this peer writes what it offers.
    """

    def __init__(self, peers: Peers, outbox: Mapped) -> None:
        self._peers, self._outbox = peers, outbox
        self.inbox = [torch.empty_like(value) for value in outbox.vectors]
        self._boxes: dict[int, Mapped] = {}  # of the peers of this host
        self._number = float(time.time_ns() // 1000)  # of the exchanges that this peer asks for

    def know_boxes(self, paths: Mapping[int, str]) -> None:
        """Learn where the peers of this host write their values."""
        self._boxes = others_boxes(self._outbox, paths)

    def ask(self, peer: int, round_number: float, weight: float, agreed: Callable[[], bool]) -> Swap | None:
        """Ask a peer for an exchange, and exchange.

        Args:
            peer: the one to ask.
            round_number: of this peer's offer.
            weight: of this peer.
            agreed: called when the peer has said yes. ``False``: this peer no longer wants to.

        Returns:
            ``None``: the peer has said no.

        Raises:
            GoneOnError: the peer has gone on to a later round.
            OSError: the exchange broke off, or was too late. It does not count.
            RefusedError: a message came that must not be believed. The exchange does not count.
        """
        self._number += 1
        channel, numbers = self._peers.channel(peer), (round_number, weight, self._number)
        sent = channel.send(Kind.ASK, numbers, (), self._peers.soon())
        reply = channel.receive(nowhere, self._peers.soon())
        if reply.kind is not Kind.YES:
            if reply.numbers and round_number != ANY and reply.numbers[0] > round_number:
                raise GoneOnError
            return None
        if not agreed():
            raise RefusedError("uninvited")
        weight, more = self._swap(channel, peer, numbers, 2)
        sent += more + self._peers.commit(channel, peer, self._number)
        self._peers.attendance.met(peer)
        return Swap(peer, weight, self.inbox, sent)

    def answer(self, channel: Channel, peer: int, number: float, offer: tuple[float, float]) -> Swap:
        """Exchange with a peer that has asked, until it is to be told that the exchange is done.

        Args:
            channel: over which it asked.
            peer: the one that asked.
            number: that it gave the exchange.
            offer: the round of this peer's offer, and this peer's weight.

        Raises:
            OSError: the exchange broke off, or was too late. It does not count.
            RefusedError: a message came that must not be believed. The exchange does not count.
        """
        sent = channel.send(Kind.YES, (), (), self._peers.soon())
        weight, more = self._swap(channel, peer, offer, 3)
        self._peers.await_commit(channel, peer, number)
        return Swap(peer, weight, self.inbox, sent + more)

    def _swap(self, channel: Channel, peer: int, numbers: Sequence[float], expected: int) -> tuple[float, int]:
        """Send what lies in the outbox, and fill the inbox; the peer's weight, and the bytes sent."""
        near = peer in self._boxes
        vectors = () if near else self._outbox.vectors
        theirs, sent = channel.swap(Kind.SWAP, numbers, vectors, lambda _: self.inbox, self._peers.soon())
        if theirs.kind is not Kind.SWAP or len(theirs.numbers) != expected:
            raise RefusedError("uninvited")
        if near:
            for own, value in zip(self.inbox, self._boxes[peer].vectors, strict=True):
                own.copy_(value)
        return theirs.numbers[1], sent
