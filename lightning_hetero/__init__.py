"""Train any LightningModule well on machines that are not alike.

Importing this package registers its strategy strings with Lightning::

    import lightning_hetero
    trainer = Trainer(strategy="hetero_ddp", devices=4)
"""

from lightning_hetero.callbacks import EmulatedSpeed, HeteroMonitor
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies import (
    DASOStrategy,
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
    HeteroStrategy,
    MEASGDAsyncStrategy,
    NodeAverageStrategy,
    register,
)

__all__ = [
    "DASOStrategy",
    "DiLoCoStrategy",
    "EAMSGDStrategy",
    "EASGDAsyncStrategy",
    "EASGDHogwildStrategy",
    "EASGDOverlapStrategy",
    "EASGDRoundRobinStrategy",
    "EASGDStrategy",
    "EmulatedSpeed",
    "GossipAsyncStrategy",
    "GossipPushSumStrategy",
    "GossipStrategy",
    "HeteroDDPStrategy",
    "HeteroError",
    "HeteroMonitor",
    "HeteroStrategy",
    "MEASGDAsyncStrategy",
    "NodeAverageStrategy",
    "__version__",
]
__version__ = "0.1.0"

register()
