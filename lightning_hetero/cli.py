"""The commands: ``lightning-hetero fit -c config.yaml``, ``doctor``, ``strategies``, ``demo``, and scripts.

The same through ``python -m lightning_hetero``.
"""

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from lightning_hetero.errors import ConfigurationError, HeteroError
from lightning_hetero.version import __version__

_TRAINER = {
    "fit": "train, as a YAML file says: -c config.yaml",
    "validate": "evaluate on the validation data: -c config.yaml",
    "test": "evaluate on the test data: -c config.yaml",
    "predict": "predict: -c config.yaml",
}


#: As people write numbers of parameters.
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class _CommandParser(argparse.ArgumentParser):
    """Parser whose errors name the nearest choice."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = get_close_matches(wrong[1], re.findall(r"\w+", wrong[2]), 1) if wrong else []
        super().error(message + "".join(f". Did you mean {word}?" for word in near))


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
            if not Path(given[0]).is_file():
                sys.exit(f"error: there is no script {given[0]} in {Path.cwd()}.")
            from lightning_hetero.launch.script import run_script

            run_script(given[0], given[1:])
        else:
            _run(_parser().parse_args(given))
    except HeteroError as error:
        if given[0] in _TRAINER or given[0].endswith(".py"):
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
            usual = vars(_parser().parse_args(["doctor"]))
            if others := [f"--{name.replace('_', '-')}" for name in given if given[name] != usual[name]]:
                raise ConfigurationError(
                    f"doctor --selftest goes without {', '.join(others)}: it takes the GPUs that it sees, four at "
                    "most, else two CPU ranks. CUDA_VISIBLE_DEVICES says which it sees."
                )
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
    parser = _CommandParser(
        prog="lightning-hetero",
        description="Train with PyTorch Lightning on unequal machines and slow links.",
        epilog="lightning-hetero SCRIPT.py ARGUMENTS runs your script, unchanged, with the strategies registered. "
        "Try first: lightning-hetero demo",
    )
    parser.add_argument("--version", action="version", version=f"lightning-hetero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in _TRAINER.items():
        commands.add_parser(name, help=text)
    commands.add_parser("strategies", help="list the strategies: their papers, and when to use them")
    doctor = commands.add_parser(
        "doctor",
        help="measure devices and links, and suggest a strategy; --selftest checks GPUs",
        description="Measure devices and links, and suggest a strategy. It starts its own ranks, or runs on those that "
        "torchrun, mpiexec or srun has started. Begin with: lightning-hetero doctor --devices 2",
    )
    doctor.add_argument(
        "--devices", default="auto", help="number of ranks on this machine, unless a launcher starts them"
    )
    doctor.add_argument("--accelerator", default="auto", help="cpu, gpu, ... (%(default)s)")
    doctor.add_argument(
        "--num-nodes", type=_at_least_one, default=1, help="number of nodes, as for the Trainer (%(default)s)"
    )
    doctor.add_argument(
        "--ranks-per-node", type=_at_least_one, help="pretend that so many ranks are one node, to try things out"
    )
    doctor.add_argument("-c", "--config", type=_file, help="measure the model and data of this YAML file, as for fit")
    doctor.add_argument(
        "--batch-size", type=_at_least_one, default=64, help="samples per rank, for the built-in model (%(default)s)"
    )
    doctor.add_argument(
        "--timeout", type=_seconds, default=60.0, help="longest wait for a rank, in seconds (%(default)s)"
    )
    doctor.add_argument("--interface", help="network interface to the other nodes, such as wg0")
    doctor.add_argument("--ports", help="ports to listen on, such as 29500-29540")
    doctor.add_argument("--save", type=Path, help="write the measurements to this file, for plan --from")
    doctor.add_argument(
        "--selftest",
        action="store_true",
        help="instead: train on the GPUs of this machine, for some minutes, and print a table to paste into an issue",
    )
    _add_plan(commands)
    demo = commands.add_parser(
        "demo",
        help="see it work: train on emulated fast and slow devices, for two minutes",
        description="Train the same model under ddp, hetero_ddp and hetero_daso, on four emulated devices of unequal "
        "speed. Prints who waits and how fast each is, and draws it. Takes about two minutes.",
    )
    demo.add_argument("--out", type=Path, default=Path("demo_results"), help="folder for the results (%(default)s)")
    demo.add_argument("--epochs", type=_at_least_one, default=6, help="epochs of each training (%(default)s)")
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict the speed of all strategies, on measured or on described machines",
        description="Predict time, bytes and speed of a step under all strategies, and recommend one. "
        "Example: lightning-hetero plan --nodes 64 --ranks 8 --params 1.3B --link 1gbit --step 0.4 --speeds 1,1,0.5",
    )
    plan.add_argument(
        "--from", dest="measured", type=_file, help="use what doctor --save has written; other options override it"
    )
    cluster = plan.add_argument_group("the machines (defaults in parentheses)", argument_default=argparse.SUPPRESS)
    cluster.add_argument("--nodes", type=_at_least_one, help="number of nodes (2)")
    cluster.add_argument(
        "--ranks", type=_counts, help="number of ranks per node, such as 8; or of each, such as 8,4 (4)"
    )
    cluster.add_argument("--params", type=_parameters, help="parameters of the model, such as 350M or 1.3B (25e6)")
    cluster.add_argument("--step", type=_seconds, help="seconds that a rank of speed 1 takes for a step (0.3)")
    cluster.add_argument(
        "--speeds", type=_speeds, help="speeds of the ranks, one after another and repeated, such as 1,1,0.5 (1)"
    )
    cluster.add_argument("--batch", type=_at_least_one, help="samples per rank and step (32)")
    cluster.add_argument(
        "--fixed", type=float, help="part of a step that does not depend on the number of samples (0.1)"
    )
    cluster.add_argument(
        "--link", type=_rate, help="speed of the link between nodes, such as 1gbit, 200mbit or 125MB (1gbit)"
    )
    cluster.add_argument("--latency", type=float, help="latency of that link, in seconds (2e-4)")
    cluster.add_argument("--inside", type=_rate, help="speed of the links between ranks of a node (5GB)")
    cluster.add_argument(
        "--handling", type=_rate, help="bytes of parameters that a rank packs and mixes per second (500MB: one core)"
    )
    plan.add_argument(
        "--every", type=_at_least_one, help="steps between two exchanges (default: the best for each strategy)"
    )
    plan.add_argument(
        "--wire",
        choices=("fp32", "bf16", "int8", "int4"),
        help="number format of exchanges (default: the best for each strategy)",
    )
    plan.add_argument(
        "--most",
        type=_at_least_one,
        default=512,
        help="largest number of nodes in the table of weak scaling (%(default)s)",
    )
    plan.add_argument("--out", type=Path, help="draw the weak scaling as this PNG")


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


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_at_least_one(part) for part in text.split(","))


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
