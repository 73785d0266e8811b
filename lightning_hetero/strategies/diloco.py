"""`hetero_diloco`: an outer optimizer on what replicas have done."""

from lightning_hetero.averaging.outer import OuterAverager
from lightning_hetero.strategies.of_averager import with_options_of
from lightning_hetero.strategies.replica import ReplicaStrategy


@with_options_of(OuterAverager, replica="rank")
class DiLoCoStrategy(ReplicaStrategy):
    """Replicas train apart for tau steps; the mean of what they have done is the gradient of an outer step.

    Source: DiLoCo, Douillard et al. 2023, algorithm 1; with other outer optimizers local SGD (``SGD(lr=1)``) and BMUF
    (heavy-ball momentum), Chen and Huo 2016.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import DiLoCoStrategy

        trainer = Trainer(strategy=DiLoCoStrategy(tau=50, outer_lr=0.7), accelerator="cpu", devices=2)
    """
