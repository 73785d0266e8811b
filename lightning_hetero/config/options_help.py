"""The help of a strategy: its own options, and those of PyTorch's DDP only on request."""

from argparse import SUPPRESS
from inspect import Parameter, signature
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_hetero.strategies.base import HeteroStrategy

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


def own_options(strategy: type[HeteroStrategy]) -> set[str]:
    """Names of the options that a strategy adds to Lightning's ``DDPStrategy``, and of those that users of both set."""
    kinds = [kind for kind in strategy.__mro__ if issubclass(kind, HeteroStrategy) and "__init__" in vars(kind)]
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
