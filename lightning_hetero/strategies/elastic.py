"""What all strategies of the elastic family have in common."""

from typing import Any, Literal

from typing_extensions import override

from lightning_hetero.averaging.center import Order
from lightning_hetero.averaging.elastic import Pull
from lightning_hetero.checks import one_of
from lightning_hetero.comm.wire import DTYPES, Wire
from lightning_hetero.strategies.centers import CenterStrategy


class ElasticStrategy(CenterStrategy):
    """Base of strategies whose replicas are tied to a center by an elastic force.

    With ``D_i = x_i - c``, weights ``w_i`` (the part of the samples that replica ``i`` takes) and p replicas::

        x_i <- x_i - alpha D_i;  c <- c + beta sum_i w_i D_i

    Source: EASGD, Zhang et al. 2015.

    Args:
        tau: optimizer steps from one exchange of a replica to the next.
        moving_rate: alpha; ``"auto"``: beta / p, with beta = 0.9 if it is not given.
        rho: instead: alpha = learning rate * rho, of the first parameter group of the first optimizer, of replica 0.
        beta: how fast the center moves. Default: p alpha.
        order: ``"jacobi"``: differences from before the replica's own step, as in the paper; ``"gauss_seidel"``: from
            after it.
        wire: number format of what travels: ``"fp32"``, ``"bf16"`` or ``"fp16"``; sums are taken in fp32.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.centers.CenterStrategy`, such as
            ``replica``.

    Raises:
        ConfigurationError: a value that cannot work; when training starts: an unstable one.
    """

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
        return {**super().algorithm_options(), "pull": self.pull, "order": self.order, "wire": self.wire}
