"""``lightning-hetero doctor --selftest``: checks this machine's devices in real fits, and prints one table."""

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.strategies.table import ENTRIES
from lightning_hetero.version import __version__

STEPS, BATCH, WIDTH = 24, 8, 64
SLEEP = 0.05  # seconds for which a rank sleeps in each step, to try the stopwatch
STEP = 0.03  # seconds that a timed step takes at least
TIMEOUT = 20  # seconds, the strategies' option where a rank freezes
LIMIT = 180.0  # seconds of a check
MARK = "selftest: "  # before what a rank reports


class Row(NamedTuple):
    """Row of the table.

    Attributes:
        check: what was checked.
        verdict: ``"ok"``, ``"warning"``, ``"FAILED"`` or ``"not here"``.
        found: what was found, in words.
    """

    check: str
    verdict: str
    found: str


class Devices(NamedTuple):
    """Devices to be tested.

    Attributes:
        kind: Lightning's accelerator: ``"cuda"`` or ``"cpu"``.
        devices: of this host; 0 for CPUs.
        world: ranks of a check. Where there are fewer devices, ranks share them.
    """

    kind: str
    devices: int
    world: int


class RankOutcome(NamedTuple):
    """Outcome of a rank.

    Attributes:
        report: that it has made, if any.
        status: with which its process has ended; ``None``: it had to be killed.
        error: the message of the error that has ended it, or its last line.
        seconds: until its end, from where a rank was struck, or from the beginning.
    """

    report: dict[str, Any] | None
    status: int | None
    error: str
    seconds: float


def devices() -> Devices:
    """The devices of this host; two ranks at least, so that they can exchange."""
    count = torch.cuda.device_count()
    return Devices("cuda", count, min(max(count, 2), 4)) if count else Devices("cpu", 0, 2)


def selftest() -> bool:
    """Run all checks, and print their table; whether none has failed."""
    here = devices()
    table = Table(title="lightning-hetero doctor --selftest", show_lines=False)
    for column in Row._fields:
        table.add_column(column, overflow="fold")
    failed = False
    for check in CHECKS:
        print(f"... {check.__doc__.splitlines()[0] if check.__doc__ else check.__name__}", file=sys.stderr, flush=True)
        for row in check(here):
            table.add_row(*row)
            failed |= row.verdict == "FAILED"
    Console(width=160 if not sys.stdout.isatty() else None).print(table)
    return not failed


# -- checks, in the parent -------------------------------------------------------------------------


def _machine(here: Devices) -> Iterator[Row]:
    """Versions and devices."""
    lightning, nccl = pl.__version__, ""
    if here.devices:
        nccl = f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    versions = f"lightning-hetero {__version__}, Lightning {lightning}, PyTorch {torch.__version__}{nccl}"
    yield Row("versions", "ok", f"{versions}, Python {platform.python_version()}, {platform.system()}")
    if not here.devices:
        yield Row("devices", "ok", f"no GPU; {os.cpu_count()} cores. Checks run on {here.world} CPU ranks")
        return
    seen: dict[str, int] = {}
    for number in range(here.devices):
        properties = torch.cuda.get_device_properties(number)
        card = str(getattr(properties, "uuid", "")) or f"{number}"
        slice_ = " (a MIG slice)" if card in seen or "MIG" in properties.name else ""
        try:
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as error:
            yield Row(f"device {number}", "FAILED", f"{properties.name}: {str(error).splitlines()[0]}")
            continue
        used = 1 - free / total
        verdict = "warning" if used > 0.5 else "ok"
        full = ": other processes use it, figures below are theirs, too" if used > 0.5 else ""
        found = f"{properties.name}{slice_}, {total / 2**30:.0f} GiB, {used:.0%} in use{full}"
        yield Row(f"device {number}", verdict, found)
        seen[card] = number
    names = {torch.cuda.get_device_name(number) for number in range(here.devices)}
    if len(names) > 1:
        yield Row("devices", "ok", f"unlike: {', '.join(sorted(names))}. Shares follow their speed")
    if here.devices < here.world:
        yield Row("devices", "ok", f"{here.world} ranks share {here.devices} device(s), and average over gloo")


def _exactness(here: Devices) -> Iterator[Row]:
    """Route of gradients, and averages against one process."""
    ranks, [alone] = run("exact", here, here.world), run("exact", here, 1)
    if (bad := _problem([*ranks, alone])) is not None:
        yield Row("averages", "FAILED", bad)
        return
    reports = [rank.report or {} for rank in ranks]
    yield Row("route of gradients", "ok", reports[0]["route"] or "one rank: none")
    same = all(report["weights"] == reports[0]["weights"] for report in reports)
    yield Row("ranks hold the same weights, bitwise", "ok" if same else "FAILED", "yes" if same else "no")
    pairs = zip(reports[0]["weights"], (alone.report or {})["weights"], strict=True)
    error = max(abs(own - its) for own, its in pairs)
    verdict = "ok" if error < 1e-10 else "FAILED"
    yield Row("against one process, float64", verdict, f"largest difference of a weight {error:.1e} (limit 1e-10)")


def _speed(here: Devices) -> Iterator[Row]:
    """Step time against Lightning's ddp."""
    found: dict[str, list[float]] = {}
    for _ in range(2):  # alternating
        for name in ("ddp", "error", "ignore"):
            ranks = run("speed", here, here.world, name)
            if (bad := _problem(ranks)) is not None:
                yield Row(f"step time, {name}", "FAILED", bad)
                return
            found.setdefault(name, []).append((ranks[0].report or {})["step"])
    base = min(found.pop("ddp"))
    for name, seconds in found.items():
        ratio = min(seconds) / base
        verdict = "ok" if ratio < 1.1 else "warning"
        yield Row(f'step time of hetero_ddp, on_nan="{name}"', verdict, f"{ratio:.2f} of ddp's {base * 1e3:.0f} ms")


def _waits_and_memory(here: Devices) -> Iterator[Row]:
    """Host synchronisations and memory, for every strategy."""
    if not here.devices:
        yield Row("host synchronisations", "not here", "there is no GPU to wait for")
        yield Row("memory on the device", "not here", "there is no GPU")
        return
    for entry in ENTRIES:
        ranks = run("device", here, 2, entry.name)
        if (bad := _problem(ranks)) is not None:
            yield Row(entry.name, "FAILED", bad)
            continue
        report = ranks[0].report or {}
        found = (
            f"{report['waits']:g} waits in a step without an exchange; {report['held']:.1f} bytes per parameter stay, "
            f"{report['most']:.1f} at most, with gradients and SGD's momentum"
        )
        yield Row(entry.name, "ok" if report["waits"] == 0 else "warning", found)


def _stopwatch(here: Devices) -> Iterator[Row]:
    """Stopwatch beside a deliberate sleep."""
    ranks = run("sleep", here, here.world)
    if (bad := _problem(ranks)) is not None:
        yield Row("stopwatch", "FAILED", bad)
        return
    work = [(rank.report or {})["work"] for rank in ranks]
    slept = work[1] - work[0]
    verdict = "ok" if abs(slept - SLEEP) < 0.2 * SLEEP else "FAILED"
    found = f"rank 1 slept {SLEEP * 1e3:.0f} ms in each step; its work is measured as {slept * 1e3:.1f} ms longer"
    yield Row("stopwatch", verdict, found)


def _failures(here: Devices) -> Iterator[Row]:
    """An exception, a kill and a freeze of a rank."""
    for how, most in (("error", 15.0), ("kill", 15.0), ("freeze", TIMEOUT + 20.0)):
        ranks = run("fail", here, here.world, how)
        others = [rank for number, rank in enumerate(ranks) if number != 1]
        seconds, message = max(rank.seconds for rank in others), others[0].error
        ended = all(rank.status not in (None, 0) for rank in others)
        named = re.search(r"\brank(?:\(s\)|s)? 1\b", message) is not None
        verdict = "ok" if ended and named and seconds < most else "FAILED"
        found = f"the others ended after {seconds:.1f} s: {message[:160]}" if ended else "the others did not end"
        yield Row(f"rank 1: {how}", verdict, found)


CHECKS: tuple[Callable[[Devices], Iterator[Row]], ...] = (
    _machine,
    _exactness,
    _speed,
    _waits_and_memory,
    _stopwatch,
    _failures,
)


# -- ranks, in processes of their own --------------------------------------------------------------


def run(part: str, here: Devices, world: int, *args: str) -> list[RankOutcome]:
    """Run a part of a check on ranks, and wait until all have ended; those that are late are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    common |= {"TORCHELASTIC_RUN_ID": "selftest", "LOCAL_WORLD_SIZE": str(world)}
    began, children = time.monotonic(), list[subprocess.Popen[str]]()
    for rank in range(world):
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if here.devices:
            env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
            env["CUDA_VISIBLE_DEVICES"] = _visible(rank % here.devices)
        command = [sys.executable, "-m", "lightning_hetero.selftest", part, here.kind, *args]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        children.append(subprocess.Popen(command, env=env, **pipes))
    ends, struck = dict[int, float](), None
    try:
        while len(ends) < world and time.monotonic() < began + LIMIT:
            for rank, child in enumerate(children):
                if rank not in ends and child.poll() is not None:
                    ends[rank] = time.monotonic()
            if part == "fail" and set(range(world)) - set(ends) == {1}:
                break  # the frozen one
            time.sleep(0.02)
    finally:
        for child in children:
            child.kill()
    outcomes = []
    for rank, child in enumerate(children):
        output = child.communicate()[0]
        reports = [line for line in output.splitlines() if line.startswith(MARK)]
        report = json.loads(reports[-1][len(MARK) :]) if reports else None
        struck = report.get("struck") if report and "struck" in report else struck
        status = child.returncode if rank in ends else None
        outcomes.append(RankOutcome(report, status, _last_error(output), ends.get(rank, time.monotonic())))
    since = struck if struck is not None else began
    return [outcome._replace(seconds=outcome.seconds - since) for outcome in outcomes]


def _visible(number: int) -> str:
    given = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    return given[number] if given else str(number)


def _last_error(output: str) -> str:
    """The message of the error that has ended a rank: the latest line that begins with the name of one."""
    found = re.findall(r"^(?:\[rank\d+\]: *)?[\w.]*(?:Error|Exception|Interrupt): (.+)$", output, re.MULTILINE)
    lines = output.strip().splitlines()
    return str(found[-1]) if found else (lines[-1] if lines else "it said nothing")


def _problem(ranks: Sequence[RankOutcome]) -> str | None:
    for number, rank in enumerate(ranks):
        if rank.report is None or rank.status != 0:
            how = f"ran for more than {LIMIT:.0f} s" if rank.status is None else f"ended with status {rank.status}"
            return f"rank {number} {how}: {rank.error[:300]}"
    return None


class _Module(pl.LightningModule):
    """A small model; what a part of a check does in its steps is given."""

    def __init__(self, during: Callable[[int], None] = lambda step: None, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
        self.during, self.clock = during, list[float]()
        self.samples: torch.Tensor | None = None  # instead of the loader's

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.append(time.perf_counter())
        self.during(batch_idx)
        return self.net(batch[0] if self.samples is None else self.samples).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _fit(module: _Module, kind: str, strategy: Any, steps: int = STEPS, data: Any = None, **settings: Any) -> Any:
    world, width = int(os.environ["WORLD_SIZE"]), module.width
    if data is None:
        data = torch.randn(steps * BATCH * world, width, generator=torch.Generator().manual_seed(0))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    nodes = int(os.environ.get("GROUP_RANK") is not None and world) or 1
    trainer = pl.Trainer(
        accelerator="gpu" if kind == "cuda" else kind,
        devices=world // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        **{**off, **settings},
    )
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=BATCH, shuffle=False))
    return trainer


def _report(**found: Any) -> None:
    print(MARK + json.dumps(found), flush=True)


def _strategy(name: str, **options: Any) -> Any:
    [entry] = [entry for entry in ENTRIES if entry.name == name]
    return entry.strategy(**options)


def _exact(kind: str) -> None:
    world = int(os.environ["WORLD_SIZE"])
    module = _Module().double()
    # Three samples of a global batch of 12 for each rank but the first: shares differ, and so do weights.
    strategy = _strategy("hetero_ddp", balance=[float(3 - rank % 2) for rank in range(world)], global_batch_size=12)
    data = torch.randn(STEPS * 12, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    trainer = _fit(module, kind, strategy, data=data)
    weights = torch.cat([p.detach().cpu().flatten() for p in module.parameters()]).tolist()
    _report(weights=weights[:: max(len(weights) // 500, 1)], route=trainer.strategy.collaborators.announced_route)


def _timed(kind: str, name: str) -> None:
    device = torch.device(kind)
    width, depth = (4096, 24) if kind == "cuda" else (512, 8)
    batch = torch.randn(BATCH * (64 if kind == "cuda" else 8), width, device=device)
    module = _Module(width=width, depth=depth)
    model = module.net.to(device)
    while True:  # until a step takes long enough
        began = time.perf_counter()
        for _ in range(3):
            model(batch).square().mean().backward()
        if kind == "cuda":
            torch.cuda.synchronize()
        if (time.perf_counter() - began) / 3 >= STEP or len(batch) > 1 << 16:
            break
        batch = torch.cat([batch, batch])
    model.zero_grad()
    module.samples = batch
    strategy = "ddp" if name == "ddp" else _strategy("hetero_ddp", on_nan=name, balance="off")
    _fit(module, kind, strategy)
    laps = [after - before for before, after in pairwise(module.clock)]
    _report(step=median(laps[STEPS // 3 :]))


def _on_device(kind: str, name: str) -> None:
    waits, held, peak = list[int](), list[int](), list[int]()
    rank = int(os.environ["RANK"])

    class Count(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            torch.cuda.set_sync_debug_mode("warn")

        def on_train_batch_start(self, *_: Any) -> None:
            waits.append(len(caught))
            held.append(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()

        def on_train_batch_end(self, *_: Any) -> None:
            peak.append(torch.cuda.max_memory_allocated())

        def on_train_end(self, *_: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    module = _Module(width=1024, depth=8)
    options = {} if name in ("hetero_ddp", "hetero_auto") else {"ranks_per_node": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(module, kind, _strategy(name, balance="off", **options), callbacks=[Count()])
    count = sum(p.numel() for p in module.parameters())
    steps = [after - before for before, after in pairwise(waits[4:])]
    _report(rank=rank, waits=min(steps), held=held[-1] / count, most=max(peak[2:]) / count)


def _sleeps(kind: str) -> None:
    asleep = int(os.environ["RANK"]) == 1
    timings: list[float] = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.accounting.watchers.append(lambda timing: timings.append(timing.work))

    module = _Module(lambda _: time.sleep(SLEEP) if asleep else None)
    _fit(module, kind, _strategy("hetero_ddp", balance="off"), callbacks=[Watch()])
    _report(work=median(timings[4:]))


def _fails(kind: str, how: str) -> None:
    struck = int(os.environ["RANK"]) == 1

    def during(step: int) -> None:
        if not struck or step != 6:
            return
        _report(struck=time.monotonic())
        if how == "error":
            raise RuntimeError("a deliberate error of the self-test on rank 1")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    _fit(_Module(during), kind, _strategy("hetero_ddp", balance="off", timeout=TIMEOUT))
    _report(ended=True)


_PARTS: dict[str, Callable[..., None]] = {
    "exact": _exact,
    "speed": _timed,
    "device": _on_device,
    "sleep": _sleeps,
    "fail": _fails,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _PARTS[sys.argv[1]](*sys.argv[2:])
