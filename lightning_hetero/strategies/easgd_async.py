"""`hetero_easgd_async` and its variants: replicas exchange with a center one by one."""

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
    each way.

    Source: "Original EASGD", You, Buluc and Demmel 2017, algorithm 1.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDRoundRobinStrategy

        trainer = Trainer(strategy=EASGDRoundRobinStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(AsyncAverager, replica="rank")
class EASGDAsyncStrategy(ReplicaStrategy):
    """Replicas train apart, tied to a center by an elastic force; each exchanges with it every tau steps of its own.

    Whoever comes first is served first, so no replica waits for a slow one within an epoch.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDAsyncStrategy

        trainer = Trainer(strategy=EASGDAsyncStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(AsyncMomentumAverager, replica="rank")
class MEASGDAsyncStrategy(ReplicaStrategy):
    """Asynchronous EASGD with heavy-ball momentum: ``v <- mu v - eta g;  x <- x + v - alpha (x - c)``.

    Replicas train apart, tied to a center ``c`` by an elastic force. Each exchanges with it every tau steps of its own.
    The model's optimizer must be ``SGD(momentum=mu)``, not Nesterov's.

    Source: Momentum EASGD, You, Buluc and Demmel 2017, eq. 5 and 6.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import MEASGDAsyncStrategy

        trainer = Trainer(strategy=MEASGDAsyncStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(HogwildAverager, replica="rank")
class EASGDHogwildStrategy(ReplicaStrategy):
    """Asynchronous EASGD without a lock, in the shared memory of one node.

    Replicas train apart, tied to a center by an elastic force. Every tau steps of its own, each one reads the center
    and adds to it, without waiting for others that do so at the same moment.

    Source: Hogwild EASGD, You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDHogwildStrategy

        trainer = Trainer(strategy=EASGDHogwildStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """
