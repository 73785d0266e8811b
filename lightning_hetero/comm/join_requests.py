"""Requests to join a running job, of processes that are started later.

A process connects to the first rank of the job (``comm/transport.py``), with a secret, so that nobody gets in by
mistake, such as by the address of an earlier job.

==================  ==============  ====================================================================
message             from            means
==================  ==============  ====================================================================
``compatibility``   the process     its request, with what must fit the job: version, options, model
``beat``            both            I am alive, every second
``refused``         the job         you cannot take part, and why
``come``            the job         the job is about to admit those that are still there
``ready``           the process     I am still there
``place``           the job         you are admitted: the :class:`Admission`
``again``           the job         ask again: this job, or its next first rank
==================  ==============  ====================================================================
"""

import json
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetero.comm.threads import THREADS, Background, close_at_exit
from lightning_hetero.comm.transport import MessageLink, MessageTransport
from lightning_hetero.errors import CommunicationError, ConfigurationError, JoinRefusedError, not_none

_BEAT = 1.0  # seconds between two signs of life
_GONE = 5.0  # seconds without a sign of life after which a process that waits counts as gone
_SILENT = 15.0  # seconds without a sign of life after which the job counts as gone
_CONNECTED = 15.0  # seconds in which the job must answer a connection: its first rank may be busy
_READY = 5.0  # seconds in which those that are asked to come must answer


class Admission(NamedTuple):
    """The place of a process in the job that it joins.

    Attributes:
        view: number of the view that begins with it.
        rank: of the process.
        world: ranks in that view.
        before: ranks in the view before it; they have the lowest numbers.
        store: address of the store with which they meet.
    """

    view: int
    rank: int
    world: int
    before: int
    store: Sequence[Any]


class Seat(NamedTuple):
    """The place of a process among those that its launcher has started on the same node.

    Attributes:
        node: names the node.
        place: of the process in it, from 0.
        ranks: of the node.
    """

    node: str
    place: int
    ranks: int


class JobGoneError(CommunicationError):
    """Nobody answers at the address of a job: it has ended, or its first rank is another one now."""


class OtherJobError(JobGoneError):
    """A job runs at that address, and does not know the secret."""


class JoinRequests:
    """Takes requests to join; on the first rank of a job.

    A thread hears them, and refuses those that do not fit.

    Args:
        interface: address of this machine on the network of the job.
        incompatibility: says why a process with other terms cannot take part; ``None`` if it can.
        limit: seconds in which all ranks of a node must come, where nodes are let in as a whole.

    Attributes:
        address: where to ask: host, port and secret.
        whole_nodes: whether processes are let in with all ranks of their node, or not at all.
    """

    def __init__(
        self, interface: str, incompatibility: Callable[[Mapping[str, Any]], str | None], limit: float = math.inf
    ) -> None:
        self._incompatibility, self._limit, secret = incompatibility, limit, secrets.token_hex(16)
        self.whole_nodes = False
        self._transport = MessageTransport(0, secret, interface)
        self._transport.addresses = None  # whoever knows the secret
        self.address = [*not_none(self._transport.address, "where this rank listens"), secret]
        self._requests = 0  # so far
        self._changed = threading.Condition()  # guards all that follows
        self._links: dict[int, MessageLink] = {}  # of those that have asked, by the numbers of their requests
        self._heard: dict[int, float] = {}  # of those that wait: when they were last heard
        self._asked: dict[int, tuple[Seat, float]] = {}  # of those that fit: where they are, and when they have asked
        self._ready: set[int] = set()  # of those that were asked to come
        self._unsent: deque[tuple[int, dict[str, Any]]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"{THREADS}join-requests", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @property
    def waiting(self) -> int:
        """Number of processes that wait to be admitted, and can be."""
        return len(self._complete(list(self._heard)))

    def _complete(self, requests: Sequence[int]) -> list[int]:
        """Those of some requests that can be admitted together, in the order of their future ranks."""
        if not self.whole_nodes:
            return list(requests)
        nodes: dict[str, dict[int, int]] = {}
        for k in requests:
            nodes.setdefault(self._asked[k][0].node, {})[self._asked[k][0].place] = k
        whole = [node for node in nodes.values() if len(node) == self._asked[next(iter(node.values()))][0].ranks]
        return [k for node in whole for _, k in sorted(node.items())]

    def _refuse_late(self, now: float) -> None:
        """Refuse those that have waited for the other ranks of their node until the limit."""
        for k in {*self._heard}.difference(self._complete(list(self._heard))):
            seat, since = self._asked[k]
            if now - since > self._limit:
                del self._heard[k]
                why = (
                    f"the model is sharded, so that a replica joins with all of its {seat.ranks} ranks, and the others "
                    f"have not come within {self._limit:g} s (the strategy's `timeout`). Start all of them again."
                )
                self._answer([k], refused=why)
                rank_zero_info(f"A rank of {seat.node} was refused: {why} Training goes on without it.")

    def _serve(self) -> None:
        beaten = 0.0
        while not self._closed or self._unsent:
            happened = self._transport.poll(_BEAT / 4)
            now = time.monotonic()
            with self._changed:
                for what, link, message in happened:
                    self._take_in(what, link, message, now)
                for k in [k for k, heard in self._heard.items() if now - heard > _GONE]:
                    del self._heard[k]
                self._refuse_late(now)
                if now - beaten >= _BEAT:
                    beaten = now
                    self._unsent.extend((k, {"beat": True}) for k in self._links)
                while self._unsent:
                    k, answer = self._unsent.popleft()
                    if k in self._links:
                        self._links[k].send(answer)
                self._changed.notify_all()
        self._transport.close()

    def _take_in(self, what: str, link: MessageLink, message: dict[str, Any], now: float) -> None:
        k = next((k for k, one in self._links.items() if one is link), None)
        if what == "message" and not isinstance(message, dict):
            self._transport.end(link)
        elif what == "message" and k is None and isinstance(message.get("compatibility"), dict):
            self._requests += 1
            k = self._requests
            self._links[k] = link
            if (why := self._incompatibility(message["compatibility"])) is not None:
                self._answer([k], refused=why)  # its seat may be that of another version
                return
            self._asked[k] = Seat(*message["compatibility"].get("seat", ("", k, 1))), now
            self._heard[k] = now
        elif what == "message" and k is not None:
            if k in self._heard:
                self._heard[k] = now
            if "ready" in message:
                self._ready.add(k)
        elif what != "opened" and k is not None:
            del self._links[k]
            self._heard.pop(k, None)

    def invite(self, most: int | None = None) -> list[int]:
        """Ask those that wait to come.

        Args:
            most: no more than so many.

        Returns:
            Those that are still there, by the numbers of their requests.
        """
        with self._changed:
            asked = self._complete(self._complete(list(self._heard))[:most])
            self._answer(asked, come=True)
            self._changed.wait_for(lambda: self._ready.issuperset(self._links.keys() & set(asked)), _READY)
            here = self._complete([k for k in asked if k in self._ready and k in self._links])
            for k in asked:
                self._heard.pop(k, None)
            self._answer([k for k in asked if k not in here], again=True)
        return here

    def admit(self, newcomers: Sequence[int], view: int, before: int, store: Sequence[Any]) -> None:
        """Tell processes their places, after the ranks that there were before.

        Args:
            newcomers: of :meth:`invite`.
            view: number of the new view.
            before: ranks in the view before.
            store: where they meet.
        """
        for rank, k in enumerate(newcomers, start=before):
            self._answer([k], place=Admission(view, rank, before + len(newcomers), before, store))

    def put_off(self, newcomers: Sequence[int]) -> None:
        """Let processes of :meth:`invite` ask again."""
        self._answer(newcomers, again=True)

    def _answer(self, requests: Sequence[int], **answer: Any) -> None:
        with self._changed:
            self._unsent.extend((k, answer) for k in requests)
        self._transport.wake()

    def close(self, over: bool = True) -> None:
        """Let nobody in any more; idempotent.

        Args:
            over: the job has come to its end, and all that wait are refused. Else they ask whoever comes first now.
        """
        if self._closed:
            return
        answer: dict[str, Any] = {"refused": "it has come to its end"} if over else {"again": True}
        self._answer(list(self._heard), **answer)
        self._closed = True
        self._transport.wake()
        self._thread.join(2.0)


def request_to_join(
    address: Sequence[Any], compatibility: Mapping[str, Any], limit: timedelta, waits: Callable[[], None]
) -> Admission:
    """Ask a job to let this process in, and wait for it.

    Args:
        address: of its :class:`JoinRequests`.
        compatibility: what must fit the job.
        limit: longest wait for the rest once the job has said that it is ready.
        waits: called when the job is there and the wait begins.

    Raises:
        JobGoneError: nobody answers, or not any more.
        JoinRefusedError: the job refuses this process.
    """
    transport, link = _reached(address)
    try:
        link.send({"compatibility": compatibility})
        waits()
        return _wait(transport, link, limit.total_seconds())
    finally:
        transport.close()


def job_answers(address: Sequence[Any]) -> bool:
    """Whether a job runs at an address."""
    with suppress(JobGoneError):
        _reached(address)[0].close()
        return True
    return False


def is_other_job(address: Sequence[Any]) -> bool:
    """Whether a job runs at an address that does not know its secret."""
    try:
        _reached(address)[0].close()
    except OtherJobError:
        return True
    except JobGoneError:
        return False
    return False


def _reached(address: Sequence[Any]) -> tuple[MessageTransport, MessageLink]:
    """A connection to a job."""
    host, port, secret = address
    transport = MessageTransport(secrets.randbits(62), str(secret))
    transport.addresses = {0: (host, port)}
    what, link, _ = transport.reach(0, _CONNECTED)
    if what == "opened":
        return transport, link
    transport.close()
    if what == "closed":  # without a word, as on everybody who does not know the secret
        raise OtherJobError(f"another job answers at {host}:{port}, where the job was")
    raise JobGoneError(f"nobody answers at {host}:{port}, where the job was: the connection is {what}")


def _wait(transport: MessageTransport, link: MessageLink, limit: float) -> Admission:
    heard, beaten, ready = time.monotonic(), 0.0, False
    while True:
        for what, _, answer in transport.poll(_BEAT / 4):
            if what != "message":
                raise JobGoneError("the job has ended, or its first rank is another one now")
            heard = time.monotonic()
            if "refused" in answer:
                raise JoinRefusedError(f"the job does not let this process in: {answer['refused']}")
            if "again" in answer:
                raise JobGoneError("the job has gone on without this process, which was not there in time")
            if "place" in answer:
                return Admission(*answer["place"])
            if "come" in answer:
                ready = True
                link.send({"ready": True})
        now = time.monotonic()
        if now - beaten >= _BEAT:
            beaten = now
            link.send({"beat": True})
        if now - heard > (limit if ready else _SILENT):
            raise JobGoneError(f"the job has been silent for {now - heard:.0f} s")


_KEY = "lightning_hetero/job"
_HERE = timedelta(seconds=30)  # in which a store of this process answers; it may ask for the names of addresses first


class AddressFile:
    """A file that all machines of a job see.

    Args:
        path: of the file. Anyone who can read it can take part in the job.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def read(self, limit: timedelta = timedelta(0)) -> list[Any] | None:
        """The address in the file, if there is one.

        Args:
            limit: of no use here.

        Raises:
            ConfigurationError: the file is something else.
        """
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"join_file={str(self.path)!r} cannot be read: {error}") from error
        with suppress(ValueError):
            address = json.loads(text)
            if isinstance(address, list) and len(address) == 3:
                return address
        raise ConfigurationError(
            f"join_file={str(self.path)!r} is there, but holds no job's address. Give the name of another file, or "
            "remove this one if nothing else needs it."
        )

    def write(self, address: Sequence[Any]) -> None:
        """Replace the file; only this user can read it.

        Raises:
            ConfigurationError: it cannot be written.
        """
        beside = self.path.with_name(f".{self.path.name}-{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(json.dumps(list(address)))
            beside.replace(self.path)
        except OSError as error:
            raise ConfigurationError(f"join_file={str(self.path)!r} cannot be written: {error}") from error

    def remove(self, address: Sequence[Any]) -> None:
        """Remove the file, unless another job has written it."""
        with suppress(OSError, ValueError):
            if json.loads(self.path.read_text()) == list(address):
                self.path.unlink()


class LauncherStore:
    """The store with which the ranks have met that the launcher started. Rank 0 of that start hosts it.

    Args:
        host: of rank 0, as the launcher says.
        port: the same.
        hosted: whether this process is that rank 0.
    """

    def __init__(self, host: str, port: int, hosted: bool) -> None:
        self._host, self._port, self._hosted = host, port, hosted
        self._kept: dist.Store | None = None  # a connection that stays when those of the process groups are cut

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    def _store(self, limit: timedelta) -> dist.Store:
        return dist.TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)

    def read(self, limit: timedelta) -> list[Any] | None:
        """The address that the job has written, if it has.

        Args:
            limit: longest wait for rank 0 of the start: this may be a first start.
        """
        if self._hosted:
            return None  # the store has yet to begin
        with suppress(dist.DistError, TimeoutError):  # on a thread: Ctrl-C would not end PyTorch's wait
            return Background(lambda: self._read(limit)).result(limit.total_seconds())
        return None

    def _read(self, limit: timedelta) -> list[Any] | None:
        store = self._store(limit)
        return json.loads(text) if store.check([_KEY]) and (text := store.get(_KEY)) else None

    def write(self, address: Sequence[Any]) -> None:
        """Write it to the store, if that is here. If its host was lost, it is gone.

        Raises:
            CommunicationError: this process hosts the store, and the store does not answer.
        """
        if self._hosted:
            try:
                self._set(json.dumps(list(address)))
            except dist.DistError as error:
                raise CommunicationError(
                    f"the store at {self} does not answer, with which later processes would find this job: {error}"
                ) from error

    def remove(self, address: Sequence[Any]) -> None:
        """Forget it; the store itself ends with this process."""
        if self._hosted:
            with suppress(dist.DistError):
                self._set("")

    def _set(self, text: str) -> None:
        self._kept = self._kept or self._store(_HERE)
        self._kept.set(_KEY, text)


#: A place that holds the address of a job.
JobAddress = AddressFile | LauncherStore
