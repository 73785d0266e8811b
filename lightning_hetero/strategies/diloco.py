"""`hetero_diloco`, `hetero_diloco_async`: an outer optimizer on what replicas have done."""

from lightning_hetero.averaging.outer import OuterAverager
from lightning_hetero.averaging.outer_async import OuterAsyncAverager
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


@with_options_of(OuterAsyncAverager, replica="rank")
class DiLoCoAsyncStrategy(ReplicaStrategy):
    """Replicas train apart, and each brings what it has done to a center when it is done; nobody waits for others.

    The center applies each outer gradient at once, and its momentum once in as many arrivals as there are replicas
    (delayed Nesterov). A slow replica takes fewer local steps between two visits, so that all come equally often.

    Source: Liu et al. 2024, "Asynchronous local-SGD training for language modeling" (arXiv:2401.09135), algorithms 3
    and 4.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import DiLoCoAsyncStrategy

        trainer = Trainer(strategy=DiLoCoAsyncStrategy(tau=50, outer_lr=0.7), accelerator="cpu", devices=2)
    """
