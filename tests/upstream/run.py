"""Runs Lightning's own tests with its `DDPStrategy` and with ours, and compares: `make test-upstream`.

The checkout must be of the version of Lightning that is installed. Its tests run in a copy of their own for each side:
some that fail leave files behind, by which others fail.
"""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from expected import EXPECTED, EXPECTED_EVERYWHERE
from results import Result, Results, alone, differing, read, table, unexplained

HERE = Path(__file__).parent
FOLDERS = (
    "strategies",
    "callbacks",
    "checkpointing",
    "loops",
    "models/test_restore.py",
    "trainer/logging_",
    "tuner",
)
SECONDS_PER_TEST, SECONDS_PER_RUN = 180, 3600
#: Tests that ask for GPUs, but can run on CPUs. In the copies they ask for CPUs.
FOR_GPUS = ("strategies/test_model_parallel_integration.py",)
ON_CPUS = (
    (r"min_cuda_gpus=\d+, skip_windows=True|min_cuda_gpus=\d+|bf16_cuda=True", "skip_windows=True"),
    (r"""torch\.device\("cuda", self\.local_rank\)""", 'torch.device("cpu")'),
    (r'(?<=accelerator=)"auto"|"cuda"|"gpu"', '"cpu"'),
)


def main() -> int:
    """Run, compare, and print; 1 if there is a difference without a reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout of Lightning")
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="within its tests/tests_pytorch")
    parser.add_argument("--everywhere", action="store_true", help="ddp on one device, too, for tests that name none")
    parser.add_argument("--results", type=Path, help="folder for results and output (default: a new one)")
    args = parser.parse_args()
    if not (args.source / "tests" / "tests_pytorch" / "conftest.py").exists():
        parser.error(f"{args.source}: there is no tests/tests_pytorch/conftest.py, so it is no checkout of Lightning")
    results = (args.results or Path(tempfile.mkdtemp(prefix="upstream-"))).resolve()
    print(f"Lightning {version('lightning')}, torch {version('torch')}; results and output in {results}", flush=True)
    runner = Runner(args.source, results, args.everywhere)
    stock, ours = ({}, {})
    for folder in args.folders:
        stock |= runner.tests("stock", folder)
        ours |= runner.tests("ours", folder)
    reasons = EXPECTED | (EXPECTED_EVERYWHERE if args.everywhere else {})
    expected = {test: why for test, why in reasons.items() if any(test.startswith(path) for path in args.folders)}
    if again := [test for test in differing(stock, ours) if test not in expected]:  # the machine may have been busy
        stock |= runner.tests("stock", *again)
        ours |= runner.tests("ours", *again)
    return tell(args.folders, stock, ours, expected)


def tell(folders: Sequence[str], stock: Results, ours: Results, expected: dict[str, str]) -> int:
    """Print the comparison; the status with which to exit."""
    print("\n" + table(folders, stock, ours) + "\n")
    found = [test for test in differing(stock, ours) if test in expected]
    print(f"{len(found)} expected differences (tests/upstream/expected.py)")
    problems = unexplained(stock, ours, expected)
    print(f"{len(problems)} unexplained" + "".join(f"\n  {line}" for line in problems))
    return 1 if problems else 0


class Runner:
    """Runs parts of Lightning's tests, each in a process of its own.

    Args:
        source: a checkout of Lightning.
        results: folder for results, output, and copies of the tests.
        everywhere: whether tests that name no strategy run with `ddp` on one device.
    """

    def __init__(self, source: Path, results: Path, everywhere: bool) -> None:
        self._results, self._everywhere = results, everywhere
        self._number, self._left_out = itertools.count(1), list[str]()
        if not any(source.glob("tests/legacy/checkpoints/**/*.ckpt")):
            print("left out: test_legacy_checkpoints.py, as tests/legacy/checkpoints has no checkpoints", flush=True)
            self._left_out.append("--ignore=tests_pytorch/checkpointing/test_legacy_checkpoints.py")
        for side in ("stock", "ours"):
            copy = self._tests(side)
            shutil.rmtree(copy.parent, ignore_errors=True)
            shutil.copytree(source / "tests" / "tests_pytorch", copy / "tests_pytorch")
            shutil.copy(source / "pyproject.toml", copy.parent)  # configures pytest
            for path in (copy / "tests_pytorch" / name for name in FOR_GPUS):
                path.write_text(on_cpus(path.read_text()))
            if (source / "tests" / "legacy").is_dir():
                (copy / "legacy").symlink_to(source.resolve() / "tests" / "legacy")

    def _tests(self, side: str) -> Path:
        return self._results / side / "tests"

    def tests(self, side: str, *what: str) -> dict[str, Result]:
        """The results of folders, files or tests; tests that ask for a process of their own get it."""
        found = self._run(side, what)
        for test in alone(found):
            found |= self._run(side, [test], PL_RUN_STANDALONE_TESTS="1")
        return found

    def _run(self, side: str, what: Sequence[str], **environment: str) -> dict[str, Result]:
        name = f"{next(self._number):03}-{side}-" + "".join(c if c.isalnum() else "_" for c in what[0])[:80]
        print(name, flush=True)
        results, output = self._results / f"{name}.jsonl", self._results / f"{name}.txt"
        results.unlink(missing_ok=True)
        paths = [str(HERE), str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "UPSTREAM_SIDE": side, "UPSTREAM_RESULTS": str(results)}
        if self._everywhere:
            environment["UPSTREAM_EVERYWHERE"] = "1"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *(f"tests_pytorch/{one}" for one in what),
            "-p",
            "takeover",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-W", "ignore::FutureWarning"]  # of a PyTorch newer than these tests, for which it is an error
        command += ["-q", "-m", "not cloud", "--continue-on-collection-errors", f"--timeout={SECONDS_PER_TEST}"]
        command += self._left_out
        with output.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self._tests(side),
                env=os.environ | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(SECONDS_PER_RUN)
            except subprocess.TimeoutExpired:
                print(f"{name}: ended after {SECONDS_PER_RUN} s", flush=True)
            finally:
                end_session(process)
        return read(results)


def on_cpus(text: str) -> str:
    """The text of a test that asks for GPUs, changed to ask for CPUs."""
    for pattern, instead in ON_CPUS:
        text = re.sub(pattern, instead, text)
    return text


def end_session(process: subprocess.Popen) -> None:
    """End a process, and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
