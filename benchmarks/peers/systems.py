"""Systems that are compared: their scripts, and the environments that they need."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent.resolve()
CONSTRAINTS = HERE.parents[1] / "constraints.txt"


class System(NamedTuple):
    """System that is compared.

    Attributes:
        prefix: of its contenders' names.
        script: what each rank runs.
        package: what is installed; empty: it runs where this package does.
        module: to import, which shows that it is there.
    """

    prefix: str
    script: str
    package: str = ""
    module: str = ""

    @property
    def name(self) -> str:
        """Of its environment."""
        return self.module or "here"


#: The last one has all contenders that none of the others has: strategies of Lightning and of this package.
SYSTEMS = (
    System("torch_", "torch_job.py"),
    System("accelerate_", "accelerate_job.py", "accelerate==1.15.0", "accelerate"),
    System("torchft_", "torchft_job.py", "torchft==0.2.0", "torchft"),
    System("hivemind_", "hivemind_job.py", "hivemind==1.1.12", "hivemind"),
    System("", "lightning_job.py"),
)


def system_of(contender: str) -> System:
    """System of a contender, by the beginning of its name."""
    return next(system for system in SYSTEMS if contender.startswith(system.prefix))


INNER_RATE = 2e-3  # learning rate of AdamW where a contender names none


def without_rate(contender: str) -> tuple[str, float]:
    """A contender without its `inner_lr`, and that learning rate of the inner optimizer."""
    name, _, options = contender.partition(":")
    pairs = [pair for pair in options.split(",") if pair]
    given = [float(pair.partition("=")[2]) for pair in pairs if pair.startswith("inner_lr=")]
    rest = ",".join(pair for pair in pairs if not pair.startswith("inner_lr="))
    return f"{name}:{rest}" if rest else name, given[0] if given else INNER_RATE


def with_rate(contender: str, rate: float) -> str:
    """A contender with a learning rate of the inner optimizer."""
    return f"{contender}{',' if ':' in contender else ':'}inner_lr={rate:g}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where environments are."""
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="folder of the peers' environments")
    parser.add_argument("--make-envs", action="store_true", help="make those that are missing, with pip, first")


def steps_to_make(system: System, envs: Path) -> list[list[str]]:
    """The commands that make an environment: PyTorch first and by itself, so that no peer chooses another one."""
    folder = envs / system.name
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-c", str(CONSTRAINTS)]
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "torch"],
        [*pip, system.package],
    ]


def interpreter(system: System, envs: Path) -> str | None:
    """The Python that runs a system; ``None`` if it has no environment that works."""
    if not system.package:
        return sys.executable
    python = envs / system.name / "bin" / "python"
    if not python.exists():
        return None
    command = [str(python), "-c", f"import torch, {system.module}"]
    return None if subprocess.run(command, capture_output=True, check=False).returncode else str(python)


def interpreters(contenders: Sequence[str], options: argparse.Namespace) -> dict[System, str]:
    """The Python of each system that the contenders need; says which are left out, and how to have them."""
    found = {}
    for system in SYSTEMS:
        own = [contender for contender in contenders if system_of(contender) is system]
        if not own:
            continue
        python = interpreter(system, options.envs)
        commands = steps_to_make(system, options.envs) if system.package else []
        if python is None and options.make_envs:
            for command in commands:
                subprocess.run(command, check=True)
            python = interpreter(system, options.envs)
        if python is None:
            lines = [f"    {' '.join(command)}" for command in commands]
            made = "does not work" if (options.envs / system.name).exists() else "is not there"
            print(
                f"Left out: {', '.join(own)}. The environment of {system.module} {made}. To make it:", *lines, sep="\n"
            )
        else:
            found[system] = python
    return found
