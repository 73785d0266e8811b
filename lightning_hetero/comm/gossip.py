"""Gossip transport: exchanges with deadlines between two replicas, both ways or one way."""

import random
import threading
import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.columns import LayoutInColumns
from lightning_hetero.comm.gossip_peers import (
    EXCHANGE,
    MessageKind,
    PeerTransport,
)
from lightning_hetero.comm.transport import RefusedError, VectorChannel, VectorMessage
from lightning_hetero.errors import CommunicationError

ANY = -1.0  # round of an offer that any peer may take, whatever its own round
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds between two questions
_SECOND_ASKS = 1.0  # seconds until the second of a pair asks by itself; at most half a deadline


class PeerSelector:
    """Chooses peers for one offer at a time: those that asked this peer without success first, then any at random.

    After each refusal it waits longer before it asks again (backoff). Little is lost by that: a peer that refused asks
    by itself as soon as it has something to offer.

    Args:
        me: this peer.
        limit: seconds within which a message must be answered.
        there: peers that can be reached.

    Attributes:
        round_number: of the offer.
        candidates: peers of the offer, including those that cannot be reached.
    """

    def __init__(self, me: int, limit: float, there: Container[int]) -> None:
        self._me, self._limit, self._there = me, limit, there
        self.round_number, self.candidates = ANY, list[int]()
        self._wanted: dict[int, float] = {}  # peers that asked without success, with their round
        self._random = random.Random()  # the user's own draws do not depend on when others ask
        self._pause, self._at = _FIRST_PAUSE, 0.0

    def begin(self, candidates: Sequence[int], round_number: float) -> None:
        """Begin a new offer. In a round, the second peer of a pair first waits for the question of the first."""
        self.candidates, self.round_number, self._pause = list(candidates), round_number, _FIRST_PAUSE
        second = round_number != ANY and self._me > max(candidates, default=-1) and not self._wanting()
        self._at = time.monotonic() + (min(self._limit / 2, _SECOND_ASKS) if second else 0.0)

    @property
    def asked(self) -> list[int]:
        """The peers of the offer that can be reached."""
        return [peer for peer in self.candidates if peer in self._there]

    @property
    def awaits(self) -> bool:
        """Whether the offer can still be taken: some of its peers can be reached, or any peer may take it."""
        return not self.candidates or bool(self.asked)

    def early(self) -> float:
        """Seconds until the next question is due."""
        return self._at - time.monotonic()

    def choose(self) -> int | None:
        """A peer to ask now; ``None``: no peer can be reached."""
        if not (asked := self._wanting() or self.asked):
            return None
        peer = self._random.choice(asked)
        self.met(peer)
        return peer

    def back_off(self, missed: bool) -> None:
        """Wait longer before the next question.

        Args:
            missed: whether the exchange failed; otherwise the peer refused it.
        """
        if not self._wanting():
            self._pause = _LONGEST_PAUSE if missed else min(2 * self._pause, _LONGEST_PAUSE)
            self._at = max(self._at, time.monotonic() + self._random.uniform(0.5, 1.0) * self._pause)

    def wants(self, peer: int, round_number: float) -> None:
        """Remember that a peer asked for a round without success."""
        self._wanted[peer] = round_number

    def met(self, peer: int) -> None:
        """Forget that a peer asked without success."""
        self._wanted.pop(peer, None)

    def _wanting(self) -> list[int]:
        return [peer for peer in self.candidates if self._wanted.get(peer) == self.round_number]


class PairResult(NamedTuple):
    """Result of an exchange with a peer.

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


class PeerMovedOnError(Exception):
    """The peer that was asked has gone on to a later round."""


_PATIENCE = 0.1  # seconds that a peer that asks waits for the answer to this peer's own question


class _State(Enum):
    CLOSED = 1  # nothing is offered, or it has been exchanged
    OPEN = 2
    ASKING = 3  # a peer has been asked, and has not answered; in this and all that follow others are refused
    AGREED = 4  # it has said yes
    ANSWERING = 5  # a peer that has asked

    @property
    def engaged(self) -> bool:
        """Whether there is one peer with which to exchange."""
        return self not in (_State.CLOSED, _State.OPEN)


class PairTransport(PeerTransport):
    """Offers values, and exchanges them with one peer at a time.

    A thread asks other peers. Other threads, one per connection, answer the questions of others.

    An exchange takes six messages: ``ASK, YES; SWAP, SWAP; COMMIT, DONE``. The two in the middle travel at the same
    time. The peer that was asked counts the exchange when ``COMMIT`` comes, if that is in time. The one that asked
    counts it when ``DONE`` comes. If ``DONE`` does not come, it connects again and asks whether the exchange has
    counted. So both count it or neither does. Only a peer that dies in this moment, or is frozen for longer than that,
    may leave the other with a wrong answer.

    Peers of one host write their values into shared memory. The messages are the same, without vectors.

    Attributes:
        misses: of each peer, exchanges with it that failed: it was late, frozen, dead or unreachable.
        inbox: the values of a peer.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.misses = Counter[int]()
        self._state, self._with = _State.CLOSED, -1
        self._offers = 0  # made so far
        self._failure: BaseException | None = None  # that has ended the thread that asks
        self._waiting = 0  # peers that have asked, and wait for the answer to this peer's own question
        self._paused = False
        self._weight = 1.0
        self._swap: PairResult | None = None
        self.inbox = [torch.empty_like(value) for value in self.outgoing]
        self._selector = PeerSelector(self.me, self.session.deadline, self.liveness)
        threading.Thread(target=self._ask_until_closed, name="hetero-gossip-asker", daemon=True).start()

    def offer(self, weight: float, candidates: Sequence[int], round_number: float = ANY) -> None:
        """Offer what lies in ``outgoing``, until it is exchanged or withdrawn. Returns at once.

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

    def result(self, wait: float = 0.0) -> PairResult | None:
        """The result of the offer, or ``None`` if there is none yet.

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
        waits = self._state.engaged or (self._state is _State.OPEN and self._selector.awaits)
        return not waits

    def withdraw(self) -> PairResult | None:
        """Close the offer. If an exchange is under way, wait for its end, and return what it has brought."""
        with self._changed:
            self._wait_for_exchange()
            self._state = _State.CLOSED
            return self._swap

    def _wait_for_exchange(self) -> None:
        self._changed.wait_for(lambda: not self._state.engaged, EXCHANGE * self.session.deadline)

    def take_misses(self) -> list[int]:
        """The peers of exchanges that have failed since the last call; a peer may be there more than once."""
        with self._changed:
            misses, self.misses = self.misses, Counter()
        return list(misses.elements())

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

    @override
    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._state = _State.CLOSED
            self._changed.notify_all()
        super().close()

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
                self._state, self._with = _State.ASKING, peer
            swap, missed, gone_on, began = None, False, False, time.monotonic()
            try:
                swap = self._ask(peer, round_number, weight)
            except PeerMovedOnError:
                gone_on = True
            except (OSError, RefusedError) as error:
                missed = True
                self.failed(peer, began, error)
            with self._changed:
                if self._state in (_State.ASKING, _State.AGREED):  # else it was asked itself meanwhile, and said yes
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

    def _ask(self, peer: int, round_number: float, weight: float) -> PairResult | None:
        """Ask a peer for an exchange, and exchange; ``None``: it has said no.

        Raises:
            PeerMovedOnError: the peer has gone on to a later round.
            OSError: the exchange broke off, or was too late. It does not count.
            RefusedError: a message came that must not be believed. The exchange does not count.
        """
        channel, number = self.channel(peer), next(self.numbers)
        numbers = round_number, weight, number
        sent = channel.send(MessageKind.ASK, numbers)
        reply = channel.receive()
        if reply.kind != MessageKind.YES:
            if reply.numbers and round_number != ANY and reply.numbers[0] > round_number:
                raise PeerMovedOnError
            return None
        if not self._peer_agrees():
            raise RefusedError("uninvited")
        weight, more = self._exchange(channel, numbers, 2)
        sent += more + self.commit(channel, number)
        self.liveness.met(peer)
        return PairResult(peer, weight, self.inbox, sent)

    def _peer_agrees(self) -> bool:
        """The peer that was asked has said yes; whether this one still wants to exchange with it."""
        with self._changed:
            if self._state is _State.ASKING:
                self._state = _State.AGREED
            self._changed.notify_all()
            return self._state is _State.AGREED

    # -- the peer that is asked --------------------------------------------------------------------

    @override
    def _attend(self, channel: VectorChannel, ask: VectorMessage) -> None:
        if ask.kind != MessageKind.ASK or len(ask.numbers) != 3:
            raise RefusedError("uninvited")
        if not self._engage(channel.peer, ask.numbers[0]):
            channel.send(MessageKind.NO, (self._selector.round_number,))
            return
        swap, offer = None, (self._selector.round_number, self._weight)
        try:
            sent = channel.send(MessageKind.YES)
            weight, more = self._exchange(channel, offer, 3)
            self.await_commit(channel, ask.numbers[2])
            swap = PairResult(channel.peer, weight, self.inbox, sent + more)
        finally:
            with self._changed:
                self._end(swap)
                if swap is None:
                    self.misses[channel.peer] += 1
        channel.send(MessageKind.DONE)

    def _engage(self, peer: int, asked_for: float) -> bool:
        """Whether this peer exchanges with one that asks for a round."""
        with self._changed:
            own = self._selector.round_number
            if asked_for >= own:  # a peer that lags behind would be waited for without success
                self.liveness.heard(peer)
            if peer < self.me and self._with != peer and asked_for == own:
                # It waits while this peer asks another. If all that ask were refused, peers that ask each other in a
                # circle could do so forever. Only peers with a lower number wait, so they never wait in a circle.
                self._waiting += 1
                self._changed.wait_for(lambda: self._state is not _State.ASKING, _PATIENCE)
                self._waiting -= 1
                own = self._selector.round_number
            # Of two peers that ask each other, the question of the first counts.
            crossing = self._state is _State.ASKING and self._with == peer and peer < self.me
            willing = (self._state is _State.OPEN or crossing) and not self._paused
            if willing and asked_for == own:
                self._state, self._with = _State.ANSWERING, peer
                self._selector.met(peer)
                return True
            self._selector.wants(peer, asked_for)
            if self._state is _State.OPEN and ANY != own < asked_for and peer in self._selector.candidates:
                self._state = _State.CLOSED  # the other has gone on to a later round
            self._changed.notify_all()
            return False

    # -- both --------------------------------------------------------------------------------------

    def _exchange(self, channel: VectorChannel, numbers: Sequence[float], expected: int) -> tuple[float, int]:
        """Send what lies in ``outgoing``, and fill the inbox; the peer's weight, and the bytes sent."""
        until, box = self.deadline_in(), self.boxes.get(channel.peer)
        vectors = self.outgoing if box is None else ()
        theirs, sent = channel.swap(MessageKind.SWAP, numbers, vectors, lambda _: self.inbox)
        if theirs.kind != MessageKind.SWAP or len(theirs.numbers) != expected:
            raise RefusedError("uninvited")
        if box is not None:
            for own, value in zip(self.inbox, box.vectors, strict=True):
                own.copy_(value)
        if time.monotonic() > until:  # perhaps this process was frozen, and the peer has gone on
            raise TimeoutError("too late")
        return theirs.numbers[1], sent

    def _end(self, swap: PairResult | None) -> None:
        if swap is not None:
            self._swap, self._state = swap, _State.CLOSED
        elif self._state.engaged:
            self._state = _State.OPEN
        self._changed.notify_all()


def part_of_the_way(theirs: float, own: float) -> float:
    """The part of the way that a replica of one weight goes towards one of another."""
    return theirs / (theirs + own) if theirs else 0.0


class PairsInColumns:
    """Offers to peers, as :class:`PairTransport` does, in several columns: each column has a peer of its own.

    If only some parts are exchanged, the others count as equal, so that nothing moves them.

    Args:
        columns: a transport for each.
        like: vectors of the sizes and dtypes to come, on the CPU.
        layout: cuts them into the parts.

    Attributes:
        outgoing: where this rank writes what it offers.
    """

    def __init__(self, columns: Sequence[PairTransport], like: Sequence[Tensor], layout: LayoutInColumns) -> None:
        self._columns, self._layout = columns, layout
        self._found: list[PairResult | None] = []
        self.outgoing = [torch.empty_like(value) for value in like]
        self._inbox = [torch.empty_like(value) for value in like]

    def offer(self, weight: float, candidates: Sequence[int], round_number: float) -> None:
        """Offer what lies in ``outgoing``; see :meth:`PairTransport.offer`."""
        for number, column in enumerate(self._columns):
            for place, part in zip(column.outgoing, self._layout.parts(self.outgoing, number), strict=True):
                place.copy_(part)
            column.offer(weight, candidates, round_number)

    def result(self, wait: float = 0.0) -> PairResult | None:
        """The result of the offer, or ``None`` if not all parts have one yet; see :meth:`PairTransport.result`."""
        until = time.monotonic() + wait
        found = [column.result(max(until - time.monotonic(), 0.0)) for column in self._columns]
        return None if None in found else self._whole(found)

    def withdraw(self) -> PairResult | None:
        """Close the offer, and return what it has brought; see :meth:`PairTransport.withdraw`."""
        found = [column.withdraw() for column in self._columns]
        return self._whole(found) if any(found) else None

    def _whole(self, found: Sequence[PairResult | None]) -> PairResult:
        pairs = list(zip(self._columns, found, strict=True))
        self._layout.put([own.outgoing if swap is None else swap.vectors for own, swap in pairs], self._inbox)
        self._found, there = list(found), [swap for swap in found if swap is not None]
        return PairResult(there[0].peer, there[0].weight, self._inbox, sum(swap.sent for swap in there))

    def scale(self, difference: Sequence[Tensor], weight: float) -> float:
        """Multiply the difference from the peers by the part of the way to go, which depends on the peer.

        Args:
            difference: from what the latest result has brought.
            weight: of this replica.

        Returns:
            The part of the way that is left: 1, or 0 if no peer has any weight.
        """
        parts = [self._layout.parts(difference, number) for number in range(len(self._columns))]
        ways = [0.0 if swap is None else part_of_the_way(swap.weight, weight) for swap in self._found]
        for of_column, way in zip(parts, ways, strict=True):
            for part in of_column:
                part.mul_(way)
        self._layout.put(parts, difference)
        return float(any(ways))

    def take_misses(self) -> list[int]:
        """The peers of exchanges that have failed since the last call, each once for several columns."""
        misses = Counter[int]()
        for column in self._columns:
            misses |= Counter(column.take_misses())
        return list(misses.elements())

    def pause(self) -> None:
        """Exchange nothing more for now. Waits for exchanges that are under way."""
        for column in self._columns:
            column.pause()

    def resume(self) -> None:
        """Go on, after :meth:`pause`."""
        for column in self._columns:
            column.resume()

    def lose(self, peer: int) -> None:
        """Go on without a peer."""
        for column in self._columns:
            column.lose(peer)

    def close(self) -> None:
        """Close all connections; idempotent."""
        for column in self._columns:
            column.close()


class ReceivedPush(NamedTuple):
    """Push that has come from a peer.

    Attributes:
        peer: the one that sent it.
        round_number: round in which it was sent.
        weight: that came with the vectors.
        vectors: give them back with :meth:`PushTransport.recycle`.
    """

    peer: int
    round_number: int
    weight: float
    vectors: list[Tensor]


class PushTransport(PeerTransport):
    """Sends values to peers and collects what comes from them.

    A push takes four messages: ``PUSH, YES; COMMIT, DONE``. The receiver counts it when ``COMMIT`` comes, if that is in
    time. The sender counts it as gone when ``DONE`` comes. If ``DONE`` does not come, it connects again and asks
    whether the push has counted. What has not gone still belongs to the sender. A push of weight 0 has no vectors: it
    only says that its sender has reached the round.

    From each peer, one push more than there are peers can wait to be collected. Further ones are refused
    (``PUSH, NO``): this peer no longer collects them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrived: list[ReceivedPush] = []
        self._free: list[list[Tensor]] = []
        self._latest: dict[int, int] = {}  # of each peer, the latest round from which something has come
        self._missed: dict[int, int] = {}  # and the latest in which nothing had

    def push(self, peer: int, round_number: int, weight: float) -> int | None:
        """Give a peer what lies in ``outgoing``; blocks.

        Args:
            peer: the one to give it to.
            round_number: of this peer.
            weight: to send with the vectors; 0: nothing is sent but the round.

        Returns:
            The bytes sent over the network; ``None``: the vectors have not gone.
        """
        if peer not in self.liveness:
            return None
        began = time.monotonic()
        try:
            channel, number = self.channel(peer), next(self.numbers)
            vectors = self.outgoing if weight and peer not in self.boxes else ()
            sent = channel.send(MessageKind.PUSH, (round_number, weight, number), vectors)
            answer = channel.receive().kind
            if answer == MessageKind.NO:
                return None
            if answer != MessageKind.YES:
                raise RefusedError("uninvited")
            sent += self.commit(channel, number)
        except (OSError, RefusedError) as error:
            self.failed(peer, began, error)
            return None
        self.liveness.met(peer)
        return sent

    def collect(self, round_number: int, sources: Sequence[int], wait: float) -> list[ReceivedPush]:
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
            there = self.liveness
            return [p for p in missing() if p in there and self._latest.get(p, -1) >= self._missed.get(p, -1)]

        with self._changed:
            self._changed.wait_for(lambda: not awaited(), wait)
            self._missed.update(dict.fromkeys(missing(), round_number))
            later = range(round_number + 1, round_number + self.count + 1)
            taken = sorted((p for p in self._arrived if p.round_number not in later), key=lambda push: push[:2][::-1])
            self._arrived = [push for push in self._arrived if push.round_number in later]
            return taken

    def waiting(self, remove: bool = False) -> list[ReceivedPush]:
        """Pushes that have come and have not been taken.

        Args:
            remove: whether they are taken now.
        """
        with self._changed:
            arrived = list(self._arrived)
            if remove:
                self._arrived = []
            return arrived

    def put(self, pushes: Iterable[ReceivedPush]) -> None:
        """Let these have come, as in a checkpoint."""
        with self._changed:
            for push in pushes:
                self._arrive(push)

    def _arrive(self, push: ReceivedPush) -> None:
        self._arrived.append(push)
        self._latest[push.peer] = max(push.round_number, self._latest.get(push.peer, -1))

    def recycle(self, pushes: Sequence[ReceivedPush]) -> None:
        """Give back the memory of pushes that are not needed any more."""
        with self._changed:
            self._free += [push.vectors for push in pushes if push.vectors]

    @override
    def _attend(self, channel: VectorChannel, push: VectorMessage) -> None:
        if push.kind != MessageKind.PUSH or len(push.numbers) != 3:
            raise RefusedError("uninvited")
        round_number, weight, number = push.numbers
        vectors = list(push.vectors)
        if bool(vectors) is not (bool(weight) and channel.peer not in self.boxes):
            raise RefusedError("size")
        if weight and channel.peer in self.boxes:
            vectors = self._memory()
            for own, value in zip(vectors, self.boxes[channel.peer].vectors, strict=True):
                own.copy_(value)
        came = ReceivedPush(channel.peer, int(round_number), weight, vectors)
        self.liveness.heard(channel.peer)
        if self._full(channel.peer):
            self.recycle([came])
            channel.send(MessageKind.NO)
            return
        channel.send(MessageKind.YES)
        self.await_commit(channel, number)
        with self._changed:
            self._arrive(came)
            self._changed.notify_all()
        channel.send(MessageKind.DONE)

    def _full(self, peer: int) -> bool:
        with self._changed:
            return sum(push.peer == peer for push in self._arrived) > self.count

    @override
    def _place(self, kind: int) -> Sequence[Tensor]:
        if kind != MessageKind.PUSH:
            raise RefusedError("uninvited")
        return self._memory()

    def _memory(self) -> list[Tensor]:
        with self._changed:
            return self._free.pop() if self._free else [torch.empty_like(v) for v in self.outgoing]
