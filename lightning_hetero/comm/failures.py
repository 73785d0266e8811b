"""Failure reports between ranks: which rank failed first, also when other ranks have already ended."""

import os
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from lightning_hetero.comm import device_exit, object_collectives, waits
from lightning_hetero.comm.threads import abort_sockets, close_at_exit
from lightning_hetero.comm.transport import HURRY, HostPort, MessageLink, MessageTransport
from lightning_hetero.comm.waits import WaitWatchdog
from lightning_hetero.errors import CommunicationError, not_none

_SECONDS_TO_SEND = 1.5  # in which an error is on its way, before this process ends
_TEXT = 300  # characters of an error's text that are sent
#: Of a rank that has said nothing.
GONE = (
    "has ended without an error message: killed, out of memory, its program is over, or gloo has aborted it at a "
    "collective of your own with unequal sizes or types on the ranks"
)

#: ``failed``: an error of its own. ``echo``: an error because of another rank. ``gone``: its process has ended.
#: ``told``: its error is on the terminal.
Kind = Literal["failed", "echo", "gone", "told"]


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
        told: called when another rank has told of its failure, or has ended.
        heard: called with each message of :meth:`tell` from another rank, on a thread.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        told: Callable[[Failure], None] = lambda failure: None,
        heard: Callable[[dict], None] = lambda _: None,
    ) -> None:
        self._told, self._heard = told, heard
        self.rank, self.world, self.run = rank, world, 0
        self._changed = threading.Condition()  # guards all that follows
        self._known: dict[tuple[int, Kind], Failure] = {}  # in order
        self._links: dict[int, MessageLink] = {}  # by the rank at the other end
        self._unsent: deque[tuple[dict[str, Any], int]] = deque()  # messages of this rank, and who must not get them
        self._closed = False
        self._transport: MessageTransport | None = None
        self._thread = threading.Thread(target=self._serve, name="hetero-failures", daemon=True)
        close_at_exit(self)

    def listen(self, interface: str) -> tuple[HostPort, str]:
        """Begin to listen; on rank 0.

        Args:
            interface: address to listen on.

        Returns:
            Address and token for the other ranks.
        """
        token = secrets.token_hex(16)
        self._transport = MessageTransport(0, token, interface)
        self._transport.addresses = dict.fromkeys(range(1, self.world))
        self._thread.start()
        return not_none(self._transport.address, "where rank 0 listens"), token

    def connect(self, where: tuple[HostPort, str], seconds: float) -> None:
        """Connect to rank 0; on another rank.

        Args:
            where: its address and token.
            seconds: longest wait.

        Raises:
            OSError: rank 0 cannot be reached.
        """
        address, token = where
        self._transport = transport = MessageTransport(self.rank, token)
        transport.addresses = {0: address}
        what, link, message = transport.reach(0, seconds)
        if what != "opened":
            transport.close()
            raise ConnectionError("no answer in time" if what == "late" else f"the connection was {what}")
        self._take_in(what, link, message)
        self._thread.start()

    # -- what ranks send and ask -------------------------------------------------------------------

    def announce(self, kind: Kind, how: str) -> None:
        """Let all ranks know what has happened to this one, before it ends.

        Args:
            kind: of failure.
            how: completes "rank 2 ...".
        """
        failure = Failure(self.rank, kind, self.run, how[:_TEXT])
        with self._changed:
            self._send(failure._asdict())
            if self.rank > 0 and self._links:  # rank 0 sends it back: all ranks have the same order
                self._changed.wait_for(lambda: self._closed or failure in self._known.values(), _SECONDS_TO_SEND)
            else:
                self._record(failure)
                self._changed.wait_for(lambda: self._closed or not self._unsent, _SECONDS_TO_SEND)
            self._record(failure)

    def tell(self, **message: object) -> None:
        """Send a message to all other ranks, or to one.

        Args:
            **message: can be written as JSON; ``to``: the rank, if to one.
        """
        with self._changed:
            self._send({**message, "by": self.rank})

    def first(self, seconds: float) -> Failure | None:
        """The failure of another rank that came first; ``None``: none is known.

        Args:
            seconds: longest wait for one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._first() is not None, seconds)
            return self._first()

    def _first(self) -> Failure | None:
        return next((failure for failure in self._blamed() if failure.rank != self.rank), None)

    def _blamed(self) -> Iterator[Failure]:
        """The failures of this run that no other one explains, in the order of rank 0."""
        for failure in self._known.values():
            echo = self._known.get((failure.rank, "echo"))
            blameless = failure.kind in ("echo", "told") or (echo is not None and echo.run >= self.run)
            if not blameless and (failure.kind == "gone" or failure.run >= self.run):
                yield failure

    def errors(self) -> list[Failure]:
        """The errors of ranks in this run, this one's among them, in the same order on all ranks; without echoes."""
        with self._changed:
            return [failure for failure in self._blamed() if failure.kind == "failed"]

    def told(self, rank: int, seconds: float = 0.0) -> bool:
        """Whether a rank's error is on the terminal.

        Args:
            rank: which one.
            seconds: longest wait for it, or for the end of that rank.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or any((rank, kind) in self._known for kind in ("told", "gone")), seconds
            )
            return (rank, "told") in self._known

    def _record(self, failure: Failure) -> None:
        old = self._known.get((failure.rank, failure.kind))
        if old is None or old.run < failure.run:
            self._known.pop((failure.rank, failure.kind), None)
            self._known[failure.rank, failure.kind] = failure
            self._changed.notify_all()
            if failure.rank != self.rank and failure.kind != "told":
                self._told(failure)

    def _send(self, message: dict[str, Any], origin: int | None = None) -> None:
        """Send a message to all, or to whom it is for, but not to whom it is from: on the thread."""
        self._unsent.append((message, self.rank if origin is None else origin))
        if self._transport is not None:
            self._transport.wake()

    def _lost(self, rank: int) -> Failure:
        explained = any((rank, kind) in self._known for kind in ("failed", "echo"))
        return Failure(rank, "gone", self.run, "has ended" if explained else GONE)

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        transport = not_none(self._transport, "the transport")
        try:
            while not self._closed:
                happened = transport.poll(HURRY)
                with self._changed:
                    for what, link, message in happened:
                        self._take_in(what, link, message)
                    while self._unsent:
                        message, origin = self._unsent[0]
                        for rank, link in self._links.items():
                            if rank != origin and (self.rank > 0 or message.get("to") in (None, rank)):
                                link.send(message)
                        self._unsent.popleft()
                    self._changed.notify_all()
        finally:
            transport.close()

    def _take_in(self, what: str, link: MessageLink, message: dict[str, Any]) -> None:
        if what == "opened":
            self._links[link.peer] = link
        elif what == "message":
            try:
                self._received(link.peer, message)
            except (KeyError, TypeError, ValueError, AttributeError):
                link.transport.end(link)
        elif self._links.get(link.peer) is link:
            del self._links[link.peer]
            failure = self._lost(link.peer)
            self._record(failure)
            self._pass_on(failure._asdict(), link.peer)

    def _received(self, peer: int, message: dict[str, Any]) -> None:
        if self.rank == 0:  # others say who they are by their connection
            message["by" if "by" in message else "rank"] = peer
        if "by" in message:
            self._pass_on(message, peer)
            if message.get("to") in (None, self.rank):
                self._heard(message)
        else:
            self._record(Failure(message["rank"], message["kind"], message["run"], message["how"]))
            self._pass_on(message, 0)  # also to the rank itself

    def _pass_on(self, message: dict[str, Any], origin: int) -> None:
        if self.rank == 0:
            self._send(message, origin)

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            not_none(self._transport, "the transport").wake()
            self._thread.join(_SECONDS_TO_SEND)


_failures: FailureChannel | None = None
_waits: WaitWatchdog | None = None
_world: object = None  # the process group of all ranks for which it was made

_SOON = 3.0  # seconds in which who waits for a rank that has failed gets an error by itself, if its process ends
_numbers: Sequence[int] = ()  # by which users know the ranks; their own, if empty


def _after_fork() -> None:
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
    failures = FailureChannel(dist.get_rank(), dist.get_world_size(), told=_failed, heard=waiting.heard)
    own = failures.listen(interface) if failures.rank == 0 else None
    where = object_collectives.unpack_value(object_collectives.broadcast(object_collectives.pack_value(own), 0))
    if failures.rank > 0:
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


def errors() -> list[Failure]:
    """The errors of ranks in this run, this one's among them, in the same order on all ranks; without echoes."""
    return [] if _failures is None else [one._replace(rank=number(one.rank)) for one in _failures.errors()]


def told(rank: int, seconds: float = 0.0) -> bool:
    """Whether a rank's error is on the terminal.

    Args:
        rank: which one.
        seconds: longest wait for it, or for the end of that rank.
    """
    return _failures is not None and _failures.told(_numbers.index(rank) if _numbers else rank, seconds)


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


def _failed(failure: Failure) -> None:
    """A rank has failed. Its process may live on, so that connections to it do not break."""
    device_exit.another_failed(lambda: first_failure(0.0))
    if failure.kind != "failed":
        return
    heard = time.monotonic()

    def wake() -> None:
        time.sleep(_SOON)
        while _waits_for_news and first_failure(0.0) is not None:  # until a new run begins
            if any(time.monotonic() - max(since, heard) >= _SOON for since in waits.since()):
                abort_sockets()
                return
            time.sleep(0.2)

    threading.Thread(target=wake, name="failure-news", daemon=True).start()


_SECONDS_FOR_NEWS = 5.0  # to wait for news of a rank that has ended; of a rank that is only late there may be none
_LATE = 1.0
_waits_for_news = True


def wait_for_news(wait: bool) -> None:
    """Whether news of a failed rank counts: an error waits for it, and it ends waits. Not where ranks may be lost."""
    global _waits_for_news
    _waits_for_news = wait


@contextmanager
def deadline(what: str, busy: Callable[[], bool] = waits.never) -> Iterator[None]:
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
        with waits.waiting(what, busy):
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
