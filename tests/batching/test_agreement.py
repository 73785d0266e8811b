"""Agreement of ranks on plans, whatever is delayed or lost, and on a batch to save at; nobody waits for it."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run

from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.plan_agreement import (
    ActionRequest,
    AgreedBatch,
    PlanDecision,
    PlanLeader,
    PlanMember,
    PlanProposal,
    decode_message,
    encode_message,
)
from lightning_hetero.batching.shares import Cost

FIRST = Plan(0, (Cost(0.0, 1.0),) * 3, (1,) * 3, (9,) * 3)
WORLD = 3


class Rank:
    """Draws steps, each by a plan."""

    def __init__(self, member: PlanMember) -> None:
        self.member, self.plans, self.drawn = member, [FIRST], []

    def draw(self) -> None:
        step = len(self.drawn)
        if self.member.may_draw(step):
            self.member.draws(step)
            self.plans += self.member.new_plans()
            self.drawn.append(next(p for p in reversed(self.plans) if p.start <= step).costs[0].fixed)


class NoWait(PlanMember):
    """The mutant: after its answer it does not wait."""

    def may_draw(self, step: int) -> bool:
        return True


def simulate(events: list[tuple[str, int]], member: Callable[[int], PlanMember]) -> list[Rank]:
    """Run ranks that draw, and messages that arrive, in some order.

    Each event is something that happens to a rank: it draws, it gets its message, its answer arrives, or it
    is late for good.
    """
    ranks, leader = [Rank(member(0)) for _ in range(WORLD)], PlanLeader(WORLD)
    sent: list[PlanProposal | PlanDecision | None] = [None] * WORLD  # in the box of each rank, the latest message
    answers: list[tuple[int, int] | None] = [None] * WORLD
    now, made = 0.0, 0
    for kind, rank in events:
        if kind == "draw":
            ranks[rank].draw()
        elif kind == "hear" and sent[rank] is not None:
            message = decode_message(json.loads(encode_message(sent[rank])))
            sent[rank] = None
            if isinstance(message, PlanProposal):
                answers[rank] = message.number, ranks[rank].member.answer(message, rate=1.0)
            else:
                ranks[rank].member.decide(message)
        elif kind == "answer" and (answer := answers[rank]) is not None:
            answers[rank] = None
            leader.answered(rank, *answer)
        elif kind == "decide":
            now += rank  # time passes, more or less
            if leader.waits:
                decision = leader.decide(now)
                if decision is not None:
                    sent = [decision] * WORLD
            elif not any(sent) and not any(answers):  # ranks report again after the last decision, and not before
                made += 1
                sent = [leader.propose(replace(FIRST, costs=(Cost(float(made), 1.0),) * 3), now)] * WORLD
    return ranks


def same_plans(ranks: list[Rank]) -> bool:
    steps = min(len(rank.drawn) for rank in ranks)
    return all(rank.drawn[:steps] == ranks[0].drawn[:steps] for rank in ranks)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["draw", "draw", "hear", "answer", "decide"]), st.integers(0, WORLD - 1)), max_size=120
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_every_step_is_drawn_by_one_plan(events: list[tuple[str, int]]) -> None:
    assert same_plans(simulate(events, PlanMember))


def one_agreement(draws_of_the_fast: int) -> list[tuple[str, int]]:
    """Events: all answer; then one rank draws before it gets the decision; then all draw."""
    asked = [("decide", 0), *(("hear", r) for r in range(3)), *(("answer", r) for r in range(3)), ("decide", 0)]
    decided = [*(("hear", r) for r in range(3)), *(("draw", r) for r in range(3) for _ in range(30))]
    return [*asked, *[("draw", 0)] * draws_of_the_fast, *decided]


def test_without_the_wait_a_step_is_drawn_by_two_plans() -> None:
    assert not same_plans(simulate(one_agreement(20), NoWait))
    ranks = simulate(one_agreement(20), PlanMember)
    assert same_plans(ranks)
    assert set(ranks[0].drawn) == {0.0, 1.0}  # the new plan was followed


def test_who_does_not_answer_holds_nobody_up() -> None:
    leader, member = PlanLeader(2), PlanMember(10)
    proposal = leader.propose(FIRST, now=0.0)
    leader.answered(0, proposal.number, member.answer(proposal, rate=4.0))
    assert member.may_draw(16)
    assert not member.may_draw(17)
    assert leader.decide(1.0) is None
    dropped = leader.decide(2.0)
    assert dropped == PlanDecision(1, None)
    member.decide(dropped)
    assert member.may_draw(17)
    assert not member.new_plans()
    assert leader.propose(FIRST, now=3.0).window == 2 * proposal.window


def test_an_answer_that_comes_too_late_counts_for_nothing() -> None:
    leader = PlanLeader(2)
    first = leader.propose(FIRST, now=0.0)
    leader.answered(0, first.number, 5)
    assert leader.decide(9.0) == PlanDecision(1, None)
    second = leader.propose(FIRST, now=10.0)
    leader.answered(1, first.number, 5)
    leader.answered(0, second.number, 8)
    assert leader.decide(10.0) is None
    leader.answered(1, second.number, 7)
    assert leader.decide(10.0) == PlanDecision(2, 8)


@pytest.mark.parametrize("reach", [(), (0.5, 0.25, 0.25)])
def test_messages_are_what_they_were(reach: tuple[float, ...]) -> None:
    plan = Plan(0, (Cost(0.1, 1 / 3), Cost(0.0, 0.7, ((4.0, 0.1),)), Cost(0.0, 1.0)), (1,) * 3, (2**62,) * 3, reach)
    plan = replace(plan, grid=((8, 128), (4, 64)))
    for message in (PlanProposal(3, plan, 1.5), PlanDecision(3, 17), PlanDecision(4, None)):
        assert decode_message(json.loads(encode_message(message))) == message


class Clock:
    """Condition under which rank 0 asks: a time has passed."""

    def __init__(self, seconds: float, notice: float = 1.0) -> None:
        self.seconds, self.notice, self.began = seconds, notice, time.monotonic()

    def __call__(self) -> ActionRequest | None:
        due = time.monotonic() >= self.began + self.seconds
        return ActionRequest("to save at", self.notice) if due and dist.get_rank() == 0 else None


def _open(clock: Clock, limit: float = 60.0, **options: Any) -> AgreedBatch:
    dist.init_process_group("gloo")
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    return AgreedBatch(store, clock, limit, **options)


def _steps(paces: list[float], seconds: float, notice: float = 1.0) -> tuple[list[int], list[float]]:
    """The batches after which this rank acts, and the wait after each batch."""
    clock = Clock(seconds, notice)
    agreed, at, waits = _open(clock), list[int](), list[float]()
    for batch in range(1, 10**5):
        time.sleep(paces[dist.get_rank()])
        before = time.monotonic()
        due = agreed.batch_ended(batch)
        waits.append(time.monotonic() - before)
        if due:
            at.append(batch)
            dist.barrier()  # as a save does
            clock.began = time.monotonic()
            agreed.rearm()
        if len(at) == 3:
            break
    agreed.close()
    dist.barrier()
    return at, waits


def test_ranks_at_unlike_speeds_agree_on_the_same_batches() -> None:
    first, second = run(_steps, 2, [0.01, 0.013], 0.5, timeout=120)
    assert first[0] == second[0]
    assert len(first[0]) == 3
    # For 0.5 s and more rank 0 does not ask, however busy this machine is.
    assert all(later - earlier > 1 for earlier, later in zip([0, *first[0]], first[0], strict=False))


def _behind() -> list[int]:
    """Rank 1 is a batch ahead, counted from an earlier fit; the thread answers before the first batch ends."""
    done, at = 7 + int(os.environ["RANK"]), list[int]()
    agreed = _open(Clock(0.0, 0.0), done=done)
    time.sleep(1.0)
    for batch in range(done + 1, 20):
        if agreed.batch_ended(batch):
            at.append(batch)
            break
    agreed.close()
    dist.barrier()
    return at


def test_who_has_not_ended_a_batch_yet_answers_by_what_was_done_before() -> None:
    assert run(_behind, 2, timeout=60) == [[9], [9]]


def _without_an_answer(patience: float) -> int:
    """Number of batches that a rank takes in 3 s, though another rank never answers."""
    agreed = _open(Clock(0.3), patience=lambda: patience)
    if dist.get_rank() == 1:
        agreed._closed.set()
        dist.distributed_c10d._get_default_store().get("done")
        return 0
    until, batch = time.monotonic() + 3.0, 0
    closing = threading.Timer(5.0, agreed._known.set)  # else it waits for the limit
    closing.start()
    while time.monotonic() < until:
        time.sleep(0.05)
        batch += 1
        agreed.batch_ended(batch)
    dist.distributed_c10d._get_default_store().set("done", "1")
    closing.cancel()
    return batch


def test_who_has_patience_goes_on_until_it_is_known_who_is_lost() -> None:
    """A lost rank is left out by then, and nobody has waited for it."""
    assert run(_without_an_answer, 2, 30.0, timeout=60)[0] > 40
    assert run(_without_an_answer, 2, 0.0, timeout=60)[0] < 35


def _ranks_change(seconds: float) -> float:
    """Seconds that a rank waits for one that does not answer, where the ranks that remain are about to begin again."""
    changing = threading.Event()
    agreed = _open(Clock(0.3, 0.0), recover=changing.is_set)
    if dist.get_rank() == 1:
        agreed._closed.set()
        dist.distributed_c10d._get_default_store().get("done")
        return 0.0
    while not agreed.asked:
        time.sleep(0.01)
    timer = threading.Timer(seconds, changing.set)
    timer.start()
    began = time.monotonic()
    assert not agreed.batch_ended(1)
    waited = time.monotonic() - began
    dist.distributed_c10d._get_default_store().set("done", "1")
    timer.join()
    agreed.close()
    return waited


def test_where_the_ranks_change_nobody_waits_for_who_is_lost() -> None:
    assert 0.9 < run(_ranks_change, 2, 1.0, timeout=60)[0] < 20  # of 60
