"""`hetero_easgd`, `hetero_easgd_overlap`, `hetero_eamsgd`: replicas and a center that all keep pull at each other."""

from lightning_hetero.averaging.elastic import EAMSGDAverager, ElasticAverager, OverlappedElasticAverager
from lightning_hetero.strategies.of_averager import with_options_of
from lightning_hetero.strategies.replica import ReplicaStrategy


@with_options_of(ElasticAverager, replica="rank")
class EASGDStrategy(ReplicaStrategy):
    """Replicas train apart, tied to a center by an elastic force; every tau steps, all at once (Sync EASGD).

    One packed all-reduce; every rank keeps the center. With fixed shares two runs are alike bit for bit. With ``D_i =
    x_i - c``, weights ``w_i`` (the part of the samples that replica ``i`` takes) and p replicas::

        x_i <- x_i - alpha D_i;  c <- c + beta sum_i w_i D_i

    Source: EASGD, Zhang et al. 2015; Sync EASGD, You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDStrategy

        trainer = Trainer(strategy=EASGDStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(OverlappedElasticAverager, replica="rank")
class EASGDOverlapStrategy(ReplicaStrategy):
    """Replicas train apart, tied to a center by an elastic force; they exchange in the background of a step.

    Every tau steps all exchange at once, while each computes its next step. The results are those of ``hetero_easgd``,
    bit for bit.

    Source: Sync EASGD3, You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDOverlapStrategy

        trainer = Trainer(strategy=EASGDOverlapStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(EAMSGDAverager, replica="rank")
class EAMSGDStrategy(ReplicaStrategy):
    """EASGD with Nesterov's momentum: ``v <- delta v - eta g(x + delta v);  x <- x + v - alpha (x - c)``.

    Replicas train apart, tied to a center ``c`` by an elastic force; every tau steps all exchange at once. The model's
    optimizer must be ``SGD(momentum=delta, nesterov=True)``; the paper's delta is 0.99.

    Source: EAMSGD, Zhang et al. 2015.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EAMSGDStrategy

        trainer = Trainer(strategy=EAMSGDStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """
