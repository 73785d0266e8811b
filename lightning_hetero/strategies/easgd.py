"""`hetero_easgd`, `hetero_easgd_overlap`, `hetero_eamsgd`: replicas and a center that all keep pull at each other."""

from typing import Any

from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.center import Order
from lightning_hetero.averaging.elastic import EAMSGDAverager, ElasticAverager
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.elastic import ElasticStrategy


class EASGDStrategy(ElasticStrategy):
    """Replicas train apart, tied to a center by an elastic force; every tau steps, all at once (Sync EASGD).

    One packed all-reduce; every rank keeps the center. With fixed shares two runs are alike bit for bit.

    Source: EASGD, Zhang et al. 2015; Sync EASGD, You, Buluc and Demmel 2017.

    Args:
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.elastic.ElasticStrategy`.

    Raises:
        ConfigurationError: a value that cannot work; when training starts: an unstable one.
    """

    overlap = False
    kind: type[ElasticAverager] = ElasticAverager

    @override
    def make_averager(self) -> Averager:
        return self.kind(self.pull, self.tau, self.order, self.wire, self.overlap)


class EASGDOverlapStrategy(EASGDStrategy):
    """The same numbers as ``hetero_easgd``, bit for bit; exchanges pass in the background of steps.

    Source: Sync EASGD3, You, Buluc and Demmel 2017.

    Args:
        order: ``"jacobi"`` only: differences from after the step are not there before it.
        **kwargs: further options, those of :class:`~lightning_hetero.EASGDStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    overlap = True

    def __init__(self, *, order: Order = "jacobi", **kwargs: Any) -> None:
        if order != "jacobi":
            raise ConfigurationError(
                f"order={order!r}: hetero_easgd_overlap exchanges differences from before the step while it runs; use "
                "order='jacobi', or hetero_easgd."
            )
        super().__init__(order=order, **kwargs)


class EAMSGDStrategy(EASGDStrategy):
    """EASGD with Nesterov's momentum: ``v <- delta v - eta g(x + delta v);  x <- x + v - alpha (x - c)``.

    The model's optimizer must be ``SGD(momentum=delta, nesterov=True)``; the paper's delta is 0.99.

    Source: EAMSGD, Zhang et al. 2015.

    Args:
        **kwargs: further options, those of :class:`~lightning_hetero.EASGDStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when training starts: another optimizer.
    """

    kind = EAMSGDAverager
