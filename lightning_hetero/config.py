"""YAML configuration, read as LightningCLI does, for training and for the doctor."""

import os
import sys
from argparse import SUPPRESS, ArgumentError
from collections.abc import Sequence
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.table import ENTRIES

#: Asks for all options, DDP's included.
ALL_OPTIONS = "--all-options"
#: Lightning's own options that a user of these strategies sets, too.
SHARED = {"start_method", "timeout"}


def own_options_first(parser: LightningArgumentParser) -> LightningArgumentParser:
    """Let a parser show the options of a strategy of this package without those that it hands on to DDP.

    Args:
        parser: a new one; it parses as before.

    Returns:
        The same parser.
    """
    parser.__class__ = _Parser  # jsonargparse makes the parser for a class's help from its type
    return parser


def own_options(kind: type[HeteroStrategy]) -> set[str]:
    """Names of the options that a strategy adds to Lightning's ``DDPStrategy``, and of those that users of both set."""
    kinds = [base for base in kind.__mro__ if issubclass(base, HeteroStrategy) and "__init__" in vars(base)]
    names = {
        parameter.name
        for kind in kinds
        for parameter in signature(kind.__init__).parameters.values()
        if parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    }
    return names - set(signature(DDPStrategy.__init__).parameters) - {"process_group_backend"} | SHARED


class _Parser(LightningArgumentParser):
    @override
    def add_class_arguments(
        self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        added = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        if nested_key and isinstance(theclass, type) and issubclass(theclass, HeteroStrategy):
            self._show_own_options(theclass, nested_key)
        return added

    def _show_own_options(self, strategy: type[HeteroStrategy], key: str) -> None:
        """Hide the other options in the help, and say how to see them."""
        own = own_options(strategy)
        for action in self._actions:
            name = action.dest.removeprefix(f"{key}.").split(".")[0]
            if action.dest.startswith(f"{key}.") and name not in own:
                action.help = SUPPRESS
        module = "lightning_hetero" if strategy.__module__.startswith("lightning_hetero.") else strategy.__module__
        path = f"{module}.{strategy.__name__}"
        self.usage = f"lightning-hetero fit -c config.yaml --{key}={path} --{key}.OPTION=VALUE ..."
        self.epilog = (
            "Not shown: what the Trainer sets, and options of PyTorch's DistributedDataParallel, such as "
            f"find_unused_parameters. To see them too, add {ALL_OPTIONS}."
        )


_HELP = "--trainer.strategy.help"


def lightning_cli(arguments: Sequence[str] | None = None, run: bool = True, **options: Any) -> LightningCLI:
    """Run a LightningCLI in which the strategies are registered; the YAML names model and data by ``class_path``.

    Args:
        arguments: such as ``["fit", "-c", "config.yaml"]``. Default: this process's.
        run: whether the arguments begin with a command to run; otherwise model, data and Trainer are made, and nothing
            is run.
        **options: further options of LightningCLI.

    Raises:
        SystemExit: the arguments or the file cannot be used; the reason has been printed.
    """
    if find_spec("jsonargparse") is None:
        sys.exit("error: YAML files need jsonargparse: pip install 'lightning-hetero[cli]'")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where a class_path is looked for; an installed command leaves it out
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's own calls
    args = None if arguments is None else list(arguments)
    given = sys.argv if args is None else args
    _name_classes(given)
    _Commands.in_full = ALL_OPTIONS in given
    if _Commands.in_full:
        given.remove(ALL_OPTIONS)  # which LightningCLI does not know
    return _Commands(args=args, run=run, parser_kwargs={"prog": "lightning-hetero"}, **options)


class _Commands(LightningCLI):
    """A LightningCLI that says what was wrong without a page of options before it, and what to do."""

    in_full = False

    @override
    def init_parser(self, **kwargs: Any) -> Any:
        parser = super().init_parser(**{"exit_on_error": False, **kwargs})
        return parser if self.in_full else own_options_first(parser)

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            hint = ""
            if "No module named" in str(error):
                hint = (
                    f"\nClasses are looked for in the working folder, here {Path.cwd()}, and on PYTHONPATH: start in "
                    "the folder of your module, or set PYTHONPATH to it."
                )
            _refuse(f"{error}{hint}")
        parser.exit_on_error = True  # from here on Lightning goes by it
        settings = self.config[self.config.subcommand] if "subcommand" in self.config else self.config
        strategy = settings.trainer.strategy
        if isinstance(strategy, str) and ("." in strategy or strategy.endswith("Strategy")):
            _refuse(
                f"--trainer.strategy={strategy}: a single word is taken for a registered name, such as hetero_daso. "
                f"Name a class by --trainer.strategy.class_path={strategy}, and its options by "
                "--trainer.strategy.init_args.NAME=VALUE."
            )


def _name_classes(given: list[str]) -> None:
    """The help of a strategy by its string, such as ``hetero_daso``: jsonargparse knows classes only."""
    paths = {entry.name: f"lightning_hetero.{entry.strategy.__name__}" for entry in ENTRIES}
    for place, word in enumerate(given):
        if word == _HELP and place + 1 < len(given):
            given[place + 1] = paths.get(given[place + 1], given[place + 1])
        elif word.startswith(f"{_HELP}="):
            name = word.removeprefix(f"{_HELP}=")
            given[place] = f"{_HELP}={paths.get(name, name)}"


def _refuse(why: str) -> None:
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)  # as argparse does
