"""Parameter center in a thread of one rank: clients send it their values, and get back the difference from it."""

import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.centers.base import (
    Center,
    CenterLayout,
    CenterPart,
    CenterRule,
    PushPull,
    RoundRule,
    copy_vectors,
)
from lightning_hetero.comm.centers.rounds import RoundClock
from lightning_hetero.comm.compression import DTYPES, Encoding, Narrow, low_bit_encoding
from lightning_hetero.comm.failures import cause, deadline
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.object_collectives import finite
from lightning_hetero.comm.threads import abort_too, close_at_exit
from lightning_hetero.comm.transport import HostPort, Listener, connect
from lightning_hetero.errors import CommunicationError, not_none


class CenterWire:
    """Sends values as they are: those of the client to the host, and their difference from the center back.

    Args:
        group: process group of the host and its clients.
        other: the rank at the other end.

    Attributes:
        sent: bytes sent so far.
    """

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group, self._other = group, other
        self.sent = 0

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the other end."""
        dist.send(tensor, self._other, group=self._group)
        self.sent += tensor.nbytes

    def receive(self, tensor: Tensor) -> None:
        """Receive a tensor from the other end."""
        dist.recv(tensor, self._other, group=self._group)

    def start(self, values: Sequence[Tensor]) -> None:
        """On both ends: begin, or begin again.

        Args:
            values: of the center, with which the client begins.
        """

    def fits(self, values: Sequence[Tensor]) -> bool:
        """On the client: whether its values fit into this format. If not, zeros will be sent in their place."""
        return True

    def send_values(self, values: list[Tensor], counts: bool = True) -> None:
        """On the client: send its values, after :meth:`fits`; they may not count."""
        for value in values:
            self.send(value)

    def receive_values(self, values: list[Tensor]) -> None:
        """On the host: receive the values of the client."""
        for value in values:
            self.receive(value)

    def round_difference(self, difference: list[Tensor]) -> bool:
        """On the host: round a difference as the client will see it. ``False``: it does not fit, and becomes 0."""
        return True

    def send_difference(self, difference: list[Tensor]) -> None:
        """On the host: send the difference from the center."""
        for value in difference:
            self.send(value)

    def receive_difference(self, difference: list[Tensor]) -> None:
        """On the client: receive the difference from the center."""
        for value in difference:
            self.receive(value)


class NarrowCenterWire(CenterWire):
    """Sends differences in 16 bits: from the values that both ends know, those of the center at the last push-pull.

    Both ends do the same arithmetic on what was sent, so they always know the same values. The values themselves are
    never rounded.

    Args:
        group: process group of the host and its clients.
        other: the rank at the other end.
        dtype: a dtype of 16 bits.
    """

    def __init__(self, group: dist.ProcessGroup, other: int, dtype: torch.dtype) -> None:
        super().__init__(group, other)
        self._dtype = dtype
        self._known: list[Tensor] = []
        self._short: list[Tensor] = []

    @override
    def start(self, values: Sequence[Tensor]) -> None:
        self._known = [value.clone() for value in values]
        self._short = [torch.empty(value.numel(), dtype=self._dtype) for value in values]

    @override
    def fits(self, values: Sequence[Tensor]) -> bool:
        for value, known, short in zip(values, self._known, self._short, strict=True):
            short.copy_(value - known)
        return self._finite()

    def _finite(self) -> bool:
        if finite(self._short):
            return True
        for short in self._short:
            short.zero_()
        return False

    @override
    def send_values(self, values: list[Tensor], counts: bool = True) -> None:
        for known, short in zip(self._known, self._short, strict=True):
            self.send(short)
            known.add_(short)

    @override
    def receive_values(self, values: list[Tensor]) -> None:
        for value, known, short in zip(values, self._known, self._short, strict=True):
            self.receive(short)
            value.copy_(known.add_(short))

    @override
    def round_difference(self, difference: list[Tensor]) -> bool:
        for value, short in zip(difference, self._short, strict=True):
            short.copy_(value)
        well = self._finite()
        for value, short in zip(difference, self._short, strict=True):
            value.copy_(short)
        return well

    @override
    def send_difference(self, difference: list[Tensor]) -> None:
        for known, short in zip(self._known, self._short, strict=True):  # as rounded
            self.send(short)
            known.sub_(short)

    @override
    def receive_difference(self, difference: list[Tensor]) -> None:
        for value, known, short in zip(difference, self._known, self._short, strict=True):
            self.receive(short)
            known.sub_(short)
            value.copy_(short)


class ChangeWire(CenterWire):
    """Sends changes in few bits: those that a client brings, and where the center is, from what the client knows of it.

    What a message of the client leaves out is added to its next one. What an answer leaves out is a part of the next
    one anyway: both ends know what the client knows. Answers to ``topk`` come in 2 bits: momentum moves all values of
    the center, and a few of them at a time would not keep up.

    Args:
        group: process group of the host and its clients.
        other: the rank at the other end.
        wire: any but fp32.
        part: of the center.
        hosts: whether this end is the host.
    """

    def __init__(self, group: dist.ProcessGroup, other: int, wire: str, part: CenterPart, hosts: bool) -> None:
        super().__init__(group, other)
        dtype, self._part, self._hosts = DTYPES.get(wire), part, hosts
        self._changes = Narrow(dtype) if dtype else low_bit_encoding(wire)
        self._answers = low_bit_encoding("2bit") if wire.startswith("topk") else self._changes
        self._known, self._tells = part.known, False

    @override
    def start(self, values: Sequence[Tensor]) -> None:
        if self._hosts:
            self._known = [value.clone() for value in values[: len(self._part.known)]]
        else:  # after a resume it goes on from another center than that of now
            self._tells = not all(map(torch.equal, self._known, values))

    def _exact(self, values: list[Tensor]) -> list[Tensor]:
        """Values that travel as they are: buffers, and vectors that only the rule knows."""
        lengths = [*self._part.lengths, *[0] * (len(values) - len(self._known))]
        return [rest for value, length in zip(values, lengths, strict=True) if len(rest := value[length:])]

    @override
    def send_values(self, values: list[Tensor], counts: bool = True) -> None:
        self.send(torch.tensor([float(self._tells)], dtype=torch.float64))
        for known in self._known if self._tells else ():
            self.send(known)
        self._tells = False
        for value, rest in zip(values, self._part.left_out, strict=False):
            change = rest.mul_(self._changes.decay).add_(value[: len(rest)]) if counts else torch.zeros_like(rest)
            self._send_coded(change, self._changes)
        for exact in self._exact(values):
            self.send(exact)

    @override
    def receive_values(self, values: list[Tensor]) -> None:
        self.receive(tells := torch.empty(1, dtype=torch.float64))
        for known in self._known if tells else ():
            self.receive(known)
        for value, length in zip(values, self._part.lengths, strict=False):
            value[:length] = self._received(length, self._changes)
        for exact in self._exact(values):
            self.receive(exact)

    @override
    def send_difference(self, difference: list[Tensor]) -> None:
        for value, known, length in zip(difference, self._known, self._part.lengths, strict=False):
            message = self._send_coded((value[:length] - known[:length]).float(), self._answers)
            known[:length].add_(self._decoded(message, length, self._answers))
        for exact in self._exact(difference):
            self.send(exact)

    @override
    def receive_difference(self, difference: list[Tensor]) -> None:
        for value, known, length in zip(difference, self._known, self._part.lengths, strict=False):
            torch.add(known[:length], self._received(length, self._answers), out=value[:length])
        for exact in self._exact(difference):
            self.receive(exact)

    def _send_coded(self, change: Tensor, encoding: Encoding) -> Tensor:
        """Send values, in which what the message leaves out remains; the message."""
        message = torch.empty(encoding.bytes(len(change)), dtype=torch.uint8)
        encoding.encode(change, message)
        self.send(message)
        return message

    def _received(self, length: int, encoding: Encoding) -> Tensor:
        self.receive(message := torch.empty(encoding.bytes(length), dtype=torch.uint8))
        return self._decoded(message, length, encoding)

    @staticmethod
    def _decoded(message: Tensor, length: int, encoding: Encoding) -> Tensor:
        encoding.add(message, values := torch.zeros(length))
        return values


class Wakeup:
    """The host's end: a connection from each client, on which every byte announces a request.

    Args:
        interface: address to listen on.
    """

    def __init__(self, interface: str) -> None:
        self._listener = Listener(interface, secrets.token_hex(16), made=abort_too)
        self._clients: dict[int, socket.socket] = {}
        self._end_read, self._end_write = socket.socketpair()

    @property
    def address(self) -> tuple[HostPort, str]:
        """The address for clients, and the token."""
        return self._listener.address, self._listener.token

    def accept_clients(self, ranks: Iterable[int], seconds: float) -> None:
        """Let clients connect. Other connections are closed.

        Args:
            ranks: of the clients.
            seconds: longest wait for them.

        Raises:
            OSError: not all clients have connected in time.
        """
        until, missing = time.monotonic() + seconds, set(ranks)
        self._listener.peers = len(missing)
        try:
            while missing:
                callers = self._listener.accept(max(until - time.monotonic(), 0.0))
                if not callers and time.monotonic() >= until:
                    raise TimeoutError(f"rank(s) {sorted(missing)} did not come within {seconds:g} s")
                for connection, rank in callers:
                    if rank in missing:
                        missing.remove(rank)
                        self._clients[rank] = connection
                    else:
                        connection.close()
        finally:
            self._listener.end()

    def wait(self, ranks: Iterable[int] | None = None, seconds: float | None = None) -> int | None:
        """Wait for a request.

        Args:
            ranks: clients to wait for. Default: all that are connected.
            seconds: longest wait. Default: no limit.

        Returns:
            The rank of a client that has announced a request; of several, the one that was returned longest ago.
            ``None``: there is none yet, because the time is up, or :meth:`interrupt` or :meth:`end` has ended the wait.

        Raises:
            ConnectionError: a client has ended.
        """
        there = self._clients if ranks is None else {rank: self._clients[rank] for rank in ranks}
        ready = _ready([self._end_read, *there.values()], seconds)
        if self._end_read in ready:
            self._end_read.recv(1)
            return None
        if not ready:
            return None
        rank = next(rank for rank, connection in there.items() if connection in ready)
        if not there[rank].recv(1):
            raise ConnectionError(f"rank {rank} has ended")
        self._clients[rank] = self._clients.pop(rank)  # the last one now: fast ones keep nobody waiting
        return rank

    def remove(self, rank: int) -> None:
        """Forget a client, which has left."""
        self._clients.pop(rank).close()

    def interrupt(self) -> None:
        """End a wait once, from another thread."""
        if self._end_write.fileno() >= 0:
            self._end_write.send(b"!")

    def end(self) -> None:
        """End all waits, from another thread; idempotent."""
        if self._end_write.fileno() >= 0:
            self._end_write.close()

    def close(self) -> None:
        """Close all connections. Only the thread that waits may call this."""
        self._listener.end()
        for connection in (self._end_read, *self._clients.values()):
            connection.close()


class WakeupClient:
    """A client's end.

    Args:
        address: of the host, and the token.
        rank: this process.
        seconds: longest wait for the host.
    """

    def __init__(self, address: tuple[HostPort, str], rank: int, seconds: float) -> None:
        self._connection = connect(*address, rank, seconds)
        abort_too(self._connection)

    def announce(self) -> None:
        """Announce a request.

        Raises:
            OSError: the host has ended, or serves no more requests.
        """
        if self.host_ended:
            raise ConnectionError("its host has ended")
        self._connection.sendall(b"!")

    @property
    def host_ended(self) -> bool:
        """Whether the host has ended, or serves no more requests."""
        # The host never sends anything: if there is something to read, it is the end of the connection.
        return self._connection.fileno() >= 0 and bool(_ready([self._connection], 0.0))

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._connection.close()


def _ready(connections: Iterable[socket.socket], seconds: float | None = None) -> list[socket.socket]:
    """The connections that have something to read or have ended. Waits for one, by default without a limit."""
    with selectors.DefaultSelector() as selector:  # `select` itself fails where a process has a thousand files open
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        return [key.data for key, _ in selector.select(seconds)]


_PUSH_PULL, _LEAVE = 0.0, 1.0  # kinds of requests
_LONGEST_WAIT = 3600.0  # seconds; `select` has a limit, and a server may look again at any time


class _Unanswered(NamedTuple):
    """Push-pull of a client, which is answered when its round has closed."""

    rank: int
    part: int
    turn: int
    learned: PushPull


class ThreadCenter(Center):
    """A center in a thread of its host. Of the clients that wait it serves the one that was served longest ago.

    In a push-pull a few numbers and the values travel in each direction.

    Args:
        layout: which ranks use it.
        groups: makes the process group of its clients.
        interface: address to listen on, of the network between the replicas.
        in_turn: serve replicas in their order instead, over and over (round robin).
        wire: number format of the values.
        parts: that are exchanged one by one. Default: all of it, by the elastic rule.
    """

    def __init__(
        self,
        layout: CenterLayout,
        groups: Groups,
        interface: str,
        in_turn: bool = False,
        wire: str = "fp32",
        parts: Sequence[CenterPart] = (CenterPart(),),
    ) -> None:
        super().__init__(layout, parts)
        self._groups, self._interface, self._in_turn, self._wire = groups, interface, in_turn, wire
        self._wakeup: Wakeup | None = None  # on the host
        self._wakeup_client: WakeupClient | None = None  # elsewhere
        self._changed = threading.Condition()  # guards all that follows
        self._values: list[Tensor] = []
        self._counts = [0] * len(layout.leaders)
        self._next = 0  # the replica to serve next, if in turn
        self._clocks = {  # of the parts that have rounds, by number
            number: RoundClock(part.rule.quorum, len(layout.leaders))
            for number, part in enumerate(parts)
            if isinstance(part.rule, RoundRule)
        }
        self._unanswered: list[_Unanswered] = []  # push-pulls of clients whose rounds are open; the server's own
        self._host_left = self._closed = False
        self._error: BaseException | None = None
        self._wires: dict[int, list[CenterWire]] = {}  # of each part, by the rank at the other end
        self._server: threading.Thread | None = None

    @override
    def open(self, values: Sequence[Tensor]) -> None:
        layout, seconds = self.layout, self.layout.timeout.total_seconds()
        if layout.is_host:
            self._wakeup = Wakeup(self._interface)
        address = gather(self._wakeup and self._wakeup.address, "the center's address", layout.group)[layout.place]
        if not layout.is_client:
            return
        group = self._groups.get("the center", layout.leaders)
        with self._in_time("reach"):
            if self._wakeup is None:
                self._wakeup_client = WakeupClient(address, layout.rank, seconds)
            else:
                self._wakeup.accept_clients(layout.leaders[1:], seconds)
        self._wires = {
            rank: [self._wire_to(rank, group, part) for part in self.parts]
            for rank in (layout.leaders[1:] if layout.is_host else [layout.host])
        }
        self._values = [value.clone() for value in values] if layout.is_host else []
        self.write(values, self._counts)
        if layout.is_host and self._wires:
            close_at_exit(self)
            self._server = threading.Thread(target=self._serve, name="hetero-center", daemon=True)
            self._server.start()

    def _wire_to(self, other: int, group: dist.ProcessGroup | None, part: CenterPart) -> CenterWire:
        assert group is not None
        if self._wire == "fp32":
            return CenterWire(group, other)
        if part.known:
            return ChangeWire(group, other, self._wire, part, self.layout.is_host)
        return NarrowCenterWire(group, other, not_none(DTYPES[self._wire], "the dtype of the wire"))

    @override
    def push_pull(self, values: Sequence[Tensor], push: float, part: int = 0, turn: int = 0) -> PushPull:
        if self.layout.is_host:
            return self._push_pull_here(values, push, part, turn)
        wire, own = self._wires[self.layout.host][part], list(values)
        with self._in_time("exchange with"):
            well, before = wire.fits(own), wire.sent
            self._request(wire, _PUSH_PULL, push if well else 0.0, part, turn)
            wire.send_values(own, push > 0)
            sent = wire.sent - before
            table = torch.empty(1 + len(self.layout.leaders), dtype=torch.float64)
            wire.receive(table)
            wire.receive_difference(own)
        square, *counts = table.tolist()
        return PushPull(square if well else math.inf, [int(count) for count in counts], sent)

    def _request(self, wire: CenterWire, wish: float, push: float = 0.0, part: int = 0, turn: int = 0) -> None:
        """Announce a request to the host, and send it."""
        not_none(self._wakeup_client, "the connection to the host").announce()
        wire.send(torch.tensor([wish, push, part, turn], dtype=torch.float64))

    @contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        try:
            with deadline(f"{what} the center, which lives with rank {self.layout.host}"):
                yield
        except OSError as error:
            raise CommunicationError(
                f"rank {self.layout.rank} could not {what} the center, which lives with rank {self.layout.host}: "
                f"{cause(error)}"
            ) from error

    @override
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        with self._changed:
            return copy_vectors(self._values, out), list(self._counts)

    @override
    def peek(self) -> tuple[list[Tensor], list[int]] | None:
        return self.read() if self.layout.is_host else None

    @override
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        with self._changed:
            for own, value in zip(self._values, values, strict=False):  # only the host has any
                own.copy_(value)
            for wires in self._wires.values():
                for wire, part in zip(wires, self.parts, strict=True):
                    wire.start(part.rule.travelling(values))
            self._counts = list(counts)
            self._next = self._counts.index(min(self._counts))  # in turn: who has made fewest exchanges
            self._changed.notify_all()

    @override
    def leave(self) -> None:
        if self.layout.is_host:
            with self._changed:
                self._host_left = True
                self._changed.notify_all()
            if self._server is not None:  # clients must not lose the connection too soon
                self._server.join(self.layout.timeout.total_seconds())
        elif self.layout.is_client:
            with self._in_time("leave"):
                self._request(self._wires[self.layout.host][0], _LEAVE)

    @override
    def close(self) -> None:
        with self._changed:
            self._host_left = self._closed = True
            self._changed.notify_all()
        if self._wakeup_client is not None:
            self._wakeup_client.close()
        if self._wakeup is not None:
            self._wakeup.end()
            if self._server is None:
                self._wakeup.close()
            else:  # the thread closes it, after the push-pull that is under way
                self._server.join(self.layout.timeout.total_seconds())
        self._wires = {}

    # -- the host ----------------------------------------------------------------------------------

    def _push_pull_here(self, values: Sequence[Tensor], push: float, part: int, turn: int) -> PushPull:
        with self._changed:
            self._await(
                lambda: not self._in_turn or self._next == 0,
                lambda: f"its turn at the center: rank {self.layout.leaders[self._next]} was next, and did not come",
            )
            rule = self.parts[part].rule
            square = rule.measure(values, rule.travelling(self._values))
            waits = self._waits(rule, turn)
            learned = self._receive(0, values, push, square, rule, turn)
            if not isinstance(rule, RoundRule) or not waits:
                return learned
            self._close_rounds()
            if self._wakeup is not None and self._server is not None:
                self._wakeup.interrupt()  # it answers the others, and knows when patience ends
            with deadline("wait for a quorum of the replicas at the center"):
                self._await(
                    lambda: self._closed or not self._waits(rule, turn),
                    lambda: f"round {turn} of the center to close: no quorum of the replicas came",
                )
            rule.answer(values, self._values)
            return learned

    def _await(self, come: Callable[[], bool], awaited: Callable[[], str]) -> None:
        """Wait until something has come, or raise the error of the thread; with the lock."""
        in_time = self._changed.wait_for(lambda: self._error or come(), self.layout.timeout.total_seconds())
        if self._error is not None:
            raise CommunicationError(
                f"rank {self.layout.rank} cannot keep the center any longer: {cause(self._error)}"
            ) from self._error
        if not in_time:
            raise self._too_late(awaited())

    def _waits(self, rule: CenterRule, turn: int) -> bool:
        """Whether a push-pull of a round is answered later, when the round has closed."""
        return isinstance(rule, RoundRule) and turn > rule.rounds(self._values)[1]

    def _close_rounds(self) -> float | None:
        """Close the rounds that are due; seconds until the next one is, ``None``: all wait for a quorum."""
        waits = []
        for number, clock in self._clocks.items():
            rule = cast(RoundRule, self.parts[number].rule)
            left = clock.seconds_left(rule.rounds(self._values)[0])
            if left == 0:
                rule.close(self._values)
                clock.begin()
                self._changed.notify_all()
            elif left is not None:
                waits.append(left)
        return min(waits, default=None)

    def _receive(
        self, index: int, difference: Sequence[Tensor], push: float, square: float, rule: CenterRule, turn: int
    ) -> PushPull:
        if isinstance(rule, RoundRule):
            rule.arrive(difference, self._values, late=not self._waits(rule, turn))
        rule.move(difference, self._values, push, square)
        self._counts[index] += 1
        self._pass_on(index)
        return PushPull(square, list(self._counts))

    def _pass_on(self, index: int) -> None:
        self._next = (index + 1) % len(self.layout.leaders)
        self._changed.notify_all()

    def _serve(self) -> None:
        """Serve all clients until they have left; in a thread."""
        wires, rules = dict(self._wires), [part.rule for part in self.parts]
        centers = [rule.travelling(self._values) for rule in rules]
        differences = [[torch.empty_like(value) for value in center] for center in centers]
        present, wakeup = set(wires), self._wakeup
        assert wakeup is not None
        with closing(wakeup), self._noting_errors():
            while present:
                rank = wakeup.wait(self._expected(), self._answer_rounds(differences))
                if self._closed:
                    return
                if rank is None:
                    continue
                request = torch.empty(4, dtype=torch.float64)
                wires[rank][0].receive(request)
                index, (wish, push, number, turn) = self.layout.leaders.index(rank), request.tolist()
                part = int(number)
                wire, rule, difference = wires[rank][part], rules[part], differences[part]
                if wish == _LEAVE:
                    present.remove(rank)
                    wakeup.remove(rank)
                    with self._changed:
                        self._pass_on(index)
                    continue
                wire.receive_values(difference)
                with self._changed:
                    square = rule.measure(difference, centers[part])
                    if not wire.round_difference(difference):
                        square = math.inf
                    waits = self._waits(rule, int(turn))
                    learned = self._receive(index, difference, push, square, rule, int(turn))
                if waits:
                    self._unanswered.append(_Unanswered(rank, part, int(turn), learned))
                else:
                    self._answer(wire, learned, difference)

    def _answer(self, wire: CenterWire, learned: PushPull, difference: list[Tensor]) -> None:
        wire.send(torch.tensor([learned.square, *learned.counts], dtype=torch.float64))
        wire.send_difference(difference)

    def _answer_rounds(self, answers: Sequence[list[Tensor]]) -> float | None:
        """Close the rounds that are due, and answer the push-pulls of all that have closed.

        Args:
            answers: memory for an answer, of each part.

        Returns:
            Seconds until the next round closes; ``None``: all wait for a quorum.
        """
        with self._changed:
            seconds = self._close_rounds()
        waiting, self._unanswered = self._unanswered, []
        for each in waiting:
            rule, answer = self.parts[each.part].rule, answers[each.part]
            with self._changed:
                if open_yet := self._waits(rule, each.turn):
                    self._unanswered.append(each)
                else:
                    cast(RoundRule, rule).answer(answer, self._values)
            if not open_yet:
                self._answer(self._wires[each.rank][each.part], each.learned, answer)
        return None if seconds is None else min(seconds, _LONGEST_WAIT)

    def _expected(self) -> list[int] | None:
        """The ranks that may be served next; ``None``: all."""
        if not self._in_turn:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._next != 0 or self._host_left)
            return [] if self._closed else [self.layout.leaders[self._next or 1]]

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # the training thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
