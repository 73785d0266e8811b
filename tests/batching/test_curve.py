"""Convex curves against their definitions, and splits by them against brute force."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shares import every_split, one_at_a_time

from lightning_hetero.batching.planner import Plan, Planner, Report
from lightning_hetero.batching.shares import (
    MOST_BENDS,
    Cost,
    Curve,
    bound,
    cost_of,
    curve_below,
    makespan,
    row_of,
    split,
)
from lightning_hetero.errors import ShareError

FLAT = Curve(0.064, 1e-9, ((16.0, 0.004),))  # flat up to 16 samples, then 4 ms each

bends = st.lists(st.tuples(st.integers(1, 40).map(float), st.integers(1, 40).map(lambda i: i / 8)), max_size=3).map(
    lambda pairs: tuple(sorted({at: (at, more) for at, more in pairs}.values()))
)
curves = st.builds(
    Curve, st.integers(0, 40).map(lambda i: i / 8), st.integers(1, 40).map(lambda i: i / 8), bends
)  # multiples of 1/8 are exact in binary, so that ties are real ties
lines = st.builds(Cost, st.floats(-1, 10), st.floats(1e-3, 10))
measured = st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 10)), min_size=2, max_size=7).map(
    lambda pairs: sorted(dict(pairs).items())
)


def greatest_below(points, n):
    """The greatest convex function below points that never decreases, from its definition: the lowest chord."""
    lowest = [(m, min(s for other, s in points if other >= m)) for m, _ in points]
    chords = [
        left_s + (right_s - left_s) * (n - left) / (right - left) if right > left else left_s
        for left, left_s in lowest
        for right, right_s in lowest
        if left <= n <= right
    ]
    return min(chords)


# -- curves ------------------------------------------------------------------------------------------


@given(measured.filter(lambda points: len(points) > 1))
@settings(max_examples=300)
def test_between_the_points_it_is_the_greatest_convex_curve_below_them(points):
    curve = curve_below(points)
    assert curve.is_valid()
    assert len(curve.bends) <= MOST_BENDS
    assert curve.fixed >= 0
    for n in range(points[0][0], points[-1][0] + 1):
        assert curve.seconds(n) == pytest.approx(greatest_below(points, n), abs=1e-4 * points[-1][1])  # it rises a bit


@given(measured.filter(lambda points: len(points) > 1))
def test_beyond_the_last_point_it_goes_straight_on(points):
    curve, last = curve_below(points), points[-1][0]
    step = curve.seconds(last + 1) - curve.seconds(last)
    assert curve.seconds(last + 10) == pytest.approx(curve.seconds(last) + 10 * step)


def test_by_hand():
    flat = curve_below([(8, 0.064), (16, 0.064), (32, 0.128)])
    assert [flat.seconds(n) for n in (1, 8, 16, 20, 32, 48)] == pytest.approx(
        [0.064, 0.064, 0.064, 0.080, 0.128, 0.192], rel=1e-4
    )
    steep = curve_below([(10, 0.010), (20, 0.100)])  # the line through them is below 0 at no samples
    assert [steep.seconds(n) for n in (0, 5, 10, 20)] == pytest.approx([0.002, 0.006, 0.010, 0.100])
    hill = curve_below([(8, 0.030), (16, 0.045), (32, 0.060)])  # it bends down: the chord remains
    assert [hill.seconds(n) for n in (8, 16, 32)] == pytest.approx([0.030, 0.040, 0.060])
    falls = curve_below([(8, 0.050), (16, 0.040), (32, 0.060)])
    assert [falls.seconds(n) for n in (8, 16, 32)] == pytest.approx([0.040, 0.040, 0.060], rel=1e-4)


def test_of_many_points_those_that_matter_most_are_kept():
    points = [(n, n**2 + (500.0 if n > 50 else 0.0)) for n in range(10, 90, 4)]
    curve = curve_below(points)
    assert len(curve.bends) == MOST_BENDS
    assert all(1 - 1e-9 <= curve.seconds(n) / greatest_below(points, n) < 1.12 for n in range(10, 87))


@given(curves, st.floats(0, 100))
def test_how_much_is_done_by_a_deadline_is_the_inverse_of_the_time(curve, samples):
    assert curve.samples(curve.seconds(samples)) == pytest.approx(samples, abs=1e-9)
    assert curve.times(3.0).seconds(samples) == pytest.approx(3 * curve.seconds(samples))
    assert curve.in_units(4).seconds(samples) == pytest.approx(curve.seconds(4 * samples))


# -- splits ------------------------------------------------------------------------------------------


@st.composite
def limited(draw, most_total=12):
    costs = draw(st.lists(curves | lines, min_size=1, max_size=4))
    total = draw(st.integers(0, most_total))
    low = [draw(st.integers(0, 3)) for _ in costs]
    high = [lo + draw(st.integers(0, most_total)) for lo in low]
    if not sum(low) <= total <= sum(high):
        low, high = [0] * len(costs), [total] * len(costs)
    return costs, total, low, high


@given(limited())
@settings(max_examples=300, deadline=None)
def test_no_other_split_is_faster(instance):
    costs, total, low, high = instance
    shares = split(total, costs, low, high)
    assert sum(shares) == total
    assert all(lo <= n <= h for lo, n, h in zip(low, shares, high, strict=True))
    assert makespan(shares, costs) == min(makespan(other, costs) for other in every_split(total, low, high))


@given(st.lists(curves, min_size=1, max_size=8), st.integers(0, 4000), st.data())
@settings(max_examples=120, deadline=None)
def test_the_shortcut_gives_exactly_what_one_sample_at_a_time_gives(costs, total, data):
    even = total // len(costs)
    low = [data.draw(st.integers(0, even)) for _ in costs]
    high = [data.draw(st.integers(even + 1, total + 1)) for _ in costs]
    shares = split(total, costs, low, high)
    assert shares == one_at_a_time(total, costs, low, high)
    assert bound(total, costs, low, high) <= makespan(shares, costs) * (1 + 1e-12) + 1e-12


def test_a_flat_device_is_filled_and_the_rest_goes_where_it_is_cheap():
    assert split(32, [FLAT, Cost(0.010, 0.004)]) == [17, 15]  # 68 and 70 ms
    assert split(24, [FLAT, Cost(0.010, 0.007)]) == [16, 8]  # 64 and 66 ms


@pytest.mark.parametrize(
    "curve",
    [
        Curve(0.0, 0.0, ()),
        Curve(math.nan, 1.0, ()),
        Curve(0.0, 1.0, ((4.0, -0.5),)),
        Curve(0.0, 1.0, ((4.0, math.inf),)),
        Curve(0.0, 1.0, ((8.0, 0.5), (4.0, 0.5))),
    ],
)
def test_a_curve_that_bends_down_or_is_none_is_refused(curve):
    with pytest.raises(ShareError, match="rank 1 has cost"):
        split(8, [Cost(0.0, 1.0), curve])


# -- wherever costs go -------------------------------------------------------------------------------


@given(curves | lines)
def test_a_cost_survives_a_report_and_a_checkpoint(cost):
    cost = cost_of(*cost[:2]) if not cost.bends else cost
    report = Report(cost.fixed, cost.per_sample, 0.1, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, bends=cost.bends)
    assert len(report.row) == len(Report._fields) - 1 + 2 * MOST_BENDS
    assert Report.of_row(report.row) == report
    assert report.cost == cost
    assert cost_of(*json.loads(json.dumps(row_of(cost)))) == cost


def test_a_planner_splits_by_curves_and_saves_them():
    planner = Planner(2)
    planner.expect(32)
    straight = Report(0.010, 0.004, 0.0, 6.0, 16, 0.1, 0.0)
    reports = [Report(*FLAT[:2], *straight[2:-1], bends=FLAT.bends), straight]
    planner._doubt = 0.0
    planner.min_gain = 0.0
    assert planner.update(4, reports) is not None
    assert planner.shares(6) == [17, 15]
    restored = Planner(2)
    restored.expect(32)
    restored.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert restored.shares(0) == [17, 15]
    assert restored.plans[0].costs == (FLAT, Cost(0.010, 0.004))


def test_a_plan_splits_several_loaders_by_curves():
    plan = Plan(0, (Curve(30.0, 1e-6, ((12.0, 1.0),)), Cost(0.0, 2.0)), (0, 0), (99, 99))
    # In units of two samples and one: 6 units are 18 samples, of which the first rank is late by 6.
    assert plan.split([24, 12]) == [[12, 12], [6, 6]]
