"""What lost ranks were to take of past steps: compared with plans that are written down by hand."""

from collections.abc import Sequence

from lightning_hetero.batching.planner import Plan, Planner, ShareHistory
from lightning_hetero.batching.shares import Cost

TOTAL = 12


def planner(*plans: tuple[int, Sequence[int]]) -> Planner:
    """One by which ranks take so many samples from a step on."""
    made = Planner(len(plans[0][1]))
    made.total = TOTAL
    made.plans = [Plan(start, (Cost(0, 1),) * len(n), tuple(n), tuple(n)) for start, n in plans]
    return made


def test_shares_are_those_of_each_step() -> None:
    past = ShareHistory()
    past.end([4, 7, 9], planner((0, [4, 4, 4]), (10, [2, 3, 7]), (20, [1, 1, 10])), 25)
    assert past.samples(9, 5) == 5 * 4 + 10 * 7 + 5 * 10
    assert past.samples(7, 12) == 8 * 3 + 5 * 1
    assert past.samples(4, 25) == 0
    assert past.samples(4, 30) == 0  # it was ahead: others take from step 25 on what it had trained on


def test_of_steps_that_nobody_remembers_the_oldest_plan_counts() -> None:
    past = ShareHistory()
    past.end([0, 1], planner((10, [2, 10]), (20, [6, 6])), 22)
    assert past.samples(1, 5) == 15 * 10 + 2 * 6


def test_two_are_lost_one_after_the_other() -> None:
    """The second one before the steps are over that were drawn when the first one was lost."""
    past = ShareHistory()
    past.end([0, 1, 2], planner((0, [2, 4, 6])), 30)
    assert past.samples(1, 20) == 10 * 4
    past.end([0, 2], planner((0, [3, 9])), 40)
    assert past.samples(2, 25) == 5 * 6 + 10 * 9
    assert past.samples(1, 20) == 10 * 4  # since step 30 others have its share


def test_who_could_not_meet_meets_again_among_fewer() -> None:
    past = ShareHistory()
    past.end([0, 1, 2, 3], planner((0, [3, 3, 3, 3])), 30)
    past.end([0, 1, 3], planner((0, [4, 4, 4])), 28)  # the one that had drawn the most is lost, too
    assert past.samples(2, 20) == past.samples(3, 20) == 8 * 3


def test_turns() -> None:
    """Ranks get in turn what is left over: in the long run, and of some steps, nobody gets more."""
    made = Planner(3, "off")
    made.expect(10)
    made.turns, made.origin = True, -50  # the epoch has begun with step 50
    taken = [made.at(step).split([10], made.turn(step))[0] for step in range(100)]
    past = ShareHistory()
    past.end([5, 6, 8], made, 100)
    for at, rank in enumerate([5, 6, 8]):
        assert past.samples(rank, 70) == sum(each[at] for each in taken[70:])
        assert past.samples(rank, 70) == 100
