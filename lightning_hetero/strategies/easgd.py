"""`hetero_easgd`, `hetero_easgd_overlap`, `hetero_eamsgd`: replicas and a center that all keep pull at each other."""

from typing import Any, Literal

from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.center import Order
from lightning_hetero.averaging.elastic import EAMSGDAverager, ElasticAverager, Pull
from lightning_hetero.comm.wire import DTYPES, Wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.centers import CenterStrategy, one_of


class EASGDStrategy(CenterStrategy):
    """Replicas train apart, tied to a center by an elastic force; every tau steps, all at once (Sync EASGD).

    With ``D_i = x_i - c``, weights ``w_i`` (the part of the samples that replica ``i`` takes) and p replicas::

        x_i <- x_i - alpha D_i;  c <- c + beta sum_i w_i D_i

    One packed all-reduce; every rank keeps the center. With fixed shares two runs are alike bit for bit.

    Source: EASGD, Zhang et al. 2015; Sync EASGD, You, Buluc and Demmel 2017.

    Args:
        tau: optimizer steps from one exchange to the next.
        moving_rate: alpha; ``"auto"``: beta / p, with beta = 0.9 if it is not given.
        rho: instead: alpha = learning rate * rho, of the first parameter group of the first optimizer, of replica 0.
        beta: how fast the center moves. Default: p alpha.
        order: ``"jacobi"``: differences from before the replica's own step, as in the paper; ``"gauss_seidel"``: from
            after it.
        wire: number format of differences: ``"fp32"``, ``"bf16"`` or ``"fp16"``; sums are taken in fp32.
        **kwargs: as for :class:`~lightning_hetero.strategies.centers.CenterStrategy`, such as ``replica``.

    Raises:
        ConfigurationError: a value that cannot work; when training starts: an unstable one.
    """

    overlap = False
    kind: type[ElasticAverager] = ElasticAverager

    def __init__(
        self,
        tau: int = 10,
        moving_rate: float | Literal["auto"] | None = None,
        rho: float | None = None,
        beta: float | None = None,
        order: Order = "jacobi",
        wire: Wire = "fp32",
        **kwargs: Any,
    ) -> None:
        self.pull = Pull(moving_rate, rho, beta)
        one_of("order", order, ("jacobi", "gauss_seidel"))
        one_of("wire", wire, tuple(DTYPES))
        self.order, self.wire = order, wire
        super().__init__(tau=tau, **kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        own = {"pull": self.pull, "order": self.order, "wire": self.wire}
        return {**super().algorithm_options(), **own}

    @override
    def make_averager(self) -> Averager:
        return self.kind(self.pull, self.tau, self.order, self.wire, self.overlap)


class EASGDOverlapStrategy(EASGDStrategy):
    """The same numbers as ``hetero_easgd``, bit for bit; exchanges pass in the background of steps.

    Source: Sync EASGD3, You, Buluc and Demmel 2017.

    Args:
        order: ``"jacobi"`` only: differences from after the step are not there before it.
        **kwargs: as for :class:`EASGDStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    overlap = True

    def __init__(
        self,
        tau: int = 10,
        moving_rate: float | Literal["auto"] | None = None,
        rho: float | None = None,
        beta: float | None = None,
        order: Order = "jacobi",
        wire: Wire = "fp32",
        **kwargs: Any,
    ) -> None:
        if order != "jacobi":
            raise ConfigurationError(
                f"order={order!r}: hetero_easgd_overlap exchanges differences from before the step while it runs; use "
                "order='jacobi', or hetero_easgd."
            )
        super().__init__(tau, moving_rate, rho, beta, order, wire, **kwargs)


class EAMSGDStrategy(EASGDStrategy):
    """EASGD with Nesterov's momentum: ``v <- delta v - eta g(x + delta v);  x <- x + v - alpha (x - c)``.

    The model's optimizer must be ``SGD(momentum=delta, nesterov=True)``; the paper's delta is 0.99.

    Source: EAMSGD, Zhang et al. 2015.

    Args:
        **kwargs: as for :class:`EASGDStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when training starts: another optimizer.
    """

    kind = EAMSGDAverager
