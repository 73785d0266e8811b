"""The rule by which some members may go on: two sets without a common member never both may."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.comm.quorum import Roster, decide


@st.composite
def views(draw: st.DrawFn) -> tuple[list[Roster], set[int], set[int]]:
    """A committed view, views that may have been committed after it, and two sets of members with none in common."""
    units, next_id = [], 0
    for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=7)):
        units.append(tuple(range(next_id, next_id + size)))
        next_id += size
    later = draw(st.lists(st.sets(st.sampled_from(units), min_size=1), max_size=2))
    rosters = [Roster(0, -1, tuple(units)), *(Roster(n + 1, 0, tuple(sorted(some))) for n, some in enumerate(later))]
    sides = draw(st.lists(st.integers(0, 2), min_size=next_id, max_size=next_id))
    return rosters, *({one for one in range(next_id) if sides[one] == side} for side in (0, 1))


@settings(max_examples=300, deadline=None)
@given(views(), st.data())
def test_two_sides_never_both_go_on(given_views: tuple, data: st.DataObject) -> None:
    """Even if they know of different members that have left, and one knows less about later views."""
    rosters, one, other = given_views
    absent = [m for m in rosters[0].members if m not in one | other]
    left_one = data.draw(st.sets(st.sampled_from(absent))) if absent else set()
    left_other = data.draw(st.sets(st.sampled_from(absent))) if absent else set()
    known = data.draw(st.integers(1, len(rosters)))
    both = not decide(one, rosters, left_one, 1).lacks and not decide(other, rosters[:known], left_other, 1).lacks
    assert not both


@settings(max_examples=200, deadline=None)
@given(views())
def test_all_may_go_on_and_nobody_may_not(given_views: tuple) -> None:
    rosters, *_ = given_views
    assert decide(rosters[0].members, rosters, (), 1) == (rosters[0].units, "")
    assert decide((), rosters, (), 1).lacks


def test_the_rule_in_small() -> None:
    four = [Roster(0, -1, ((0,), (1,), (2,), (3,)))]
    assert decide({0, 3}, four, (), 1).units == ((0,), (3,))
    assert not decide({0, 3}, four, (), 1).lacks
    assert "only 2 of 4 replicas remain without rank 0" in decide({1, 3}, four, (), 1).lacks
    assert "only 2 of 4 ranks remain without rank 0" in decide({1, 3}, four, (), 1, "rank").lacks
    assert "only 3 ranks remain, and at least 4 are required" in decide({0, 1, 3}, four, (), 4, "rank").lacks
    assert "only 1 of 4" in decide({0}, four, (), 1).lacks
    assert not decide({1, 2, 3}, four, (), 1).lacks
    assert "at least 4 are required" in decide({1, 2, 3}, four, (), 4).lacks
    assert not decide({1, 3}, four, {0}, 1).lacks  # one of the other three is lost
    assert not decide({3}, four, {0, 1, 2}, 1).lacks
    pairs = [Roster(0, -1, ((0, 1), (2, 3), (4, 5)))]
    assert decide({0, 2, 3, 4, 5}, pairs, (), 1) == (((2, 3), (4, 5)), "")
    acknowledged = [*four, Roster(1, 0, ((0,), (1,)))]
    assert "only 1 of 2 replicas remain without rank 0" in decide({1, 2, 3}, acknowledged, (), 1).lacks
