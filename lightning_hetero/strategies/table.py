"""The table of strategy strings: what each stands for, when to use it, and its paper."""

import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC
from lightning.pytorch.strategies import StrategyRegistry
from rich.table import Table

from lightning_hetero.errors import ConfigurationError, UnsupportedError
from lightning_hetero.registration import why_not_aliased
from lightning_hetero.strategies import algorithms
from lightning_hetero.strategies.auto import AutoStrategy
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.fabric import HeteroFabricStrategy
from lightning_hetero.strategies.replica import register_name


class StrategyEntry(NamedTuple):
    """One strategy string.

    Attributes:
        name: the string.
        strategy: the class that it makes.
        replica: what trains apart from the others: the whole world, a node, or a rank (or, if asked for, a node).
        when: when to use it.
        paper: where it comes from.
    """

    name: str
    strategy: type[HeteroStrategy]
    replica: Literal["world", "node", "rank"]
    when: str
    paper: str


_ELASTIC = "Zhang et al. 2015"
_ON_CLUSTERS = "You, Buluç and Demmel 2017"
_GOSSIP = "Georgiev and Gurov 2019"

ENTRIES = (
    StrategyEntry(
        "hetero_ddp",
        algorithms.HeteroDDPStrategy,
        "world",
        "the links are fast, or there is one machine; exact",
        "HetGrad, Moreno-Álvarez et al. 2022",
    ),
    StrategyEntry(
        "hetero_auto",
        AutoStrategy,
        "world",
        "you do not know the links, or do not want to choose",
        f"{_ON_CLUSTERS}; DASO, Coquelin et al. 2021 (the arithmetic)",
    ),
    StrategyEntry(
        "hetero_node",
        algorithms.NodeAverageStrategy,
        "node",
        "slow links between nodes; the simplest that leaves them out of the step",
        "eDNNcomm, Moreno-Álvarez et al. 2023",
    ),
    StrategyEntry(
        "hetero_daso",
        algorithms.DASOStrategy,
        "node",
        "slow links between nodes; exchanges pass in the background",
        "DASO, Coquelin et al. 2021",
    ),
    StrategyEntry(
        "hetero_easgd",
        algorithms.EASGDStrategy,
        "rank",
        "slow links between ranks; repeatable bit for bit",
        f"EASGD, {_ELASTIC}; {_ON_CLUSTERS}",
    ),
    StrategyEntry(
        "hetero_easgd_overlap",
        algorithms.EASGDOverlapStrategy,
        "rank",
        "the same numbers, sooner",
        f"Sync EASGD3, {_ON_CLUSTERS}",
    ),
    StrategyEntry(
        "hetero_easgd_round_robin",
        algorithms.EASGDRoundRobinStrategy,
        "rank",
        "as the baseline that the others beat",
        f"Original EASGD, {_ON_CLUSTERS}",
    ),
    StrategyEntry(
        "hetero_easgd_async",
        algorithms.EASGDAsyncStrategy,
        "rank",
        "ranks stall now and then, so that nobody should wait for them",
        f"Async EASGD, {_ELASTIC}; {_ON_CLUSTERS}",
    ),
    StrategyEntry(
        "hetero_easgd_hogwild",
        algorithms.EASGDHogwildStrategy,
        "rank",
        "many ranks on one machine, at short intervals",
        f"Hogwild EASGD, {_ON_CLUSTERS}",
    ),
    StrategyEntry(
        "hetero_measgd_async",
        algorithms.MEASGDAsyncStrategy,
        "rank",
        "as hetero_easgd_async, with SGD(momentum=)",
        f"Async MEASGD, {_ON_CLUSTERS}",
    ),
    StrategyEntry(
        "hetero_eamsgd",
        algorithms.EAMSGDStrategy,
        "rank",
        "as hetero_easgd, with SGD(nesterov=True)",
        f"EAMSGD, {_ELASTIC}",
    ),
    StrategyEntry(
        "hetero_gossip",
        algorithms.GossipStrategy,
        "rank",
        "many replicas, no point that all must pass",
        f"GoSGD, Blot et al. 2016; {_GOSSIP}",
    ),
    StrategyEntry(
        "hetero_gossip_push_sum",
        algorithms.GossipPushSumStrategy,
        "rank",
        "messages come late, or links go one way",
        f"SGP, Assran et al. 2019; {_GOSSIP}",
    ),
    StrategyEntry(
        "hetero_gossip_async",
        algorithms.GossipAsyncStrategy,
        "rank",
        "as hetero_gossip, beside ranks that stall",
        f"AD-PSGD, Lian et al. 2018; {_GOSSIP}",
    ),
    StrategyEntry(
        "hetero_diloco",
        algorithms.DiLoCoStrategy,
        "rank",
        "very slow links: hundreds of steps between exchanges",
        "DiLoCo, Douillard et al. 2023; Streaming DiLoCo, 2025",
    ),
    StrategyEntry(
        "hetero_diloco_async",
        algorithms.DiLoCoAsyncStrategy,
        "rank",
        "as hetero_diloco, with ranks of unequal speed and fixed shares",
        "Delayed Nesterov and DyLU, Liu et al. 2024",
    ),
    StrategyEntry(
        "hetero_noloco",
        algorithms.NoLoCoStrategy,
        "rank",
        "as hetero_diloco, with many replicas, or links that are not alike",
        "NoLoCo, Kolehmainen et al. 2025",
    ),
)


def register() -> None:
    """Make the strategy strings known to Lightning; importing ``lightning_hetero.strategies`` does it."""
    for entry in ENTRIES:
        register_name(entry.name, entry.strategy)
    if "hetero_ddp" not in FABRIC:
        FABRIC.register("hetero_ddp", HeteroFabricStrategy, "hetero_ddp for Fabric")
    _show_unknown(StrategyRegistry, _explain)
    refuse_elsewhere()


# -- what is given as a strategy, and is none --------------------------------------------------------


def refuse_elsewhere() -> None:
    """Let Fabric, and ``pytorch_lightning`` where it is a package of its own, say why they have no such strategy."""
    _show_unknown(FABRIC, _refuse_in_fabric)
    for package, name in (("pytorch_lightning", "StrategyRegistry"), ("lightning_fabric", "STRATEGY_REGISTRY")):
        own = getattr(sys.modules.get(f"{package}.strategies"), name, None)
        if own is not None and own is not StrategyRegistry and own is not FABRIC:
            _show_unknown(own, _refuse_pytorch_lightning if name == "StrategyRegistry" else _refuse_in_fabric)


class _Names(list):
    """Strings that are known; anything else that is looked up is shown to a function, which may raise an error."""

    def __init__(self, names: Iterable[str], look: Callable[[object], None]) -> None:
        super().__init__(names)
        self._look = look

    def __contains__(self, asked: object) -> bool:
        if super().__contains__(asked):
            return True
        self._look(asked)
        return False


def _show_unknown(registry: Any, look: Callable[[object], None]) -> None:
    """Show a function what a Trainer, or Fabric, is given as a strategy, and does not find in its registry."""
    registry.available_strategies = lambda: _Names(type(registry).available_strategies(registry), look)


def _squashed(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _meant(asked: object) -> str | None:
    """The string of a strategy that was probably meant; empty: of this package, but nobody knows which."""
    if isinstance(asked, HeteroStrategy):
        return asked.saved_as
    if not isinstance(asked, str):
        return None
    own = [name for name, data in StrategyRegistry.items() if _is_ours(data["strategy"])]
    words = {_squashed(form): name for name in own for form in (name.removeprefix("hetero_"), name)}
    words |= {_squashed(entry.strategy.__name__): entry.name for entry in ENTRIES}
    word = _squashed(re.split(r"[(\[:,\s]", asked.strip(), maxsplit=1)[0].rpartition(".")[2])
    if word not in words and "hetero" not in word:
        return None
    return next((words[near] for near in get_close_matches(word, words, n=1, cutoff=0.7)), "")


def _is_ours(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, HeteroStrategy)


def _shown(asked: object) -> str:
    return repr(asked) if isinstance(asked, str) else f"{type(asked).__name__}(...)"


def _explain(asked: object) -> None:
    """Raise an error if a string was meant to be one of these, or if a class is given in place of its instance."""
    if isinstance(asked, type) and _is_ours(asked):
        given = asked.__name__
        raise ConfigurationError(f"strategy={given} is a class: give an instance, strategy={given}(...).")
    if (name := _meant(asked)) is None or not isinstance(asked, str):
        return
    near = ""
    if name:
        kind = StrategyRegistry[name]["strategy"]
        module = "lightning_hetero" if kind.__module__.startswith("lightning_hetero.") else kind.__module__
        options = re.sub(r"^[\w.\s-]*[(\[:,]?\s*|[)\]\s]*$", "", asked) or "..."
        near = f" Did you mean {name!r}? Options are given to the class: {module}.{kind.__name__}({options})."
    raise ConfigurationError(
        f"strategy={asked!r}: there is no strategy of this name.{near} `lightning-hetero strategies` lists all. A name "
        "of your own is known once the module that registers it, by strategy_for, has been imported."
    )


def _refuse_in_fabric(asked: object) -> None:
    """Raise an error if Fabric is given one of these strategies."""
    if _meant(asked) is not None:
        raise UnsupportedError(
            f"strategy={_shown(asked)} for Fabric: the strategies of lightning_hetero are for the Trainer, which tells "
            "them where a fit stands; Fabric does not. Use lightning.pytorch.Trainer; or, in lightning.fabric, "
            "strategy='hetero_ddp' or HeteroFabricStrategy(...), which splits batches by speed there."
        )


def _refuse_pytorch_lightning(asked: object) -> None:
    """Raise an error if the Trainer of another package is given one of these strategies."""
    if _meant(asked) is not None:
        raise ConfigurationError(
            f"strategy={_shown(asked)} for the Trainer of pytorch_lightning: strategies of lightning_hetero are made "
            f"for lightning.pytorch. {why_not_aliased()} Or import Trainer, LightningModule and callbacks from "
            "lightning.pytorch."
        )


def strategies_table() -> Table:
    """A row per strategy string: replica, when to use it, paper."""
    table = Table(
        title="Ranks of a replica average gradients at every step; replicas bring their parameters together.",
        caption="Replicas of a rank can be nodes too: replica='node'.",
        title_justify="left",
        caption_justify="left",
        show_lines=True,
    )
    table.add_column("strategy", no_wrap=True)
    table.add_column("replica", no_wrap=True)
    table.add_column("use it when", overflow="fold")
    table.add_column("paper", overflow="fold")
    for entry in ENTRIES:
        table.add_row(f"[bold]{entry.name}[/bold]", entry.replica, entry.when, entry.paper)
    return table
