"""Draws who computes, who waits and who exchanges with whom, for README and the page of each strategy.

    python docs/images/timelines.py [folder]

No run is measured: steps have made-up lengths, or those of emulated devices, and everything else follows from the rules
of the package itself: shares, phases, rhythms, matchings, and the arithmetic of planning.
"""

import sys
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from pathlib import Path

from gains import NODES, ddp, gain, of_nodes
from lanes import BELOW, COLOURS, Lane, draw

from lightning_hetero.algorithms.schedules import Phases, TauSchedule
from lightning_hetero.algorithms.topologies import one_peer_exponential, random_matching, sends


def ranks_of(count: int = 4) -> list[str]:
    """Names of rows."""
    return [f"rank {i}" for i in range(count)]


# -- a slow link between two nodes -------------------------------------------------------------------


def node() -> list[Lane]:
    """Gradients within nodes, parameters between them now and then."""
    lane, step = Lane("hetero_node, every_n_steps=4: nodes meet after every fourth step", of_nodes(), 19), 0
    while lane.running:
        step += 1
        for ranks in NODES:
            for rank in ranks:
                lane.step(rank)
            lane.average(ranks)
        if step % 4 == 0:
            lane.meet(range(4), 1.1)
    return [lane]


def in_nodes(lane: Lane) -> None:
    """A step of all ranks, with gradients averaged within nodes."""
    for ranks in NODES:
        for rank in ranks:
            lane.step(rank)
        lane.average(ranks)


def cycle(lane: Lane, every: int, wait: int, lasts: float) -> None:
    """The rule of ``DASOAverager.after_step``: one rank of each node in turn; mixed in ``wait`` steps later."""
    step, member, since = 0, 0, 0
    pending: tuple[int, float] | None = None
    while lane.running:
        step += 1
        in_nodes(lane)
        if pending is not None and step - pending[0] >= wait:
            for rank in range(4):
                lane.wait(rank, pending[1])
            lane.mix(range(4))
            pending = None
        since += 1
        if since >= every and pending is None:
            pending = (step, lane.begin([ranks[member] for ranks in NODES], lasts))
            since, member = 0, (member + 1) % 2


def daso(every: int = 4, wait: int = 2, lasts: float = 1.6) -> list[Lane]:
    """Blocking first, then in the background."""
    title = f"hetero_daso, global_every={every}, wait={wait}: warm-up, then an exchange in the background"
    lane, step = Lane(title, of_nodes(), 21), 1
    while Phases(1000, 2).of_step(step) != "cycling":
        in_nodes(lane)
        lane.meet(range(4), 1.1)
        step += 1
    cycle(lane, every, wait, lasts)
    return [lane]


def auto(measure: int = 3) -> list[Lane]:
    """All gradients at every step, until another strategy gains enough."""
    lane = Lane(f"hetero_auto, measure={measure}: hetero_ddp first; then what gains, here hetero_daso", of_nodes(), 21)
    for _ in range(measure):
        for rank in range(4):
            lane.step(rank)
        lane.meet(range(4), 2.2)
    chosen = max(lane.now)
    cycle(lane, 4, 2, 1.6)
    lane.texts.append((chosen, -0.6, "measures the links, and chooses", COLOURS["compute"]))
    return [lane]


# -- replicas of one rank: all at once ---------------------------------------------------------------


def all_at_once(title: str, tau: int, lasts: float, until: float) -> Lane:
    """All exchange after every ``tau`` steps, and wait for it."""
    lane, step = Lane(title, ranks_of(), until), 0
    while lane.running:
        step += 1
        for rank in range(4):
            lane.step(rank)
        if step % tau == 0:
            lane.meet(range(4), lasts)
    return lane


def overlapped(tau: int, lasts: float, until: float) -> Lane:
    """All exchange what they had before every ``tau``-th step, while they take it."""
    title = f"hetero_easgd_overlap, tau={tau}: the same numbers, behind a step"
    lane, step = Lane(title, ranks_of(), until), 0
    while lane.running:
        step += 1
        over = lane.begin(range(4), lasts) if step % tau == 0 else 0.0
        for rank in range(4):
            lane.step(rank)
            lane.wait(rank, over)
        if over:
            lane.mix(range(4))
    return lane


def streaming(tau: int = 6, fragments: int = 3, delay: int = 2, until: float = 20) -> Lane:
    """Fragments begin by the package's own rhythm, and arrive ``delay`` steps later."""
    title = f"hetero_diloco, tau={tau}, fragments={fragments}, delay={delay}: the parts of the model take turns"
    lane, rhythm = Lane(title, ranks_of(), until), TauSchedule(tau, delay, 500, fragments)
    pending: list[tuple[int, float]] = []
    for step in range(1, 40):
        for rank in range(4):
            lane.step(rank)
        while pending and step - pending[0][0] >= delay:
            for rank in range(4):
                lane.wait(rank, pending[0][1])
            lane.mix(range(4))
            del pending[0]
        pending += [(step, lane.begin(range(4), 1.4, f"part {part}")) for part in rhythm.beginning(step)]
    return lane


# -- one by one, or in pairs -------------------------------------------------------------------------


def visiting(title: str, every: Sequence[int], lengths: Sequence[float], until: float, hidden: bool) -> Lane:
    """Each replica comes to the center after so many steps of its own, first come, first served."""
    lane = Lane(title, [*ranks_of(len(every)), "center"], until)
    center, free, left = len(every), 0.0, list(every)
    lane.center = center
    queue = [(0.0, row) for row in range(center)]
    heapify(queue)
    while queue[0][0] < until:
        at, row = queue[0]
        back = 0.0
        if left[row] == 0:
            start = max(free, at)
            free = back = start + 0.3
            kind, top = ("hidden", row + BELOW) if hidden else ("exchange", row)
            lane.arrows.append((top, start + 0.15, center - 0.15, start + 0.15, kind))
            lane.spans.append((center, start, 0.3, kind))
            left[row] = every[row]
            if hidden:
                lane.behind(row, at, back)
            else:
                lane.wait(row, start)
                lane.add(row, 0.3, "exchange")
        lane.step(row, lengths[row])
        left[row] -= 1
        if hidden and back:
            lane.mix([row])
        heapreplace(queue, (lane.now[row], row))
    lane.now[center] = until
    return lane


def pairs_in_rounds(every: int = 2, lasts: float = 0.7, until: float = 14) -> Lane:
    """Pairs exchange what they had before a step, while they take it."""
    title = f"hetero_gossip, every_n_steps={every}: a new matching in each round, behind a step"
    lane = Lane(title, ranks_of(), until)
    for step in range(1, 20):
        over = [0.0] * 4
        if step % every == 0:
            whom = sends(random_matching, range(4), step // every, 1)
            pairs = [(one, other) for one, (other,) in whom.items() if one < other]
            for place, pair in enumerate(pairs):
                over[pair[0]] = over[pair[1]] = lane.begin(pair, lasts, drawn=0.4 * place)
        for rank in range(4):
            lane.step(rank)
            if over[rank]:
                lane.wait(rank, over[rank])
                lane.mix([rank])
    return lane


def pushes(every: int = 2, until: float = 14) -> Lane:
    """Each sends after its step, and waits for what is sent to it in the round."""
    title = f"hetero_gossip_push_sum, every_n_steps={every}: each sends half of what it has to one other"
    lane = Lane(title, ranks_of(), until)
    for step in range(1, 20):
        for rank in range(4):
            lane.step(rank)
        if step % every == 0:
            whom = sends(one_peer_exponential, range(4), step // every, 0)
            left = list(lane.now)
            for one, (other,) in whom.items():
                come = max(left[one], left[other]) + 0.5
                lane.arrows.append((one, left[one], other, come, "exchange"))
                lane.wait(other, come - 0.5)
                lane.add(other, 0.5, "exchange")
    return lane


def first_come(until: float = 14) -> Lane:
    """Who offers is paired with who has offered; what comes is taken in after a step."""
    title = "hetero_gossip_async: whoever comes, with whoever is there; rank 3 is slow, and nobody waits"
    lane, engaged = Lane(title, ranks_of(), until), [0.0] * 4
    offers: list[int] = []
    queue = [(0.0, row) for row in range(4)]
    while queue[0][0] < until:
        at, row = queue[0]
        if 0 < engaged[row] <= at:
            lane.mix([row])
            engaged[row] = 0.0
        if at > 0 and not engaged[row] and row not in offers:
            if offers:
                other = offers.pop(0)
                engaged[row] = engaged[other] = at + 0.6
                lane.links.append((at, [row, other], "hidden"))
                lane.behind(row, at, at + 0.6)
                lane.behind(other, at, at + 0.6)
            else:
                offers.append(row)
        lane.step(row, 2.3 if row == 3 else 1.0)
        heapreplace(queue, (lane.now[row], row))
    return lane


def outer_pairs(tau: int = 5, count: int = 6, until: float = 20) -> Lane:
    """Pairs meet after every ``tau`` steps."""
    title = f"hetero_noloco, tau={tau}: outer steps in pairs that are drawn anew in each round"
    lane, step = Lane(title, ranks_of(count), until), 0
    while lane.running:
        step += 1
        for rank in range(count):
            lane.step(rank)
        if step % tau == 0:
            whom = sends(random_matching, range(count), step // tau, 0)
            pairs = [(one, other) for one, (other,) in whom.items() if one < other]
            for place, pair in enumerate(pairs):
                lane.meet(pair, 1.1, (place + 1) / (len(pairs) + 1))
    return lane


PICTURES: dict[str, tuple[int, Callable[[], list[Lane]]]] = {
    "gain": (2, gain),
    "hetero_ddp": (1, ddp),
    "hetero_node": (1, node),
    "hetero_daso": (1, daso),
    "hetero_auto": (1, auto),
    "hetero_easgd": (
        1,
        lambda: [
            all_at_once("hetero_easgd, tau=4: all at once; each rank keeps the center", 4, 0.8, 14),
            overlapped(4, 0.8, 14),
            visiting("hetero_easgd_async, tau=4: one by one; rank 3 is slow", [4] * 4, [1, 1, 1, 1.9], 14, True),
        ],
    ),
    "hetero_gossip": (1, lambda: [pairs_in_rounds(), pushes(), first_come()]),
    "hetero_diloco": (
        1,
        lambda: [
            all_at_once("hetero_diloco, tau=6: an outer step for all at once", 6, 2.0, 20),
            streaming(),
            visiting(
                "hetero_diloco_async, tau=8: speeds 4:2:1:1, local steps by speed",
                [8, 4, 2, 2],
                [0.5, 1, 2, 2],
                20,
                False,
            ),
        ],
    ),
    "hetero_noloco": (1, lambda: [outer_pairs()]),
}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, (columns, make) in PICTURES.items():
        draw(make(), columns, folder / f"timeline_{name}.png")
