"""`hetero_node`: gradients within a node, parameter averages between nodes."""

from typing import Any

from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.node import PeriodicAverager
from lightning_hetero.checks import at_least_one
from lightning_hetero.strategies.replica import ReplicaStrategy


class NodeAverageStrategy(ReplicaStrategy):
    """Averages gradients within each node at every step, and parameters between nodes every K steps.

    The slow links between nodes carry one message per K steps instead of one per step; between them nodes do not wait
    for each other. Nodes weigh by the samples that they take.

    Source: eDNNcomm, Moreno-Alvarez et al. 2023.

    Args:
        every_n_steps: K, in optimizer steps. Default: once per epoch, as in the paper's experiments.
        average_optimizer_state: also average momentum and the like. With it and K = 1, plain SGD is exactly flat
            data-parallel training.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.replica.ReplicaStrategy`.

    Raises:
        ConfigurationError: ``every_n_steps`` below 1.
    """

    def __init__(self, every_n_steps: int | None = None, average_optimizer_state: bool = False, **kwargs: Any) -> None:
        if every_n_steps is not None:
            at_least_one("every_n_steps", every_n_steps, ", or None")
        self.every_n_steps, self.average_optimizer_state = every_n_steps, average_optimizer_state
        super().__init__(**kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        own = {"every_n_steps": self.every_n_steps, "average_optimizer_state": self.average_optimizer_state}
        return {**super().algorithm_options(), **own}

    @override
    def make_averager(self) -> Averager:
        return PeriodicAverager(self.every_n_steps, self.average_optimizer_state)
