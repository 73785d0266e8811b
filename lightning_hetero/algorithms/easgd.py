"""Elastic averaging SGD (EASGD): replicas and a center pull at each other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_hetero.algorithms.base import LowBitAverager, Outcome, StepContext
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.algorithms.state import Own
from lightning_hetero.argument_checks import at_least_one, is_number
from lightning_hetero.comm.all_reduce import Average, Contribution
from lightning_hetero.comm.compression import check_wire
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.errors import ConfigurationError, UnsupportedError
from lightning_hetero.replicas.sharding import local


@dataclass
class ElasticBase(CenteredAverager):
    """Base of all forms of EASGD: replicas are tied to a center by an elastic force.

    With ``D_i = x_i - c`` from before the replica's own step, weights ``w_i`` (the part of the samples that replica
    ``i`` takes) and p replicas::

        x_i <- x_i - alpha D_i;  c <- c + beta sum_i w_i D_i

    Source: EASGD, Zhang et al. 2015.

    Args:
        tau: optimizer steps from one exchange of a replica to the next.
        moving_rate: alpha; ``"auto"``: beta / p, with beta = 0.9 if it is not given. Default: ``"auto"``, unless
            ``rho`` is given.
        rho: instead: alpha = learning rate * rho, of the first parameter group of the first optimizer, of replica 0.
        beta: how fast the center moves. Default: p alpha.
        wire: number format of what travels: ``"fp32"``, ``"bf16"`` or ``"fp16"``, and where all replicas exchange at
            once ``"int8"``, ``"int4"``, ``"2bit"`` or ``"topk:0.02"``; sums are taken in fp32.

    Raises:
        ConfigurationError: a value that cannot work; when training starts: an unstable one.
    """

    tau: int = 10
    moving_rate: float | Literal["auto"] | None = None
    rho: float | None = None
    beta: float | None = None
    wire: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("tau", self.tau)
        if self.moving_rate is None and self.rho is None:
            self.moving_rate = "auto"
        elif self.moving_rate is not None and self.rho is not None:
            raise ConfigurationError(
                f"moving_rate={self.moving_rate!r}, rho={self.rho!r}: both are given; give one. moving_rate is alpha "
                "itself, with 'auto' for 0.9 / number of replicas; rho gives alpha = learning rate * rho."
            )
        for name in ("moving_rate", "rho", "beta"):
            value = getattr(self, name)
            fits = value is None or (is_number(value) and value >= 0)
            if not fits and (name, value) != ("moving_rate", "auto"):
                raise ConfigurationError(f"{name}={value!r} must be a number of at least 0.")
        check_wire(self.wire)

    @override
    def prepare(self) -> Outcome | None:
        super().prepare()
        return Outcome(warning=stability(*self.strength()))

    @property
    @override
    def uses_center(self) -> bool:
        # A center that never moves: nothing is sent, for the mean neither.
        return not self.moves or super().uses_center

    @override
    def join_values(self, context: StepContext) -> list[Tensor]:
        # The center is some exchanges behind the replicas: what they have learned since would be lost.
        return self.average(context).mean

    @property
    def moves(self) -> bool:
        """Whether anything ever moves; false if alpha and beta are 0, whatever the learning rate."""
        return bool(self.moving_rate or self.rho or self.beta)

    def strength(self) -> tuple[float, float]:
        """Alpha and beta, of the step that is to come, or has just been taken.

        Raises:
            ConfigurationError: ``rho`` needs a learning rate, and there is no optimizer.
        """
        alpha = self.moving_rate
        if self.rho is not None:
            if not self.optimizers:
                raise ConfigurationError(
                    f"rho={self.rho!r} gives alpha = learning rate * rho, but configure_optimizers gave no optimizer. "
                    "Give moving_rate instead."
                )
            alpha = float(self.optimizers[0].param_groups[0]["lr"]) * self.rho
        elif alpha is None or alpha == "auto":
            alpha = (0.9 if self.beta is None else self.beta) / self.links.count
        return alpha, self.strength_of_center(alpha)

    def strength_of_center(self, alpha: float) -> float:
        """Beta, if this is alpha."""
        return self.links.count * alpha if self.beta is None else self.beta


@dataclass
class ElasticAverager(ElasticBase, LowBitAverager):
    """EASGD: ``x_i -= alpha D_i;  c += beta sum_i w_i D_i``, both from the old values, all replicas at once.

    Every rank keeps the center, bitwise the same. Alpha is that of the first replica, for all. Without gradients
    ``alpha c + beta sum_i w_i x_i`` is conserved.

    Source: EASGD, Zhang et al. 2015, eq. 5 and 6; Sync EASGD, You et al. 2017.

    Attributes:
        overlap: exchange in the background of the step.
    """

    overlap: ClassVar[bool] = False
    alpha = Own[float](math.nan)  # of the latest exchange

    @override
    def prepare(self) -> Outcome | None:
        self._exchange: Callable[[], Average] | None = None
        self._snapshot, self._packed = self._packed[: self.replica.included], []
        self._mean = [memory_like(old) for old in self.center]  # memory for the next exchange
        if self.overlap:
            self.links.prepare()
        return super().prepare()

    @property
    def center(self) -> list[Tensor]:
        """``c``, which every rank keeps up to date."""
        return self.last_center

    @override
    def due(self, context: StepContext) -> bool:
        return self.moves and context.step % self.tau == 0

    @override
    def on_missed(self, step: int) -> Literal["adopt", "keep"]:
        return "keep"  # the next exchange pulls this replica towards the center

    @override
    def before_step(self, context: StepContext) -> None:
        if self.due(context._replace(step=context.step + 1)):
            self._begin(context)

    @override
    def meet(self, context: StepContext) -> Outcome | None:
        exchange = self._exchange or self._begin(context)  # replicas may have been lost since the step began
        average, self._exchange = exchange(), None
        self._distance = average.displacement  # RMS over the replicas
        own = [value.to("cpu", c.dtype).sub_(c) for value, c in zip(self._snapshot, self.center, strict=True)]
        warning = self.move(own, average)
        if not average.healthy[self.links.index]:
            self.restart_from(self.center)
        self.commits += 1
        return Outcome(exchanged=True, warning=warning)

    def _begin(self, context: StepContext) -> Callable[[], Average]:
        """Take ``x_i``, and exchange the differences: now in the background, or when the result is asked for."""
        weights, (alpha, _) = context.samples_per_replica, self.strength()
        if self.overlap:
            self._snapshot, copied = self.replica.snapshot(self._snapshot)
            own = Contribution(self._snapshot, weights, self.center, self.wire, alpha, self.feedback, copied)
            self._exchange = self.links.begin(own, self._mean, want="difference").result
        else:
            self._snapshot = self.position(self._snapshot)
            own = Contribution(self._snapshot, weights, self.center, self.wire, alpha, self.feedback)
            self._exchange = lambda: self.links.exchange(own, self._mean, want="difference")
        return self._exchange

    def position(self, out: Sequence[Tensor]) -> list[Tensor]:
        """``x_i``, of which differences are taken."""
        return self.replica.pack(out)

    def move(self, own: list[Tensor], average: Average) -> str | None:
        """Move replica and center by their equations.

        Args:
            own: ``D_i``: vectors like the center.
            average: with ``sum_i w_i D_i`` as its ``difference``.

        Returns:
            What to warn the user of, if anything.
        """
        alpha = average.payloads[0]
        beta = self.strength_of_center(alpha)
        warning = stability(alpha, beta) if self.alpha < alpha else None
        self.alpha = alpha
        self.replica.add(own, -alpha)
        for c, mean in zip(self.center, average.difference, strict=True):
            c.add_(mean, alpha=beta)
        return warning


@dataclass
class OverlappedElasticAverager(ElasticAverager):
    """The same numbers as :class:`ElasticAverager`, bit for bit; exchanges pass in the background of steps.

    Source: Sync EASGD3, You, Buluc and Demmel 2017.
    """

    overlap = True


@dataclass
class EAMSGDAverager(ElasticAverager):
    """EAMSGD: ``v <- delta v - eta g(x + delta v);  x <- x + v - alpha (x - c)``.

    PyTorch's ``SGD(nesterov=True, momentum=delta)`` holds ``y = x + delta v`` and, in its buffer, ``-v / eta``: so
    ``D_i`` is taken at ``x = y + delta eta buffer``, with ``eta`` of the latest step, and ``y`` moves as ``x`` does.

    Source: EAMSGD, Zhang et al. 2015, section 3.2.

    Raises:
        UnsupportedError: when training starts: another optimizer.

    Attributes:
        rates: learning rates of the step before the latest exchange, of each parameter group; empty before the first.
    """

    rates = Own[list[float]](lambda averager: [])

    @override
    def prepare(self) -> Outcome | None:
        check_momentum(self.optimizers, nesterov=True)
        return super().prepare()

    @override
    def position(self, out: Sequence[Tensor]) -> list[Tensor]:
        names, velocity = self.replica.parameter_ids, dict[str, tuple[Tensor, float]]()
        pairs = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = self.rates if len(self.rates) == len(pairs) else self._rates()
        for (optimizer, group), rate in zip(pairs, rates, strict=True):
            for p in group["params"]:
                buffer = optimizer.state.get(p, {}).get("momentum_buffer")
                if buffer is not None and id(p) in names:
                    velocity[names[id(p)]] = local(buffer), group["momentum"] * rate
        return self.replica.pack_moved(velocity, out)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        if self.due(context._replace(step=context.step + 1)):  # an exchange comes next
            self.rates = self._rates()  # schedulers have yet to change them
        return super().after_step(context)


def stability(alpha: float, beta: float) -> str | None:
    """A warning for settings that are stable, but outside the region where every pull shortens its distance.

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
                    f"{'EAMSGD' if nesterov else 'MEASGD'} needs {wanted}, since it knows the momentum of that one; "
                    f"configure_optimizers gave {type(optimizer).__name__} with {settings}. Use that, or hetero_easgd "
                    "(hetero_easgd_async), which takes any optimizer."
                )
