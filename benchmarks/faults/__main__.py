"""Cost of faults: ranks are killed, frozen, cut off, or fail, at random moments, and the fit goes on.

    python benchmarks/faults --seconds 30 --mean 8 --seeds 1 --strategies hetero_ddp           # two minutes
    python benchmarks/faults --ranks 8 --step 0.4 --seconds 300 --mean 20 --restart 2 --faults killed frozen error
    python benchmarks/faults --strategies hetero_ddp torchft_localsgd --faults killed --restart 10 --envs peers-envs
    sudo python benchmarks/faults --cluster --seconds 60 --faults alone halves "slow link"

The task is that of `benchmarks/peers`: a small GPT on text, of which each rank reads a part of its own. Each rank is a
process, and a replica where the strategy has any. In half of all cases the first rank is struck. Where a fault ends the
fit on all ranks, as a disk that is full does, the same command is started again and goes on from its newest checkpoint.
Faults do not overlap. `torchft_localsgd` and `torchft_diloco` run in an environment of their own; they average every 16
steps, as this package's strategies with a period do here.

Goodput: samples that count per second, over those of the same fit without faults.
"""

import argparse
import atexit
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch's store asks for the names of addresses. Without an answer that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS / "faults"), str(BENCHMARKS), str(BENCHMARKS / "cluster"), str(BENCHMARKS / "peers")]

import network
import systems
from jobs import machine
from place import FIRST, GRACE, LATEST, PAUSE, RANK, SAMPLES, TIMEOUT, Place, ending, progress
from replica import worker

from lightning_hetero.strategies.table import ENTRIES

#: Each with its own node: one node alone, the two halves apart, every link at a hundredth of its rate.
LINK_FAULTS = ("alone", "halves", "slow link")
_RATE_MBIT = 1000
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
_context.set_forkserver_preload(["replica"])
# The server that processes are forked from finds it there.
folders = str(BENCHMARKS / "faults"), str(BENCHMARKS / "peers")
os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
#: Options for the steps between two exchanges; the first that a strategy has is set to torchft's.
PERIODS, EVERY = ("tau", "every_n_steps", "global_every"), 16
TORCHFT_FAULTS = ("killed", "frozen", "error")  # by an error torchft's processes end without a word


def options_of(strategy: str) -> dict[str, Any]:
    """Options of a strategy: its period, which comes first, and an outer step that takes the mean."""
    classes = {entry.name: entry.strategy for entry in ENTRIES}
    known = signature(classes[strategy]).parameters if strategy in classes else {}
    options = {name: EVERY for name in PERIODS if name in known}
    if "outer_lr" in known:
        options |= {"outer_lr": 1.0, "outer_momentum": 0.0}
    return options


@dataclass
class Result:
    """Result of a fit.

    Attributes:
        outcomes: by fault, how often it was survived, ended the fit cleanly, made it hang, or was lost.
        said: what ranks said that did not end well.
        loss: at the end; ``None`` if it did not come to its end.
        stalls: by fault, the longest stall of a process that nothing had struck, each time that the fault was survived:
            the time between two steps, less what the device takes for the second one.
        stall: the longest one of the whole fit, in which processes also join.
        samples: trained on by all ranks; local steps of one that was lost do not count.
        seconds: from the first step of any rank to the end.
        living: seconds for which processes were there, all together.
        joined: processes that were started again, and have trained.
        starts: of the whole fit, from its newest checkpoint.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    said: list[str] = field(default_factory=list)
    loss: float | None = None
    stalls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stall: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    living: float = 0.0
    joined: int = 0
    starts: int = 0


class Links(network.Cluster):
    """A cluster with one rank on each node.

    Args:
        nodes: how many.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, network.Link(f"{_RATE_MBIT}mbit"), "lhfaults")

    def space(self, node: int) -> str:
        """The network namespace of a node."""
        return f"{self.name}-node{node}"

    def cut(self, nodes: list[int]) -> None:
        """Take nodes off the network. They still reach each other."""
        self._bridge("link add br1 type bridge stp_state 0 forward_delay 0")
        self._bridge("link set br1 up")
        for node in nodes:
            self._bridge(f"link set port{node} master br1")

    def slow(self) -> None:
        """Let every link have a hundredth of its rate."""
        self._rate(_RATE_MBIT // 100)

    def heal(self) -> None:
        """All links are as at the beginning."""
        for node in range(self.nodes):
            self._bridge(f"link set port{node} master br0")
        subprocess.run(["ip", "-n", f"{self.name}-bridge", "link", "del", "br1"], capture_output=True, check=False)
        self._rate(_RATE_MBIT)

    def _bridge(self, arguments: str) -> None:
        subprocess.run(["ip", "-n", f"{self.name}-bridge", *arguments.split()], capture_output=True, check=True)

    def _rate(self, mbit: int) -> None:
        for node in range(self.nodes):
            change = f"qdisc change dev eth0 root tbf rate {mbit}mbit burst 70000 limit 1500000"
            subprocess.run(["tc", "-n", self.space(node), *change.split()], capture_output=True, check=True)


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
            grace=options.grace,
            joins=options.restart is not None,
            variables=variables,
            space=links.space(slot) if links else None,
            options=options_of(self.strategy),
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
        result.seconds = now - min((float(rank.seen[FIRST]) for rank in self.ranks if rank.seen[FIRST]), default=now)
        for rank in self.ranks:
            result.samples += float(rank.seen[SAMPLES])
            from_ = float(rank.seen[FIRST]) if rank.begins == 1 and rank.seen[FIRST] else rank.began
            result.living += max(0.0, (rank.over or now) - from_)
            if not rank.struck:
                self._pause(rank)
            result.joined += bool(not rank.begins and rank.seen[FIRST])


class Forked:
    """A process of torchft's interpreter, with what `Fit` asks of a `multiprocessing.Process`."""

    def __init__(self, server: subprocess.Popen, order: dict[str, Any]) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    @property
    def exitcode(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.05)


class TorchftFit(Fit):
    """As `Fit`, with torchft's replicas and their lighthouse."""

    server: subprocess.Popen

    def run(self) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "address")
            lighthouse = Forked(self.server, {"lighthouse": str(file)})
            try:
                deadline = time.monotonic() + 60
                while not file.exists():
                    if time.monotonic() > deadline or lighthouse.exitcode is not None:
                        raise SystemExit("torchft's lighthouse does not start.")
                    time.sleep(0.1)
                self.address = file.read_text()
                return super().run()
            finally:
                lighthouse.kill()

    def _process(self, place: Place) -> Any:
        return Forked(self.server, {"place": asdict(place), "address": self.address})


def serve_torchft(strategies: list[str], options: argparse.Namespace) -> bool:
    """Start torchft's interpreter, from which its processes are forked; whether there is one."""
    for python in systems.interpreters(strategies, options).values():
        TorchftFit.server = subprocess.Popen(
            [python, str(BENCHMARKS / "faults" / "torchft_replica.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )
        atexit.register(TorchftFit.server.kill)
    return hasattr(TorchftFit, "server")


def main() -> None:
    """Run each strategy without faults and with them, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["hetero_ddp", "hetero_node", "hetero_gossip_async"])
    parser.add_argument("--seconds", type=float, default=60.0, help="that the fit takes without faults")
    parser.add_argument("--mean", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step takes while all ranks are there")
    parser.add_argument("--save", type=float, default=5.0, help="seconds between checkpoints; all ranks meet")
    parser.add_argument("--grace", type=_grace, default="auto", help="the strategies' option: seconds, or auto")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="others have other weights, data and dice")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--restart", type=float, help="seconds after which a lost rank is started again, and joins")
    parser.add_argument("--cluster", action="store_true", help="a network namespace for each rank: needs root")
    parser.add_argument("--faults", nargs="+", choices=ALL_FAULTS, help="that may strike; default: all")
    systems.add_options(parser)
    options = parser.parse_args()
    faults = tuple(options.faults or (ALL_FAULTS if options.cluster else HOST_FAULTS))
    if not options.cluster and set(faults) & set(LINK_FAULTS):
        parser.error("faults of links need --cluster")
    torchft = [name for name in options.strategies if name.startswith("torchft_")]
    if torchft and (options.cluster or not set(faults) <= set(TORCHFT_FAULTS)):
        parser.error(f"torchft's replicas are not struck by other faults than --faults {' '.join(TORCHFT_FAULTS)}")
    if torchft and not serve_torchft(torchft, options):
        options.strategies = [name for name in options.strategies if name not in torchft]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidy up, as on Ctrl-C
    print(
        f"{machine()}; {options.ranks} ranks, {options.seconds:.0f} s, a fault every {options.mean:.0f} s", flush=True
    )
    with Links(options.ranks) if options.cluster else contextlib.nullcontext() as links:
        rows = [run_strategy(name, options, faults, links) for name in options.strategies]
    print("\n".join([HEAD, *rows]))
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


def run_strategy(name: str, options: argparse.Namespace, faults: tuple[str, ...], links: Links | None) -> str:
    """Run a strategy for all seeds, and print what came of it; its row of the table."""
    fit = TorchftFit if name.startswith("torchft_") else Fit
    plain, struck = list[Result](), list[Result]()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for results, some in ((plain, ()), (struck, faults)):
            began = time.monotonic()

            def tell(text: str, began: float = began) -> None:
                print(f"    {time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

            tell(f"{name}, seed {seed}, {'with' if some else 'without'} faults")
            results.append(fit(options, name, seed, some, links, tell).run())
            tell(f"samples {results[-1].samples:.0f}, loss {results[-1].loss}")
    line = row(name, plain, struck)
    print(f"{HEAD}\n{line}", flush=True)
    for result in struck:
        for text in result.said:
            print(f"    not clean: {text}", flush=True)
        for fault, outcomes in result.outcomes.items():
            stalls = result.stalls[fault]
            stall = f"; stalls: median {median(stalls):.2f} s, longest {max(stalls):.2f} s" if stalls else ""
            print(f"    {fault}: {', '.join(f'{how} {times}' for how, times in outcomes.items())}{stall}", flush=True)
    return line


_COLUMNS = ("tried", "survived", "ended cleanly", "hung", "lost", "joined", "longest stall, s", "without faults, s")
HEAD = "\n".join(
    [
        f"| strategy | {' | '.join(_COLUMNS)} | goodput | and per process that lived | loss without | loss with |",
        "|---" * (len(_COLUMNS) + 5) + "|",
    ]
)


def row(name: str, plain: list[Result], struck: list[Result]) -> str:
    """A row of the table."""
    counts = {
        how: sum(outcomes[how] for result in struck for outcomes in result.outcomes.values())
        for how in ("survived", "ended", "hung", "lost")
    }
    # What is trained on again after a checkpoint counts once.
    useful = sum(min(one.samples, other.samples) for one, other in zip(struck, plain, strict=True))
    possible = sum(result.samples for result in plain)
    kept = [
        useful / possible * sum(getattr(one, what) for one in plain) / sum(getattr(one, what) for one in struck)
        for what in ("seconds", "living")
    ]
    stalls = (f"{max(result.stall for result in results):.1f}" for results in (struck, plain))
    losses = (" ".join(_loss(result) for result in results) for results in (plain, struck))
    cells = [
        sum(counts.values()),
        *counts.values(),
        sum(result.joined for result in struck),
        *stalls,
        *(f"{part:.0%}" for part in kept),
    ]
    return f"| `{name}` | {' | '.join(map(str, [*cells, *losses]))} |"


def _grace(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _loss(result: Result) -> str:
    return "-" if result.loss is None else f"{result.loss:.4f}"


if __name__ == "__main__":
    main()
