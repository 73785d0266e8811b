"""Launchers that watch the processes they have started, and say which one failed."""

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_hetero.comm import failures
from lightning_hetero.comm.object_collectives import pack_value, unpack_value
from lightning_hetero.errors import CommunicationError
from lightning_hetero.launch.failure_report import report_if_uncaught
from lightning_hetero.launch.script import passed_on
from lightning_hetero.lightning_compat import (
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    set_num_threads_if_needed,
    start_ranks,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

_STARTER = "LIGHTNING_HETERO_STARTED_BY"  # the variable with the process that has started this one
_ORDERLY = (0, 128 + signal.SIGTERM)  # exit codes of a rank that is done, or was asked to stop
_POLL = 0.5  # seconds between two looks at processes


class ObservedLauncher(SubprocessScriptLauncher):
    """Starts ranks as Lightning does, but lets the others end by themselves when one fails.

    Lightning kills all ranks, rank 0 among them, within seconds of a child's failure: what the others have to say, such
    as which rank they miss, and what they would save, is lost. Here they have ``grace`` seconds for it.

    Args:
        survive: the others go on instead. If this rank fails, its process ends when they have.
        around: calls the Trainer's function, given that and its arguments.
        **kwargs: as for Lightning's launcher.

    Attributes:
        grace: seconds from a rank's failure until the others are killed.
    """

    grace = 30.0

    def __init__(self, survive: bool = False, around: Callable | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.survive, self.around = survive, around
        self.observer: ProcessObserver | None = None  # of the processes that it has started
        self._interrupted = False  # by Ctrl-C

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        function = function if self.around is None else partial(self.around, function)
        try:
            return self._launch(function, *args, **kwargs)
        except BaseException as error:
            self._interrupted = isinstance(error, KeyboardInterrupt)
            report_if_uncaught(error, self.observer.report if self.observer else None)
            raise

    def _launch(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        # Lightning insists on as many ranks on each node. The launcher alone knows how many there are.
        if self.cluster_environment.creates_processes_externally:
            if (starter := _starter()) is not None:
                starter.grace = None if self.survive else self.grace
            set_num_threads_if_needed(num_processes=self.num_processes)
            return function(*args, **kwargs)
        with passed_on(), _named_as_starter():
            start_ranks(self)
        first = self.cluster_environment.global_rank()
        observer = self.observer = ProcessObserver(self.procs, None if self.survive else self.grace, first)
        observer.start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except SIGTERMException:
            raise  # no failure: all ranks end so
        except KeyboardInterrupt:
            observer.interrupted()  # Lightning kills the others now
            raise
        except BaseException as error:
            # Not here: the other ranks hear of this rank's error only once it has left the Trainer.
            if self.survive:  # a scheduler would end the others together with this process
                atexit.register(observer.wait)
            # It may be the echo of another's error, and that process takes a while to end. Runs before the line above.
            atexit.register(observer.report, patience=10.0 if isinstance(error, CommunicationError) else 2.0)
            raise

    @override
    def kill(self, signum: int | signal.Signals) -> None:
        super().kill(signum)
        if self._interrupted:  # Lightning would end this process with status 1, now that the others have ended
            sys.exit(128 + signal.SIGINT)

    def ended(self) -> str | None:
        """The process of this machine that has ended and that others need to begin, in words; ``None``: none has."""
        if self.observer is not None:
            return self.observer.ended()
        starter = _starter()
        return "local rank 0, which has started this process, has ended" if starter and starter.ended else None


@contextmanager
def _named_as_starter() -> Iterator[None]:
    """Processes that are started in this block know that this one has started them."""
    os.environ[_STARTER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_STARTER]


@functools.cache
def _starter() -> "ParentProcess | None":
    """The process that has started this one, if it was a launcher of this package."""
    pid = os.environ.pop(_STARTER, None)  # not for processes that this one starts
    if pid is None:
        return None
    starter = ParentProcess(int(pid))
    starter.start()
    return starter


class ParentProcess(threading.Thread):
    """The process that has started this one. If it ends, this one does not stay behind.

    Args:
        pid: of that process.

    Attributes:
        grace: seconds from its end until this process is killed; ``None``: this process goes on.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True, name="rank-starter")
        self.grace: float | None = None
        self._parent = os.getppid() if os.getppid() == pid or not _runs(pid) else None
        self._over = self._parent is not None and self._parent != pid

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._over or (self._parent is not None and os.getppid() != self._parent)

    @override
    def run(self) -> None:
        while not self.ended:
            time.sleep(_POLL)
        since = time.monotonic()
        while self.grace is None or time.monotonic() < since + self.grace:  # this thread ends with the process
            time.sleep(_POLL)
        with suppress(OSError):
            print(
                f"lightning_hetero: process {os.getpid()} is ended, since local rank 0, which has started it, ended "
                f"{self.grace:.0f} s ago.",
                file=sys.stderr,
                flush=True,
            )
        os.kill(os.getpid(), signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether a process runs; if it has ended, its own parent may not have noticed."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


class ProcessObserver(threading.Thread):
    """Says which child failed, and ends what is left of the job after a grace.

    Args:
        children: the processes of local ranks 1, 2, ...
        grace: seconds from a failure until all are killed; ``None``: they go on.
        first: the rank of this process.
        poll: seconds between looks.
    """

    def __init__(
        self, children: Sequence[subprocess.Popen], grace: float | None, first: int = 0, poll: float = _POLL
    ) -> None:
        super().__init__(daemon=True, name="rank-observer")
        self.children, self.grace, self.first, self.poll = children, grace, first, poll
        self._told = threading.Lock()

    def interrupted(self) -> None:
        """Say that Ctrl-C has ended all ranks: how they end is no failure of theirs."""
        if self._told.acquire(blocking=False):
            print("lightning_hetero: Ctrl-C. Rank 0 ends, and ends the other ranks.", file=sys.stderr, flush=True)

    @override
    def run(self) -> None:
        while True:
            codes = [child.poll() for child in self.children]
            if all(code in _ORDERLY for code in codes):
                return
            if any(code not in (None, *_ORDERLY) for code in codes):
                break
            time.sleep(self.poll)
        time.sleep(self.poll)  # Ctrl-C reaches all ranks, of which this one may be the last to end
        self.report()
        if self.grace is None:
            return
        deadline = time.monotonic() + self.grace
        while time.monotonic() < deadline:  # this thread ends with the main process
            time.sleep(self.poll)
        with suppress(OSError):
            print(
                f"lightning_hetero: {self.ended()}, and {self.grace:.0f} s later the other ranks of this machine still "
                "run. They are killed.",
                file=sys.stderr,
                flush=True,
            )
        for child in self.children:
            if child.poll() is None:
                child.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def ended(self) -> str | None:
        """The child that has failed, and how, in words; ``None``: none has."""
        failed = self._failed()
        return None if not failed else f"local rank {failed[0][0]} {_how(failed[0][1])}"

    def wait(self) -> None:
        """Wait until all children have ended."""
        for child in self.children:
            child.wait()

    def _failed(self) -> list[tuple[int, int]]:
        codes = [child.poll() for child in self.children]
        return [(rank, code) for rank, code in enumerate(codes, start=1) if code not in (None, *_ORDERLY)]

    def _running(self) -> bool:
        return any(child.poll() is None for child in self.children)

    def report(self, patience: float = 0.0) -> None:
        """Say once which children failed first, waiting up to ``patience`` seconds for one to if any still runs.

        Those that have said so themselves are left out.
        """
        deadline = time.monotonic() + patience
        while not (failed := self._failed()) and self._running() and time.monotonic() < deadline and not self._said():
            time.sleep(0.05)
        failed = [(rank, code) for rank, code in failed if not failures.told(self.first + rank)]
        if not failed or self._said() or not self._told.acquire(blocking=False):
            return
        for rank, code in failed:
            above = "; its own error, if it had one, is above" if code > 0 else ""
            print(f"lightning_hetero: local rank {rank} {_how(code)}{above}.", file=sys.stderr, flush=True)

    def _said(self) -> bool:
        """Whether the error that came first is on the terminal."""
        return any(failures.told(one.rank) for one in failures.errors()[:1])


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = [f" ({one.name})" for one in signal.Signals if one == -code]
    return f"was killed by signal {-code}{''.join(names)}"


_FILE = "lightning_hetero_callbacks"  # in what a process sends back


@runtime_checkable
class GivesBack(Protocol):
    """A callback, or a strategy, that comes back to the process which has called the Trainer, as in a notebook.

    Example::

        >>> from lightning_hetero import HeteroMonitor
        >>> from lightning_hetero.launch.observer import GivesBack
        >>> isinstance(HeteroMonitor(), GivesBack)
        True
    """

    def give_back(self) -> Any:
        """Data to send, once the run has ended, from the node's first rank; anything that can be pickled."""

    def take_back(self, given: Any) -> None:
        """Hold what that callback, or strategy, has sent."""


class ReturningLauncher(MultiProcessingLauncher):
    """Starts ranks by ``fork``, ``spawn`` or ``forkserver`` as Lightning does, and asks what else to bring back.

    Lightning brings back the weights, the state of the Trainer and the metrics, but nothing of callbacks; their
    ``state_dict`` is for checkpoints only. What they give travels as the weights do, in a file: Lightning reads the
    pipe only after the process has ended, and a process that sends more than the pipe holds, often 64 kB, never would.
    """

    @override
    def get_extra_results(self, trainer: "pl.Trainer") -> dict[str, Any]:
        given = [(_kind(one), one.give_back()) for one in _giving(trainer)]
        path = Path(tempfile.mkdtemp(), "callbacks.pickle")
        path.write_bytes(pack_value(given))
        return {**super().get_extra_results(trainer), _FILE: str(path)}

    @override
    def update_main_process_results(self, trainer: "pl.Trainer", extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        path = Path(extra[_FILE])
        given = unpack_value(path.read_bytes())
        shutil.rmtree(path.parent)
        waiting = _giving(trainer)
        for kind, what in given:  # callbacks that a module has brought along exist in the other process only
            found = next((one for one in waiting if _kind(one) == kind), None)
            if found is not None:
                waiting.remove(found)
                found.take_back(what)


def _giving(trainer: "pl.Trainer") -> list[GivesBack]:
    found = (*trainer.callbacks, trainer.strategy)  # type: ignore[attr-defined]
    return [one for one in found if isinstance(one, GivesBack)]


def _kind(one: GivesBack) -> str:
    return type(one).__qualname__  # a spawned process has another name for the module of the script
