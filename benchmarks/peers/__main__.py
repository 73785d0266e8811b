"""Comparison with other packages: the same task, links and devices for all, in one table.

    sudo python benchmarks/peers --envs peers-envs --make-envs --save runs.json    # all contenders, three links
    sudo python benchmarks/peers --envs peers-envs --rates 200mbit --seeds 1 ddp torchft_diloco:every=16 hetero_daso
    sudo python benchmarks/peers --envs peers-envs --unequal                        # devices of unequal speed
    sudo python benchmarks/peers --rates 1gbit --seeds 1 --steps 16 ddp torch_alone hetero_ddp    # a minute

Two nodes of two ranks (`--unequal`: four of one), emulated: network namespaces, shaped links, devices by a delay that
uses no core. Network, first weights, each rank's part of the text, global batch and inner optimizer are the same for
all; each seed has other weights and another order of the text, which Lightning shuffles once more. Each peer has an
environment of its own; one that has none is left out, with a line that says how to make it. A run ends after so many
steps, or, at the same step on all ranks, after so many seconds. Weights are tested after a run, so that takes no time
of it: the mean of all ranks' weights after every 16th step, and of those that the run leaves. Needs root, Linux and
iproute2.

Contenders are NAME or NAME:option=value,option=value: strategies of Lightning and of this package, those of
`benchmarks/cluster/contenders.py`, and those of the files `*_job.py` beside this one.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cluster")]

import contenders
import outcome
import runner
import systems
from rich.console import Console, Group

OFF = "balance=off"
NODES = "replica=node,outer_lr=1.0,outer_momentum=0.0"  # a node is a replica; the outer step takes the mean
PEERS = (
    "torch_hierarchical:within=2,every=16",
    "accelerate_local_sgd:every=16",
    "torchft_diloco:every=16",
    f"torchft_diloco:every=16,{NODES}",
    f"torchft_diloco:every=16,{NODES},fragments=2,delay=4,blend=0.5",
    "hivemind_local:every=16",
)
OURS = (
    f"hetero_ddp:{OFF}",
    f"hetero_ddp:wire=powersgd:4,{OFF}",
    f"hetero_node:every_n_steps=16,{OFF}",
    f"hetero_daso:warmup=0,cooldown=0,patience=1000,wire=bf16,global_every=4,wait=auto,{OFF}",
    f"hetero_daso:warmup=0,cooldown=0,patience=1000,wire=int4,global_every=4,wait=auto,{OFF}",
    f"hetero_diloco:tau=16,{NODES},wire=int4,{OFF}",
    f"hetero_diloco:tau=16,{NODES},wire=2bit:decay=0.95,{OFF}",
    f"hetero_diloco:tau=16,{NODES},wire=int4,fragments=2,delay=4,blend=0.5,{OFF}",
    f"hetero_diloco:tau=16,{NODES},wire=topk:0.05:bits=2:decay=0.95,{OFF}",
    f"hetero_diloco_async:tau=16,{NODES},wire=int4,{OFF}",
    f"hetero_gossip_async:every_n_steps=4,wire=bf16,{OFF}",
    "hetero_auto:every=16,measure=16",
)
ALIKE = ("ddp", "ddp_powersgd:rank=4", "post_local_sgd:every=16", "alone", *PEERS, *OURS)
UNEQUAL = (
    "alone",
    "ddp",
    "post_local_sgd:every=16",
    "accelerate_local_sgd:every=16",
    "torchft_diloco:every=16,outer_lr=1.0,outer_momentum=0.0",
    "hivemind_gradients",
    "hivemind_local:every=16",
    "hetero_ddp",
    "hetero_daso:warmup=0,cooldown=0,patience=1000,wire=bf16,global_every=4,wait=auto",
    "hetero_diloco:tau=16,outer_lr=1.0,outer_momentum=0.0,wire=int4",
    "hetero_diloco_async:tau=16,outer_lr=1.0,outer_momentum=0.0,wire=int4",
    "hetero_easgd_async:tau=16,moving_rate=auto",
    "hetero_auto:every=16,measure=16",
)
AGAINST = (
    "ddp",
    "ddp_powersgd:rank=4",
    "post_local_sgd:every=16",
    "accelerate_local_sgd:every=16",
    f"torchft_diloco:every=16,{NODES}",
    f"torchft_diloco:every=16,{NODES},fragments=2,delay=4,blend=0.5",
    "hivemind_local:every=16",
)
SPEEDS, FIXED = (0.04, 0.02, 0.01, 0.01), 0.02  # samples per millisecond of unequal devices; seconds of a batch besides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", help="without: all")
    parser.add_argument("--unequal", action="store_true", help="devices of unequal speed: samples per second")
    parser.add_argument("--against", nargs="+", default=AGAINST, help="what all are compared with, the first one most")
    parser.add_argument(
        "--rates", nargs="+", type=rate_of_link, help="of each node's link; without: 20mbit 200mbit 1gbit"
    )
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, help="of each run, at most; without: 576")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of each run")
    parser.add_argument("--batch", type=positive, help="samples per rank and step; without: 2, or 4 with --unequal")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds that a step of alike devices takes at least")
    parser.add_argument("--loss", type=float, default=2.6, help="to be reached on text that nobody trains on")
    parser.add_argument("--equal", type=int, default=320, help="steps after which losses are compared")
    parser.add_argument("--search", type=float, nargs="+", help="learning rates to try with each contender")
    parser.add_argument("--save", type=Path, help="file for the runs; those that it has already are not done again")
    systems.add_options(parser)
    options = parser.parse_args()
    with_defaults(options)
    check_names(options.contenders)
    console = Console(highlight=False, width=400)
    pythons = systems.interpreters(options.contenders, options)
    for rate in options.rates:
        options.rate = rate
        console.print(headline(options))
        runs = []
        for seed in range(1, options.seeds + 1):
            for system, python in pythons.items():
                names = [name for name in options.contenders if systems.system_of(name) is system]
                runs += Runs(options, console).of(seed, system, python, names)
        order = {name: place for place, name in enumerate(options.contenders)}
        runs.sort(key=lambda run: order[run["contender"]])
        console.print(table(runs, options))
        console.print(f"Load average at the end {os.getloadavg()[0]:.2f}.\n")


def check_names(names: Sequence[str]) -> None:
    """Make each strategy once, so that an unknown name or option ends the program before any run."""
    for name in names:
        if not systems.system_of(name).prefix:
            contenders.parse(systems.without_rate(name)[0])


def rate_of_link(text: str) -> str:
    """A rate as `tc` takes it, so that no contender after ``--rates`` is taken for one."""
    if not re.fullmatch(r"[\d.]+[kmg]bit", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 200mbit. Give contenders before --rates.")
    return text


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0.")
    return int(text)


def with_defaults(options: argparse.Namespace) -> None:
    """Fill in what was not given."""
    unequal = options.unequal
    options.contenders = list(options.contenders or (UNEQUAL if unequal else ALIKE))
    options.rates = options.rates or (["200mbit", "1gbit"] if unequal else ["20mbit", "200mbit", "1gbit"])
    options.steps = options.steps or 576
    options.batch = options.batch or (4 if unequal else 2)
    if options.search:
        options.contenders = [systems.with_rate(name, rate) for name in options.contenders for rate in options.search]
    options.nodes, options.ranks = (len(SPEEDS), 1) if unequal else (2, 2)
    alike = [[options.delay, 1e-6]] * (options.nodes * options.ranks)
    options.costs = [[FIXED, 1e-3 / speed] for speed in SPEEDS] if unequal else alike


def headline(options: argparse.Namespace) -> str:
    """Headline of a table: the runs, and the machine."""
    devices = f"{SPEEDS} samples per ms" if options.unequal else f"{1e3 * options.delay:.0f} ms a step at least"
    return (
        f"{options.nodes} nodes of {options.ranks} ranks, links of {options.rate}; {options.batch} samples per rank "
        f"and step, devices of {devices}; {options.seeds} seeds, {options.steps} steps or {options.limit:g} s each. "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}."
    )


def table(runs: Sequence[outcome.Run], options: argparse.Namespace) -> Any:
    """Table of the runs on one kind of link."""
    goal = outcome.Goal(options.loss, options.equal)
    if options.search:
        return outcome.best_rates(runs, goal)
    if options.unequal:
        return Group(outcome.table(runs, options.against[0], goal), outcome.shares(runs, "alone", 0.4 * options.limit))
    return Group(outcome.table(runs, options.against[0], goal), *outcome.pairs(runs, options.against[1:], goal))


class Runs:
    """Runs of one call, and those that a file has kept.

    Args:
        options: of the call.
        console: to say what went wrong.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console

    def of(self, seed: int, system: systems.System, python: str, names: list[str]) -> list[outcome.Run]:
        """A run of each contender; without those that fail."""
        kept = self._kept()
        runs = [kept[self._key(seed, name)] for name in names if self._key(seed, name) in kept]
        names = [name for name in names if self._key(seed, name) not in kept]
        if not names:
            return runs
        options = self._options
        options.timeout = len(names) * (3 * options.limit + 90)
        task = {key: getattr(options, key) for key in ("steps", "batch", "costs", "limit")}
        arguments = [json.dumps({**task, "seed": seed}), *names]
        try:
            made = runner.run_script(systems.HERE / system.script, arguments, options, None, self._console, python)
        except runner.network.Unavailable:
            raise
        except SystemExit as failed:
            if isinstance(failed.code, int):  # SIGTERM
                raise
            if len(names) > 1:  # which one is it?
                return runs + [run for name in names for run in self.of(seed, system, python, [name])]
            self._console.print(f"Left out: {names[0]}, seed {seed}: {failed}", markup=False)
            return runs
        self._keep({self._key(seed, run["contender"]): run for run in made})
        return runs + made

    def _key(self, seed: int, name: str) -> str:
        options = self._options
        what = options.rate, seed, options.steps, options.limit, options.batch, options.costs, name
        return json.dumps(what)

    def _kept(self) -> dict[str, outcome.Run]:
        file = self._options.save
        return json.loads(file.read_text()) if file and file.exists() else {}

    def _keep(self, made: dict[str, outcome.Run]) -> None:
        if self._options.save:
            self._options.save.write_text(json.dumps({**self._kept(), **made}))


if __name__ == "__main__":
    main()
