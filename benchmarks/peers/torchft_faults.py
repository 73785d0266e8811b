"""torchft beside this package's strategies: replicas are struck at random moments, and started again.

    python benchmarks/peers/torchft_faults.py --envs peers-envs --make-envs
    python benchmarks/peers/torchft_faults.py --envs peers-envs --ranks 8 --seconds 300 --faults killed frozen error

The same schedule of faults for all, on one host; each rank is a replica (under hetero_ddp all ranks are one). torchft
averages every 16 steps, and so do those of this package's strategies that have a period. See `faults.py`, which has
more faults.
"""

import argparse
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import faults
from faults import Fit, Result
from faults_files import Place
from jobs import machine
from systems import add_options, interpreters

STRATEGIES = (
    "torchft_localsgd",
    "torchft_diloco",
    "hetero_node",
    "hetero_diloco",
    "hetero_ddp",
    "hetero_gossip_async",
)
FAULTS = ("killed", "frozen", "error")  # by an error torchft's processes end without a word
_JOB = str(Path(__file__).with_name("torchft_fault_job.py").resolve())


class Process:
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


class OurFit(Fit):
    """As `Fit`, with torchft's period."""

    given = {
        "hetero_node": {"every_n_steps": 16},
        "hetero_diloco": {"tau": 16},
        "hetero_gossip_async": {"every_n_steps": 16},
    }


class TorchftFit(Fit):
    """As `Fit`, with torchft's replicas and their lighthouse."""

    server: subprocess.Popen

    def run(self) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "address")
            lighthouse = Process(self.server, {"lighthouse": str(file)})
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
        return Process(self.server, {"place": asdict(place), "address": self.address})


def main() -> None:
    """Run each strategy without faults and with them, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--seconds", type=float, default=60.0, help="that the fit takes without faults")
    parser.add_argument("--mean", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--step", type=float, default=0.06, help="seconds that a step takes while all ranks are there")
    parser.add_argument("--save", type=float, default=1e6, help="seconds between checkpoints; torchft makes none")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="others have other weights, data and dice")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--restart", type=float, default=10.0, help="seconds after which a lost rank is started again")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["killed"], help="that may strike")
    add_options(parser)
    options = parser.parse_args()
    peers = [name for name in options.strategies if name.startswith("torchft_")]
    for python in interpreters(peers, options).values():
        TorchftFit.server = subprocess.Popen(
            [python, _JOB],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )
        atexit.register(TorchftFit.server.kill)
    if not hasattr(TorchftFit, "server"):
        options.strategies = [name for name in options.strategies if name not in peers]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidy up, as on Ctrl-C
    print(f"{machine()}; {options.ranks} ranks, {options.seconds:.0f} s, a fault every {options.mean:.0f} s")
    rows = []
    for name in options.strategies:
        kind = TorchftFit if name in peers else OurFit
        rows.append(faults.run_strategy(name, options, tuple(options.faults), None, kind))
    print("\n".join([faults.HEAD, *rows]))
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
