"""``python -m lightning_hetero demo``."""

import argparse
import signal
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run what it asks for."""
    parser = argparse.ArgumentParser(prog="python -m lightning_hetero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train with ddp, hetero_ddp and hetero_daso on emulated fast and slow devices; takes about two minutes",
    )
    demo.add_argument("--out", type=Path, default=Path("demo_results"), help="folder for the results (%(default)s)")
    demo.add_argument("--epochs", type=_at_least_one, default=6, help="epochs of each training (%(default)s)")
    options = parser.parse_args(arguments)

    from lightning_hetero.demo.compare import demo as run_demo  # after parsing, so that --help is quick
    from lightning_hetero.errors import HeteroError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidy up, as on Ctrl-C
    try:
        run_demo(options.out, options.epochs)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; all processes have been ended.")
    except HeteroError as error:
        sys.exit(f"error: {error}")


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


if __name__ == "__main__":
    main()
