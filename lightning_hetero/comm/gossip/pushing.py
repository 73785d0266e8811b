"""A peer gives part of its values away; they are the other's then, or they have never left."""

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
        peer: from whom.
        turn: round in which it was sent.
        weight: that came with the vectors.
        vectors: to be given back with :meth:`Pushing.recycle`.
    """

    peer: int
    turn: int
    weight: float
    vectors: list[Tensor]


class Pushing:
    """Sends values to peers and collects what comes from them.

    A push takes four messages: ``PUSH, YES; COMMIT, DONE``. The receiver counts it at ``COMMIT``, if that comes in
    time; the sender counts it as gone at ``DONE``, and if that does not come, it connects anew and asks whether it has
    counted. What has not gone remains the sender's. A push of weight 0 brings nothing, but tells that its sender has
    come to the round.

    Of each peer, one push more than there are peers can wait to be taken. A receiver that is no longer at work takes no
    others: ``PUSH, NO``.

    Args:
        me: this peer.
        session: what all share.
        interface: address to listen on.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Attributes:
        misses: pushes that were not completed, by peer.
        outbox: where this peer lays what it sends.
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
        """Learn where peers of this host lay their values."""
        self._boxes = others_boxes(self.outbox, paths)

    def push(self, peer: int, turn: int, weight: float) -> int | None:
        """Give a peer what lies in the outbox; blocks. The bytes sent over the network; ``None``: it has not gone."""
        sent, began = None, time.monotonic()
        if peer in self.peers.attendance:
            try:
                sent = self._push(peer, turn, weight)
            except (OSError, RefusedError) as error:
                self.peers.failed(peer, began, error)
        self.misses[peer] += sent is None
        return sent

    def _push(self, peer: int, turn: int, weight: float) -> int | None:
        channel = self.peers.channel(peer)
        vectors = self.outbox.vectors if weight and peer not in self._boxes else ()
        self._number += 1
        sent = channel.send(Kind.PUSH, (turn, weight, self._number), vectors, self.peers.soon())
        answer = channel.receive(nowhere, self.peers.soon()).kind
        if answer is Kind.NO:
            return None
        if answer is not Kind.YES:
            raise RefusedError("uninvited")
        sent += self.peers.commit(channel, peer, self._number)
        self.peers.attendance.met(peer)
        return sent

    def collect(self, turn: int, sources: Sequence[int], wait: float) -> list[Push]:
        """Take all that has come, in the order of rounds and peers.

        Waits for a round's pushes from some peers for at most so many seconds; not for who has ended or is silent, nor
        for who lags behind since it was waited for in vain.

        A fast peer may be some rounds ahead, but not by more than there are peers, unless it no longer waits for this
        one, who lags behind. What comes from nearer stays for its round, so that sums do not depend on who is fast;
        what comes from farther ahead is taken now.
        """

        def missing() -> list[int]:
            return [peer for peer in sources if self._latest.get(peer, -1) < turn]

        def awaited() -> list[int]:
            there = self.peers.attendance
            return [p for p in missing() if p in there and self._latest.get(p, -1) >= self._missed.get(p, -1)]

        with self._changed:
            self._changed.wait_for(lambda: not awaited(), wait)
            self._missed.update(dict.fromkeys(missing(), turn))
            later = range(turn + 1, turn + self.peers.count + 1)
            taken = sorted((p for p in self._arrived if p.turn not in later), key=lambda push: push[:2][::-1])
            self._arrived = [push for push in self._arrived if push.turn in later]
            return taken

    def waiting(self) -> list[Push]:
        """What has come and has not been taken."""
        with self._changed:
            return list(self._arrived)

    def put(self, pushes: Sequence[Push]) -> None:
        """Let these have come, as a checkpoint says."""
        with self._changed:
            for push in pushes:
                self._arrive(push)

    def _arrive(self, push: Push) -> None:
        self._arrived.append(push)
        self._latest[push.peer] = max(push.turn, self._latest.get(push.peer, -1))

    def recycle(self, pushes: Sequence[Push]) -> None:
        """Give memory back."""
        with self._changed:
            self._free += [push.vectors for push in pushes if push.vectors]

    def close(self) -> None:
        """Hang up; idempotent."""
        self.peers.close()

    def _attend(self, channel: Channel, push: Message) -> None:
        """Take what a peer sends."""
        if push.kind is not Kind.PUSH or len(push.numbers) != 3:
            raise RefusedError("uninvited")
        turn, weight, number = push.numbers
        vectors = list(push.vectors)
        if bool(vectors) is not (bool(weight) and push.sender not in self._boxes):
            raise RefusedError("size")
        if weight and push.sender in self._boxes:
            vectors = self._memory()
            for own, value in zip(vectors, self._boxes[push.sender].vectors, strict=True):
                own.copy_(value)
        came = Push(push.sender, int(turn), weight, vectors)
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
