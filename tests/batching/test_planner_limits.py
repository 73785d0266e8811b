"""What a planner is given: larger batches, shares, limits, a saved state."""

import json
import math

import pytest
from test_planner import planner_of, report
from test_planner_simulated import EXAMPLE

from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.shares import fixed_shares
from lightning_hetero.errors import ConfigurationError, HeteroError, ShareError

# -- batches that are larger than the one that was expected --------------------------------------------


def skewed_planner(total=64, **options):
    planner = planner_of(total, 4, **options)
    assert planner.update(4, [report(k, 0.010, drawn=6.0) for k in EXAMPLE]) is not None
    return planner


@pytest.mark.parametrize("size", [128, 129, 1000])
def test_a_plan_also_splits_batches_much_larger_than_those_of_training(size):
    # Validation may use larger batches, and a batch sampler of the user's may vary them; the caution about growth
    # is no limit that the user has set.
    shares = skewed_planner().plans[-1].split([size])[0]
    assert sum(shares) == size
    assert min(shares) > 0
    assert size < 1000 or shares[0] > 1.5 * shares[2] > 2 * shares[3]


@pytest.mark.parametrize("low", [0, 1, [1, 20, 1, 7]])
def test_a_plan_splits_tails_of_any_size(low):
    plan = skewed_planner(low=low).plans[-1]
    assert plan.start > 0
    for size in range(65):
        shares = plan.split([size])[0]
        assert sum(shares) == size
        if size >= sum(plan.low):
            assert all(n >= least for n, least in zip(shares, plan.low, strict=True))


def test_after_a_plan_the_batch_size_may_grow():
    planner = skewed_planner()
    planner.expect(640)
    shares = planner.shares(100)
    assert sum(shares) == 640
    assert shares[0] > 1.5 * shares[2] > 2 * shares[3]


def test_a_checkpoint_of_small_batches_can_be_resumed_with_large_ones():
    planner = planner_of(640, 4)
    planner.load_state_dict(skewed_planner().state_dict())
    assert sum(planner.shares(0)) == 640
    planner.update(4, [report(k, 0.010, drawn=6.0) for k in EXAMPLE])
    assert sum(planner.shares(6)) == 640


def test_the_users_upper_limits_hold_for_any_batch():
    plan = skewed_planner(high=40).plans[-1]
    assert max(plan.split([160])[0]) == 40
    with pytest.raises(ShareError, match="at most"):
        plan.split([161])


# -- given shares and limits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("balance", "total", "shares"),
    [
        ("off", 64, [16, 16, 16, 16]),
        ("off", 66, [17, 17, 16, 16]),
        ([1, 1, 1, 1], 66, [17, 17, 16, 16]),
        ([4, 2, 1, 1], 64, [32, 16, 8, 8]),
        ([0.5, 0.25, 0.125, 0.125], 64, [32, 16, 8, 8]),  # relative
        ([1, 0, 0, 1], 64, [32, 0, 0, 32]),
        ([0, 0, 0, 3], 7, [0, 0, 0, 7]),
        ([100, 100, 100, 1], 12, [4, 4, 3, 1]),  # a share above 0 means at least a sample
    ],
)
def test_given_shares(balance, total, shares):
    planner = planner_of(total, 4, balance)
    assert planner.shares(0) == shares
    assert planner.update(4, [report(k) for k in EXAMPLE]) is None  # and no measurement changes them
    assert planner.shares(100) == shares


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"balance": [1, 1, 1]}, ["[1, 1, 1]", "3 shares", "4 ranks"]),
        ({"balance": []}, ["0 shares"]),
        ({"balance": [1, 1, 1, math.nan]}, ["nan", "finite"]),
        ({"balance": [1, 1, 1, math.inf]}, ["inf", "finite"]),
        ({"balance": [1, 1, 1, -0.5]}, ["-0.5", "at least 0"]),
        ({"balance": [0, 0, 0, 0]}, ["[0, 0, 0, 0]", "not all 0"]),
        ({"low": [1, 1]}, ["min_batch_size", "[1, 1]", "2 limits", "4 ranks"]),
        ({"high": [8] * 5}, ["max_batch_size", "5 limits"]),
        ({"low": -1}, ["min_batch_size", "-1"]),
        ({"high": [8, 8, 8, -8]}, ["max_batch_size", "-8"]),
        ({"low": [1, 1, 1, 1.5]}, ["min_batch_size", "1.5", "whole"]),
        ({"low": 1.5}, ["min_batch_size", "1.5", "whole"]),
        ({"low": True}, ["min_batch_size", "True", "whole"]),
        ({"balance": [True, 1, 1, 1]}, ["True", "numbers"]),
        ({"balance": ["1", 1, 1, 1]}, ["'1'", "numbers"]),
        ({"low": 9, "high": [9, 9, 9, 8]}, ["min_batch_size=[9, 9, 9, 9]", "max_batch_size=[9, 9, 9, 8]"]),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_values(options, words):
    with pytest.raises(ConfigurationError) as caught:
        Planner(4, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert isinstance(caught.value, HeteroError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "total", "words"),
    [
        ({}, 3, ["3", "4 ranks", "[1, 1, 1, 1]"]),
        ({"low": 17}, 64, ["64", "[17, 17, 17, 17]", "min_batch_size"]),
        ({"high": 15}, 64, ["64", "[15, 15, 15, 15]", "sum 60"]),
        ({"high": [0, 0, 60, 3], "low": 0}, 64, ["64", "sum 63"]),
    ],
)
def test_a_batch_that_the_limits_do_not_admit_is_refused(options, total, words):
    with pytest.raises(ShareError) as caught:
        planner_of(total, 4, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_rank_takes_a_sample_unless_it_may_take_none():
    extreme = [report(0.0001), report(0.0001), report(0.0001), report(5.0)]
    planner = planner_of(64, 4)
    planner.update(4, extreme)
    assert planner.shares(4)[3] == 1
    planner = planner_of(64, 4, low=0)
    planner.update(4, extreme)
    assert planner.shares(4)[3] == 0


@pytest.mark.parametrize(
    ("options", "total", "shares"),
    [
        ({}, 64, [28, 28, 4, 4]),  # a quarter of an even share
        ({}, 1024, [496, 496, 16, 16]),  # but no more than that
        ({}, 16, [6, 6, 2, 2]),  # and no less than this
        ({"low": 1}, 64, [31, 31, 1, 1]),  # the user has said otherwise
        ({}, 7, [2, 2, 2, 1]),  # too few for that; the plan begins even, and no share doubles at once
        ({"balance": [20, 20, 1, 0]}, 64, [31, 31, 2, 0]),
    ],
)
def test_models_that_normalise_their_batch_get_enough_of_it_where_the_batch_allows(options, total, shares):
    planner = Planner(4, **options)
    planner.least = 2
    planner.expect(total)
    if total > 7:
        planner.update(4, [report(0.001), report(0.001), report(1.0), report(1.0)])
    assert planner.shares(4) == shares


def test_limits_hold_for_the_even_start_and_for_every_plan():
    limits = {"low": [1, 20, 1, 7], "high": [10, 64, 12, 64]}
    planner = planner_of(64, 4, **limits)
    planner.update(4, [report(k, 0.010) for k in EXAMPLE])
    for step in (0, 4):
        shares = planner.shares(step)
        assert sum(shares) == 64
        assert all(lo <= n <= hi for lo, n, hi in zip(limits["low"], shares, limits["high"], strict=True))
    assert planner.shares(4) == [10, 34, 12, 8]  # 30, 78, 58 and 74 ms


@pytest.mark.parametrize(("value", "shares"), [([1, 2.5], [1.0, 2.5]), ((0, 1), [0.0, 1.0])])
def test_fixed_shares_are_numbers(value, shares):
    assert fixed_shares(value, 2) == shares


# -- state ---------------------------------------------------------------------------------------------


def test_a_restored_planner_goes_on_as_the_saved_one():
    saved = skewed_planner(low=2, high=40)
    state = json.loads(json.dumps(saved.state_dict()))  # builtins only, as a weights-only checkpoint needs
    restored = planner_of(64, 4, low=2, high=40)
    restored.load_state_dict(state)
    assert restored.shares(0) == saved.shares(100) == [24, 24, 11, 5]
    faster = [report(0.0001, drawn=101.0), *[report(0.01, drawn=101.0)] * 3]
    assert restored.update(100, faster) == saved.update(100, faster)
    assert restored.shares(101) == saved.shares(101)


def test_a_restored_share_grows_no_faster():
    fast = [report(0.0001), report(0.01), report(0.01), report(0.01)]
    saved, restored = planner_of(64, 4), planner_of(64, 4)
    saved.update(4, fast)
    restored.load_state_dict(saved.state_dict())
    assert restored.shares(0)[0] == saved.shares(4)[0] == 32


# -- limits that are found after the planner was made ----------------------------------------------------


@pytest.mark.parametrize("balance", ["auto", "off", [3.0, 1.0, 1.0, 0.0]])
@pytest.mark.parametrize("least", [1, 2])
def test_limits_that_are_found_later_are_as_those_that_were_given(balance, least):
    high = [20, 40, 9, 30]

    def planner(**options):
        made = Planner(4, balance, **options)
        made.least = least
        made.expect(64)
        return made

    given, found = planner(high=high), planner()
    assert found.limit(high)
    assert not found.limit(high)
    assert found.plans == given.plans
    assert found.shares(0) == given.shares(0)
    assert found.state_dict() == given.state_dict()
    slow = [report(k, 0.010, drawn=6.0) for k in EXAMPLE]
    assert found.update(4, slow) == given.update(4, slow)
    assert found.shares(6) == given.shares(6)


def test_limits_that_are_found_and_cannot_be_met():
    with pytest.raises(ShareError, match="64 samples cannot be split"):
        planner_of(64, 2).limit([20, 30])
    with pytest.raises(ShareError, match=r"min_batch_size=\[8, 8\] exceeds max_batch_size=\[7, 64\]"):
        planner_of(64, 2, low=8).limit([7, 64])
    planner = planner_of(None, 2)
    planner.least = 2  # BatchNorm's least share gives way to what fits
    planner.expect(64)
    assert planner.limit([5, 64])
    assert planner.shares(0) == [5, 59]
