"""`hetero_node`: gradients within a node, parameter averages between nodes."""

from lightning_hetero.averaging.node import PeriodicAverager
from lightning_hetero.strategies.of_averager import with_options_of
from lightning_hetero.strategies.replica import ReplicaStrategy


@with_options_of(PeriodicAverager)
class NodeAverageStrategy(ReplicaStrategy):
    """Averages gradients within each node at every step, and parameters between nodes every K steps.

    The slow links between nodes carry one message per K steps instead of one per step; between them nodes do not wait
    for each other. Nodes weigh by the samples that they take.

    Source: eDNNcomm, Moreno-Alvarez et al. 2023.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import NodeAverageStrategy

        trainer = Trainer(strategy=NodeAverageStrategy(every_n_steps=16), accelerator="cpu", devices=2)
    """
