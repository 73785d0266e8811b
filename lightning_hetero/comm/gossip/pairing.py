"""Two peers exchange what they had when each offered it; both count it, or neither does."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetero.comm.gossip.message import Channel, Kind, Message, RefusedError, nowhere
from lightning_hetero.comm.gossip.outbox import others_boxes
from lightning_hetero.comm.gossip.peer_selector import ANY, PeerSelector
from lightning_hetero.comm.gossip.peers import EXCHANGE, Peers, Session
from lightning_hetero.comm.leaving import close_at_exit
from lightning_hetero.comm.mapped import Mapped
from lightning_hetero.errors import CommunicationError

_PATIENCE = 0.1  # seconds for which one who asks waits until this peer's own question is answered


class Swap(NamedTuple):
    """What an exchange has brought.

    Attributes:
        peer: with whom.
        weight: the peer's.
        vectors: the peer's, as offered; to be used before the next offer.
        sent: bytes sent over the network.
    """

    peer: int
    weight: float
    vectors: Sequence[Tensor]
    sent: int


class _State(Enum):
    CLOSED = 1  # nothing on offer, or it has been exchanged
    OPEN = 2
    ENGAGED = 3  # with one peer: others are sent away


class _GoneOnError(Exception):
    """The other has passed the round."""


class Pairing:
    """Offers values, and exchanges them with one peer at a time.

    An exchange takes six messages: ``ASK, YES; SWAP, SWAP; COMMIT, DONE``, the two in the middle at once. The one who
    was asked counts it at ``COMMIT``, if that comes in time; the one who asked at ``DONE``, and if that does not come,
    it connects anew and asks whether it has counted. So both count it or neither does; only one that dies just then,
    or is frozen for longer than that, may leave the other in the wrong.

    Peers of one host lay their values in shared memory; the messages are the same, without vectors.

    Args:
        me: this peer.
        session: what all share.
        interface: address to listen on.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Attributes:
        misses: exchanges that were not completed, by peer: late, frozen, dead, unreachable.
        outbox: where this peer lays what it offers.
    """

    def __init__(self, me: int, session: Session, interface: str, like: Sequence[Tensor]) -> None:
        self.me = me
        self.misses = Counter[int]()
        self.outbox = Mapped(like)
        self._inbox = [torch.empty_like(value) for value in like]
        self._boxes: dict[int, Mapped] = {}  # of the peers of this host
        self._changed = threading.Condition()  # guards all that follows
        self._state, self._with, self._asking = _State.CLOSED, -1, False
        self._agreed = False  # the peer that is asked has said yes
        self._offers = 0  # made so far
        self._failure: BaseException | None = None  # that has ended the thread that asks
        self._number = float(time.time_ns() // 1000)  # of exchanges that this peer asks for
        self._waiting = 0  # peers that have asked, for this one's own question to be answered
        self._paused = self._closed = False
        self._weight = 1.0
        self._swap: Swap | None = None
        self.peers = Peers(me, session, interface, self._attend, changed=self._wake)
        self._selector = PeerSelector(me, session.deadline, self.peers.attendance)
        close_at_exit(self)
        threading.Thread(target=self._ask_until_closed, name="hetero-gossip-asker", daemon=True).start()

    def know_boxes(self, paths: Mapping[int, str]) -> None:
        """Learn where peers of this host lay their values."""
        self._boxes = others_boxes(self.outbox, paths)

    def offer(self, weight: float, whom: Sequence[int], turn: float = ANY) -> None:
        """Offer what lies in the outbox, until it is exchanged or withdrawn; returns at once.

        Args:
            weight: of this peer.
            whom: peers to ask.
            turn: only a peer that offers for the same round will do; the offer is closed if that one has gone on to a
                later round or cannot be reached. Of such a pair, the first asks, and the second only if it has been
                asked in vain, or is not asked for long. Who has ended or is silent is neither asked nor waited for.
        """
        with self._changed:
            assert self._state is _State.CLOSED
            self._weight, self._swap, self._offers = weight, None, self._offers + 1
            self._selector.begin(whom, turn)
            self._state = _State.OPEN
            self._changed.notify_all()

    def result(self, wait: float = 0.0) -> Swap | None:
        """What the offer has brought, if it has within so many seconds.

        Does not wait for a peer that has ended or is silent.

        Raises:
            CommunicationError: the thread that asks has failed.
        """
        with self._changed:
            self._changed.wait_for(self._settled, wait)
            if self._failure is not None:
                raise CommunicationError(
                    f"replica {self.me} can exchange no more: its thread that asks others has failed with "
                    f"{self._failure!r}."
                ) from self._failure
            return self._swap if self._state is _State.CLOSED else None

    def _settled(self) -> bool:
        waits = self._state is _State.ENGAGED or (self._state is _State.OPEN and self._selector.awaits)
        return not waits

    def withdraw(self) -> Swap | None:
        """Close the offer; if an exchange is under way, after its end, with what it has brought."""
        with self._changed:
            self._wait_for_exchange()
            self._state = _State.CLOSED
            return self._swap

    def _wait_for_exchange(self) -> None:
        self._changed.wait_for(lambda: self._state is not _State.ENGAGED, EXCHANGE * self.peers.session.deadline)

    def pause(self) -> None:
        """Exchange nothing more for now; waits for what is under way."""
        with self._changed:
            self._paused = True
            self._wait_for_exchange()

    def resume(self) -> None:
        """Go on, after :meth:`pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether something is on offer that has not been exchanged."""
        with self._changed:
            return self._state is not _State.CLOSED

    def close(self) -> None:
        """Hang up; idempotent."""
        with self._changed:
            self._closed = True
            self._state = _State.CLOSED
            self._changed.notify_all()
        self.peers.close()

    # -- who asks ----------------------------------------------------------------------------------

    def _ask_until_closed(self) -> None:
        """Ask for what is on offer; on a thread, whose failure :meth:`result` tells."""
        try:
            self._ask_around()
        except BaseException as error:
            with self._changed:
                self._failure, self._state = error, _State.CLOSED
                self._changed.notify_all()

    def _ask_around(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_ask)
                if self._closed:
                    return
                if (early := self._selector.early()) > 0:
                    self._changed.wait(early)
                    continue
                peer, offer, turn, weight = self._selector.choose(), self._offers, self._selector.turn, self._weight
                if peer is None:
                    continue  # it has gone just now
                self._state, self._with, self._asking, self._agreed = _State.ENGAGED, peer, True, False
            swap, missed, in_vain, began = None, False, False, time.monotonic()
            try:
                swap = self._exchange_with(peer, turn, weight)
            except _GoneOnError:
                in_vain = True
            except (OSError, RefusedError) as error:
                missed = True
                self.peers.failed(peer, began, error)
            with self._changed:
                if self._asking:  # or it has been asked itself meanwhile, and said yes
                    self._asking = False
                    self._end(swap)
                if offer != self._offers:
                    continue  # exchanged when the peer asked for it: the answer says nothing of the next offer
                if missed:
                    self.misses[peer] += 1
                if swap is None:
                    self._selector.back_off(missed)
                if self._state is _State.OPEN and turn != ANY and (missed or in_vain):
                    self._state = _State.CLOSED
                    self._changed.notify_all()

    def _may_ask(self) -> bool:
        able = self._state is _State.OPEN and bool(self._selector.asked) and not self._paused
        return self._closed or (able and not self._waiting)

    def _exchange_with(self, peer: int, turn: float, weight: float) -> Swap | None:
        """As the one who asks; ``None`` if the peer does not want to."""
        self._number += 1
        channel, numbers = self.peers.channel(peer), (turn, weight, self._number)
        sent = channel.send(Kind.ASK, numbers, (), self.peers.soon())
        reply = channel.receive(nowhere, self.peers.soon())
        if reply.kind is not Kind.YES:
            if reply.numbers and turn != ANY and reply.numbers[0] > turn:
                raise _GoneOnError
            return None
        with self._changed:
            if not self._asking:
                raise RefusedError("uninvited")
            self._agreed = True
            self._changed.notify_all()
        near = peer in self._boxes
        vectors = () if near else self.outbox.vectors
        answer, more = channel.swap(Kind.SWAP, numbers, vectors, lambda _: self._inbox, self.peers.soon())
        sent += more
        if answer.kind is not Kind.SWAP or len(answer.numbers) != 2:
            raise RefusedError("uninvited")
        if near:
            self._take(peer)
        sent += self.peers.commit(channel, peer, self._number)
        self.peers.attendance.met(peer)
        return Swap(peer, answer.numbers[1], self._inbox, sent)

    # -- who is asked ------------------------------------------------------------------------------

    def _attend(self, channel: Channel, ask: Message) -> None:
        """Exchange with a peer who asks for it, if something is on offer."""
        if ask.kind is not Kind.ASK or len(ask.numbers) != 3:
            raise RefusedError("uninvited")
        if not self._engage(ask):
            channel.send(Kind.NO, (self._selector.turn,), (), self.peers.soon())
            return
        swap = None
        try:
            swap = self._answer(channel, ask.sender, ask.numbers[2])
        finally:
            with self._changed:
                self._end(swap)
                if swap is None:
                    self.misses[ask.sender] += 1
        channel.send(Kind.DONE, (), (), self.peers.soon())

    def _engage(self, ask: Message) -> bool:
        turn = ask.numbers[0]
        with self._changed:
            if turn >= self._selector.turn:  # not from one who lags behind: it would be waited for in vain
                self.peers.attendance.heard(ask.sender)
            if ask.sender < self.me and self._with != ask.sender and turn == self._selector.turn:
                # It waits while this one asks another. If all who ask were sent away, those who ask each other in a
                # circle could do so for ever; as only the first are let wait, they never wait in a circle.
                self._waiting += 1
                self._changed.wait_for(lambda: not self._asking or self._agreed, _PATIENCE)
                self._waiting -= 1
            # Two who ask each other: the question of the first counts.
            crossing = self._asking and not self._agreed and self._with == ask.sender and ask.sender < self.me
            willing = (self._state is _State.OPEN or crossing) and not self._paused
            if willing and turn == self._selector.turn:
                self._state, self._with, self._asking = _State.ENGAGED, ask.sender, False
                self._selector.met(ask.sender)
                return True
            self._selector.wants(ask.sender, turn)
            if self._state is _State.OPEN and ANY != self._selector.turn < turn and ask.sender in self._selector.whom:
                self._state = _State.CLOSED  # the other has passed the round
            self._changed.notify_all()
            return False

    def _answer(self, channel: Channel, peer: int, number: float) -> Swap:
        near, sent = peer in self._boxes, channel.send(Kind.YES, (), (), self.peers.soon())
        numbers, vectors = (self._selector.turn, self._weight), () if near else self.outbox.vectors
        theirs, more = channel.swap(Kind.SWAP, numbers, vectors, lambda _: self._inbox, self.peers.soon())
        sent += more
        if theirs.kind is not Kind.SWAP or len(theirs.numbers) != 3:
            raise RefusedError("uninvited")
        if near:
            self._take(peer)
        self.peers.await_commit(channel, peer, number)
        return Swap(peer, theirs.numbers[1], self._inbox, sent)

    # -- both --------------------------------------------------------------------------------------

    def _take(self, peer: int) -> None:
        for own, value in zip(self._inbox, self._boxes[peer].vectors, strict=True):
            own.copy_(value)

    def _end(self, swap: Swap | None) -> None:
        if swap is not None:
            self._swap, self._state = swap, _State.CLOSED
        elif self._state is _State.ENGAGED:
            self._state = _State.OPEN
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
