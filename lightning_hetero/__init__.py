"""Train any LightningModule well on machines that are not alike.

Importing this package registers its strategy strings with Lightning::

    import lightning_hetero
    trainer = Trainer(strategy="hetero_ddp", devices=4)

The names below are imported when they are first used, because PyTorch and Lightning take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_hetero.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_hetero.callbacks import EmulatedSpeed, HeteroMonitor
    from lightning_hetero.errors import ConfigurationError, HeteroError
    from lightning_hetero.strategies import (
        AutoStrategy,
        Averager,
        DASOStrategy,
        DiLoCoAsyncStrategy,
        DiLoCoStrategy,
        EAMSGDStrategy,
        EASGDAsyncStrategy,
        EASGDHogwildStrategy,
        EASGDOverlapStrategy,
        EASGDRoundRobinStrategy,
        EASGDStrategy,
        Facts,
        GossipAsyncStrategy,
        GossipPushSumStrategy,
        GossipStrategy,
        HeteroDDPStrategy,
        HeteroStrategy,
        MEASGDAsyncStrategy,
        NodeAverageStrategy,
        NoLoCoStrategy,
        Outcome,
        ReplicaStrategy,
        Run,
        StepContext,
        strategy_for,
    )
    from lightning_hetero.workload.shared_stream import SharedStream

__all__ = [
    "AutoStrategy",
    "Averager",
    "ConfigurationError",
    "DASOStrategy",
    "DiLoCoAsyncStrategy",
    "DiLoCoStrategy",
    "EAMSGDStrategy",
    "EASGDAsyncStrategy",
    "EASGDHogwildStrategy",
    "EASGDOverlapStrategy",
    "EASGDRoundRobinStrategy",
    "EASGDStrategy",
    "EmulatedSpeed",
    "Facts",
    "GossipAsyncStrategy",
    "GossipPushSumStrategy",
    "GossipStrategy",
    "HeteroDDPStrategy",
    "HeteroError",
    "HeteroMonitor",
    "HeteroStrategy",
    "MEASGDAsyncStrategy",
    "NoLoCoStrategy",
    "NodeAverageStrategy",
    "Outcome",
    "ReplicaStrategy",
    "Run",
    "SharedStream",
    "StepContext",
    "__version__",
    "strategy_for",
]
__version__ = "0.1.0.dev0"
_PARTS = ("strategies", "callbacks", "errors", "workload.shared_stream")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        for part in _PARTS:
            found = getattr(import_module(f"{__name__}.{part}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_lightning()
