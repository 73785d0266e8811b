"""What happens between replicas: before and after every optimizer step, and wherever their consensus is looked at."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.averaging.averager import Averager, Outcome, Run, StepContext
from lightning_hetero.averaging.regrow import regrow
from lightning_hetero.comm.agreement import check_equal, of_rank
from lightning_hetero.comm.links import ReplicaLinks, Traffic
from lightning_hetero.comm.replica import Replica
from lightning_hetero.engine import optimizer_states
from lightning_hetero.engine.checkpoint import of_layout
from lightning_hetero.engine.looks import Looks
from lightning_hetero.engine.losses import Losses
from lightning_hetero.engine.not_finite import explained
from lightning_hetero.engine.own_state import beside_values
from lightning_hetero.engine.regrowing import CHANGED, cannot_regrow, in_mid_epoch
from lightning_hetero.engine.step import Workshare
from lightning_hetero.engine.view import View
from lightning_hetero.errors import UnsupportedError


class ReplicaEngine:
    """Lets replicas train apart, and an averager bring them together.

    Args:
        view: who takes part.
        links: the wires between replicas.
        share: this rank's part of the work.
        report_every: batches from one exchange of reports to the next, where there is one replica only.

    Attributes:
        averager: brings parameters together; of the running fit, else ``None``.
        losses: what this rank's training loss has been.
        windows: optimizer steps since the start of the fit.
    """

    def __init__(self, view: View, links: ReplicaLinks, share: Workshare, report_every: int) -> None:
        self.view, self.links, self._share = view, links, share
        self._report_every = report_every
        self.averager: Averager | None = None
        self.losses = Losses()
        self.windows = self.meetings = 0
        self._open = False  # whether a window has begun
        self._due = self._epoch_ends = False  # whether replicas meet after the window that ends, and an epoch ends
        self._own: list[Tensor] | None = None  # this replica's values while the model holds the consensus
        self._looks = Looks()

    # -- a fit -------------------------------------------------------------------------------------

    def start(
        self,
        averager: Averager,
        replica: Replica,
        optimizers: Callable[[], Sequence[Optimizer]],
        run: Run,
        metric: Callable[[str], float | None],
    ) -> Outcome | None:
        """Begin a fit, with the same values on all ranks (collective).

        Args:
            averager: a new one.
            replica: the values that replicas exchange.
            optimizers: gives the optimizers.
            run: what is known of the fit.
            metric: gives the mean over all ranks of a logged metric; see :class:`StepContext`.
        """
        self._open = False  # an earlier fit may have ended in a window
        self._looks = Looks()
        self.averager, self._metric, self._optimizers = averager, metric, optimizers
        return averager.setup(replica, self.links, optimizers, run)

    def resume(self, windows: int) -> None:
        """Go on after so many optimizer steps."""
        self.windows, self._looks.before = windows, None

    def finish(self) -> Outcome | None:
        """Make all replicas equal, at the end of a fit (collective)."""
        assert self.averager is not None
        with explained(self):
            return self.averager.finish(self.context(epoch_ends=False))

    def close(self) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        if self.averager is not None:
            self.averager.close()
            self.averager = self._own = None

    def take_over(self, former: "ReplicaEngine") -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        self.windows, self.meetings, self.losses = former.windows, former.meetings, former.losses
        self.links.traffic = former.traffic

    @property
    def lockstep(self) -> bool:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        return self.averager is not None and self.averager.facts.lockstep

    def abandon(self) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        self.links.abandon()

    def go_on(self, former: "ReplicaEngine", kept: Sequence[int], missed: bool, run: Run) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        self._open, self._due, self._epoch_ends = former._open, former._due, former._epoch_ends
        self._own, self._looks = former._own, former._looks
        if former.averager is None:
            return
        averager = self.averager = former.averager
        self._metric, self._optimizers = former._metric, former._optimizers
        if not former.averages:
            averager.links, averager.run = self.links, run
            return
        state = averager.remains(kept)
        averager.close()
        everyone = self.links.gather((missed, self.view.leads))
        if any(one for one, _ in everyone):  # who has completed it says where it has led
            source = next(rank for rank, (one, _) in enumerate(everyone) if not one)
            theirs = of_rank(state, source)
            state = theirs if missed else state
        averager.setup(averager.replica, self.links, self._optimizers, run)
        averager.go_on(state, self.context(epoch_ends=False))
        if missed:
            averager.missed_exchange(self.context(epoch_ends=False))

    @property
    def averages(self) -> bool:
        """Whether an averager is at work."""
        return self.averager is not None and (self.view.count > 1 or not self.averager.facts.needs_others)

    @property
    def meets(self) -> bool:
        """Whether all replicas have met after the latest batch."""
        return self._due

    @property
    def traffic(self) -> Traffic:
        """What exchanges between replicas have cost since the ranks have met."""
        return self.links.traffic

    def samples_per_replica(self) -> list[int]:
        """What each replica takes of a full batch; where all meet at once, 0 for those that have no more data."""
        assert self.averager is not None
        samples = self.view.per_replica(self._share.samples_per_rank())
        if not self.averager.facts.lockstep:
            return samples
        left = [0 if self._share.ended[ranks[0]] else n for ranks, n in zip(self.view.ranks, samples, strict=True)]
        return left if any(left) else samples

    def context(self, epoch_ends: bool) -> StepContext:
        """What all ranks know alike about the latest optimizer step."""
        samples = self.samples_per_replica()
        return StepContext(self.windows, epoch_ends, samples, self.losses.mean_over_ranks, self._metric)

    # -- a window ----------------------------------------------------------------------------------

    def before_window(self) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`.

        Raises:
            UnsupportedError: parameters have become trainable, or frozen, in mid-epoch.
        """
        if self._open or self.averager is None:
            return
        self._open = True
        if not self.averages:
            return
        if changed := self.averager.replica.changed():
            raise UnsupportedError(in_mid_epoch(changed))
        with self._share.timer.waiting(exchange=True), explained(self):
            self.averager.before_step(self.context(epoch_ends=False))

    def regrow(self) -> bool:
        """Between two windows, go on with the parameters that are trainable now; whether these have changed.

        Collective.

        Raises:
            DisagreementError: on every rank: they are not the same ones everywhere.
            UnsupportedError: on every rank: the averager cannot go on.
        """
        assert self.averager is not None
        with self._share.timer.waiting(exchange=True):
            changed = self.averager.replica.changed()
            check_equal(CHANGED, {name: "trainable" if on else "frozen" for name, on in changed.items()})
            if not changed:
                return False
            if self.averages and not self.averager.facts.regrows:
                raise UnsupportedError(cannot_regrow(type(self.averager).__name__, changed))
            self.averager.replica.share([name for name, trainable in changed.items() if trainable])
            with explained(self):
                regrow(self.averager, self.context(epoch_ends=False), self._optimizers)
        return True

    def due(self, batch: int, window_ends: bool, epoch_ends: bool) -> bool:
        """See :class:`~lightning_hetero.engine.single.Engine`.

        Ranks report where replicas meet anyway: elsewhere the fast ones would have to wait.
        """
        self._due, self._epoch_ends = False, epoch_ends
        if window_ends and self.averager is not None:
            self._due = self.averager.due(self.context(epoch_ends)._replace(step=self.windows + 1))
        return batch % self._report_every == 0 if self.view.count == 1 else self._due

    def take_loss(self, loss: Tensor) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        self.losses.take(loss, self._share.current().samples, self.windows)

    def window_ended(self) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        self.windows += 1
        self._open = False

    def exchange(self) -> Outcome | None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        assert self.averager is not None
        if not self.averages:
            return None
        with self._share.timer.waiting(exchange=True), explained(self):
            outcome = self.averager.after_step(self.context(self._epoch_ends))
        self.meetings += self._due
        self._looks.exchanges += outcome is not None and outcome.exchanged
        return outcome

    def met(self) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        if self.averages and self._due and self.averager is not None and self.averager.facts.blocking:
            self._share.listen()  # all are here now

    # -- the consensus -----------------------------------------------------------------------------

    def consensus(self, sanity_check: bool = False) -> list[Tensor]:
        """The values to evaluate and to save (collective). In a ``sanity_check`` training has not begun."""
        assert self.averager is not None
        with explained(self):
            values = self.averager.consensus(self.context(epoch_ends=False))
        if not sanity_check:
            self.looked()
        return values

    def common_start(self) -> list[Tensor]:
        """The values from which all replicas go on together when others join (collective)."""
        assert self.averager is not None
        with explained(self):
            return self.averager.common_start(self.context(epoch_ends=False))

    def looked(self) -> None:
        """Somebody looks at the mean of the replicas without :meth:`consensus`."""
        assert self.averager is not None
        self._looks.look(self.windows, self.averager.facts.between)

    def look(self, sanity_check: bool) -> list[Tensor] | None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        return self.consensus(sanity_check) if self.averages and self._own is None else None

    def hold(self, values: list[Tensor] | None) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        if values is not None:
            assert self.averager is not None
            self._own = self.averager.replica.pack()
            self.averager.replica.unpack(values)

    def release(self) -> None:
        """See :class:`~lightning_hetero.engine.single.Engine`."""
        if self.averager is not None and self._own is not None:
            self.averager.replica.unpack(self._own)
            self._own = None

    @property
    def holds(self) -> bool:
        """Whether the model holds the consensus."""
        return self._own is not None

    def own_values(self, flat: Callable[..., Tensor] | None = None) -> list[Tensor]:
        """This replica's own values, whatever the model holds; for ``flat`` see :meth:`Replica.pack`."""
        assert self.averager is not None
        return self.averager.replica.pack(flat=flat) if self._own is None else self._own

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(
        self, optimizers: Sequence[Optimizer], precision: dict[str, Any], flat: Callable[..., Tensor] | None = None
    ) -> dict[str, Any] | None:
        """This replica's own state, on its leader; elsewhere ``None`` (collective). Tensors and builtins only."""
        rest = beside_values(self, optimizers, precision)
        values = self.own_values(flat)  # on all ranks: those of a replica make their buffers alike first
        return {"values": [value.cpu() for value in values], **rest} if self.view.leads else None

    def common_state(self) -> dict[str, Any]:
        """What is alike on all replicas, for :meth:`Averager.load_common` (collective)."""
        assert self.averager is not None
        with explained(self):
            state = self.averager.state_dict()
        return {name: state[name] for name in self.averager.common}

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Continue from :meth:`state_dict`, and this rank's losses by that name."""
        assert self.averager is not None
        self.averager.replica.unpack(of_layout(state["values"], self.averager.replica.layout))
        self.averager.replica.keep(state["kept"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer_states.restore(optimizer, saved)
        self.averager.load_state_dict(state["algorithm"])
        self.losses.load_state_dict(state["losses"])
        self.resume(int(state["windows"]))
