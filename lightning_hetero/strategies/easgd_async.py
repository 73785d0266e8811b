"""`hetero_easgd_async` and its kin: replicas exchange with a center one by one."""

from lightning_hetero.averaging.push_pull import (
    AsyncAverager,
    AsyncMomentumAverager,
    HogwildAverager,
    RoundRobinAverager,
)
from lightning_hetero.strategies.of_averager import with_options_of
from lightning_hetero.strategies.replica import ReplicaStrategy


@with_options_of(RoundRobinAverager, replica="rank")
class EASGDRoundRobinStrategy(ReplicaStrategy):
    """The original EASGD: replicas exchange with the center strictly in their order, over and over.

    It is the baseline that the others beat. A thread of the first replica keeps the center; an exchange is one message
    each way, or one for each parameter with ``packed=False``, as in the original.

    Source: "Original EASGD", You, Buluc and Demmel 2017, algorithm 1.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDRoundRobinStrategy

        trainer = Trainer(strategy=EASGDRoundRobinStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(AsyncAverager, replica="rank")
class EASGDAsyncStrategy(ReplicaStrategy):
    """Asynchronous EASGD: whoever comes first is served first; nobody waits for a slow replica within an epoch.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDAsyncStrategy

        trainer = Trainer(strategy=EASGDAsyncStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(AsyncMomentumAverager, replica="rank")
class MEASGDAsyncStrategy(ReplicaStrategy):
    """Asynchronous EASGD with heavy-ball momentum: ``v <- mu v - eta g;  x <- x + v - alpha (x - c)``.

    The model's optimizer must be ``SGD(momentum=mu)``, not Nesterov's.

    Source: Momentum EASGD, You, Buluc and Demmel 2017, eq. 5 and 6.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import MEASGDAsyncStrategy

        trainer = Trainer(strategy=MEASGDAsyncStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(HogwildAverager, replica="rank")
class EASGDHogwildStrategy(ReplicaStrategy):
    """Asynchronous EASGD without a lock, in the shared memory of one node: replicas read and add as they come.

    Source: Hogwild EASGD, You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDHogwildStrategy

        trainer = Trainer(strategy=EASGDHogwildStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """
