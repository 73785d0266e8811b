"""How ranks that take steps at their own pace agree on a new plan, and on a step that none of them has drawn yet.

The leader proposes a plan. Each rank answers how far it may draw by the plan before: beyond what it draws while the
ranks agree. There it waits until the leader has decided. Once all have answered, the plan starts at the farthest of
these steps; no rank has drawn it. Where one does not answer in time, the proposal is dropped, and all go on.

Nothing here communicates or reads a clock, so that tests can try every order of messages.
"""

import json
import math
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_hetero.workload.plan import Plan
from lightning_hetero.workload.shares import cost_of, row_of


class Proposal(NamedTuple):
    """A plan that ranks are asked to follow.

    Attributes:
        number: of the proposal, from 1 on.
        plan: its start is not known yet.
        window: seconds in which the ranks should agree.
    """

    number: int
    plan: Plan
    window: float


class Decision(NamedTuple):
    """What has become of a proposal.

    Attributes:
        number: of the proposal.
        start: the step from which all follow it; ``None``: it was dropped.
    """

    number: int
    start: int | None


class Member:
    """A rank's side.

    Args:
        next_step: the first step that it has not drawn yet.

    Attributes:
        latest: the latest plan that all follow, and the number of its proposal; 0 and ``None`` before the first.
        waits: whether it has answered, and does not know what was decided.
    """

    def __init__(self, next_step: int) -> None:
        self.next_step = next_step
        self.latest: tuple[int, Plan | None] = 0, None
        self._open: Proposal | None = None
        self._bound = 0
        self._plans: list[Plan] = []

    @property
    def waits(self) -> bool:
        """Whether it has answered, and does not know what was decided."""
        return self._open is not None

    def may_draw(self, step: int) -> bool:
        """Whether it is sure by which plan to draw a step."""
        return self._open is None or step < self._bound

    def draws(self, step: int) -> None:
        """It draws a step."""
        self.next_step = max(self.next_step, step + 1)

    def answer(self, proposal: Proposal, rate: float) -> int:
        """The first step that it does not draw before it knows what was decided.

        Args:
            proposal: that the leader has sent.
            rate: steps that it draws in a second.
        """
        self._open = proposal
        self._bound = self.next_step + math.ceil(rate * proposal.window) + 1
        return self._bound

    def decide(self, decision: Decision) -> None:
        """The leader has decided."""
        proposal = self._open
        if proposal is None or decision.number != proposal.number:
            return  # dropped before this rank had heard of it
        self._open = None
        if decision.start is not None:
            plan = replace(proposal.plan, start=decision.start)
            self.latest = decision.number, plan
            self._plans.append(plan)

    def new_plans(self) -> list[Plan]:
        """Plans to follow that have not been asked for yet."""
        plans, self._plans = self._plans, []
        return plans


class Leader:
    """The side of the rank that proposes.

    Args:
        world: number of ranks.

    Attributes:
        window: seconds in which the ranks should agree; twice as many after each time that they have not.
    """

    WINDOW, LONGEST = 1.5, 12.0

    def __init__(self, world: int) -> None:
        self.window = self.WINDOW
        self._world, self._number, self._until = world, 0, 0.0
        self._answers: dict[int, int] = {}
        self.waits = False

    def propose(self, plan: Plan, now: float) -> Proposal:
        """Ask all ranks to follow a plan.

        Args:
            plan: to follow.
            now: seconds on a clock.
        """
        self._number, self._answers, self.waits = self._number + 1, {}, True
        self._until = now + self.window
        return Proposal(self._number, plan, self.window)

    def answered(self, rank: int, number: int, bound: int) -> None:
        """A rank has answered a proposal."""
        if number == self._number:
            self._answers[rank] = bound

    def decide(self, now: float) -> Decision | None:
        """What becomes of the proposal; ``None``: that is not known yet."""
        if len(self._answers) == self._world:
            self.waits = False
            return Decision(self._number, max(self._answers.values()))
        if now < self._until:
            return None
        self.waits, self.window = False, min(2 * self.window, self.LONGEST)
        return Decision(self._number, None)


def text_of(message: Proposal | Decision) -> str:
    """A message as text."""
    if isinstance(message, Decision):
        return json.dumps({"decided": message.number, "start": message.start})
    plan = plan_as_row(message.plan)
    return json.dumps({"proposed": message.number, "plan": plan, "window": message.window})


def message_of(told: dict[str, Any]) -> Proposal | Decision:
    """The message that :func:`text_of` has made a text of, and ``json`` a dictionary."""
    if "decided" in told:
        return Decision(told["decided"], told["start"])
    return Proposal(told["proposed"], plan_of_row(told["plan"]), told["window"])


def plan_as_row(plan: Plan) -> list[Any]:
    """A plan as builtins."""
    return [plan.start, [row_of(c) for c in plan.costs], plan.low, plan.high, plan.reach, plan.need]


def plan_of_row(row: list[Any]) -> Plan:
    """The plan that :func:`plan_as_row` has described."""
    start, costs, *limits = row
    return Plan(start, tuple(cost_of(*cost) for cost in costs), *map(tuple, limits))
