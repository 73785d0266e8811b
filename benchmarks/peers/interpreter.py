"""Finds the Python in which torchft is installed."""

import argparse
import subprocess

HOW = """\
torchft needs an environment of its own:

    python -m venv torchft-env
    torchft-env/bin/pip install torch torchft==0.2.0 scikit-learn

Then give --torchft-python torchft-env/bin/python."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option that names the interpreter."""
    parser.add_argument("--torchft-python", metavar="PATH", help="Python of an environment with torchft")


def torchft_python(options: argparse.Namespace) -> str:
    """The interpreter; ends the program with advice if there is none that works."""
    python = options.torchft_python
    if python is None:
        raise SystemExit(HOW)
    try:
        command = [python, "-c", "import torchft, sklearn"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise SystemExit(f"--torchft-python {python}: {error}.\n\n{HOW}") from None
    if done.returncode:
        raise SystemExit(f"--torchft-python {python}: {done.stderr.strip()[-500:]}\n\n{HOW}")
    return str(python)
