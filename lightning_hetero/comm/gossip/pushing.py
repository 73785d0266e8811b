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
from lightning_hetero.comm.gossip.peers import Job, Peers
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
    counted. What has not gone remains the sender's.

    Args:
        me: this peer.
        job: what all share.
        interface: address to listen on.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Attributes:
        misses: pushes that were not completed, by peer.
        outbox: where this peer lays what it sends.
    """

    def __init__(self, me: int, job: Job, interface: str, like: Sequence[Tensor]) -> None:
        self.me = me
        self.misses = Counter[int]()
        self.outbox = Mapped(like)
        self._boxes: dict[int, Mapped] = {}
        self._changed = threading.Condition()  # guards what follows
        self._arrived: list[Push] = []
        self._free: list[list[Tensor]] = []
        self._absent: set[int] = set()  # from whom nothing has come when it was waited for
        self._number = float(time.time_ns() // 1000)  # of this peer's pushes
        self.peers = Peers(me, job, interface, self._attend, self._place, self._wake)

    def know_boxes(self, paths: Mapping[int, str]) -> None:
        """Learn where peers of this host lay their values."""
        self._boxes = others_boxes(self.outbox, paths)

    def push(self, peer: int, turn: int, weight: float) -> int | None:
        """Give a peer what lies in the outbox; blocks. The bytes sent over the network; ``None``: it has not gone."""
        try:
            channel, near = self.peers.channel(peer), peer in self._boxes
            vectors = () if near else self.outbox.vectors
            self._number += 1
            sent = channel.send(Kind.PUSH, (turn, weight, self._number), vectors, self.peers.soon())
            if channel.receive(nowhere, self.peers.soon()).kind is not Kind.YES:
                raise RefusedError("uninvited")
            return sent + self.peers.commit(channel, peer, self._number)
        except (OSError, RefusedError) as error:
            self.peers.drop(peer)
            self.misses[peer] += 1
            if isinstance(error, RefusedError):
                self.peers.refused[str(error)] += 1
            return None

    def collect(self, turn: int, sources: Sequence[int], wait: float) -> list[Push]:
        """Take all that has come, in the order of rounds and peers.

        Waits for a round's pushes from some peers for at most so many seconds; for who has been waited for in vain, not
        again until something has come from it. Once all are to stop it does not wait.
        """

        def here() -> set[int]:
            return {push.peer for push in self._arrived if push.turn >= turn}

        with self._changed:
            self._changed.wait_for(lambda: self.peers.stop or set(sources) - self._absent <= here(), wait)
            self._absent |= set(sources) - here()
            # A fast peer may already be a round ahead: what it has sent then stays for then.
            taken = sorted((push for push in self._arrived if push.turn <= turn), key=lambda push: push[:2][::-1])
            self._arrived = [push for push in self._arrived if push.turn > turn]
            return taken

    def waiting(self) -> list[Push]:
        """What has come and has not been taken."""
        with self._changed:
            return list(self._arrived)

    def put(self, pushes: Sequence[Push]) -> None:
        """Let these have come, as a checkpoint says."""
        with self._changed:
            self._arrived += pushes

    def recycle(self, pushes: Sequence[Push]) -> None:
        """Give memory back."""
        with self._changed:
            self._free += [push.vectors for push in pushes]

    def close(self) -> None:
        """Hang up; idempotent."""
        self.peers.close()

    def _attend(self, channel: Channel, push: Message) -> None:
        """Take what a peer sends."""
        if push.kind is not Kind.PUSH or len(push.numbers) != 3:
            raise RefusedError("uninvited")
        vectors = list(push.vectors) or self._memory()
        if push.sender in self._boxes:
            for own, value in zip(vectors, self._boxes[push.sender].vectors, strict=True):
                own.copy_(value)
        channel.send(Kind.YES, (), (), self.peers.soon())
        turn, weight, number = push.numbers
        self.peers.await_commit(channel, push.sender, number)
        with self._changed:
            self._absent.discard(push.sender)
            self._arrived.append(Push(push.sender, int(turn), weight, vectors))
            self._changed.notify_all()
        channel.send(Kind.DONE, (), (), self.peers.soon())

    def _place(self, kind: Kind) -> Sequence[Tensor]:
        return self._memory() if kind is Kind.PUSH else nowhere(kind)

    def _memory(self) -> list[Tensor]:
        with self._changed:
            return self._free.pop() if self._free else [torch.empty_like(v) for v in self.outbox.vectors]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
