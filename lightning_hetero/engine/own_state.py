"""What a replica has of its own beside the values that replicas exchange."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_hetero.engine.not_finite import explained

if TYPE_CHECKING:
    from lightning_hetero.engine.replicas import ReplicaEngine


def beside_values(
    engine: "ReplicaEngine", optimizers: Sequence[Optimizer], precision: dict[str, Any]
) -> dict[str, Any]:
    """What a replica goes on with, but for its values; the tensors are those in use (collective).

    Args:
        engine: of the replica.
        optimizers: of the fit.
        precision: state of the precision plugin.
    """
    assert engine.averager is not None
    with explained(engine):
        algorithm = engine.averager.state_dict()
    return {
        "kept": dict(engine.averager.replica.kept()),
        "precision": precision,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "windows": engine.windows,
        "algorithm": algorithm,
    }
