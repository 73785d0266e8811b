"""DiLoCo with a quorum: an outer step waits for so many replicas, and late ones take part in the next outer step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.async_center import ExchangeRates
from lightning_hetero.algorithms.base import Outcome, ReplicaLoss, StepContext
from lightning_hetero.algorithms.diloco_async import OuterAsyncAverager
from lightning_hetero.algorithms.outer_rules import OuterRule, RoundStep
from lightning_hetero.comm.centers.rounds import Quorum
from lightning_hetero.errors import ConfigurationError, not_none


@dataclass
class QuorumAverager(OuterAsyncAverager):
    """All replicas take ``tau`` local steps, and each waits until a quorum of them has brought theirs to the center.

    ::

        s <- sum_i w_i (x_i - c_i);  m <- mu m + s;  c <- c + lr (s + mu m);  x_i <- c

    One that is late does not wait: it goes on from the center as it is, and what it has brought takes part in the next
    outer step. So each local step moves the center once.

    Replicas come after the same steps, so that nobody waits for one that will not come. So the number of a visit is
    that of its round: those that the steps before the fit stand for count, too.

    Source: Decoupled DiLoCo (arXiv:2604.21428).

    Args:
        others: see :class:`~lightning_hetero.algorithms.diloco_async.OuterAsyncAverager`.

    Raises:
        ConfigurationError: when training starts: a quorum of more replicas than the job begins with.
    """

    @property
    @override
    def rule_name(self) -> str:
        return "a quorum"

    @property
    @override
    def outer_rule(self) -> Callable[..., OuterRule]:
        return partial(RoundStep, Quorum(not_none(self.quorum, "the quorum"), self.patience))

    @override
    def prepare(self) -> Outcome | None:
        # Once replicas have been lost, all that there are are the quorum.
        if not_none(self.quorum, "the quorum") > self.links.count and not self.run.regrouped:
            raise ConfigurationError(
                f"quorum={self.quorum}: there are {self.links.count} replicas. Use at most as many."
            )
        return super().prepare()

    @override
    def before_step(self, context: StepContext) -> None:
        if self.last_step < 0:
            self.visits, self.visits_before = 0, self._visits_by(context.step)
        super().before_step(context)

    @override
    def visit_is_due(self, step: int) -> bool:
        return self.visits_before + self.visits < self._visits_by(step)

    def _visits_by(self, step: int) -> int:
        return ((step + 1) * len(self._parts) - 1) // self.tau

    @property
    @override
    def next_round(self) -> int:
        return self._rounds_of(self.next_fragment, self.visits + 1)

    def _rounds_of(self, p: int, visits: int) -> int:
        """Of so many visits in this fit, those with a fragment."""
        count, before = len(self._parts), self.visits_before
        skip = count - (p or count)
        return (before + visits + skip) // count - (before + skip) // count

    @override
    def steps_by(self, speeds: Tensor) -> int:
        return self.tau

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), **{f"late/replica{i}": float(n) for i, n in enumerate(self.late)}}

    @override
    def add_arrived(self, values: Sequence[Tensor]) -> None:
        super().add_arrived(values)
        own, waiting = (self.replica.views(flats)[0] for flats in (values, self.gradient_sum))
        for value, late in zip(own, waiting, strict=False):  # it has arrived, and its round is open
            value.add_(late)

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        outcome = super().finish(context)
        self._forget_waiting()  # all hold it
        self._client.write(self.center_vectors, self.counts)
        return outcome

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        begins = self.last_step < 0
        if loss is not None:
            self.arrivals.zero_()  # who waited comes again
            most = max(self.links.gather_of_replicas(self.visits))
            for p, closed in enumerate(self.closed_rounds):
                closed.clamp_(min=self._rounds_of(p, most))
        elif begins or self.local_steps != self.tau:
            # All are at one step, and no round is open: rounds begin again.
            if begins:  # the weights that all begin from hold what waited for its outer step
                self._forget_waiting()
            self.last_step, self.local_steps = -1, self.tau
            self.arrivals.zero_()
            self.closed_rounds.zero_()
            self.counts = [0] * self.links.count
            self._rates = ExchangeRates(self.links.index)
        super().after_restore(loss)

    def _forget_waiting(self) -> None:
        for waiting in (*self.gradient_sum, *self.replica.views(self.momentum)[1]):  # there are weights of buffers
            waiting.zero_()

    @override
    def replace_center(self, context: StepContext) -> None:
        super().replace_center(context)
        self._forget_waiting()  # what waited for its outer step when all last looked
