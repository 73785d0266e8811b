"""``lightning-hetero doctor --selftest``: checks this machine's devices in real fits, and prints one table."""

import gc
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
from itertools import combinations, pairwise
from statistics import median
from textwrap import shorten
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
LIMIT = 300.0  # seconds of a check
MARK = "selftest: "  # before what a rank reports
DRIVER = "/dev/nvidiactl"  # where there is one


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
        reports: that it has made, in their order.
        status: with which its process has ended; ``None``: it had to be killed.
        output: what it has printed.
        seconds: until its end, from where a rank was struck, or from the beginning.
    """

    reports: list[dict[str, Any]]
    status: int | None
    output: str
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        """The first report, empty without any."""
        return self.reports[0] if self.reports else {}

    @property
    def error(self) -> str:
        """The message of the error that has ended it: the latest line that begins with the name of one, or the last."""
        found = re.findall(r"^(?:\[rank\d+\]: *)?[\w.]*(?:Error|Exception|Interrupt): (.+)$", self.output, re.MULTILINE)
        lines = self.output.strip().splitlines()
        return str(found[-1]) if found else (lines[-1] if lines else "it said nothing")


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
            print(": ".join(row), file=sys.stderr, flush=True)  # at once: a device may hang later on
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
    if reason := _hidden_devices(here.devices):
        yield Row("devices", "warning", reason)
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
    if pairs := list(combinations(range(here.devices), 2)):
        direct = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
        yield Row("topology", "ok", f"of {len(pairs)} pairs of devices, {direct} reach each other's memory directly")
    names = {torch.cuda.get_device_name(number) for number in range(here.devices)}
    if len(names) > 1:
        yield Row("devices", "ok", f"unlike: {', '.join(sorted(names))}. Shares follow their speed")
    if here.devices < here.world:
        yield Row("devices", "ok", f"{here.world} ranks share {here.devices} device(s), and average over gloo")


def _hidden_devices(count: int) -> str:
    """Reason why PyTorch may see fewer devices than there are; empty: nothing speaks for that."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip() not in ("", "-1")]
    if len(named) > count:
        return (
            f"CUDA_VISIBLE_DEVICES names {len(named)}, and PyTorch sees {count}: name none twice, and none that this "
            "machine does not have. A process sees one MIG slice"
        )
    if not count and "CUDA_VISIBLE_DEVICES" not in os.environ and os.path.exists(DRIVER):
        built = "" if torch.version.cuda else ", which is built without CUDA"
        return f"this machine has NVIDIA's driver, but PyTorch {torch.__version__}{built}, sees no GPU"
    return ""


def _exactness(here: Devices) -> Iterator[Row]:
    """Route of gradients, and averages against one process."""
    ranks, [alone] = run("exact", here, here.world), run("exact", here, 1)
    if (bad := _problem([*ranks, alone])) is not None:
        yield Row("averages", "FAILED", bad)
        return
    reports = [rank.report for rank in ranks]
    yield Row("route of gradients", "ok", reports[0]["route"] or "one rank: none")
    same = all(report["weights"] == reports[0]["weights"] for report in reports)
    yield Row("ranks hold the same weights, bitwise", "ok" if same else "FAILED", "yes" if same else "no")
    pairs = zip(reports[0]["weights"], alone.report["weights"], strict=True)
    error = max(abs(own - its) for own, its in pairs)
    verdict = "ok" if error < 1e-10 else "FAILED"
    yield Row("against one process, float64", verdict, f"largest difference of a weight {error:.1e} (limit 1e-10)")


def _speed(here: Devices) -> Iterator[Row]:
    """Step time against Lightning's ddp."""
    found: dict[str, list[float]] = {}
    world = min(here.world, here.devices) or here.world  # Lightning's ddp refuses ranks that share a device
    [alone] = run("calibrate", here, 1)
    if (bad := _problem([alone])) is not None:
        yield Row("step time", "FAILED", bad)
        return
    ranks = run("speed", here, world, str(alone.report["samples"]))
    if (bad := _problem(ranks)) is not None:
        yield Row("step time", "FAILED", bad)
        return
    for report in ranks[0].reports:
        found.setdefault(report["name"], []).append(report["step"])
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
    names = [entry.name for entry in ENTRIES]
    while names:  # all in one pair of processes, unless one of them ends it
        ranks = run("device", here, 2, *names)
        done = min(len(rank.reports) for rank in ranks)
        for report in ranks[0].reports[:done]:
            found = (
                f"{report['waits']} waits in {report['steps']} steps with {report['exchanges']} exchanges, each of "
                f"which may wait once; {report['held']:.1f} bytes per parameter stay beyond parameters, gradients and "
                f"momentum, {report['most']:.1f} at most"
            )
            # Another exchange may have begun, and not be counted yet.
            yield Row(report["name"], "ok" if report["waits"] <= report["exchanges"] + 1 else "warning", found)
        names = names[done:]
        if (bad := _problem(ranks)) is not None:
            yield Row(names.pop(0) if names else "the end of the fits", "FAILED", bad)


def _stopwatch(here: Devices) -> Iterator[Row]:
    """Stopwatch beside a deliberate sleep."""
    ranks = run("sleep", here, here.world)
    if (bad := _problem(ranks)) is not None:
        yield Row("stopwatch", "FAILED", bad)
        return
    work = [rank.report["work"] for rank in ranks]
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
        verdict = "FAILED" if not (ended and named) else "ok" if seconds < most else "warning"
        late = "" if seconds < most else f", later than {most:.0f} s: this machine is busy, or learns late"
        found = f"the others ended after {seconds:.1f} s{late}: {shorten(message, 320)}"
        found = found if ended else "the others did not end"
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
        reports = [json.loads(line[len(MARK) :]) for line in output.splitlines() if line.startswith(MARK)]
        struck = next((report["struck"] for report in reports if "struck" in report), struck)
        status = child.returncode if rank in ends else None
        outcomes.append(RankOutcome(reports, status, output, ends.get(rank, time.monotonic())))
    since = struck if struck is not None else began
    return [outcome._replace(seconds=outcome.seconds - since) for outcome in outcomes]


def _visible(number: int) -> str:
    given = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    return given[number] if given else str(number)


def _problem(ranks: Sequence[RankOutcome]) -> str | None:
    for number, rank in enumerate(ranks):
        if not rank.reports or rank.status != 0:
            how = f"ran for more than {LIMIT:.0f} s" if rank.status is None else f"ended with status {rank.status}"
            if "out of memory" not in rank.error:  # which says it all
                print(rank.output[-4000:], file=sys.stderr, flush=True)
            return f"rank {number} {how}: {rank.error[:300]}"
    return None


class _Module(pl.LightningModule):
    """A small model; what a part of a check does in its steps is given."""

    def __init__(
        self,
        during: Callable[[int], None] = lambda step: None,
        width: int = WIDTH,
        depth: int = 2,
        nesterov: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width, self.nesterov = width, nesterov
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
        self.during, self.clock = during, list[float]()
        self.samples: torch.Tensor | None = None  # instead of the loader's

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.append(time.perf_counter())
        self.during(batch_idx)
        return self.net(batch[0] if self.samples is None else self.samples).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=self.nesterov)


def _fit(module: _Module, kind: str, strategy: Any, data: Any = None, **settings: Any) -> Any:
    world, width = int(os.environ["WORLD_SIZE"]), module.width
    if data is None:
        data = torch.randn(STEPS * BATCH * world, width, generator=torch.Generator().manual_seed(0))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    nodes = int(os.environ.get("GROUP_RANK") is not None and world) or 1
    trainer = pl.Trainer(
        accelerator="gpu" if kind == "cuda" else kind,
        devices=world // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_steps=STEPS,
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
    _report(weights=weights[:: max(len(weights) // 500, 1)], route=trainer.strategy.announced_route[1])


def _timed_module(kind: str) -> _Module:
    width, depth = (4096, 24) if kind == "cuda" else (512, 8)
    return _Module(width=width, depth=depth)


def _calibrates(kind: str) -> None:
    """Finds a batch for which a step takes long enough."""
    module, samples = _timed_module(kind), BATCH * (64 if kind == "cuda" else 8)
    model, laps = module.net.to(kind), list[float]()
    while samples <= 1 << 16:
        batch = torch.randn(samples, module.width, device=kind)
        for _ in range(4):
            began = time.perf_counter()
            model(batch).square().mean().backward()
            if kind == "cuda":
                torch.cuda.synchronize()
            laps.append(time.perf_counter() - began)
        if median(laps[-3:]) >= STEP:
            break
        samples *= 2
    _report(samples=samples)


def _timed(kind: str, samples: str) -> None:
    for name in ("ddp", "error", "ignore") * 2:  # alternating
        module = _timed_module(kind)
        module.samples = torch.randn(int(samples), module.width, device=kind)
        strategy = "ddp" if name == "ddp" else _strategy("hetero_ddp", on_nan=name, balance="off")
        _fit(module, kind, strategy)
        laps = [after - before for before, after in pairwise(module.clock)]
        _report(name=name, step=median(laps[STEPS // 3 :]))


class _CountOnDevice(pl.Callback):
    """Counts waits of the host, exchanges, and bytes on the device, before each step; and the most bytes within it."""

    def __init__(self, caught: Sequence[Any]) -> None:
        self.caught = caught
        self.waits, self.exchanges, self.held, self.peak = list[int](), list[int](), list[int](), list[int]()

    def on_train_start(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        traffic = getattr(trainer.strategy, "traffic", None)
        self.exchanges.append(0 if traffic is None else traffic.exchanges)
        self.waits.append(sum("synchronizing CUDA" in str(one.message) for one in self.caught))
        self.held.append(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *_: Any) -> None:
        self.peak.append(torch.cuda.max_memory_allocated())

    def on_train_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def _on_device(kind: str, *names: str) -> None:
    for name in names:
        module = _Module(width=1024, depth=8, nesterov=name == "hetero_eamsgd")
        options = {} if name in ("hetero_ddp", "hetero_auto") else {"ranks_per_node": 1}
        _Module(width=1024, depth=1).net.to(kind)(torch.randn(BATCH, 1024, device=kind)).sum().backward()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()  # cuBLAS' workspaces, and what is left of the fits before
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            count = _CountOnDevice(caught)
            _fit(module, kind, _strategy(name, balance="off", **options), callbacks=[count])
        each = sum(p.numel() for p in module.parameters())
        waits, exchanges = (total[-1] - total[4] for total in (count.waits, count.exchanges))
        own = 3 * 4  # bytes of a parameter, its gradient and its momentum
        held, most = (count.held[-1] - before) / each - own, (max(count.peak[2:]) - before) / each - own
        _report(name=name, waits=waits, exchanges=exchanges, steps=len(count.waits) - 5, held=held, most=most)


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
    "calibrate": _calibrates,
    "speed": _timed,
    "device": _on_device,
    "sleep": _sleeps,
    "fail": _fails,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _PARTS[sys.argv[1]](*sys.argv[2:])
