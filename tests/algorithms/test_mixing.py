"""Partners of exchanges: matrices that conserve sums, equal on all ranks, that mix as fast as theory says."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import matrix

import lightning_hetero
from lightning_hetero.algorithms.topologies import (
    DIRECTED,
    MATCHINGS,
    Rule,
    Sends,
    exponential,
    hypercube,
    one_peer_exponential,
    random_matching,
    ring,
    ring_matching,
    sends,
)

SIZES = [1, 2, 3, 5, 7, 17]
ALL = {**{f"pairs-{name}": rule for name, rule in MATCHINGS.items()}, **DIRECTED}
BOTH_WAYS = [*(f"pairs-{name}" for name in MATCHINGS), "ring", "random", "hypercube"]


def product(rule: Rule, n: int, rounds: int, seed: int = 0, first: int = 0) -> np.ndarray:
    """Product of the matrices of some rounds."""
    result = np.eye(n)
    for turn in range(first, first + rounds):
        result = matrix(rule, n, turn, seed) @ result
    return result


def second(mixing: np.ndarray) -> float:
    """Second largest modulus of the eigenvalues: 0 is an exact average, 1 no mixing."""
    return sorted(abs(np.linalg.eigvals(mixing)))[-2]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_rows_and_columns_sum_to_one(name: str, n: int) -> None:
    for turn in range(20):
        mixing = matrix(ALL[name], n, turn, 3)
        np.testing.assert_allclose(mixing.sum(0), 1, atol=1e-14)
        np.testing.assert_allclose(mixing.sum(1), 1, atol=1e-14)
        assert (mixing >= 0).all()
        assert (mixing.diagonal() > 0).all()
        if name in BOTH_WAYS:
            assert np.array_equal(mixing, mixing.T)


def is_matching(to: Sends) -> bool:
    return all(len(others) <= 1 and all(j != i and to[j] == (i,) for j in others) for i, others in enumerate(to))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(MATCHINGS)), st.integers(1, 40), st.integers(0, 10**6), st.integers(-5, 10**9))
def test_matchings_are_matchings(name: str, n: int, turn: int, seed: int) -> None:
    to = MATCHINGS[name](n, turn, seed)
    assert len(to) == n
    assert is_matching(to)
    if name != "hypercube" and n > 1:
        assert sum(not others for others in to) == n % 2
    assert not is_matching([(1,), (2,), (0,)])


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(DIRECTED)), st.integers(1, 40), st.integers(0, 10**6))
def test_nobody_sends_to_itself_or_twice(name: str, n: int, turn: int) -> None:
    for i, others in enumerate(DIRECTED[name](n, turn, 0)):
        assert i not in others
        assert len(set(others)) == len(others)
        assert all(0 <= j < n for j in others)


@pytest.mark.parametrize("n", SIZES[1:-1])
@pytest.mark.parametrize("name", ALL)
def test_all_come_to_the_mean(name: str, n: int) -> None:
    np.testing.assert_allclose(product(ALL[name], n, 1200), 1 / n, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(ALL)), st.lists(st.integers(0, 999), min_size=1, max_size=12, unique=True),
    st.integers(0, 999), st.integers(0, 99),
)  # fmt: skip
def test_members_of_any_numbers(name: str, members: list[int], turn: int, seed: int) -> None:
    to = sends(ALL[name], members, turn, seed)
    assert to == sends(ALL[name], tuple(members), turn, seed)
    assert list(to) == members
    places = ALL[name](len(members), turn, seed)
    assert [tuple(members.index(peer) for peer in to[member]) for member in members] == places


def test_another_process_draws_alike() -> None:
    package = str(Path(lightning_hetero.__file__).parent)
    script = (
        "import sys; from types import ModuleType\n"
        "sys.modules['lightning_hetero'] = ModuleType('lightning_hetero')\n"  # Lightning's import takes seconds
        f"sys.modules['lightning_hetero'].__path__ = [{package!r}]\n"
        "from lightning_hetero.algorithms.topologies import *; import random; random.seed(9)\n"
        "print([[rule(11, turn, 5) for turn in range(30)] for rule in (*MATCHINGS.values(), *DIRECTED.values())])"
    )
    env = {"PYTHONHASHSEED": "77", "PATH": "/usr/bin"}
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
    here = [[rule(11, turn, 5) for turn in range(30)] for rule in (*MATCHINGS.values(), *DIRECTED.values())]
    assert there.strip() == repr(here)


def test_seeds_and_rounds_differ() -> None:
    drawn = [str(random_matching(10, turn, seed)) for turn in range(20) for seed in range(20)]
    assert len(set(drawn)) > 200  # of 945
    # Not the round and the seed run together: (1, 11) is not (11, 1).
    assert random_matching(10, 1, 11) != random_matching(10, 11, 1)
    assert [random_matching(10, t, 1) for t in range(5)] != [random_matching(10, t + 1, 1) for t in range(5)]


@pytest.mark.parametrize("n", [3, 5, 7])
def test_an_odd_one_is_idle_uniformly(n: int) -> None:
    rounds = 400 * n
    idle = Counter(random_matching(n, turn, 1).index(()) for turn in range(rounds))
    chi = sum((idle[i] - rounds / n) ** 2 for i in range(n)) / (rounds / n)
    assert chi < (n - 1) + 4.5 * (2 * (n - 1)) ** 0.5  # mean and deviations of chi-square
    always_the_last = rounds**2 / (rounds / n) - rounds
    assert always_the_last > (n - 1) + 4.5 * (2 * (n - 1)) ** 0.5
    assert set(Counter(ring_matching(n, turn, 0).index(()) for turn in range(5 * n)).values()) == {5}


@pytest.mark.parametrize("n", [6, 7])
def test_every_pair_meets_equally_often(n: int) -> None:
    rounds, pairs = 6000, Counter[tuple[int, int]]()
    for turn in range(rounds):
        pairs.update((i, to[0]) for i, to in enumerate(random_matching(n, turn, 2)) if to and i < to[0])
    share = rounds * (n // 2) / (n * (n - 1) / 2)
    assert len(pairs) == n * (n - 1) // 2
    assert max(abs(count - share) for count in pairs.values()) < 5 * share**0.5


def test_spectra_of_what_never_changes() -> None:
    assert second(matrix(exponential, 8, 0, 0)) == pytest.approx(0.5, abs=1e-12)
    assert second(matrix(ring, 8, 0, 0)) == pytest.approx((1 + 2 * np.cos(np.pi / 4)) / 3, abs=1e-12)
    assert round(second(matrix(ring, 8, 0, 0)), 3) == 0.805
    assert np.array_equal(matrix(ring, 8, 0, 0), matrix(ring, 8, 9, 4))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_one_peer_is_exact_after_a_cycle(n: int) -> None:
    cycle = n.bit_length() - 1
    for first in range(2 * cycle):  # wherever it begins
        mixing = product(one_peer_exponential, n, cycle, first=first)
        assert np.array_equal(mixing, np.full((n, n), 1 / n))
    assert np.linalg.matrix_rank(mixing) == 1
    if cycle > 1:
        assert abs(product(one_peer_exponential, n, cycle - 1) - 1 / n).max() > 0.01


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_hypercube_is_exact_after_a_cycle_and_rotates(n: int) -> None:
    cycle = n.bit_length() - 1
    for first in range(0, 5 * cycle, cycle):
        assert np.array_equal(product(hypercube, n, cycle, seed=4, first=first), np.full((n, n), 1 / n))
    if n > 4:
        rounds = [str([hypercube(n, turn, 4) for turn in range(c * cycle, (c + 1) * cycle)]) for c in range(6)]
        assert all(a != b for a, b in pairwise(rounds))
        partners = {i for turn in range(60) for i in hypercube(n, turn, 4)[0]}
        assert partners == set(range(1, n))


@pytest.mark.parametrize("n", [4, 6, 8, 5, 7])
def test_random_matchings_contract_as_theory_says(n: int) -> None:
    expected = (n - 2) / (2 * (n - 1)) if n % 2 == 0 else 0.5
    draw, ratios = np.random.default_rng(n), []
    for seed in range(50):
        for turn in range(20):
            x = draw.normal(size=n)
            x -= x.mean()
            ratios.append(((matrix(random_matching, n, turn, seed) @ x) ** 2).sum() / (x**2).sum())
    error = np.std(ratios) / len(ratios) ** 0.5
    assert abs(np.mean(ratios) - expected) < 4 * error
    assert 4 * error < 0.06  # so that it can fail
