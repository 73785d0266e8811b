"""Gossip topologies: who exchanges in a round, as pure functions of (members, round, seed), alike on every member."""

import math
from collections.abc import Callable, Iterable, Sequence
from random import Random

from lightning_hetero.errors import ConfigurationError

#: Of each member, by place in the list, the places that it sends to in a round.
Sends = list[tuple[int, ...]]


def random_matching(n: int, round_number: int, seed: int) -> Sends:
    """Pairs at random; if there is an odd one, each is idle equally often in the long run."""
    order = list(range(n))
    Random(f"{seed}/{round_number}").shuffle(order)
    return _paired(n, zip(order[::2], order[1::2], strict=False))


def ring_matching(n: int, round_number: int, seed: int) -> Sends:
    """Neighbours on a ring: (0, 1), (2, 3), ..., then (1, 2), (3, 4), ...; an odd ring's gap moves on."""
    first = round_number % n if n % 2 else round_number % 2
    return _paired(n, (((first + i) % n, (first + i + 1) % n) for i in range(0, n - 1, 2)))


def hypercube(n: int, round_number: int, seed: int) -> Sends:
    """Partners across one dimension after the other, and others in each such cycle (GossipGraD's rotation).

    Where ``n`` is no power of 2, a member without a partner in a dimension is idle.
    """
    dimensions = _dimensions(n)
    cycle, dimension = divmod(round_number, dimensions)
    order = list(range(n))
    if cycle:
        Random(f"{seed}/{cycle}").shuffle(order)
    pairs = ((i, i ^ (1 << dimension)) for i in range(n))
    return _paired(n, ((order[i], order[j]) for i, j in pairs if i < j < n))


def one_peer_exponential(n: int, round_number: int, seed: int) -> Sends:
    """Each sends to the one that is 1, then 2, 4, ... places on: exact after log2 n rounds if n is a power of 2."""
    step = 1 << round_number % _dimensions(n)
    return [((i + step) % n,) if n > 1 else () for i in range(n)]


def exponential(n: int, round_number: int, seed: int) -> Sends:
    """Each sends to all that are 1, 2, 4, ... places on."""
    steps = dict.fromkeys((1 << k) % n for k in range(_dimensions(n)))
    return [tuple((i + step) % n for step in steps if step) for i in range(n)]


def ring(n: int, round_number: int, seed: int) -> Sends:
    """Each sends to both of its neighbours on a ring."""
    return [tuple(dict.fromkeys(j % n for j in (i - 1, i + 1) if j % n != i)) for i in range(n)]


Rule = Callable[[int, int, int], Sends]
#: Every exchange goes both ways, and nobody has more than one.
MATCHINGS: dict[str, Rule] = {"random": random_matching, "ring": ring_matching, "hypercube": hypercube}
#: Everyone sends as much as it gets, if nothing is lost.
DIRECTED: dict[str, Rule] = {
    "one_peer_exponential": one_peer_exponential,
    "exponential": exponential,
    "ring": ring,
    "random": random_matching,
    "hypercube": hypercube,
}


def sends(rule: Rule, members: Sequence[int], round_number: int, seed: int) -> dict[int, tuple[int, ...]]:
    """The members that each member sends to in a round.

    Args:
        rule: a topology.
        members: who takes part; in the same order on every member.
        round_number: the round, from 0.
        seed: of what is drawn at random.
    """
    places = rule(len(members), round_number, seed)
    return {member: tuple(members[j] for j in to) for member, to in zip(members, places, strict=True)}


def rule_of(topology: str, known: dict[str, Rule], form: str) -> Rule:
    """A topology by name.

    Raises:
        ConfigurationError: there is none, or the form of gossip cannot use it.
    """
    if topology not in known:
        everywhere = {**MATCHINGS, **DIRECTED}
        why = f"cannot be used by {form}" if topology in everywhere else "is unknown"
        raise ConfigurationError(f"topology={topology!r} {why}: give one of {', '.join(map(repr, known))}.")
    return known[topology]


def _paired(n: int, pairs: Iterable[tuple[int, int]]) -> Sends:
    result: Sends = [()] * n
    for i, j in pairs:
        result[i], result[j] = (j,), (i,)
    return result


def _dimensions(n: int) -> int:
    return max(math.ceil(math.log2(n)), 1) if n > 1 else 1
