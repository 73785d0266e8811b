"""Strategies whose replicas exchange with a center: the options that they have in common."""

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from lightning_hetero.averaging.center import check_patterns
from lightning_hetero.checks import one_of
from lightning_hetero.comm.replica import Replica
from lightning_hetero.comm.topology import ReplicaKind, Topology
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.replica import ReplicaStrategy


class CenterStrategy(ReplicaStrategy):
    """Base of strategies with a center; it is what is validated, saved and left at the end.

    Args:
        tau: optimizer steps from one exchange to the next.
        replica: what trains apart from the others: each ``"rank"``, or each ``"node"``, whose ranks then average
            gradients at every step.
        exclude: names of parameters and buffers that do not take part, such as norms or embeddings; with patterns:
            ``"*norm*"``. Each replica keeps its own; where the center is looked at, their mean stands for them.
        packed: ``False`` sends a message for each parameter instead of one for all; to see what that costs.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.replica.ReplicaStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(
        self,
        tau: int,
        replica: ReplicaKind = "rank",
        exclude: Sequence[str] = (),
        packed: bool = True,
        **kwargs: Any,
    ) -> None:
        if type(tau) is not int or tau < 1:
            raise ConfigurationError(f"tau={tau!r} must be a whole number of optimizer steps, at least 1.")
        one_of("replica", replica, ("rank", "node"))
        if not isinstance(exclude, (list, tuple)) or not all(isinstance(name, str) for name in exclude):
            raise ConfigurationError(
                f"exclude={exclude!r}: give a list of names, such as ['embedding.weight', '*norm*']."
            )
        one_of("packed", packed, (True, False))
        self.tau, self.replica, self.exclude, self.packed = tau, replica, tuple(exclude), packed
        super().__init__(**kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        own = {"tau": self.tau, "replica": self.replica, "exclude": self.exclude, "packed": self.packed}
        return {**super().algorithm_options(), **own}

    @override
    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        return topology.replicas(self.replica)

    @override
    def make_replica(self, module: torch.nn.Module) -> Replica:
        replica = Replica(module, self.settle, self.exclude, self.packed)
        check_patterns(self.exclude, replica.names)
        return replica
