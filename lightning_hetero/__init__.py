"""Train any LightningModule well on machines that are not alike.

Importing this package registers its strategy strings with Lightning::

    import lightning_hetero
    trainer = Trainer(strategy="hetero_ddp", devices=4)

The names below are imported when they are first used, because PyTorch and Lightning take seconds to import.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_hetero.registration import register_with_lightning
from lightning_hetero.version import __version__

if TYPE_CHECKING:
    from lightning_hetero.algorithms.base import Averager, FitInfo, Outcome, StepContext, Traits
    from lightning_hetero.algorithms.state import InFlight, Own, PerReplica, Scratch, Shared, model_values, zeros
    from lightning_hetero.batching.streams import SharedStream
    from lightning_hetero.callbacks.emulation import EmulatedSpeed
    from lightning_hetero.callbacks.monitor import HeteroMonitor
    from lightning_hetero.errors import ConfigurationError, HeteroError
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
    "FitInfo",
    "GossipAsyncStrategy",
    "GossipPushSumStrategy",
    "GossipStrategy",
    "HeteroDDPStrategy",
    "HeteroError",
    "HeteroFabricStrategy",
    "HeteroMonitor",
    "HeteroStrategy",
    "InFlight",
    "MEASGDAsyncStrategy",
    "NoLoCoStrategy",
    "NodeAverageStrategy",
    "Outcome",
    "Own",
    "PerReplica",
    "ReplicaStrategy",
    "Scratch",
    "Shared",
    "SharedStream",
    "StepContext",
    "Traits",
    "__version__",
    "model_values",
    "strategy_for",
    "zeros",
]
_PARTS = ("strategies", "callbacks", "errors", "batching.streams", "algorithms.state")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        for part in _PARTS:
            found = getattr(import_module(f"{__name__}.{part}"), name, None)
            if found is not None:
                return found
    near = "".join(f". Did you mean {word}?" for word in get_close_matches(name, __all__, 1))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_lightning()
