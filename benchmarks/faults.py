"""What faults cost a fit: ranks are killed, frozen, cut off, or fail, at random moments, and the fit goes on.

Each rank is a process, and a replica where the strategy has any. In half of all cases the first rank is struck. Where a
fault ends the fit on all ranks, as a disk that is full does, the same command is started again and goes on from its
newest checkpoint. Faults do not overlap.

    python benchmarks/faults.py --seconds 30 --mean 8 --seeds 2 --strategies hetero_ddp hetero_node
    python benchmarks/faults.py --ranks 8 --step 0.2 --seconds 300 --mean 20 --restart 10 --faults killed frozen error
    sudo python benchmarks/faults.py --cluster --seconds 60 --faults alone halves "slow link"
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch's store asks for the names of addresses. Without an answer that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

from faults_links import LINK_FAULTS, Links
from faults_result import Result
from faults_watch import ALL_FAULTS, HOST_FAULTS, Fit
from jobs import machine


def main() -> None:
    """Run each strategy without faults and with them, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--strategies", nargs="+", default=["hetero_ddp", "hetero_node", "hetero_gossip_async"])
    parser.add_argument("--seconds", type=float, default=60.0, help="that the fit takes without faults")
    parser.add_argument("--mean", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a step takes while all ranks are there")
    parser.add_argument("--save", type=float, default=5.0, help="seconds between checkpoints; all ranks meet")
    parser.add_argument("--grace", type=_grace, default="auto", help="the strategies' option: seconds, or auto")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="others have other weights, data and dice")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--restart", type=float, help="seconds after which a lost rank is started again, and joins")
    parser.add_argument("--cluster", action="store_true", help="a network namespace for each rank: needs root")
    parser.add_argument("--faults", nargs="+", choices=ALL_FAULTS, help="that may strike; default: all")
    options = parser.parse_args()
    faults = tuple(options.faults or (ALL_FAULTS if options.cluster else HOST_FAULTS))
    if not options.cluster and set(faults) & set(LINK_FAULTS):
        parser.error("faults of links need --cluster")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidy up, as on Ctrl-C
    print(
        f"{machine()}; {options.ranks} ranks, {options.seconds:.0f} s, a fault every {options.mean:.0f} s", flush=True
    )
    with Links(options.ranks) if options.cluster else contextlib.nullcontext() as links:
        rows = [run_strategy(name, options, faults, links) for name in options.strategies]
    print("\n".join([HEAD, *rows]))
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


def run_strategy(
    name: str, options: argparse.Namespace, faults: tuple[str, ...], links: Links | None, fit: type[Fit] = Fit
) -> str:
    """Run a strategy for all seeds, and print what came of it; its row of the table."""
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
        f"| strategy | {' | '.join(_COLUMNS)} | throughput, of what the living could do | loss without | loss with |",
        "|---" * (len(_COLUMNS) + 4) + "|",
    ]
)


def row(name: str, plain: list[Result], struck: list[Result]) -> str:
    """A row of the table."""
    counts = {
        how: sum(outcomes[how] for result in struck for outcomes in result.outcomes.values())
        for how in ("survived", "ended", "hung", "lost")
    }
    able = sum(result.samples for result in plain) / sum(result.living for result in plain)
    # What is trained on again after a checkpoint counts once.
    useful = sum(min(one.samples, other.samples) for one, other in zip(struck, plain, strict=True))
    kept = useful / sum(result.living for result in struck) / able
    stalls = (f"{max(result.stall for result in results):.1f}" for results in (struck, plain))
    losses = (" ".join(_loss(result) for result in results) for results in (plain, struck))
    cells = [sum(counts.values()), *counts.values(), sum(result.joined for result in struck), *stalls, f"{kept:.0%}"]
    return f"| `{name}` | {' | '.join(map(str, [*cells, *losses]))} |"


def _grace(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _loss(result: Result) -> str:
    return "-" if result.loss is None else f"{result.loss:.4f}"


if __name__ == "__main__":
    main()
