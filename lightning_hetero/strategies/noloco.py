"""`hetero_noloco`: an outer optimizer in random pairs."""

from lightning_hetero.averaging.noloco import NoLoCoAverager
from lightning_hetero.strategies.of_averager import with_options_of
from lightning_hetero.strategies.replica import ReplicaStrategy


@with_options_of(NoLoCoAverager, replica="rank")
class NoLoCoStrategy(ReplicaStrategy):
    """Replicas train apart for tau steps; then random pairs take an outer step with momentum, and pull at each other.

    A replica waits for its partner only, however many there are. All wait for each other at the ends of epochs only. An
    exact average of all precedes validation and checkpoints, and ends the run.

    Source: NoLoCo, Kolehmainen et al. 2025 (arXiv:2506.10911).

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import NoLoCoStrategy

        trainer = Trainer(strategy=NoLoCoStrategy(tau=50, gamma=0.7), accelerator="cpu", devices=2)
    """
