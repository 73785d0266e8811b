"""The commands: ``lightning-hetero fit -c config.yaml``, ``doctor``, ``strategies``, ``demo``, and scripts.

The same through ``python -m lightning_hetero``.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hetero.errors import HeteroError
from lightning_hetero.version import __version__

_TRAINER = {
    "fit": "train what a YAML file describes: -c config.yaml",
    "validate": "evaluate on the validation data: -c config.yaml",
    "test": "evaluate on the test data: -c config.yaml",
    "predict": "predict: -c config.yaml",
}


#: As people write numbers of parameters.
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: the command line, without the program's name. Default: this process's.

    Raises:
        SystemExit: the arguments are wrong, or the command failed; the reason has been printed.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not given:
            _parser().print_help()
        elif given[0] in _TRAINER:
            from lightning_hetero.config import lightning_cli

            lightning_cli(arguments)
        elif given[0].endswith(".py"):
            from lightning_hetero.launch.script import run_script

            run_script(given[0], given[1:])
        else:
            _run(_parser().parse_args(given))
    except HeteroError as error:
        if given[0] in _TRAINER or (given[0].endswith(".py") and Path(given[0]).is_file()):
            raise  # from a training: the traceback says where
        sys.exit(f"error: {error}")


def _run(options: argparse.Namespace) -> None:
    if options.command == "strategies":
        from rich.console import Console

        from lightning_hetero.strategies.table import strategies_table

        Console().print(strategies_table())
    elif options.command == "doctor":
        given = {name: value for name, value in vars(options).items() if name != "command"}
        if given.pop("selftest"):
            from lightning_hetero.selftest import selftest

            sys.exit(0 if selftest() else 1)
        from lightning_hetero.doctor import examine

        examine(**given)
    elif options.command == "plan":
        from lightning_hetero.planning import plan
        from lightning_hetero.planning.plan import ClusterOptions

        given = {name: getattr(options, name) for name in ClusterOptions._fields if hasattr(options, name)}
        plan.run(options.measured, given, options.every, options.wire, options.most, options.out)
    else:
        from lightning_hetero.demo.demo import demo

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidy up, as on Ctrl-C
        try:
            demo(options.out, options.epochs)
        except KeyboardInterrupt:
            sys.exit("\nInterrupted; all processes have been ended.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-hetero",
        description="Train on machines that are not alike and links that are slow.",
        epilog="lightning-hetero SCRIPT.py ARGUMENTS: run your script, unchanged, with the strategies registered.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-hetero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in _TRAINER.items():
        commands.add_parser(name, help=text)
    commands.add_parser("strategies", help="list the strategies: their papers, and when to use them")
    doctor = commands.add_parser(
        "doctor",
        help="measure this machine, or the job that this runs in, and suggest a strategy",
        description="Measure ranks and links, and suggest a strategy with its arithmetic. It starts its own ranks, or "
        "runs as one of them under torchrun, mpiexec or srun.",
    )
    doctor.add_argument("--devices", default="auto", help="ranks on this machine, unless a launcher has started them")
    doctor.add_argument("--accelerator", default="auto", help="cpu, gpu, ... (%(default)s)")
    doctor.add_argument("--num-nodes", type=_at_least_one, default=1, help="nodes, as for the Trainer (%(default)s)")
    doctor.add_argument(
        "--ranks-per-node", type=_at_least_one, help="treat so many consecutive ranks as one node, to try things out"
    )
    doctor.add_argument("-c", "--config", type=_file, help="a YAML file as for fit; its model and data are measured")
    doctor.add_argument(
        "--batch-size", type=_at_least_one, default=64, help="of each rank, for the built-in model (%(default)s)"
    )
    doctor.add_argument("--timeout", type=_seconds, default=60.0, help="longest wait for a rank, in s (%(default)s)")
    doctor.add_argument("--interface", help="network interface towards the others, such as wg0, as for the strategies")
    doctor.add_argument("--ports", help="range of ports to listen in, such as 29500-29540, as for the strategies")
    doctor.add_argument("--save", type=Path, help="write what was measured to this file, for plan --from")
    doctor.add_argument(
        "--selftest",
        action="store_true",
        help="check this machine's devices in real fits, for some minutes, and print a table to paste into an issue",
    )
    _add_plan(commands)
    demo = commands.add_parser(
        "demo",
        help="train with ddp, hetero_ddp and hetero_daso on emulated fast and slow devices; takes about two minutes",
    )
    demo.add_argument("--out", type=Path, default=Path("demo_results"), help="folder for the results (%(default)s)")
    demo.add_argument("--epochs", type=_at_least_one, default=6, help="epochs of each training (%(default)s)")
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict the speed of all strategies, on what doctor has measured or on machines that you describe",
        description="Predict time, bytes and speed of a step under all strategies, by arithmetic: "
        "lightning-hetero plan --nodes 64 --ranks 8 --params 1.3e9 --link 1gbit --step 0.4 --speeds 1,1,0.5",
    )
    plan.add_argument("--from", dest="measured", type=_file, help="a file of doctor --save; other options override it")
    cluster = plan.add_argument_group("the machines", argument_default=argparse.SUPPRESS)
    cluster.add_argument("--nodes", type=_at_least_one, help="(2)")
    cluster.add_argument("--ranks", type=_at_least_one, help="of each node (4)")
    cluster.add_argument("--params", type=_parameters, help="of the model, such as 350M or 1.3B (25e6)")
    cluster.add_argument("--step", type=_seconds, help="seconds of a rank of speed 1 (0.3)")
    cluster.add_argument("--speeds", type=_speeds, help="of the ranks, repeated, such as 1,1,0.5 (1)")
    cluster.add_argument("--batch", type=_at_least_one, help="samples per rank and step (32)")
    cluster.add_argument("--fixed", type=float, help="part of a step that does not depend on samples (0.1)")
    cluster.add_argument("--link", type=_rate, help="out of a node, such as 1gbit, 200mbit or 125MB (1gbit)")
    cluster.add_argument("--latency", type=float, help="of that link, in s (2e-4)")
    cluster.add_argument("--inside", type=_rate, help="between the ranks of a node (5GB)")
    cluster.add_argument("--handling", type=_rate, help="parameters that a rank packs and mixes (500MB; a core's)")
    plan.add_argument("--every", type=_at_least_one, help="steps between exchanges (default: the best for each)")
    plan.add_argument("--wire", choices=("fp32", "bf16", "int8", "int4"), help="(default: the best for each)")
    plan.add_argument("--most", type=_at_least_one, default=512, help="nodes of the weak scaling (%(default)s)")
    plan.add_argument("--out", type=Path, help="draw the weak scaling to this PNG")


def _rate(text: str) -> float:
    from lightning_hetero.planning.cluster import bytes_per_second

    try:
        return bytes_per_second(text)
    except HeteroError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str, of: str = "") -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number{of} above 0")
    return value


def _parameters(text: str) -> float:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in {*_SUFFIXES} else (text, "")
    return _positive(number) * _SUFFIXES.get(unit, 1.0)


def _speeds(text: str) -> tuple[float, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    return _positive(text, " of seconds")


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text} in {Path.cwd()}")
    return Path(text)
