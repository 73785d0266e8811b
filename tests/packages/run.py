"""Runs the scripts of this folder, each in an environment of its own with its package: `make test-packages`."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".envs"
#: Packages by their names on PyPI, with the requirements for pip.
PACKAGES = {
    "pytorch-forecasting": ["pytorch-forecasting"],
    "scvi-tools": ["scvi-tools"],
    "chemprop": ["chemprop"],
    "gluonts": ["gluonts[torch]", "scipy"],
    "nequip": ["nequip"],
    "pina-mathlab": ["pina-mathlab"],
    "deeptab": ["deeptab"],
    "transformers": ["transformers"],
    "litgpt": ["litgpt"],
    "hydra-core": ["hydra-core"],
    "darts": ["darts[torch]"],
    "neuralforecast": ["neuralforecast"],
}


def python_of(package: str, constraints: str) -> Path:
    """The Python of a package's environment, which is made if it does not exist."""
    folder = ENVIRONMENTS / package
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"-- setting up {folder}", flush=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, "--editable", ROOT, *PACKAGES[package]], check=True)
        ready.touch()
    return python


def main() -> int:
    """Run all scripts, or the named ones; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--constraints", default=str(ROOT / "constraints.txt"), help="for pip")
    args = parser.parse_args()
    if unknown := set(args.packages) - set(PACKAGES):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(PACKAGES)}")
    failed = []
    print("| package | strategy | steps | samples of the ranks | loss, first and last epoch | weights, from ddp's | |")
    print("|---|---|---:|---|---|---:|---|", flush=True)
    for package in args.packages or PACKAGES:
        python = python_of(package, args.constraints)
        script = HERE / f"with_{package.replace('-', '_')}.py"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [python, script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
        print("\n".join(rows) if not done.returncode else done.stdout, flush=True)
        failed += [package] if done.returncode else []
    print(f"not as it should be: {', '.join(failed)}" if failed else "all as it should be")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
