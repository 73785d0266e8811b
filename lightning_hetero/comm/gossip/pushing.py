"""A peer gives part of its values to another. Then they belong to the other, or they never left."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.gossip.message import Channel, Kind, Message, RefusedError, nowhere
from lightning_hetero.comm.gossip.outbox import others_boxes
from lightning_hetero.comm.gossip.peers import Peers, Session
from lightning_hetero.comm.mapped import Mapped


class Push(NamedTuple):
    """What has come from a peer.

    Attributes:
        peer: the one that sent it.
        round_number: round in which it was sent.
        weight: that came with the vectors.
        vectors: give them back with :meth:`Pushing.recycle`.
    """

    peer: int
    round_number: int
    weight: float
    vectors: list[Tensor]


class Pushing:
    """Sends values to peers and collects what comes from them.

    A push takes four messages: ``PUSH, YES; COMMIT, DONE``. The receiver counts it when ``COMMIT`` comes, if that is in
    time. The sender counts it as gone when ``DONE`` comes. If ``DONE`` does not come, it connects again and asks
    whether the push has counted. What has not gone still belongs to the sender. A push of weight 0 has no vectors: it
    only says that its sender has reached the round.

    From each peer, one push more than there are peers can wait to be collected. Further ones are refused
    (``PUSH, NO``): this peer no longer collects them.

    Args:
        me: this peer.
        session: what all peers share.
        interface: address to listen on.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Attributes:
        misses: of each peer, pushes to it that failed.
        outbox: where this peer writes what it sends.
        peers: the connections to others.
    """

    def __init__(self, me: int, session: Session, interface: str, like: Sequence[Tensor]) -> None:
        self.me = me
        self.misses = Counter[int]()
        self.outbox = Mapped(like)
        self._boxes: dict[int, Mapped] = {}
        self._changed = threading.Condition()  # guards what follows
        self._arrived: list[Push] = []
        self._free: list[list[Tensor]] = []
        self._latest: dict[int, int] = {}  # of each peer, the latest round from which something has come
        self._missed: dict[int, int] = {}  # and the latest in which nothing had
        self._number = float(time.time_ns() // 1000)  # of this peer's pushes
        self.peers = Peers(me, session, interface, self._attend, self._place, self._wake)

    def know_boxes(self, paths: Mapping[int, str]) -> None:
        """Learn where the peers of this host write their values."""
        self._boxes = others_boxes(self.outbox, paths)

    def push(self, peer: int, round_number: int, weight: float) -> int | None:
        """Give a peer what lies in the outbox; blocks.

        Args:
            peer: the one to give it to.
            round_number: of this peer.
            weight: to send with the vectors; 0: nothing is sent but the round.

        Returns:
            The bytes sent over the network; ``None``: the vectors have not gone.
        """
        sent, began = None, time.monotonic()
        if peer in self.peers.attendance:
            try:
                sent = self._push(peer, round_number, weight)
            except (OSError, RefusedError) as error:
                self.peers.failed(peer, began, error)
        self.misses[peer] += sent is None
        return sent

    def _push(self, peer: int, round_number: int, weight: float) -> int | None:
        channel = self.peers.channel(peer)
        vectors = self.outbox.vectors if weight and peer not in self._boxes else ()
        self._number += 1
        sent = channel.send(Kind.PUSH, (round_number, weight, self._number), vectors, self.peers.soon())
        answer = channel.receive(nowhere, self.peers.soon()).kind
        if answer is Kind.NO:
            return None
        if answer is not Kind.YES:
            raise RefusedError("uninvited")
        sent += self.peers.commit(channel, peer, self._number)
        self.peers.attendance.met(peer)
        return sent

    def collect(self, round_number: int, sources: Sequence[int], wait: float) -> list[Push]:
        """Take all that has come, in the order of rounds and peers.

        A fast peer may be some rounds ahead: by at most the number of peers, unless it no longer waits for this one,
        which lags behind. What comes from up to so many rounds ahead stays for its round, so that sums do not depend on
        which peer is fast. What comes from farther ahead is taken now.

        Args:
            round_number: of this peer.
            sources: peers to wait for; not those that have ended or are silent, nor those that have sent nothing since
                they were waited for without success.
            wait: seconds to wait at most.
        """

        def missing() -> list[int]:
            return [peer for peer in sources if self._latest.get(peer, -1) < round_number]

        def awaited() -> list[int]:
            there = self.peers.attendance
            return [p for p in missing() if p in there and self._latest.get(p, -1) >= self._missed.get(p, -1)]

        with self._changed:
            self._changed.wait_for(lambda: not awaited(), wait)
            self._missed.update(dict.fromkeys(missing(), round_number))
            later = range(round_number + 1, round_number + self.peers.count + 1)
            taken = sorted((p for p in self._arrived if p.round_number not in later), key=lambda push: push[:2][::-1])
            self._arrived = [push for push in self._arrived if push.round_number in later]
            return taken

    def waiting(self) -> list[Push]:
        """What has come and has not been taken."""
        with self._changed:
            return list(self._arrived)

    def put(self, pushes: Sequence[Push]) -> None:
        """Let these have come, as in a checkpoint."""
        with self._changed:
            for push in pushes:
                self._arrive(push)

    def _arrive(self, push: Push) -> None:
        self._arrived.append(push)
        self._latest[push.peer] = max(push.round_number, self._latest.get(push.peer, -1))

    def recycle(self, pushes: Sequence[Push]) -> None:
        """Give back the memory of pushes that are not needed any more."""
        with self._changed:
            self._free += [push.vectors for push in pushes if push.vectors]

    def close(self) -> None:
        """Close all connections; idempotent."""
        self.peers.close()

    def _attend(self, channel: Channel, push: Message) -> None:
        """Receive a push."""
        if push.kind is not Kind.PUSH or len(push.numbers) != 3:
            raise RefusedError("uninvited")
        round_number, weight, number = push.numbers
        vectors = list(push.vectors)
        if bool(vectors) is not (bool(weight) and push.sender not in self._boxes):
            raise RefusedError("size")
        if weight and push.sender in self._boxes:
            vectors = self._memory()
            for own, value in zip(vectors, self._boxes[push.sender].vectors, strict=True):
                own.copy_(value)
        came = Push(push.sender, int(round_number), weight, vectors)
        self.peers.attendance.heard(push.sender)
        if self._full(push.sender):
            self.recycle([came])
            channel.send(Kind.NO, (), (), self.peers.soon())
            return
        channel.send(Kind.YES, (), (), self.peers.soon())
        self.peers.await_commit(channel, push.sender, number)
        with self._changed:
            self._arrive(came)
            self._changed.notify_all()
        channel.send(Kind.DONE, (), (), self.peers.soon())

    def _full(self, peer: int) -> bool:
        with self._changed:
            return sum(push.peer == peer for push in self._arrived) > self.peers.count

    def _place(self, kind: Kind) -> Sequence[Tensor]:
        return self._memory() if kind is Kind.PUSH else nowhere(kind)

    def _memory(self) -> list[Tensor]:
        with self._changed:
            return self._free.pop() if self._free else [torch.empty_like(v) for v in self.outbox.vectors]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
