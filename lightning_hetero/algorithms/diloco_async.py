"""Asynchronous DiLoCo: each replica sends its outer gradient to a center when its local steps are done."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.algorithms.async_center import AsyncCenterAverager, Views, check_home
from lightning_hetero.algorithms.base import Outcome, ReplicaLoss, StepContext
from lightning_hetero.algorithms.outer_rules import MOMENTUM_RULES, OuterRule
from lightning_hetero.algorithms.state import Own, PerReplica, Scratch, Shared, model_values, zeros
from lightning_hetero.argument_checks import at_least_one, is_number, one_of, outer_rates
from lightning_hetero.comm.centers.base import CenterPart
from lightning_hetero.comm.centers.client import CenterOptions
from lightning_hetero.comm.columns import Layout
from lightning_hetero.comm.compression import Feedback, check_wire
from lightning_hetero.errors import CheckpointError, ConfigurationError
from lightning_hetero.replicas.fragments import Fragments, partition


@dataclass
class OuterAsyncAverager(AsyncCenterAverager):
    """A replica brings what its local steps have done to a center, alone, and goes on from what the center is then.

    With weights ``w_i`` by samples, ``c_i`` the center that replica ``i`` began from, and N replicas, for each arrival
    (delayed Nesterov)::

        g <- w_i (c_i - x_i);  c <- c - lr g;  s <- s + g
        every N arrivals:  m <- mu m + s;  c <- c - lr mu m;  s <- 0
        x_i <- c

    Local steps follow the measured speed (DyLU), so that all arrive about equally often: the fastest replica takes
    ``tau`` steps, another one ``tau`` times its steps per second over those of the fastest. All take ``tau`` in their
    first round, before speeds are known.

    The center, moved by what replicas have done since they came to it, is validated, saved and left at the end:
    ``c + sum_i w_i (x_i - c_i)``. The replicas' mean would take back what others have brought since the slow ones
    began. Buffers, which have no gradients, take the mean.

    With ``momentum_rule="look_ahead"`` the momentum moves the center at each arrival, and replicas go on ahead of the
    center; ``"heloco"`` also turns stale arrivals towards the momentum.

    With a ``quorum`` it is :class:`~lightning_hetero.algorithms.diloco_quorum.QuorumAverager`.

    With ``fragments`` a replica brings a part of the model at a time, in turn, and each part of the center moves by its
    own arrivals.

    Source: Liu et al. 2024 (arXiv:2401.09135), algorithms 3 (delayed Nesterov, with c = 0) and 4 (DyLU); HeLoCo
    (arXiv:2606.00271).

    Args:
        tau: local steps of the fastest replica from one exchange to its next.
        outer_lr: learning rate of the outer step.
        outer_momentum: its momentum.
        momentum_rule: when the momentum moves the center: ``"delayed_nesterov"``, ``"look_ahead"`` or ``"heloco"``.
        follow_speed: whether local steps follow the measured speed; ``False``: every replica takes ``tau``. Default:
            ``True``, and ``False`` with a ``quorum``.
        center: where it lives: ``"shared_memory"`` of one host, or a ``"thread"`` of the first replica, which serves
            any. ``"auto"``: shared memory if it can.
        fragments: parts of the model that take turns: a number, of sizes as equal as its modules allow, or
            ``"blocks"``. Each is exchanged once in a replica's local steps. Default: 1, the whole model at once.
        wire: number format of changes, where the center is a thread's: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"int4"``, ``"2bit"`` or ``"topk:0.02"``.
        quorum: replicas for which an outer step waits. What a late replica brings takes part in the next outer step.
            With all of them it is the synchronous outer step of ``hetero_diloco``. Default: none waits.
        patience: how much longer an outer step waits for the others, as a part of the time from one outer step to a
            quorum for the next. Default: 0.1. Only with a quorum.

    Raises:
        CheckpointError: on resuming: the run that was saved had another ``momentum_rule``, or one of the two a quorum.
        ConfigurationError: a value that cannot work; when training starts: more fragments than modules, or a quorum of
            more replicas than there are.
        UnsupportedError: when the ranks have met: the center cannot live there.
    """

    traits = replace(
        AsyncCenterAverager.traits,
        between="the center moved by what replicas have done since, and each such look costs as much as an exchange",
    )
    momentum = Shared[list[Tensor]](zeros)
    gradient_sum = Shared[list[Tensor]](zeros)
    arrivals = Shared[Tensor](lambda averager: torch.zeros(len(averager.replica.fragments), dtype=torch.float64))
    closed_rounds = Shared[Tensor](lambda averager: torch.zeros(len(averager.replica.fragments), dtype=torch.float64))
    rule = Shared[str](lambda averager: averager.rule_name)
    speeds = PerReplica[Tensor](lambda averager: torch.zeros(averager.links.count, dtype=torch.float64))
    late = PerReplica[Tensor](lambda averager: torch.zeros(averager.links.count, dtype=torch.float64))
    begun_from = Own[list[Tensor]](model_values)
    last_step = Own[int](-1)
    local_steps = Own[int](lambda averager: averager.tau)
    visits_before = Own[int](0)  # with a quorum: those that the steps before this fit stand for
    feedback = Scratch[Feedback | None](
        lambda averager: averager.make_feedback(), "error feedback, which is what earlier messages have left out"
    )

    tau: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    follow_speed: bool | None = None
    center: Literal["auto", "shared_memory", "thread"] = field(default="auto", kw_only=True)
    momentum_rule: Literal["delayed_nesterov", "look_ahead", "heloco"] = field(default="delayed_nesterov", kw_only=True)
    fragments: Fragments = field(default=1, kw_only=True)
    wire: str = field(default="fp32", kw_only=True)
    quorum: int | None = field(default=None, kw_only=True)
    patience: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("tau", self.tau)
        outer_rates(self.outer_lr, self.outer_momentum)
        if self.follow_speed is not None:
            one_of("follow_speed", self.follow_speed, (True, False))
        one_of("momentum_rule", self.momentum_rule, tuple(MOMENTUM_RULES))
        one_of("center", self.center, ("auto", "shared_memory", "thread"))
        check_wire(self.wire)
        check_home(self.wire, self.center)
        self._check_quorum()
        self._cut = partition(self.fragments)

    def _check_quorum(self) -> None:
        if not is_number(self.patience) or self.patience < 0:
            raise ConfigurationError(f"patience={self.patience!r}: it must be a part of a round, at least 0.")
        if self.quorum is None:
            if self.patience != type(self).patience:
                raise ConfigurationError(
                    f"patience={self.patience!r} without a quorum: nobody waits. Give quorum, such as all replicas but "
                    "one, or leave patience out."
                )
            return
        at_least_one("quorum", self.quorum)
        others = {"momentum_rule": "delayed_nesterov", "follow_speed": None, "center": "auto"}
        fitting = {"momentum_rule": (), "follow_speed": (False,), "center": ("thread",)}
        for name, usual in others.items():
            if (given := getattr(self, name)) not in (usual, *fitting[name]):
                raise ConfigurationError(
                    f"{name}={given!r} with quorum={self.quorum}: all replicas take tau={self.tau} steps in a round, "
                    f"whose outer step has Nesterov's momentum, in a thread. Leave {name} out, or quorum."
                )

    @property
    def rule_name(self) -> str:
        """The rule of the outer step, which gives the center's momentum and sum their meaning."""
        return f"momentum_rule={self.momentum_rule!r}"

    @property
    def outer_rule(self) -> Callable[..., OuterRule]:
        """Makes the rule of the outer step, from the arguments of :class:`OuterRule`."""
        return MOMENTUM_RULES[self.momentum_rule]

    def make_feedback(self) -> Feedback | None:
        """Memory for what messages of this replica leave out; ``None``: they leave out nothing."""
        if self.wire == "fp32" or self.links.count == 1:
            return None
        lengths = self.replica.parameter_lengths[: self.replica.included]
        return Feedback(self.wire, [[length] for length in lengths], 1)

    @override
    def center_options(self, views: Callable[[slice], Views]) -> CenterOptions:
        made, left_out = [], [] if self.feedback is None else self.feedback.sent
        for p, (vectors, replica) in enumerate(self._parts):
            rule = self.outer_rule(self.links.count, self.outer_lr, self.outer_momentum, views(vectors), p, vectors)
            made.append(CenterPart(rule, self.begun_from[vectors], replica.parameter_lengths, left_out[vectors]))
        return CenterOptions(self.center, wire=self.wire, parts=made)

    @override
    def prepare(self) -> Outcome | None:
        self._parts = [(vectors, self.replica.part(vectors)) for vectors in self.replica.fragments]
        self._given = [torch.empty_like(value) for value in self.last_center]
        return super().prepare()

    @property
    @override
    def center_vectors(self) -> list[Tensor]:
        tables, counts = (self.speeds, self.late), (self.arrivals, self.closed_rounds)
        return [*self.last_center, *tables, *self.momentum, *self.gradient_sum, *counts]

    @property
    @override
    def center_layout(self) -> Layout:
        layout, tables = super().center_layout, (self.speeds, self.late)
        counts = self.arrivals, self.closed_rounds
        return [*layout, *({"": each} for each in tables), *layout, *layout, *({"": each} for each in counts)]

    @property
    @override
    def uses_center(self) -> bool:
        return False  # replicas have learned something since they came to the center

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        self.before_save()
        values = [value.to("cpu", old.dtype) for value, old in zip(self.replica.pack(), self.reference, strict=True)]
        self.add_arrived(values)
        return self.links.average(values, context.samples_per_replica, self.reference).mean

    def add_arrived(self, values: Sequence[Tensor]) -> None:
        """Add to the parameters in vectors what others have brought to the center since this replica came to it."""
        own, begun, now = (self.replica.views(flats)[0] for flats in (values, self.begun_from, self.last_center))
        for value, start, center in zip(own, begun, now, strict=False):  # the last ones may be excluded
            value.add_(center - start)

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        outcome = super().finish(context)
        for start, center in zip(self.begun_from, self.last_center, strict=True):
            start.copy_(center)  # all hold what others have brought, which must not count twice in a fit that goes on
        return outcome

    @override
    def before_step(self, context: StepContext) -> None:
        if self.last_step < 0:
            self.last_step = context.step

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        outcome = None
        while self.visit_is_due(context.step):
            self._visit(context)
            outcome = Outcome(exchanged=True)
        return outcome

    def visit_is_due(self, step: int) -> bool:
        """Whether this replica comes to the center after this step."""
        return step - self.last_step >= self._steps_to_next()

    def _steps_to_next(self) -> int:
        """Steps from a visit to the next one: those of all fragments come to the local steps."""
        turn, count = self.visits % len(self._parts), len(self._parts)
        return (turn + 1) * self.local_steps // count - turn * self.local_steps // count

    @property
    def next_fragment(self) -> int:
        """Number of the fragment with which this replica comes next."""
        return (self.visits_before + self.visits + 1) % len(self._parts)

    @property
    def next_round(self) -> int:
        """Number of the round in which its next visit takes part; 0: there are no rounds."""
        return 0

    def _visit(self, context: StepContext) -> None:
        """Bring the outer gradient of the next fragment to the center, and go on from there."""
        p = self.next_fragment
        vectors, replica = self._parts[p]
        moved, begun_from = self._given[vectors], self.begun_from[vectors]
        speeds, late = torch.zeros_like(self.speeds), torch.zeros_like(self.late)
        self._packed[vectors] = packed = replica.pack(self._packed[vectors])
        for out, value, start in zip(moved, packed, begun_from, strict=True):
            torch.sub(value.to("cpu", start.dtype), start, out=out)
        for part, start in zip(replica.views(moved)[1], replica.views(begun_from)[1], strict=True):
            part.add_(start)  # buffers travel as they are
        push = context.samples_per_replica[self.links.index] / sum(context.samples_per_replica)
        healthy = self.is_finite(moved)
        if not healthy:
            push = 0.0
            for out in moved:
                out.zero_()
        speeds[self.links.index] = max(0.0, self.run.in_steps(1.0))  # 0 while it is NaN
        late[self.links.index] = 1
        seen = self._client.push_pull([*moved, speeds, late], push, p, self.next_round)()
        self.late.copy_(late)
        self._rates.observe(seen.counts)
        self._distance = math.sqrt(seen.square)
        for start, value in zip(begun_from, moved, strict=True):
            start.copy_(value)
        if healthy:
            replica.unpack(begun_from)
        else:
            self.restart_from(self.begun_from)
        self.visits, self.last_step, self.local_steps = self.visits + 1, context.step, self.steps_by(speeds)

    def steps_by(self, speeds: Tensor) -> int:
        """Local steps by speed; the same on all ranks of the replica, unless each has a shard, and its own table."""
        own, most = float(speeds[self.links.index]), float(speeds.max())
        follows = self.follow_speed in (None, True)  # 0 is False
        return max(round(self.tau * own / most), 1) if follows and own and most else self.tau

    @override
    def status(self, step: int) -> dict[str, float | str]:
        return {**super().status(step), "local_steps": float(self.local_steps)}

    @override
    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        if self.rule != self.rule_name:
            raise CheckpointError(
                f"The checkpoint was saved with {self.rule}, here it is {self.rule_name}: the center's momentum has "
                "another meaning. Resume with the quorum and the momentum_rule of the run that was saved; or load the "
                "weights into the model, and begin a fit without the checkpoint."
            )
        self.local_steps = min(self.local_steps, self.tau)  # it was saved with another tau if they are more
        if loss is not None and self.commits >= 0 and self.counts[self.links.index] > self.visits:
            # The center has what the visit has brought, and only its answer was lost: the visit is repeated.
            vectors, replica = self._parts[self.next_fragment]
            for start, value in zip(self.begun_from[vectors], replica.pack(), strict=True):
                start.copy_(value)
        super().after_restore(loss)

    @override
    def replace_center(self, context: StepContext) -> None:
        super().replace_center(context)
        # What replicas have done since they began is in the mean, and must not count twice.
        for start, value in zip(self.begun_from, self.replica.pack(), strict=False):
            start.copy_(value)
