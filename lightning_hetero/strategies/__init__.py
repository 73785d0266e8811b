"""The Lightning face: one typed class per algorithm, and its strategy strings."""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero.strategies.daso import DASOStrategy
from lightning_hetero.strategies.ddp import HeteroDDPStrategy
from lightning_hetero.strategies.diloco import DiLoCoStrategy
from lightning_hetero.strategies.easgd import EAMSGDStrategy, EASGDOverlapStrategy, EASGDStrategy
from lightning_hetero.strategies.easgd_async import (
    EASGDAsyncStrategy,
    EASGDHogwildStrategy,
    EASGDRoundRobinStrategy,
    MEASGDAsyncStrategy,
)
from lightning_hetero.strategies.gossip import GossipAsyncStrategy, GossipPushSumStrategy, GossipStrategy
from lightning_hetero.strategies.hetero import HeteroStrategy
from lightning_hetero.strategies.node import NodeAverageStrategy
from lightning_hetero.strategies.replicas import ReplicaStrategy

__all__ = [
    "DASOStrategy",
    "DiLoCoStrategy",
    "EAMSGDStrategy",
    "EASGDAsyncStrategy",
    "EASGDHogwildStrategy",
    "EASGDOverlapStrategy",
    "EASGDRoundRobinStrategy",
    "EASGDStrategy",
    "GossipAsyncStrategy",
    "GossipPushSumStrategy",
    "GossipStrategy",
    "HeteroDDPStrategy",
    "HeteroStrategy",
    "MEASGDAsyncStrategy",
    "NodeAverageStrategy",
    "ReplicaStrategy",
    "register",
]

_AUTO = {"moving_rate": "auto"}
_ENTRIES: tuple[tuple[str, type[HeteroStrategy], dict[str, Any], str], ...] = (
    ("hetero_ddp", HeteroDDPStrategy, {}, "batches split by measured speed, gradients weighted by samples"),
    ("hetero_node", NodeAverageStrategy, {}, "gradients within a node, parameter averages between nodes"),
    ("hetero_daso", DASOStrategy, {}, "gradients within a node, stale background mixing between nodes"),
    ("hetero_easgd", EASGDStrategy, _AUTO, "an elastic center, all at once"),
    ("hetero_easgd_overlap", EASGDOverlapStrategy, _AUTO, "an elastic center, in the background of a step"),
    ("hetero_easgd_round_robin", EASGDRoundRobinStrategy, _AUTO, "an elastic center, in turn"),
    ("hetero_easgd_async", EASGDAsyncStrategy, _AUTO, "an elastic center, first come, first served"),
    ("hetero_easgd_hogwild", EASGDHogwildStrategy, _AUTO, "an elastic center in shared memory, without a lock"),
    ("hetero_measgd_async", MEASGDAsyncStrategy, _AUTO, "an elastic center and heavy-ball momentum, asynchronous"),
    ("hetero_eamsgd", EAMSGDStrategy, _AUTO, "an elastic center and Nesterov's momentum"),
    ("hetero_gossip", GossipStrategy, {}, "averages in pairs, in rounds"),
    ("hetero_gossip_push_sum", GossipPushSumStrategy, {}, "pushes of values with their weight, in rounds"),
    ("hetero_gossip_async", GossipAsyncStrategy, {}, "averages in pairs, first come, first paired"),
    ("hetero_diloco", DiLoCoStrategy, {}, "an outer optimizer on what replicas have done"),
)


def register() -> None:
    """Make the strategy strings known to Lightning; importing the package does it."""
    for name, strategy, options, description in _ENTRIES:
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            for unused in (None, True, False):
                StrategyRegistry.register(
                    name + suffix + ("" if unused is None else f"_find_unused_parameters_{unused}".lower()),
                    strategy,
                    description=f"{description} ({start_method})",
                    start_method=start_method,
                    **options,
                    **({} if unused is None else {"find_unused_parameters": unused}),
                )
