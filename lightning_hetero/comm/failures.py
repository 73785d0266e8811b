"""Failure reports between ranks: which rank failed first, also when other ranks have already ended."""

import json
import os
import secrets
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple

import torch.distributed as dist

from lightning_hetero.comm import device_exit, object_collectives, waits
from lightning_hetero.comm.threads import abort_sockets, close_at_exit, exclude_from_abort
from lightning_hetero.comm.transport import HURRY, HostPort, Listener, connect
from lightning_hetero.comm.waits import WaitWatchdog
from lightning_hetero.errors import CommunicationError

_LONGEST = 4096  # bytes of a message
_TEXT = 300  # characters of an error's text that are sent
#: Of a rank that has said nothing.
GONE = (
    "has ended without an error message: killed, out of memory, its program is over, or gloo has aborted it at a "
    "collective of your own with unequal sizes or types on the ranks"
)

#: ``failed``: an error of its own. ``echo``: an error because of another rank. ``gone``: its process has ended.
Kind = Literal["failed", "echo", "gone"]


class Failure(NamedTuple):
    """Failure of a rank.

    Attributes:
        rank: the rank.
        kind: of failure.
        run: number of the fit, validation, test or prediction in which it happened.
        how: completes "rank 2 ...".
    """

    rank: int
    kind: Kind
    run: int
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


class FailureChannel:
    """Connection between rank 0 and every other rank, silent until one fails, or waits long.

    A rank sends its error to rank 0 before it ends. If a rank was killed, its connection ends. Rank 0 forwards all of
    this to the others, in its order. So every rank knows which failure came first, also if its own connection broke
    with a rank that ended only because of that failure.

    Args:
        rank: this process.
        world: number of ranks.
        host: on rank 0, the address to listen on.
        told: called when another rank has told of its failure, or has ended.
        heard: called with each message of :meth:`tell` from another rank, on a thread.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        host: str = "",
        told: Callable[[Failure], None] = lambda failure: None,
        heard: Callable[[dict], None] = lambda _: None,
    ) -> None:
        self._told, self._heard = told, heard
        self.rank, self.world, self.run = rank, world, 0
        self._changed = threading.Condition()  # guards all that follows
        self._known: dict[tuple[int, Kind], Failure] = {}  # in order
        self._others: dict[socket.socket, int] = {}  # the rank at the other end
        self._closed = False
        token = secrets.token_hex(16)
        self._listener = Listener(host, token, world, exclude_from_abort) if rank == 0 else None
        close_at_exit(self)

    @property
    def where(self) -> tuple[HostPort, str] | None:
        """Address and token for the other ranks; on rank 0."""
        return None if self._listener is None else (self._listener.address, self._listener.token)

    def listen(self) -> None:
        """Begin to listen; on rank 0."""
        threading.Thread(target=self._serve, args=(self._listener,), name="hetero-failures", daemon=True).start()

    def connect(self, where: tuple[HostPort, str], seconds: float) -> None:
        """Connect to rank 0; on another rank.

        Args:
            where: its address and token.
            seconds: longest wait.

        Raises:
            OSError: rank 0 cannot be reached.
        """
        connection = connect(*where, self.rank, seconds)
        connection.settimeout(None)
        exclude_from_abort(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._others[connection] = 0
        threading.Thread(target=self._receive, args=(connection,), name="hetero-failures", daemon=True).start()

    # -- what ranks send and ask -------------------------------------------------------------------

    def announce(self, kind: Kind, how: str) -> None:
        """Let all ranks know what has happened to this one, before it ends.

        Args:
            kind: of failure.
            how: completes "rank 2 ...".
        """
        failure = Failure(self.rank, kind, self.run, how[:_TEXT])
        with self._changed:
            self._record(failure)
            self._forward(failure)

    def tell(self, **message: object) -> None:
        """Send a message to all other ranks, or to one.

        Args:
            **message: can be written as JSON; ``to``: the rank, if to one.
        """
        with self._changed:
            self._pass_on({**message, "by": self.rank})

    def first(self, seconds: float) -> Failure | None:
        """The failure of another rank that came first; ``None``: none is known.

        Args:
            seconds: longest wait for one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._first() is not None, seconds)
            return self._first()

    def _first(self) -> Failure | None:
        for failure in self._known.values():
            echo = self._known.get((failure.rank, "echo"))
            blameless = failure.kind == "echo" or (echo is not None and echo.run >= self.run)
            of_now = failure.kind == "gone" or failure.run >= self.run
            if failure.rank != self.rank and of_now and not blameless:
                return failure
        return None

    def _record(self, failure: Failure) -> None:
        old = self._known.get((failure.rank, failure.kind))
        if old is None or old.run < failure.run:
            self._known.pop((failure.rank, failure.kind), None)
            self._known[failure.rank, failure.kind] = failure
            self._changed.notify_all()
            if failure.rank != self.rank:
                self._told(failure)

    def _forward(self, failure: Failure) -> None:
        line = _line(failure._asdict())
        for connection, rank in self._others.items():
            if rank != failure.rank:
                with suppress(OSError):  # it has ended as well
                    connection.sendall(line)

    def _pass_on(self, message: dict) -> None:
        line, to = _line(message), message.get("to")
        for connection, rank in self._others.items():
            if rank != message["by"] and (self.rank or to in (None, rank)):
                with suppress(OSError):
                    connection.sendall(line)

    def _lost(self, rank: int) -> Failure:
        explained = any((rank, kind) in self._known for kind in ("failed", "echo"))
        return Failure(rank, "gone", self.run, "has ended" if explained else GONE)

    # -- other ranks than 0 ------------------------------------------------------------------------

    def _receive(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            for message in _messages(connection):
                with self._changed:
                    if "by" in message:
                        self._heard(message)
                    else:
                        self._record(Failure(**message))
        with self._changed:
            if not self._closed:
                self._record(self._lost(0))

    # -- rank 0 ------------------------------------------------------------------------------------

    def _serve(self, listener: Listener) -> None:
        buffers: dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._closed:
                ready = [key.fileobj for key, _ in selector.select(HURRY)]
                for connection, rank in listener.accept():
                    connection.settimeout(1.0)  # for sending; what is read has already come
                    selector.register(connection, selectors.EVENT_READ)
                    buffers[connection] = b""
                    with self._changed:
                        self._others[connection] = rank
                for one in buffers.keys() & set(ready):
                    try:
                        part = one.recv(_LONGEST)
                    except OSError:
                        part = b""
                    if not part or not self._take_in(one, part, buffers):
                        self._drop(one, selector, buffers)
            listener.end()
            for connection in buffers:
                connection.close()

    def _drop(
        self, connection: socket.socket, selector: selectors.BaseSelector, buffers: dict[socket.socket, bytes]
    ) -> None:
        """The connection of a rank has ended."""
        selector.unregister(connection)
        connection.close()
        del buffers[connection]
        with self._changed:
            rank = self._others.pop(connection)
            if not self._closed:
                failure = self._lost(rank)
                self._record(failure)
                self._forward(failure)

    def _take_in(self, connection: socket.socket, part: bytes, buffers: dict[socket.socket, bytes]) -> bool:
        """Handle what has come; whether to keep the connection."""
        *lines, rest = (buffers[connection] + part).split(b"\n")
        if len(rest) > _LONGEST:
            return False
        buffers[connection] = rest
        try:
            for message in map(json.loads, lines):
                with self._changed:
                    rank = self._others[connection]
                    if "by" in message:
                        message["by"] = rank
                        self._pass_on(message)
                        if message.get("to") in (None, 0):
                            self._heard(message)
                        continue
                    failure = Failure(rank, message["kind"], message["run"], message["how"])
                    self._record(failure)
                    self._forward(failure)
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = list(self._others)
        if self._listener is not None:
            self._listener.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def after_fork(self) -> None:
        """Close the connections in a child process, which would keep them open for as long as it lives."""
        if self._listener is not None:
            self._listener.after_fork()
        for connection in self._others:
            if connection.fileno() >= 0:
                os.close(connection.detach())  # at once: a file object may still refer to it


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _messages(connection: socket.socket) -> Iterator[dict]:
    with connection.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


_failures: FailureChannel | None = None
_waits: WaitWatchdog | None = None
_world: object = None  # the process group of all ranks for which it was made

_SOON = (
    3.0  # seconds in which who waits for a rank that has failed gets an error by itself, if that rank's process ends
)
_interrupts_waits = True
_numbers: Sequence[int] = ()  # by which users know the ranks; their own, if empty


def _after_fork() -> None:
    if _failures is not None:
        _failures.after_fork()
    if _waits is not None:
        _waits.leave_signals()


os.register_at_fork(after_in_child=_after_fork)


def watch_ranks(interface: str, seconds: float, numbers: Sequence[int] = ()) -> None:
    """Begin to watch all ranks, or begin a new run of them (collective over all ranks the first time).

    Args:
        interface: address of this machine on the network of the job.
        seconds: longest wait for rank 0.
        numbers: that the ranks had at first, if others were lost since: messages name them so.
    """
    global _failures, _waits, _world, _numbers
    if _world is not dist.group.WORLD:
        stop_watching()
        _world, _numbers = dist.group.WORLD, tuple(numbers)
        if dist.get_world_size() > 1:
            _waits = WaitWatchdog(dist.get_rank(), dist.get_world_size(), number, seconds)
            _failures = _connected(interface, seconds, _waits)
            _waits.begin(_failures.tell)
    if _failures is not None:
        _failures.run += 1
    if _waits is not None:
        _waits.stopped = ""


def stop_watching() -> None:
    """Watch nobody any more: this process does not belong to those ranks now. Local, idempotent."""
    global _failures, _waits, _world, _numbers
    for one in (_failures, _waits):
        if one is not None:
            one.close()
    _failures, _waits, _world, _numbers = None, None, None, ()


def waiting() -> set[int]:
    """The other ranks that wait for others now, by their own word; empty if ranks are not watched."""
    return set() if _waits is None else _waits.waiting()


def watched() -> bool:
    """Whether the ranks of the present process group are watched."""
    return dist.is_initialized() and _world is dist.group.WORLD


def _connected(interface: str, seconds: float, waiting: WaitWatchdog) -> FailureChannel:
    """A connection between rank 0 and every other rank (collective over all ranks)."""
    failures = FailureChannel(dist.get_rank(), dist.get_world_size(), interface, told=_failed, heard=waiting.heard)
    where = object_collectives.unpack_value(
        object_collectives.broadcast(object_collectives.pack_value(failures.where if failures.rank == 0 else None), 0)
    )
    if failures.rank == 0:
        failures.listen()
    elif where is not None:
        try:
            failures.connect(where, seconds)
        except OSError as error:
            warnings.warn(
                f"rank {failures.rank} cannot reach rank 0 at {where[0]}: {error}. Errors will not be able to "
                "name a rank that has ended.",
                stacklevel=3,
            )
    return failures


def announce(kind: Kind, how: str) -> None:
    """Let all ranks know what has happened to this one, before it ends.

    Args:
        kind: of failure.
        how: completes "rank 2 ...".
    """
    if _failures is not None:
        _failures.announce(kind, how)


def first_failure(seconds: float) -> Failure | None:
    """The failure of another rank that came first; ``None``: none is known.

    Args:
        seconds: longest wait for one.
    """
    failure = None if _failures is None else _failures.first(seconds)
    return None if failure is None else failure._replace(rank=number(failure.rank))


def places(since: float | None = None) -> str:
    """Places of the ranks while one waits for long, as the last notice has said.

    Args:
        since: from when on a notice counts, by ``time.monotonic()``. Default: it is no older than they come.
    """
    return "" if _waits is None else _waits.places(since)


def stop_signal() -> str:
    """The signal that has ended a wait of this process in this run, in a sentence; empty: none has."""
    return "" if _waits is None else _waits.stopped


def number(rank: int) -> int:
    """The number by which users know a rank: the one that it had at first."""
    return _numbers[rank] if _numbers else rank


def this_rank() -> str:
    """This rank in words, by the number that it had at first."""
    me, world = number(dist.get_rank()), dist.get_world_size()
    return f"rank {me} (one of the {world} that remain)" if _numbers else f"rank {me} of {world}"


# -- who waits for a rank that has failed --------------------------------------------------------------


def interrupt_waits(on: bool) -> None:
    """Whether those who wait get an error when a rank has failed and its process lives on; not where ranks are lost."""
    global _interrupts_waits
    _interrupts_waits = on


def _failed(failure: Failure) -> None:
    """A rank has failed. Its process may live on, so that connections to it do not break."""
    device_exit.another_failed(lambda: first_failure(0.0))
    if failure.kind != "failed":
        return
    heard = time.monotonic()

    def wake() -> None:
        time.sleep(_SOON)
        while _interrupts_waits and first_failure(0.0) is not None:  # until a new run begins
            if any(time.monotonic() - max(since, heard) >= _SOON for since in waits.since()):
                abort_sockets()
                return
            time.sleep(0.2)

    threading.Thread(target=wake, name="failure-news", daemon=True).start()


_SECONDS_FOR_NEWS = (
    5.0  # seconds to wait for news of a rank that has ended; of a rank that is only late there may be none
)
_LATE = 1.0
_waits_for_news = True


def wait_for_news(wait: bool) -> None:
    """Whether an error waits until it is known which rank failed first. Where lost ranks are survived it need not."""
    global _waits_for_news
    _waits_for_news = wait
    interrupt_waits(wait)


@contextmanager
def deadline(what: str, busy: Callable[[], bool] | None = None) -> Iterator[None]:
    """Run a block with collectives, and turn their errors into ours. The process group sets the time limit.

    Args:
        what: completes "rank 1 of 4 could not ...".
        busy: whether this rank still works on its own in the block, if it may; called on other threads.

    Raises:
        CommunicationError: another rank did not take part in time, or has ended, or a signal has ended the wait. Other
            errors are not changed.
    """
    began = time.monotonic()
    try:
        with waits.waiting(what, *filter(None, [busy])):
            yield
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not _broken(error):
            raise
        me = this_rank() if dist.is_initialized() else "this process"
        raise CommunicationError(f"{me} could not {what}: {stop_signal() or cause(error, began)}") from error


def cause(error: BaseException, began: float | None = None) -> str:
    """The cause of a failed collective, in words: the rank that failed first, if known in time, and what broke here.

    Args:
        error: with which it failed.
        began: when it began, by ``time.monotonic()``: from then on it counts where the ranks were.
    """
    seconds = (_LATE if "imed out" in str(error) else _SECONDS_FOR_NEWS) if _waits_for_news else 0.0
    if (failure := first_failure(seconds)) is not None:
        return f"{failure}. What has broken here: {error}"
    where = places(began) if began is not None else ""
    return (
        "another rank has failed or was too late (the strategy's `timeout` is the limit). "
        f"{where or 'Look for the first error among the other ranks.'} Cause: {error}"
    )


def is_communication_error(error: BaseException) -> bool:
    """Whether an error means that another rank has ended or was too late."""
    return not stop_signal() and _broken(error)


def _broken(error: BaseException) -> bool:
    # NCCL and the store have their own classes; gloo raises plain RuntimeErrors.
    signs = ("gloo", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, CommunicationError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
