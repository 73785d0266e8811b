"""Starts the ranks of one fit for `faults.py`, lets faults strike, and watches what becomes of it."""

import multiprocessing
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults_files import FIRST, GRACE, LATEST, PAUSE, RANK, SAMPLES, TIMEOUT, Place, ending, progress
from faults_job import worker
from faults_links import LINK_FAULTS, Links
from faults_result import Result

#: A fault of one process, and the signal by which the process gets it, or does it to itself.
SIGNALS = {
    "killed": signal.SIGKILL,
    "frozen": signal.SIGSTOP,
    "paused": signal.SIGSTOP,
    "error": signal.SIGUSR1,
    "nan": signal.SIGUSR2,
    "disk full": signal.SIGURG,
    "sigterm": signal.SIGTERM,
}
HOST_FAULTS, ALL_FAULTS = tuple(SIGNALS), (*SIGNALS, *LINK_FAULTS)
#: After these the fit goes on without the process. The others end the fit on all ranks, or do nothing to it.
LOSES = ("killed", "frozen", "paused", "error", "alone", "halves")
LASTS = 15.0  # seconds, of a pause or a fault of a link
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["faults_job"])
# The server that processes are forked from finds it there.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@dataclass
class Rank:
    """A process of the fit."""

    number: int
    slot: int
    process: Any
    seen: Any
    begins: int  # with which start of the whole fit; 0: with none, it joins
    began: float
    struck: str = ""
    over: float | None = None  # when it was struck, or has ended
    trains: bool = False

    @property
    def runs(self) -> bool:
        return self.process.exitcode is None


class Fit:
    """One fit.

    Args:
        options: of the command line.
        strategy: its string.
        seed: of weights, data and faults.
        faults: that may strike.
        links: the cluster, if there is one.
        tell: is told what happens.
    """

    #: Options of strategies, beside those that all have.
    given: dict[str, dict[str, Any]] = {}

    def __init__(
        self,
        options: Any,
        strategy: str,
        seed: int,
        faults: tuple[str, ...],
        links: Links | None,
        tell: Callable[[str], None],
    ) -> None:
        self.options, self.strategy, self.seed, self.faults, self.links = options, strategy, seed, faults, links
        self.tell, self.dice, self.result = tell, random.Random(seed), Result()
        self.ranks: list[Rank] = []
        self.pending: tuple[str, float] | None = None
        self.later: list[tuple[float, Callable[[], Any]]] = []  # what ends a fault
        self.due = float("inf")
        self.deck: list[str] = []

    def run(self) -> Result:
        """The fit, from its first process to the end of its last one."""
        self.folder = tempfile.mkdtemp(prefix="faults-")
        try:
            self._start_all()
            while not self._tick():
                time.sleep(0.05)
        finally:
            for rank in self.ranks:
                if rank.runs:
                    rank.process.kill()
                rank.process.join(10)
            for _, end in self.later:
                end()
            self._count()
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.result

    # -- processes ---------------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Start the fit, from its newest checkpoint if it has one."""
        Path(self.folder, "job").unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.result.starts += 1
        for slot in range(self.options.ranks):
            self._start(slot, self.result.starts)
        self.limit = time.monotonic() + 90 + 5 * self.options.seconds
        self.due = float("inf")

    def _start(self, slot: int, begins: int = 0) -> None:
        size, number, links = str(self.options.ranks), len(self.ranks), self.links
        variables = {"MASTER_ADDR": links.address(0) if links else "127.0.0.1", "MASTER_PORT": str(self.port)}
        variables |= {"WORLD_SIZE": size, "RANK": str(slot), "GROUP_RANK": str(slot), "GROUP_WORLD_SIZE": size}
        variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "faults"}
        variables |= {"GLOO_SOCKET_IFNAME": "eth0" if links else "lo"}
        seen = progress(self.folder, number)
        options = self.options
        place = Place(
            folder=self.folder,
            number=number,
            strategy=self.strategy,
            seed=self.seed,
            steps=int(options.seconds / options.step),
            step=options.step,
            save=options.save,
            grace=getattr(options, "grace", GRACE),
            joins=options.restart is not None,
            variables=variables,
            space=links.space(slot) if links else None,
            options=self.given.get(self.strategy, {}),
        )
        self.ranks.append(Rank(number, slot, self._process(place), seen, begins, time.monotonic()))

    def _process(self, place: Place) -> Any:
        """Start a process of the fit."""
        process = _context.Process(target=worker, args=(place,), daemon=True)
        process.start()
        return process

    def _end(self, rank: Rank) -> dict[str, Any]:
        return ending(self.folder, rank.number) or {"error": f"exit code {rank.process.exitcode}", "ours": False}

    # -- what happens ------------------------------------------------------------------------------

    def _tick(self) -> bool:
        """Look at everything once; whether the fit is over."""
        now = time.monotonic()
        for when, end in list(self.later):
            if now > when:
                self.later.remove((when, end))
                end()
        for rank in self.ranks:
            if rank.seen[FIRST] and not rank.trains:
                rank.trains = True
                self.tell(f"process {rank.number} trains, {rank.seen[FIRST] - rank.began:.1f} s after its start")
            if rank.over is None and not rank.runs:
                rank.over = now
                self._ended(rank)
        living = [rank for rank in self.ranks if rank.over is None]
        if self.result.loss is not None:  # the others end now as well, or hang
            joiners = [rank for rank in living if not rank.seen[FIRST]]
            self._settle("survived" if not self.result.said else "lost")
            self.faults = ()
            if len(joiners) == len(living):  # who was too late to join
                return True
        elif not living:
            self._settle("ended" if all(self._end(rank)["ours"] for rank in self._judged()) else "lost")
            if self.result.starts > 12 or now > self.limit:
                return True
            self.tell("all ranks have ended; the same command again")
            for rank in self.ranks:
                if rank.runs:
                    rank.process.kill()
                    rank.process.join(10)
            self._start_all()
            return False
        if any(now - max(rank.seen[LATEST], rank.began) > TIMEOUT + 30 for rank in living) or now > self.limit:
            self._settle("hung", force=True)
            self.tell("hangs")
            return True
        self._go_on(living, now)
        return False

    def _go_on(self, living: list[Rank], now: float) -> None:
        trains = [rank for rank in living if rank.seen[FIRST]]
        if self.pending and trains:
            fault, since = self.pending  # that a disk is full shows when the checkpoint after the next one is due
            until = since + GRACE + (15 if fault == "disk full" else 2)
            if min(rank.seen[LATEST] for rank in trains) > until:
                self._settle("survived")
        if self.options.restart is not None and trains and self.result.loss is None:
            for slot in range(self.options.ranks):
                latest = max((rank for rank in self.ranks if rank.slot == slot), key=lambda rank: rank.number)
                if latest.over is not None and now > latest.over + self.options.restart:
                    if latest.runs:
                        latest.process.kill()
                    self._start(slot)
        if self.faults and self.due == float("inf") and len(trains) == len(living) == self.options.ranks:
            self.due = now + 2 + self.dice.expovariate(1 / self.options.mean)
        if self.faults and now > self.due and not self.pending and not self.later and len(trains) > 2:
            self._strike(trains, now)

    def _strike(self, trains: list[Rank], now: float) -> None:
        self.deck = self.deck or self.dice.sample(self.faults, len(self.faults))  # each of them once, then again
        fault = self.deck.pop()
        trains = sorted(trains, key=lambda rank: rank.seen[RANK])
        target = trains[0] if self.dice.random() < 0.5 else self.dice.choice(trains)
        self.due = now + self.dice.expovariate(1 / self.options.mean)
        self.pending = fault, now
        for rank in trains:
            self._pause(rank)
            rank.seen[PAUSE] = 0.0
        struck = [target]
        if fault in SIGNALS:
            os.kill(target.process.pid, SIGNALS[fault])
            if fault == "paused":
                self.later.append((now + LASTS, lambda: target.runs and os.kill(target.process.pid, signal.SIGCONT)))
        else:
            assert self.links is not None
            self.later.append((now + LASTS, self.links.heal))
            if fault == "slow link":
                self.links.slow()
            else:
                upper = [rank for rank in trains if rank.slot >= self.options.ranks // 2]
                lower = [rank for rank in trains if rank not in upper]
                if fault == "halves":  # the larger part goes on, or that with the lowest rank
                    struck = min((upper, lower), key=lambda part: (len(part), trains[0] in part))
                self.links.cut([rank.slot for rank in struck])
        if fault in LOSES:
            for rank in struck:
                rank.struck, rank.over = fault, now
        self.tell(f"{fault}: rank(s) {', '.join(str(int(rank.seen[RANK])) for rank in struck)} of {len(trains)}")

    def _ended(self, rank: Rank) -> None:
        end = self._end(rank)
        if "loss" in end:
            self.result.loss = self.result.loss or end["loss"]
        elif not end["ours"]:
            said = f"process {rank.number}: {end['error']}: {end.get('text', '')}"
            self.result.said.append(said)
            self.tell(said)
        else:
            self.tell(f"process {rank.number} ended with {end['error']}: {end.get('text', '')[:120]}")

    def _judged(self) -> list[Rank]:
        return [rank for rank in self.ranks[-self.options.ranks :] if not rank.struck]

    def _settle(self, outcome: str, force: bool = False) -> None:
        if self.pending:
            self.result.outcomes[self.pending[0]][outcome] += 1
            stall = max((self._pause(rank) for rank in self.ranks if rank.over is None), default=0.0)
            if outcome == "survived":
                self.result.stalls[self.pending[0]].append(stall)
            self.tell(f"{self.pending[0]}: {outcome}, longest stall {stall:.1f} s")
        elif force:
            self.result.outcomes["nothing"][outcome] += 1
        self.pending = None

    def _pause(self, rank: Rank) -> float:
        pause = float(rank.seen[PAUSE])
        self.result.stall = max(self.result.stall, pause)
        return pause

    def _count(self) -> None:
        result, now = self.result, time.monotonic()
        for rank in self.ranks:
            result.samples += float(rank.seen[SAMPLES])
            from_ = float(rank.seen[FIRST]) if rank.begins == 1 and rank.seen[FIRST] else rank.began
            result.living += max(0.0, (rank.over or now) - from_)
            if not rank.struck:
                self._pause(rank)
            result.joined += bool(not rank.begins and rank.seen[FIRST])
