"""Agreement protocol for ranks at their own pace: on a new plan, and on a step that none has drawn yet.

The leader proposes a plan. Each rank answers how far it may draw by the plan before: beyond what it draws while the
ranks agree. There it waits until the leader has decided. Once all have answered, the plan starts at the farthest of
these steps; no rank has drawn it. Where one does not answer in time, the proposal is dropped, and all go on.

The protocol of plans neither communicates nor reads a clock, so that tests can try every order of messages.
:class:`AgreedBatch` has a thread and the job's store.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.shares import cost_of, row_of
from lightning_hetero.comm import failures
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.threads import THREADS, close_at_exit
from lightning_hetero.errors import CommunicationError


class PlanProposal(NamedTuple):
    """Plan that ranks are asked to follow.

    Attributes:
        number: of the proposal, from 1 on.
        plan: its start is not known yet.
        window: seconds in which the ranks should agree.
    """

    number: int
    plan: Plan
    window: float


class PlanDecision(NamedTuple):
    """Outcome of a proposal.

    Attributes:
        number: of the proposal.
        start: the step from which all follow it; ``None``: it was dropped.
    """

    number: int
    start: int | None


class PlanMember:
    """Follower's side of the agreement.

    Args:
        next_step: the first step that it has not drawn yet.

    Attributes:
        latest: the latest plan that all follow, and the number of its proposal; 0 and ``None`` before the first.
        waits: whether it has answered, and does not know what was decided.
    """

    def __init__(self, next_step: int) -> None:
        self.next_step = next_step
        self.latest: tuple[int, Plan | None] = 0, None
        self._open: PlanProposal | None = None
        self._bound = 0
        self._plans: list[Plan] = []

    @property
    def waits(self) -> bool:
        """Whether it has answered, and awaits the decision."""
        return self._open is not None

    def may_draw(self, step: int) -> bool:
        """Whether it is sure by which plan to draw a step."""
        return self._open is None or step < self._bound

    def draws(self, step: int) -> None:
        """It draws a step."""
        self.next_step = max(self.next_step, step + 1)

    def answer(self, proposal: PlanProposal, rate: float) -> int:
        """The first step that it does not draw before it knows what was decided.

        Args:
            proposal: that the leader has sent.
            rate: steps that it draws in a second.
        """
        self._open = proposal
        self._bound = self.next_step + math.ceil(rate * proposal.window) + 1
        return self._bound

    def decide(self, decision: PlanDecision) -> None:
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


class PlanLeader:
    """Leader's side of the agreement, which proposes.

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

    def propose(self, plan: Plan, now: float) -> PlanProposal:
        """Ask all ranks to follow a plan.

        Args:
            plan: to follow.
            now: seconds on a clock.
        """
        self._number, self._answers, self.waits = self._number + 1, {}, True
        self._until = now + self.window
        return PlanProposal(self._number, plan, self.window)

    def answered(self, rank: int, number: int, bound: int) -> None:
        """A rank has answered a proposal."""
        if number == self._number:
            self._answers[rank] = bound

    def decide(self, now: float) -> PlanDecision | None:
        """The decision on the proposal; ``None``: that is not known yet."""
        if len(self._answers) == self._world:
            self.waits = False
            return PlanDecision(self._number, max(self._answers.values()))
        if now < self._until:
            return None
        self.waits, self.window = False, min(2 * self.window, self.LONGEST)
        return PlanDecision(self._number, None)


def encode_message(message: PlanProposal | PlanDecision) -> str:
    """A message as text."""
    if isinstance(message, PlanDecision):
        return json.dumps({"decided": message.number, "start": message.start})
    plan = plan_as_row(message.plan)
    return json.dumps({"proposed": message.number, "plan": plan, "window": message.window})


def decode_message(told: dict[str, Any]) -> PlanProposal | PlanDecision:
    """The message that :func:`encode_message` has made a text of, and ``json`` a dictionary."""
    if "decided" in told:
        return PlanDecision(told["decided"], told["start"])
    return PlanProposal(told["proposed"], plan_from_row(told["plan"]), told["window"])


def plan_as_row(plan: Plan) -> list[Any]:
    """A plan as builtins."""
    costs = [row_of(cost) for cost in plan.costs]
    return [plan.start, plan.by_samples, plan.grid, costs, plan.low, plan.high, plan.reach, plan.need]


def plan_from_row(row: list[Any]) -> Plan:
    """The plan that :func:`plan_as_row` has described."""
    start, by_samples, grid, costs, *limits = row
    low, high, reach, need = map(tuple, limits)
    multiples = tuple(map(tuple, grid))
    return Plan(start, tuple(cost_of(*cost) for cost in costs), low, high, reach, need, by_samples, multiples)


_POLL = 0.25  # seconds between two looks at the store


class ActionRequest(NamedTuple):
    """Request of a rank that all do something.

    Attributes:
        what: completes "could not agree on a step ...".
        notice: seconds until then, at least. If all answers are there by then, nobody waits for them. Without any
            notice all do it as soon as possible, and wait for each other.
    """

    what: str
    notice: float


class AgreedBatch:
    """Agreement of all ranks to do something after the same batch, once any of them asks for it.

    It asks through the job's key-value store, and a thread of each rank answers with the batch beyond which its rank
    will not go before it knows all answers. The latest of these batches is the one. It stays so when ranks are lost
    (:meth:`move`): some of those that remain may have come to it already.

    Args:
        store: of the job, with keys of its own.
        asks: what this rank asks for, if anything; called again and again, on a thread.
        limit: longest wait for the other ranks' answers, seconds.
        done: batches that this rank has done, counted alike on all ranks.
        patience: gives the seconds for which ranks go on without an answer that does not come. Where they need not
            meet otherwise, a rank that is lost is known by then, and nobody has waited for it.
        recover: where lost ranks are survived: takes part if ranks agree on who remains, which moves this agreement,
            and returns whether they did.
    """

    def __init__(
        self,
        store: dist.Store,
        asks: Callable[[], ActionRequest | None],
        limit: float,
        done: int = 0,
        patience: Callable[[], float] = lambda: 0.0,
        recover: Callable[[], bool] | None = None,
    ) -> None:
        self._asks, self._limit, self._patience, self._recover = asks, limit, patience, recover
        self._lock, self._known = threading.Lock(), threading.Event()
        self._done, self._round = done, 0  # the latest batch, and how often ranks have agreed
        self._silent: list[int] = []  # ranks that have not answered yet
        self._ended: float | None = None  # when the latest batch was done
        self._took = deque[float](maxlen=5)  # seconds of the latest batches; some of them are longer, as who saves is
        self._at: int | None = None  # the batch that all have agreed on
        self._arm()
        self._begin(store)
        close_at_exit(self)

    def _begin(self, store: dist.Store) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._closed = threading.Event()
        work = partial(self._listen, store, self._closed)
        self._thread = threading.Thread(target=work, daemon=True, name=f"{THREADS}agreed-batch")
        self._thread.start()

    def move(self, store: dist.Store) -> None:
        """Go on among other ranks (collective over them).

        A batch that any of them knows as agreed on stays so for all: its rank may be there already, and wait. What was
        not agreed on yet is agreed on again.

        Args:
            store: of these ranks, with keys of its own.
        """
        self.close()
        everyone = gather((self._round, self._at), "the batches that were agreed on")
        known = [at for number, at in everyone if number == self._round and at is not None]
        with self._lock:
            self._arm()
            if known:
                self._at = max(known)
                self._known.set()
        self._begin(store)

    def _arm(self) -> None:
        self._at = None
        self._bound: int | None = None  # how far this rank may go before it knows
        self._asked = ActionRequest("", 0.0)
        self._known.clear()

    @property
    def asked(self) -> bool:
        """Whether this rank knows that one asks, and has answered."""
        return self._bound is not None

    def batch_ended(self, batch: int) -> bool:
        """Whether it is time, which stays so until :meth:`rearm`.

        Args:
            batch: the one that has ended.

        Raises:
            CommunicationError: the other ranks do not answer.
        """
        now = time.monotonic()
        with self._lock:
            if self._ended is not None:
                self._took.append(now - self._ended)
            self._done, self._ended = batch, now
            wait = self._bound is not None and self._done >= self._bound
        if wait:
            self._wait()
        return self._at is not None and self._done >= self._at

    def rearm(self) -> None:
        """It has been done, and ranks may ask for it again."""
        with self._lock:
            self._round += 1
            self._arm()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()
        self._thread.join(2.0)  # a thread within the store would break the process's end off

    def _listen(self, store: dist.Store, closed: threading.Event) -> None:
        try:
            while not closed.wait(_POLL):
                if self._at is not None:
                    continue
                key = f"{self._round}/asked"
                if (own := self._asks()) is not None:
                    store.set(key, json.dumps(own))
                if store.check([key]):
                    self._agree(ActionRequest(*json.loads(store.get(key))), store, closed)
        except RuntimeError:  # the store has gone, and the job with it, unless lost ranks are survived
            if self._recover is None:
                self._known.set()

    def _agree(self, asked: ActionRequest, store: dist.Store, closed: threading.Event) -> None:
        notice = max(asked.notice, self._patience())
        with self._lock:
            ahead = math.ceil(notice / max(median_low(self._took), 1e-4)) if self._took else 0
            self._bound, self._asked = self._done + 1 + ahead, asked
        keys = {rank: f"{self._round}/{rank}" for rank in range(self._world)}
        store.set(keys[self._rank], str(self._bound))
        silent = list(keys)
        while silent := [rank for rank in silent if not store.check([keys[rank]])]:
            self._silent = silent
            if closed.wait(0.05):
                return
        at = max(int(store.get(key)) for key in keys.values())
        with self._lock:
            if not closed.is_set():  # else the ranks are others now
                self._at = at
                self._known.set()

    def _wait(self) -> None:
        """Wait for all answers, unless the ranks that remain after a loss begin again."""
        until = time.monotonic() + self._limit
        while (seconds := until - time.monotonic()) > 0:
            if self._known.wait(min(seconds, _POLL)):
                return
            if self._recover is not None:
                if self._recover():
                    return
                continue
            lost = failures.first_failure(0.0)  # it will not answer any more, unless it has
            if lost is not None and not self._known.wait(2 * _POLL):
                raise self._error(f"{lost}")
        ranks = f"rank(s) {', '.join(map(str, self._silent))}" if self._silent else "a rank"
        raise self._error(f"no answer from {ranks} within {self._limit:.0f} s")

    def _error(self, why: str) -> CommunicationError:
        me = f"rank {self._rank} of {self._world}"
        return CommunicationError(f"{me} could not agree with the others on a step {self._asked.what}: {why}.")
