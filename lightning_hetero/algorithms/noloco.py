"""NoLoCo: an outer optimizer without an all-reduce; replicas take outer steps in random pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.base import Outcome, StepContext
from lightning_hetero.algorithms.peers import PairAverager
from lightning_hetero.algorithms.state import Own, model_values, zeros
from lightning_hetero.algorithms.topologies import random_matching
from lightning_hetero.argument_checks import at_least_one, is_number, outer_rates
from lightning_hetero.comm.all_reduce import in_chunks
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.errors import ConfigurationError


class _Rates(NamedTuple):
    """The coefficients of the outer step: ``alpha``, ``beta`` and ``gamma`` of the paper."""

    momentum: float
    lr: float
    pull: float


@dataclass
class NoLoCoAverager(PairAverager):
    """Replicas train apart for tau steps, then take an outer step in random pairs; nobody waits for all.

    Every replica has slow weights ``phi``, and fast weights ``x``, which it trains. With ``g = phi - x``, what the
    local steps have done, and the mean over the two members of the pair, weighted by samples::

        delta <- alpha delta - beta mean(g) - gamma (phi - mean(phi))
        phi   <- phi + delta;  x <- phi

    One vector of the model's size travels each way: ``u = gamma phi - beta g`` is all that the other needs to know,
    since ``delta_i = alpha delta_i - beta g_i + w_j (u_j - u_i)``. A replica without a partner in a round, or one that
    misses it, takes the step alone. Buffers, which have no gradients, take the mean of the pair.

    The mean of all replicas is validated, saved and left at the end.

    Source: NoLoCo, Kolehmainen et al. 2025 (arXiv:2506.10911), with groups of two. The authors' code
    (github.com/jkolehm/noloco) takes ``gamma = beta``.

    Args:
        tau: optimizer steps from one outer step to the next.
        outer_lr: beta: learning rate of the outer step.
        outer_momentum: alpha: its momentum.
        gamma: how strongly the slow weights of a pair are pulled to their mean; above 0 and below
            ``2 (1 - outer_momentum ** 2)``, beyond which many replicas drift apart.
        wire: number format of what travels: ``"fp32"``, ``"bf16"`` or ``"fp16"``; differences from the initial values
            travel.

    Raises:
        ConfigurationError: a value that cannot work.

    Attributes:
        slow: ``phi``, as vectors on the CPU, in fp32 or wider.
        velocity: ``delta``, of the latest outer step.
    """

    traits = replace(PairAverager.traits, needs_others=False, fresh_start="its slow weights")
    slow = Own[list[Tensor]](model_values)
    velocity = Own[list[Tensor]](zeros)

    tau: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    gamma: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("tau", self.tau)
        outer_rates(self.outer_lr, self.outer_momentum)
        gamma, bound = self.gamma, 2 * (1 - self.outer_momentum**2)
        if not is_number(gamma) or not 0 < gamma < bound:
            raise ConfigurationError(
                f"gamma={gamma!r} must be above 0 and below 2 (1 - outer_momentum^2) = {bound:g}: with 0 nothing keeps "
                "replicas together, and beyond the bound many replicas swing past each other, further each time."
            )

    @override
    def prepare(self) -> Outcome | None:
        # Where the values of `pack` were, if these are as wide as the slow weights: nobody reads them again.
        pairs = zip(self._packed, self.slow, strict=True)
        self._gradient = [x if x.dtype == slow.dtype else memory_like(slow) for x, slow in pairs]
        return super().prepare()

    @property
    @override
    def restart_values(self) -> list[Tensor]:
        return self.slow

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        round_number, since = divmod(context.step, self.tau)
        if since:
            return None
        for gradient, slow, x in in_chunks(self._gradient, self.slow, self.pack()):
            torch.sub(slow, x, out=gradient)
        whom, _ = self.partners(random_matching, round_number)
        if whom and not self.arrived:  # else a loss has broken this step after the exchange
            self.client.offer(self._message(), self.weight(context), whom, round_number, origins=0.0)
        self.keep(self.client.meet(self._spare))
        exchanged = bool(self.arrived)
        self._step()
        return Outcome(exchanged=exchanged)

    def _message(self) -> list[Tensor]:
        """``u``, without what belongs to the values that all have begun with."""
        for message, slow, origin in zip(self._spare, self.slow, self.reference, strict=True):
            torch.sub(slow, origin, out=message)
        for rates, part, its in self._by_kind(self._spare, self._gradient):
            part.mul_(rates.pull).sub_(its, alpha=rates.lr)
        return self._spare

    def _step(self) -> None:
        """The outer step, with the difference from the partner's ``u`` if there is any."""
        for rates, velocity, its in self._by_kind(self.velocity, self._gradient):
            velocity.mul_(rates.momentum).sub_(its, alpha=rates.lr)
        for velocity, away in zip(self.velocity, self.arrived, strict=False):
            velocity.add_(away, alpha=self.arrived_part)
        self.arrived = []
        for slow, velocity in zip(self.slow, self.velocity, strict=True):
            slow.add_(velocity)
        self.replica.unpack(self.slow)

    def _by_kind(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> Iterator[tuple[_Rates, Tensor, Tensor]]:
        """Parts of vectors, with their coefficients: buffers have no momentum, and meet at their mean."""
        of_parameters = _Rates(self.outer_momentum, self.outer_lr, self.gamma)
        kinds = of_parameters, _Rates(0.0, 1.0, 1.0)
        for rates, ones, others in zip(kinds, self.replica.views(one), self.replica.views(other), strict=True):
            for part, its in zip(ones, others, strict=True):
                yield rates, part, its
