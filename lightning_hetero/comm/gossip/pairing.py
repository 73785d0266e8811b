"""A peer offers values, and exchanges them with one other peer."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

from torch import Tensor

from lightning_hetero.comm.gossip.message import Channel, Kind, Message, RefusedError
from lightning_hetero.comm.gossip.peer_selector import ANY, PeerSelector
from lightning_hetero.comm.gossip.peers import EXCHANGE, Peers, Session
from lightning_hetero.comm.gossip.swapping import GoneOnError, Swap, Swapping
from lightning_hetero.comm.leaving import close_at_exit
from lightning_hetero.comm.mapped import Mapped
from lightning_hetero.errors import CommunicationError

_PATIENCE = 0.1  # seconds that a peer that asks waits for the answer to this peer's own question


class _State(Enum):
    CLOSED = 1  # nothing is offered, or it has been exchanged
    OPEN = 2
    ENGAGED = 3  # with one peer: others are refused


class Pairing:
    """Offers values, and exchanges them with one peer at a time; see :class:`Swapping` for the messages.

    A thread asks other peers. Other threads, one per connection, answer the questions of others.

    Args:
        me: this peer.
        session: what all peers share.
        interface: address to listen on.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Attributes:
        misses: of each peer, exchanges with it that failed: it was late, frozen, dead or unreachable.
        outbox: where this peer writes what it offers.
        peers: the connections to others.
    """

    def __init__(self, me: int, session: Session, interface: str, like: Sequence[Tensor]) -> None:
        self.me = me
        self.misses = Counter[int]()
        self.outbox = Mapped(like)
        self._changed = threading.Condition()  # guards all that follows
        self._state, self._with, self._asking = _State.CLOSED, -1, False
        self._agreed = False  # the peer that was asked has said yes
        self._offers = 0  # made so far
        self._failure: BaseException | None = None  # that has ended the thread that asks
        self._waiting = 0  # peers that have asked, and wait for the answer to this peer's own question
        self._paused = self._closed = False
        self._weight = 1.0
        self._swap: Swap | None = None
        self.peers = Peers(me, session, interface, self._attend, changed=self._wake)
        self._swapping = Swapping(self.peers, self.outbox)
        self._selector = PeerSelector(me, session.deadline, self.peers.attendance)
        close_at_exit(self)
        threading.Thread(target=self._ask_until_closed, name="hetero-gossip-asker", daemon=True).start()

    def know_boxes(self, paths: Mapping[int, str]) -> None:
        """Learn where the peers of this host write their values."""
        self._swapping.know_boxes(paths)

    def offer(self, weight: float, candidates: Sequence[int], round_number: float = ANY) -> None:
        """Offer what lies in the outbox, until it is exchanged or withdrawn. Returns at once.

        Args:
            weight: of this peer.
            candidates: peers to ask. Those that have ended or are silent are neither asked nor waited for.
            round_number: only a peer that offers for the same round will do. The offer is closed if that peer has gone
                on to a later round or cannot be reached. The first of such a pair asks. The second asks only if it was
                asked without success, or is not asked for long.
        """
        with self._changed:
            assert self._state is _State.CLOSED
            self._weight, self._swap, self._offers = weight, None, self._offers + 1
            self._selector.begin(candidates, round_number)
            self._state = _State.OPEN
            self._changed.notify_all()

    def result(self, wait: float = 0.0) -> Swap | None:
        """What the offer has brought, or ``None`` if it has brought nothing yet.

        Args:
            wait: seconds to wait for it at most. A peer that has ended or is silent is not waited for.

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
        """Close the offer. If an exchange is under way, wait for its end, and return what it has brought."""
        with self._changed:
            self._wait_for_exchange()
            self._state = _State.CLOSED
            return self._swap

    def _wait_for_exchange(self) -> None:
        self._changed.wait_for(lambda: self._state is not _State.ENGAGED, EXCHANGE * self.peers.session.deadline)

    def pause(self) -> None:
        """Exchange nothing more for now. Waits for an exchange that is under way."""
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
        """Whether something is offered that has not been exchanged."""
        with self._changed:
            return self._state is not _State.CLOSED

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._changed:
            self._closed = True
            self._state = _State.CLOSED
            self._changed.notify_all()
        self.peers.close()

    # -- the peer that asks ------------------------------------------------------------------------

    def _ask_until_closed(self) -> None:
        """Ask for an exchange of what is offered; in a thread. :meth:`result` raises its failure."""
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
                peer, offer, weight = self._selector.choose(), self._offers, self._weight
                round_number = self._selector.round_number
                if peer is None:
                    continue  # it has gone in this moment
                self._state, self._with, self._asking, self._agreed = _State.ENGAGED, peer, True, False
            swap, missed, gone_on, began = None, False, False, time.monotonic()
            try:
                swap = self._swapping.ask(peer, round_number, weight, self._peer_agrees)
            except GoneOnError:
                gone_on = True
            except (OSError, RefusedError) as error:
                missed = True
                self.peers.failed(peer, began, error)
            with self._changed:
                if self._asking:  # else it was asked itself meanwhile, and said yes
                    self._asking = False
                    self._end(swap)
                if offer != self._offers:
                    continue  # exchanged when the peer asked for it: the answer says nothing about the next offer
                if missed:
                    self.misses[peer] += 1
                if swap is None:
                    self._selector.back_off(missed)
                if self._state is _State.OPEN and round_number != ANY and (missed or gone_on):
                    self._state = _State.CLOSED
                    self._changed.notify_all()

    def _may_ask(self) -> bool:
        able = self._state is _State.OPEN and bool(self._selector.asked) and not self._paused
        return self._closed or (able and not self._waiting)

    def _peer_agrees(self) -> bool:
        """The peer that was asked has said yes; whether this one still wants to exchange with it."""
        with self._changed:
            self._agreed |= self._asking
            self._changed.notify_all()
            return self._asking

    # -- the peer that is asked --------------------------------------------------------------------

    def _attend(self, channel: Channel, ask: Message) -> None:
        """Exchange with a peer that asks for it, if something is offered."""
        if ask.kind is not Kind.ASK or len(ask.numbers) != 3:
            raise RefusedError("uninvited")
        if not self._engage(ask):
            channel.send(Kind.NO, (self._selector.round_number,), (), self.peers.soon())
            return
        swap = None
        try:
            offer = self._selector.round_number, self._weight
            swap = self._swapping.answer(channel, ask.sender, ask.numbers[2], offer)
        finally:
            with self._changed:
                self._end(swap)
                if swap is None:
                    self.misses[ask.sender] += 1
        channel.send(Kind.DONE, (), (), self.peers.soon())

    def _engage(self, ask: Message) -> bool:
        """Whether this peer exchanges with one that asks."""
        asked_for = ask.numbers[0]
        with self._changed:
            own = self._selector.round_number
            if asked_for >= own:  # a peer that lags behind would be waited for without success
                self.peers.attendance.heard(ask.sender)
            if ask.sender < self.me and self._with != ask.sender and asked_for == own:
                # It waits while this peer asks another. If all that ask were refused, peers that ask each other in a
                # circle could do so for ever. Only peers with a lower number wait, so they never wait in a circle.
                self._waiting += 1
                self._changed.wait_for(lambda: not self._asking or self._agreed, _PATIENCE)
                self._waiting -= 1
                own = self._selector.round_number
            # Of two peers that ask each other, the question of the first counts.
            crossing = self._asking and not self._agreed and self._with == ask.sender and ask.sender < self.me
            willing = (self._state is _State.OPEN or crossing) and not self._paused
            if willing and asked_for == own:
                self._state, self._with, self._asking = _State.ENGAGED, ask.sender, False
                self._selector.met(ask.sender)
                return True
            self._selector.wants(ask.sender, asked_for)
            if self._state is _State.OPEN and ANY != own < asked_for and ask.sender in self._selector.candidates:
                self._state = _State.CLOSED  # the other has gone on to a later round
            self._changed.notify_all()
            return False

    # -- both --------------------------------------------------------------------------------------

    def _end(self, swap: Swap | None) -> None:
        if swap is not None:
            self._swap, self._state = swap, _State.CLOSED
        elif self._state is _State.ENGAGED:
            self._state = _State.OPEN
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
