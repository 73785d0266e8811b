"""Makes the strategy of an averager: a class with the averager's options and those of every strategy with replicas."""

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, getsourcefile, isabstract, signature
from typing import Any, TypeVar, get_args, get_type_hints

from lightning.pytorch.strategies import StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.checks import one_of, plain
from lightning_hetero.comm.topology import ReplicaKind
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.docstrings import documented
from lightning_hetero.strategies.replica import ReplicaStrategy

S = TypeVar("S", bound=type[ReplicaStrategy])


def strategy_for(averager: type[Averager], name: str, **defaults: Any) -> type[ReplicaStrategy]:
    """Make the strategy class of an averager, and register a name for it with Lightning.

    Its options are the averager's fields, then those of :class:`~lightning_hetero.ReplicaStrategy`; help, YAML, and the
    check that all ranks were given the same options, know them from there.

    Assign the result to a variable of the class's name, so that copies in other processes find it: the averager's name
    without "Averager", and with "Strategy".

    Args:
        averager: a dataclass, in which the fields are the options.
        name: the strategy string, as in ``Trainer(strategy=name)``.
        **defaults: defaults of the options, where they differ, such as ``replica="rank"``.

    Returns:
        The class.

    Raises:
        ConfigurationError: the averager is no dataclass, lacks a method, or has a field with the name of an option or
            attribute of strategies; the name is taken, or is no text; or a default cannot be used.

    Example::

        from dataclasses import dataclass

        from lightning_hetero import Averager, strategy_for


        @dataclass
        class LocalSGD(Averager):
            every: int = 8

            def due(self, context):
                return context.step % self.every == 0


        LocalSGDStrategy = strategy_for(LocalSGD, name="hetero_local_sgd", replica="rank")
    """
    _checked(averager)
    if not (isinstance(name, str) and name):
        raise ConfigurationError(f"name={name!r}: give the strategy's string, such as 'hetero_local_sgd'.")
    one_of("replica", defaults.get("replica", "node"), get_args(ReplicaKind))
    title = averager.__name__.removesuffix("Averager") + "Strategy"
    module = sys._getframe(1).f_globals.get("__name__", averager.__module__)  # as namedtuple does
    made = type(title, (ReplicaStrategy,), {"__module__": module, "__qualname__": title, "__doc__": averager.__doc__})
    strategy = with_options_of(averager, **defaults)(made)
    taken = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else strategy
    if (_file_of(taken), taken.__qualname__) != (_file_of(strategy), title):  # else the file has been run once more
        raise ConfigurationError(
            f"name={name!r} is taken by {taken.__module__}.{taken.__qualname__}. Choose another name for {title}."
        )
    summary = (averager.__doc__ or title).strip().split("\n")[0].rstrip(".")
    register_name(name, strategy, summary)
    return strategy


def with_options_of(averager: type[Averager], **defaults: Any) -> Callable[[S], S]:
    """A decorator that gives a strategy class the options of an averager, and the averager made of them.

    Args:
        averager: a dataclass, in which the fields are the options.
        **defaults: defaults of the options, where they differ.

    Raises:
        ConfigurationError: the averager cannot be used; see :func:`strategy_for`.
    """
    names = _checked(averager)
    given = {name: defaults.pop(name) for name in names if name in defaults}

    def decorate(strategy: S) -> S:
        whole = _signature(averager, {**given, **defaults})
        if unknown := sorted({*defaults} - {*whole.parameters}):
            raise ConfigurationError(f"{averager.__name__}: {', '.join(unknown)} is no option of its strategy.")

        def options(arguments: Any, more: dict[str, Any]) -> tuple[Averager, dict[str, Any]]:
            bound = whole.bind(None, *arguments, **more).arguments
            others = {**defaults, **bound.pop("kwargs", {}), **bound}
            del others["self"]
            own = {**given, **{name: plain(others.pop(name)) for name in names if name in others}}
            return averager(**own), others

        def __init__(self: ReplicaStrategy, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self.algorithm, kwargs = options(args, kwargs)
            ReplicaStrategy.__init__(self, **kwargs)

        __init__.__signature__ = whole  # type: ignore[attr-defined]
        __init__.__qualname__ = f"{strategy.__qualname__}.__init__"
        strategy.__init__ = __init__  # type: ignore[method-assign]
        strategy.averager_class = averager
        explained_by = (*averager.__mro__, *strategy.__mro__[1:])
        strategy.__doc__ = documented(strategy.__doc__, [*whole.parameters], explained_by)
        return strategy

    return decorate


def register_name(name: str, strategy: type[HeteroStrategy], what: str) -> None:
    """Register a strategy string with Lightning, in the variants that ``ddp`` has; checkpoints go by it, too.

    Args:
        name: such as ``"hetero_ddp"``.
        strategy: the class that it makes.
        what: what it does, in a line.
    """
    strategy.saved_as = name
    for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        for unused in (None, True, False):
            StrategyRegistry.register(
                name + suffix + ("" if unused is None else f"_find_unused_parameters_{unused}".lower()),
                strategy,
                description=f"{what} ({start_method})",
                override=True,
                start_method=start_method,
                **({} if unused is None else {"find_unused_parameters": unused}),
            )


def _file_of(strategy: type) -> str:
    """Where the algorithm of a strategy is written; under another name if the file was run as a script."""
    try:
        return getsourcefile(getattr(strategy, "averager_class", strategy)) or strategy.__module__
    except (OSError, TypeError):  # in a notebook, say
        return strategy.__module__


def _checked(averager: type[Averager]) -> list[str]:
    """The names of an averager's options, if a strategy can be made of it."""
    if not (isinstance(averager, type) and issubclass(averager, Averager)):
        raise ConfigurationError(f"{averager!r} is no subclass of lightning_hetero.Averager.")
    if not is_dataclass(averager):
        raise ConfigurationError(
            f"{averager.__name__} is no dataclass, so that its options are unknown. Put @dataclass above it, and let "
            "its fields be the options."
        )
    if isabstract(averager):
        missing = ", ".join(sorted(averager.__abstractmethods__))
        raise ConfigurationError(f"{averager.__name__} lacks {missing}, which every averager must define.")
    taken = {*signature(ReplicaStrategy.__init__).parameters, *signature(HeteroStrategy.__init__).parameters}
    taken |= {*signature(DistributedDataParallel.__init__).parameters, *dir(Averager), *Averager.__annotations__}
    # Gossip has an option `topology`; the attribute of this name is the job's.
    taken |= {*dir(ReplicaStrategy), *ReplicaStrategy.__annotations__, *HeteroStrategy.__annotations__} - {"topology"}
    names = [field.name for field in fields(averager) if field.init]
    if clash := [name for name in names if name in taken]:
        raise ConfigurationError(
            f"{averager.__name__}: {', '.join(clash)} is a name that strategies or averagers use themselves. Give the "
            "field another name."
        )
    return names


def _signature(averager: type[Averager], defaults: dict[str, Any]) -> Signature:
    """The options of an averager, then of replicas, then of every strategy, with their types and defaults."""
    hints = get_type_hints(averager)
    own = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in signature(averager).parameters.values()]
    inherited: dict[str, Parameter] = {}
    for kind in (ReplicaStrategy, HeteroStrategy):
        for p in signature(kind.__init__).parameters.values():
            listed = kind is ReplicaStrategy or p.kind is Parameter.KEYWORD_ONLY
            if listed and p.kind is not Parameter.VAR_KEYWORD and p.name != "self":
                inherited.setdefault(p.name, p.replace(kind=Parameter.KEYWORD_ONLY))
    options = [p.replace(default=defaults[p.name]) if p.name in defaults else p for p in (*own, *inherited.values())]
    positional = [p for p in options if p.kind is not Parameter.KEYWORD_ONLY]
    keyword = [p for p in options if p.kind is Parameter.KEYWORD_ONLY]
    first = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    last = Parameter("kwargs", Parameter.VAR_KEYWORD, annotation=Any)
    return Signature([first, *positional, *keyword, last], return_annotation=None)
