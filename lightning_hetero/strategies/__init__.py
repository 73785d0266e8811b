"""The Lightning face: one typed class per algorithm, and its strategy strings."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero.strategies.ddp import HeteroDDPStrategy
from lightning_hetero.strategies.hetero import HeteroStrategy

__all__ = ["HeteroDDPStrategy", "HeteroStrategy", "register"]


def register() -> None:
    """Make the strategy strings known to Lightning; importing the package does it."""
    for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        for unused in (False, True):
            StrategyRegistry.register(
                f"hetero_ddp{suffix}" + ("_find_unused_parameters_true" if unused else ""),
                HeteroDDPStrategy,
                description=f"Batches split by measured speed, gradients weighted by samples ({start_method})",
                start_method=start_method,
                **({"find_unused_parameters": True} if unused else {}),
            )
