"""The Lightning face: one typed class per algorithm, and its strategy strings."""

import lightning.pytorch  # noqa: F401  before any part of this package, as it triggers the registration

from lightning_hetero.algorithms.base import Averager, FitInfo, Outcome, StepContext, Traits
from lightning_hetero.strategies.algorithms import (
    DASOStrategy,
    DiLoCoAsyncStrategy,
    DiLoCoStrategy,
    EAMSGDStrategy,
    EASGDAsyncStrategy,
    EASGDHogwildStrategy,
    EASGDOverlapStrategy,
    EASGDRoundRobinStrategy,
    EASGDStrategy,
    GossipAsyncStrategy,
    GossipPushSumStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
    MEASGDAsyncStrategy,
    NodeAverageStrategy,
    NoLoCoStrategy,
)
from lightning_hetero.strategies.auto import AutoStrategy
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.fabric import HeteroFabricStrategy
from lightning_hetero.strategies.replica import ReplicaStrategy, strategy_for
from lightning_hetero.strategies.table import register

__all__ = [
    "AutoStrategy",
    "Averager",
    "DASOStrategy",
    "DiLoCoAsyncStrategy",
    "DiLoCoStrategy",
    "EAMSGDStrategy",
    "EASGDAsyncStrategy",
    "EASGDHogwildStrategy",
    "EASGDOverlapStrategy",
    "EASGDRoundRobinStrategy",
    "EASGDStrategy",
    "FitInfo",
    "GossipAsyncStrategy",
    "GossipPushSumStrategy",
    "GossipStrategy",
    "HeteroDDPStrategy",
    "HeteroFabricStrategy",
    "HeteroStrategy",
    "MEASGDAsyncStrategy",
    "NoLoCoStrategy",
    "NodeAverageStrategy",
    "Outcome",
    "ReplicaStrategy",
    "StepContext",
    "Traits",
    "register",
    "strategy_for",
]

register()
