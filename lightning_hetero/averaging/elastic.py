"""Elastic averaging: replicas and a center pull at each other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import StepContext
from lightning_hetero.averaging.center import CenterAverager, Order
from lightning_hetero.checks import is_number
from lightning_hetero.comm.all_reduce import Average
from lightning_hetero.comm.links import ReplicaLinks
from lightning_hetero.comm.replica import Replica
from lightning_hetero.comm.wire import Wire
from lightning_hetero.errors import ConfigurationError, UnsupportedError


@dataclass(frozen=True)
class Pull:
    """How strongly replicas and their center pull at each other. Give exactly one of the first two.

    Attributes:
        moving_rate: alpha; ``"auto"``: beta / p, with p replicas and, if it is not given, beta = 0.9, as in the paper.
        rho: alpha = eta rho, with eta the learning rate of the first parameter group of the first optimizer.
        beta: of the center. Default: p alpha, the symmetric case.

    Raises:
        ConfigurationError: both or neither of the first two, or what is no number of at least 0.
    """

    moving_rate: float | Literal["auto"] | None = None
    rho: float | None = None
    beta: float | None = None

    def __post_init__(self) -> None:
        if (self.moving_rate is None) == (self.rho is None):
            given = "neither is" if self.rho is None else "both are"
            raise ConfigurationError(
                f"moving_rate={self.moving_rate!r}, rho={self.rho!r}: {given} given; give exactly one. moving_rate is "
                "alpha itself, with 'auto' for 0.9 / number of replicas; rho gives alpha = learning rate * rho."
            )
        for name, value in asdict(self).items():
            fits = value is None or (is_number(value) and value >= 0)
            if not fits and (name, value) != ("moving_rate", "auto"):
                raise ConfigurationError(f"{name}={value!r} must be a number of at least 0.")

    def alpha(self, optimizers: Sequence[Optimizer], replicas: int) -> float:
        """Of the step that is to come, or has just been taken.

        Raises:
            ConfigurationError: ``rho`` needs a learning rate, and there is no optimizer.
        """
        if self.rho is not None:
            if not optimizers:
                raise ConfigurationError(
                    f"rho={self.rho!r} gives alpha = learning rate * rho, but configure_optimizers gave no optimizer. "
                    "Give moving_rate instead."
                )
            return float(optimizers[0].param_groups[0]["lr"]) * self.rho
        if self.moving_rate == "auto":
            return (0.9 if self.beta is None else self.beta) / replicas
        assert self.moving_rate is not None
        return self.moving_rate

    def of_center(self, alpha: float, replicas: int) -> float:
        """Beta: of the center."""
        return replicas * alpha if self.beta is None else self.beta

    @property
    def nothing(self) -> bool:
        """Whether nothing ever moves, whatever the learning rate."""
        return not (self.moving_rate or self.rho or self.beta)


class ElasticAverager(CenterAverager):
    """EASGD: ``x_i -= alpha D_i;  c += beta sum_i w_i D_i``, both from the old values.

    Without gradients ``alpha c + beta sum_i w_i x_i`` is conserved.

    Source: EASGD, Zhang et al. 2015, eq. 5 and 6; Sync EASGD, You et al. 2017.

    Args:
        pull: gives alpha, of the first replica for all, and beta.
        tau: optimizer steps from one exchange to the next.
        order: when ``D_i`` is taken: before the replica's own step, or after it.
        wire: number format of the differences.
        overlap: exchange in the background of the step; needs differences from before it.
    """

    def __init__(
        self, pull: Pull, tau: int, order: Order = "jacobi", wire: Wire = "fp32", overlap: bool = False
    ) -> None:
        super().__init__(tau, order, wire, overlap)
        self.pull = pull
        self._alpha = math.nan  # of the latest exchange

    @override
    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        super().setup(replica, links, optimizers)
        self._moved = self.pull.nothing  # the center never will: nothing is sent, for the mean neither
        alpha = self.pull.alpha(optimizers(), links.count)
        self.warning = stability(alpha, self.pull.of_center(alpha, links.count))

    @override
    def due(self, context: StepContext) -> bool:
        return not self.pull.nothing and super().due(context)

    @override
    def payload(self) -> float:
        return self.pull.alpha(self.optimizers(), self.links.count)

    @override
    def move(self, own: list[Tensor], average: Average) -> None:
        alpha = average.payloads[0]
        beta = self.pull.of_center(alpha, self.links.count)
        if alpha != self._alpha:
            self.warning, self._alpha = stability(alpha, beta) if self._alpha < alpha else None, alpha
        self.replica.add(own, -alpha)
        for c, mean in zip(self.center, average.difference, strict=True):
            c.add_(mean, alpha=beta)


class EAMSGDAverager(ElasticAverager):
    """EAMSGD: ``v <- delta v - eta g(x + delta v);  x <- x + v - alpha (x - c)``.

    PyTorch's ``SGD(nesterov=True, momentum=delta)`` holds ``y = x + delta v`` and, in its buffer, ``-v / eta``: so
    ``D_i`` is taken at ``x = y + delta eta buffer``, and ``y`` moves as ``x`` does.

    Source: EAMSGD, Zhang et al. 2015, section 3.2.
    """

    @override
    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        check_momentum(optimizers(), nesterov=True)
        super().setup(replica, links, optimizers)

    @override
    @torch.no_grad()
    def position(self, out: Sequence[Tensor]) -> list[Tensor]:
        y = self._packed = self.replica.pack(self._packed)
        pairs = [(optimizer, group) for optimizer in self.optimizers() for group in optimizer.param_groups]
        for optimizer, group in pairs:
            for p in group["params"]:
                buffer = optimizer.state.get(p, {}).get("momentum_buffer")
                if buffer is not None:
                    p.add_(buffer, alpha=group["momentum"] * float(group["lr"]))
        x = self.replica.pack(out)
        self.replica.unpack(y)
        return x


def stability(alpha: float, beta: float) -> str | None:
    """What to say of settings that are stable, but outside the region where every pull shortens its distance.

    As the learning rate goes to 0, the replicas' mean distance from the center is multiplied by 1 - alpha - beta, and
    that of one replica from their mean by 1 - alpha.

    Raises:
        ConfigurationError: one of these is not below 1 in size.
    """
    given = f"alpha={alpha:g} (moving_rate, or rho times the learning rate) and beta={beta:g} (p alpha, if not given)"
    if alpha < 0 or beta < 0 or alpha + beta >= 2:
        raise ConfigurationError(
            f"{given}: unstable; both must be at least 0, and alpha + beta less than 2. Typical: beta=0.9 and alpha = "
            "beta/p, which is moving_rate='auto'."
        )
    if alpha > 1 or beta > 1:
        return (
            f"{given}: above 1, so that replicas or the center swing past each other. Typical: beta=0.9, alpha=beta/p."
        )
    return None


def check_momentum(optimizers: Sequence[Optimizer], nesterov: bool) -> None:
    """See that all are SGD with momentum of a kind.

    Raises:
        UnsupportedError: one is not.
    """
    wanted = f"SGD(momentum=..., nesterov={nesterov})"
    for optimizer in optimizers:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper
        for group in optimizer.param_groups:
            if type(optimizer) is not SGD or not group["momentum"] or group["nesterov"] != nesterov:
                settings = {name: group[name] for name in ("momentum", "nesterov") if name in group}
                raise UnsupportedError(
                    f"{'EAMSGD' if nesterov else 'MEASGD'} is defined by {wanted}, whose momentum it knows; "
                    f"configure_optimizers gave {type(optimizer).__name__} with {settings}. Use that, or hetero_easgd "
                    "(hetero_easgd_async), which takes any optimizer."
                )
