"""`hetero_daso`: gradients within a node, stale asynchronous mixing between nodes at an adaptive rate."""

from lightning_hetero.averaging.daso import DASOAverager
from lightning_hetero.strategies.of_averager import with_options_of
from lightning_hetero.strategies.replica import ReplicaStrategy


@with_options_of(DASOAverager)
class DASOStrategy(ReplicaStrategy):
    """Averages gradients within each node at every step, and mixes nodes in the background between.

    In the warm-up and the cool-down nodes average at every step. Between, every B steps one rank of each node (in
    rotation) exchanges parameters while training goes on, and mixes them in W steps later. B and W are halved whenever
    the training loss stalls, and start over from the rarest exchange.

    Source: DASO, Coquelin et al. 2021.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import DASOStrategy

        trainer = Trainer(strategy=DASOStrategy(global_every=4, ranks_per_node=1), accelerator="cpu", devices=2)
    """
