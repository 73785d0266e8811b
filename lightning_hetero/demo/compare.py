"""The demo as a whole: the trainings, one after the other, then a table and a picture."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_hetero.demo.result import DEVICES, GLOBAL_BATCH, WARM_UP, Result
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.workload.shares import bound, split

STRATEGIES = ("ddp", "hetero_ddp", "hetero_daso")


def demo(out: Path, epochs: int) -> None:
    """Train with each strategy, print what came of it, and save a picture.

    Args:
        out: folder for the picture and the measurements; made if missing.
        epochs: passes over the data, for each strategy.

    Raises:
        ConfigurationError: a package that only the demo needs is not installed.
        SystemExit: a training failed; it has said why.
    """
    if missing := [name for name in ("matplotlib", "sklearn") if find_spec(name) is None]:
        raise ConfigurationError(
            f"the demo also needs {' and '.join(missing)}: python -m pip install 'lightning-hetero[examples]'"
        )
    from lightning_hetero.demo.picture import draw

    console = Console(highlight=False)
    console.print(introduction(epochs))
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for strategy in STRATEGIES:
        path = out.resolve() / f"{strategy}.json"
        run_alone([sys.executable, "-m", "lightning_hetero.demo.run", strategy, str(epochs), str(path)])
        results.append(Result.load(path))
    console.print(table(results))
    console.print(notes(results))
    for name in STRATEGIES[1:]:
        console.print(f"HeteroMonitor's report on {name}: {out / name / 'report.html'}", soft_wrap=True)
    console.print(f"A picture of who worked and who waited: {draw(results, out / 'demo.png')}", soft_wrap=True)


def introduction(epochs: int) -> str:
    """What is about to happen, what of it is emulated, and what is real."""
    devices = "\n".join(
        f"    rank {rank}   {1e3 * cost.fixed:.0f} ms per step + {1e3 * cost.per_sample:.0f} ms per image"
        for rank, cost in enumerate(DEVICES)
    )
    return f"""
[bold]{" against ".join(STRATEGIES)}, on devices of unequal speed[/bold]

{len(DEVICES)} processes on this machine train a small network to read handwritten digits, {GLOBAL_BATCH} images per \
step, {epochs} epochs: with Lightning's own ddp, then with hetero_ddp, then with hetero_daso, which takes ranks 0 and \
1 for one node and ranks 2 and 3 for another.

[bold]Emulated[/bold] is the speed of the devices: each rank sleeps for as long as its device would still compute.
{devices}

[bold]Real[/bold] is all else: the processes, the training, and the exchanges between them. The strategies are told \
nothing of these speeds: they measure them.

Starting the processes takes some seconds, each time.
"""


def run_alone(command: Sequence[str]) -> None:
    """Run a command that starts processes, and leave none of them behind, whatever happens.

    Raises:
        SystemExit: the command failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # ranks share this machine's cores
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait()
    finally:  # also on Ctrl-C, which reaches this process only: the ranks have a session of their own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status:
        raise SystemExit(f"The training failed (exit status {status}): {' '.join(command)}")


def table(results: Sequence[Result]) -> Table:
    """One row per training, and one for what no split can beat."""
    steps, base = results[0].steps_per_epoch, results[0].epoch_seconds
    best = steps * bound(GLOBAL_BATCH, DEVICES)
    rows = [(r.strategy, r.epoch_seconds, r.shares, f"{r.waiting():.0%}", f"{r.accuracy:.1%}") for r in results]
    rows.append(("the bound", best, split(GLOBAL_BATCH, DEVICES), "", ""))
    result = Table()
    result.add_column("strategy", style="bold")
    for name in ("time per\nepoch", "speed-up\nover ddp", "images of\nranks 0 1 2 3", "waiting", "test\naccuracy"):
        result.add_column(name, justify="right")
    for name, seconds, shares, waiting, accuracy in rows:
        images = " ".join(map(str, shares))
        result.add_row(name, f"{seconds:.2f} s", f"{base / seconds:.2f}x", images, waiting, accuracy)
    return result


def notes(results: Sequence[Result]) -> str:
    """How the numbers in the table were measured."""
    return f"""
[bold]time per epoch[/bold]: {results[0].steps_per_epoch} times the mean time from the start of a step to the start \
of the next one. The first {WARM_UP} steps of the training and the test are left out; the steps that are still split \
evenly, because speeds have yet to be measured, are not.
[bold]hetero_daso[/bold] averages gradients within a node only, and exchanges parameters between nodes in the \
background. Here all processes share one machine, so that it saves little; what it does on slow links between machines \
is in docs/benchmarks.md.
[bold]images[/bold]: how the last batch of {GLOBAL_BATCH} was split.
[bold]waiting[/bold]: the part of all ranks' time spent waiting for other ranks and for the exchange of gradients.
[bold]the bound[/bold]: no split is faster on such devices, even if the exchange of gradients, the optimizer and \
Python itself took no time.
"""
