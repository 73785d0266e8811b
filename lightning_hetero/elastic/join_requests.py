"""Requests to join a running job, of processes that are started later.

It asks through a key-value store, which the first rank of the job hosts:

====================  ==============  ===================================================================
key                   written by      means
====================  ==============  ===================================================================
``beat``              the job         counts up while the job runs
``requests``          processes       how many have asked; gives each one its number *k*
``k/compatibility``   the process     what must fit the job: version, options, model
``k/alive``           the process     counts up while it waits
``k/answer``          the job         ``refused`` and why; ``come``: the job is about to admit those that are
                                      still there; ``place``: this one is admitted; ``again``: ask again
``k/ready``           the process     it is still there
====================  ==============  ===================================================================

All keys begin with a secret, so that nobody gets in by mistake, such as by the address of an earlier job.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from lightning_hetero.comm.stores import store_at
from lightning_hetero.comm.threads import THREADS, Background, close_at_exit
from lightning_hetero.errors import CommunicationError, ConfigurationError, JoinRefusedError

_LOOK = 0.25  # seconds between two looks at the requests
_GONE = 5.0  # seconds without a sign of life after which a process that waits counts as gone
_SILENT = 15.0  # seconds without a sign of life after which the job counts as gone
_CONNECTED = 5.0  # seconds in which the job must accept a connection, and its store answer
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


class JobGoneError(CommunicationError):
    """Nobody answers at the address of a job: it has ended, or its first rank is another one now."""


class OtherJobError(JobGoneError):
    """A job runs at that address, and does not know the secret."""


class JoinRequests:
    """Takes requests to join; on the first rank of a job.

    A thread looks for them, and refuses those that do not fit.

    Args:
        interface: address of this machine on the network of the job.
        limit: longest wait for an answer of the store.
        incompatibility: says why a process with other terms cannot take part; ``None`` if it can.

    Attributes:
        address: where to ask: host, port and secret.
    """

    def __init__(
        self, interface: str, limit: timedelta, incompatibility: Callable[[Mapping[str, Any]], str | None]
    ) -> None:
        self._incompatibility, secret = incompatibility, secrets.token_hex(16)
        # Not of a view: it stays when ranks are lost, and the connections of their view are broken.
        self._server = dist.TCPStore(interface, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.address = [interface, self._server.port, secret]
        self._store = dist.PrefixStore(secret, self._server)
        self._store.add("beat", 1)
        self._seen = 0  # requests
        self._alive: dict[int, tuple[bytes, float]] = {}  # of those that wait: their latest sign of life, and when
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"{THREADS}join-requests", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @property
    def waiting(self) -> int:
        """Number of processes that wait to be admitted."""
        return len(self._alive)

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it those that wait
            while not self._closed.wait(_LOOK):
                with self._lock:
                    self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self._store.add("beat", 1)
        while self._store.check([f"{self._seen + 1}/compatibility"]):
            self._seen += 1
            why = self._incompatibility(json.loads(self._store.get(f"{self._seen}/compatibility")))
            if why is None:
                self._alive[self._seen] = b"", now
            else:
                self._answer([self._seen], refused=why)
        for k, (sign, since) in list(self._alive.items()):
            latest = self._store.get(f"{k}/alive")
            if latest != sign:
                self._alive[k] = latest, now
            elif now - since > _GONE:
                del self._alive[k]

    def invite(self, most: int | None = None) -> list[int]:
        """Ask those that wait to come.

        Args:
            most: no more than so many.

        Returns:
            Those that are still there, by the numbers of their requests.
        """
        with self._lock:
            self._look()
            asked, until = list(self._alive)[:most], time.monotonic() + _READY
            self._answer(asked, come=True)
            while not self._store.check([f"{k}/ready" for k in asked]) and time.monotonic() < until:
                time.sleep(0.02)
            here = [k for k in asked if self._store.check([f"{k}/ready"])]
            self._alive = {k: sign for k, sign in self._alive.items() if k not in asked}
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
        for k in requests:
            self._store.set(f"{k}/answer", json.dumps(answer))

    def close(self, over: bool = True) -> None:
        """Let nobody in any more; idempotent.

        Args:
            over: the job has come to its end, and all that wait are refused. Else they ask whoever comes first now.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(2.0)
        answer: dict[str, Any] = {"refused": "it has come to its end"} if over else {"again": True}
        with suppress(RuntimeError), self._lock:
            self._look()
            self._answer(list(self._alive), **answer)


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
    try:
        store = _reached(address)
        k = store.add("requests", 1)
        store.add(f"{k}/alive", 1)
        store.set(f"{k}/compatibility", json.dumps(compatibility))
        waits()
        return _wait(store, k, limit.total_seconds())
    except dist.DistError as error:
        raise JobGoneError(f"the job at {address[0]}:{address[1]} does not answer: {error}") from error


def job_answers(address: Sequence[Any]) -> bool:
    """Whether a job runs at an address."""
    with suppress(JobGoneError, dist.DistError):
        return bool(_reached(address))
    return False


def is_other_job(address: Sequence[Any]) -> bool:
    """Whether a job runs at an address that does not know its secret."""
    try:
        _reached(address)
    except OtherJobError:
        return True
    except (JobGoneError, dist.DistError):
        return False
    return False


def _reached(address: Sequence[Any]) -> dist.Store:
    host, port, secret = address
    try:  # the store itself would try again and again
        socket.create_connection((host, port), _CONNECTED).close()
    except OSError as error:
        raise JobGoneError(f"nobody answers at {host}:{port}, where the job was: {error}") from error
    store = dist.PrefixStore(str(secret), store_at((host, port), timedelta(seconds=_CONNECTED)))
    if not store.check(["beat"]):
        raise OtherJobError(f"another job answers at {host}:{port}, where the job was")
    return store


def _wait(store: dist.Store, k: int, limit: float) -> Admission:
    beat, heard, ready = -1, time.monotonic(), False
    while True:
        store.add(f"{k}/alive", 1)
        answer = json.loads(store.get(f"{k}/answer")) if store.check([f"{k}/answer"]) else {}
        if "refused" in answer:
            raise JoinRefusedError(f"the job does not let this process in: {answer['refused']}")
        if "again" in answer:
            raise JobGoneError("the job has gone on without this process, which was not there in time")
        if "place" in answer:
            return Admission(*answer["place"])
        if "come" in answer and not ready:
            store.set(f"{k}/ready", "1")
            ready, heard = True, time.monotonic()
        now, latest = time.monotonic(), store.add("beat", 0)
        if latest != beat:
            beat, heard = latest, now
        if now - heard > (limit if ready else _SILENT):
            raise JobGoneError(f"the job has been silent for {now - heard:.0f} s")
        time.sleep(0.02)  # the ranks of the job wait for the answer


_KEY = "lightning_hetero/job"
_HERE = timedelta(seconds=30)  # in which a store of this process answers; it may ask for the names of addresses first


class JobAddress(Protocol):
    """A place that holds the address of a job."""

    def read(self, limit: timedelta) -> list[Any] | None:
        """The address; ``None``: no job runs, as far as is known here.

        Args:
            limit: longest wait, where there may be somebody to wait for.
        """

    def write(self, address: Sequence[Any]) -> None:
        """Let others find it."""

    def remove(self, address: Sequence[Any]) -> None:
        """The job has ended. An address that another job has written stays."""


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
