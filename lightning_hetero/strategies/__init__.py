"""The Lightning face: one typed class per algorithm, and its strategy strings."""

import lightning.pytorch  # noqa: F401  before any part of this package, as it triggers the registration

from lightning_hetero.averaging.averager import Averager, Facts, Outcome, Run, StepContext
from lightning_hetero.strategies.auto import AutoStrategy
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.daso import DASOStrategy
from lightning_hetero.strategies.ddp import HeteroDDPStrategy
from lightning_hetero.strategies.diloco import DiLoCoAsyncStrategy, DiLoCoStrategy
from lightning_hetero.strategies.easgd import EAMSGDStrategy, EASGDOverlapStrategy, EASGDStrategy
from lightning_hetero.strategies.easgd_async import (
    EASGDAsyncStrategy,
    EASGDHogwildStrategy,
    EASGDRoundRobinStrategy,
    MEASGDAsyncStrategy,
)
from lightning_hetero.strategies.gossip import GossipAsyncStrategy, GossipPushSumStrategy, GossipStrategy
from lightning_hetero.strategies.node import NodeAverageStrategy
from lightning_hetero.strategies.noloco import NoLoCoStrategy
from lightning_hetero.strategies.of_averager import strategy_for
from lightning_hetero.strategies.registry import register
from lightning_hetero.strategies.replica import ReplicaStrategy

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
    "Facts",
    "GossipAsyncStrategy",
    "GossipPushSumStrategy",
    "GossipStrategy",
    "HeteroDDPStrategy",
    "HeteroStrategy",
    "MEASGDAsyncStrategy",
    "NoLoCoStrategy",
    "NodeAverageStrategy",
    "Outcome",
    "ReplicaStrategy",
    "Run",
    "StepContext",
    "register",
    "strategy_for",
]

register()
