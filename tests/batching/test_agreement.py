"""Ranks agree on plans: whatever is delayed or lost, each step is drawn by one plan on all of them."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.batching.plan_agreement import (
    PlanDecision,
    PlanLeader,
    PlanMember,
    PlanProposal,
    decode_message,
    encode_message,
)
from lightning_hetero.batching.planner import Plan
from lightning_hetero.batching.shares import Cost, Curve

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


class Hasty(PlanMember):
    """Does not wait, though it has answered: the mutant."""

    def may_draw(self, step: int) -> bool:
        return True


def simulate(events: list[tuple[str, int]], member: Callable[[int], PlanMember]) -> list[Rank]:
    """Ranks that draw, and messages that arrive, in some order.

    Each event is something that happens to a rank: it draws, it hears what was sent to it, its answer arrives, or it
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
            elif not any(sent) and not any(answers):  # who has heard of the last one reports again, and only then
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
    """All answer; then one rank draws before it hears what was decided; then all draw."""
    asked = [("decide", 0), *(("hear", r) for r in range(3)), *(("answer", r) for r in range(3)), ("decide", 0)]
    told = [*(("hear", r) for r in range(3)), *(("draw", r) for r in range(3) for _ in range(30))]
    return [*asked, *[("draw", 0)] * draws_of_the_fast, *told]


def test_without_the_wait_a_step_is_drawn_by_two_plans() -> None:
    assert not same_plans(simulate(one_agreement(20), Hasty))
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
    plan = Plan(0, (Cost(0.1, 1 / 3), Curve(0.0, 0.7, ((4.0, 0.1),)), Cost(0.0, 1.0)), (1,) * 3, (2**62,) * 3, reach)
    for message in (PlanProposal(3, plan, 1.5), PlanDecision(3, 17), PlanDecision(4, None)):
        assert decode_message(json.loads(encode_message(message))) == message
