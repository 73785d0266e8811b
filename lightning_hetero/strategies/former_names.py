"""Names that public properties had in earlier versions."""

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


class former_topology:  # noqa: N801 - it is used as `property` is
    """``strategy.topology``, which is now ``strategy.cluster``; under gossip it is the option of that name."""

    def __get__(self, strategy: "HeteroStrategy | None", owner: Any = None) -> Any:
        """The option, or with a warning the cluster."""
        if strategy is None:
            return self
        if "topology" in (options := strategy.algorithm_options()):
            return options["topology"]
        warnings.warn(
            "strategy.topology is called strategy.cluster now: under gossip `topology` is an option.",
            FutureWarning,
            stacklevel=2,
        )
        return strategy.cluster
