"""The Lightning face: one typed class per algorithm, and its strategy strings."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero.strategies.daso import DASOStrategy
from lightning_hetero.strategies.ddp import HeteroDDPStrategy
from lightning_hetero.strategies.hetero import HeteroStrategy
from lightning_hetero.strategies.node import NodeAverageStrategy
from lightning_hetero.strategies.replicas import ReplicaStrategy

__all__ = ["DASOStrategy", "HeteroDDPStrategy", "HeteroStrategy", "NodeAverageStrategy", "ReplicaStrategy", "register"]

_ENTRIES = (
    ("hetero_ddp", HeteroDDPStrategy, "batches split by measured speed, gradients weighted by samples"),
    ("hetero_node", NodeAverageStrategy, "gradients within a node, parameter averages between nodes"),
    ("hetero_daso", DASOStrategy, "gradients within a node, stale background mixing between nodes"),
)


def register() -> None:
    """Make the strategy strings known to Lightning; importing the package does it."""
    for name, strategy, description in _ENTRIES:
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            for unused in ({}, {"find_unused_parameters": True}):
                StrategyRegistry.register(
                    name + suffix + ("_find_unused_parameters_true" if unused else ""),
                    strategy,
                    description=f"{description} ({start_method})",
                    start_method=start_method,
                    **unused,
                )
