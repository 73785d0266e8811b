"""Many random histories of deaths, freezes and partitions: two sides never both go on, and nobody waits for ever."""

import itertools
import random

import pytest
from membership_world import TERMS, TICK, World

from lightning_hetero.comm.failure_reports import Failure

SINGLE = [[0], [1], [2], [3], [4]]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


def check_views(world: World) -> None:
    """Any two views that were committed have a member in common, so no two of them can be complete at once."""
    for one, other in itertools.combinations(world.agreed.values(), 2):
        assert set(one.roster.members) & set(other.roster.members), (one, other)
        assert one.roster.number != other.roster.number, (one, other)


def check_settled(world: World) -> None:
    """All members that go on are steady, in one view, and are all of its members that have not left."""
    going = world.going
    for one in going:
        member = world.nodes[one].member
        assert not member.changing, (one, vars(member))
        here = [each for each in member.view.members if each not in member.lost.left]
        assert here == going, (one, member.view, member.lost.left, going)


def faults(world: World, draw: random.Random) -> None:
    """A few faults at random, one after the other, or close together."""
    ids = list(world.nodes)
    for _ in range(draw.randint(1, 5)):
        world.run(draw.choice([0.0, 0.01, 0.1, 0.5, 2.5, 6.0]))
        kind = draw.choice(
            ["kill", "freeze", "thaw", "part", "alone", "heal", "break", "slow", "cut", "ask", "leave", "fail"]
        )
        one = draw.choice(ids)
        if kind == "kill":
            world.kill(one)
        elif kind == "freeze":
            world.freeze(one)
        elif kind == "thaw":
            for each in ids:
                world.thaw(each)
        elif kind == "part":
            world.part(draw.sample(ids, len(ids) // 2))
        elif kind == "alone":
            world.part([one])
        elif kind == "heal":
            world.heal()
        elif kind == "slow":
            world.nodes[one].slow = draw.choice([3.0, 30.0])
        elif kind == "ask" and world.nodes[one].runs:
            world.nodes[one].member.request_view()
        elif kind == "leave":
            world.end(one, None)
        elif kind == "fail":
            world.end(one, "failed")
        elif kind == "cut":
            world.cut.add(frozenset(draw.sample(ids, 2)))
        elif kind == "break":
            world.break_links(one)


@pytest.mark.parametrize("units", [SINGLE, PAIRS], ids=["ranks", "pairs"])
@pytest.mark.parametrize("seed", range(20))
def test_histories(units: list[list[int]], seed: int) -> None:
    world, draw = World(seed, units), random.Random(seed)
    world.run(1.0)
    faults(world, draw)
    world.run(40.0)
    check_views(world)
    world.heal()
    for one in world.nodes:
        world.thaw(one)
    world.run(20.0)
    check_views(world)
    check_settled(world)


@pytest.mark.parametrize("when", ["offer", "acknowledged"])
@pytest.mark.parametrize("seed", range(5))
def test_coordinator_dies_while_it_proposes(seed: int, when: str) -> None:
    """The others go on together, whatever its last message was."""
    world = World(seed, SINGLE)
    world.run(1.0)
    first = world.nodes[0]
    if when == "offer":
        first.offer = lambda number: world.kill(0)  # type: ignore[method-assign]
    else:
        world.on_agreed = lambda node: world.kill(0) if node is first else None
    world.kill(3)
    world.run(15.0)
    check_views(world)
    check_settled(world)
    assert world.going == [1, 2, 4]


@pytest.mark.parametrize("seed", range(5))
def test_a_partition_in_halves_goes_on_once(seed: int) -> None:
    world = World(seed, [[0], [1], [2], [3]])
    world.run(1.0)
    world.part([0, 2])
    world.run(15.0)
    assert world.going == [0, 2]
    assert "only 2 of 4 replicas remain without rank 0" in str(world.nodes[1].member.evicted)
    check_settled(world)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("when", "goes_on"), [("proposed", [2, 3, 4]), ("committed", [0, 1])])
def test_the_network_breaks_in_another_place_while_a_view_is_made(seed: int, when: str, goes_on: list[int]) -> None:
    """First members 3 and 4 are cut off, then 0 and 1; member 2 knows of the view without 3 and 4, or not."""
    world = World(seed, SINGLE)
    world.run(1.0)
    first = world.nodes[0]

    def breaks() -> None:
        world.heal()
        world.part([0, 1])
        for one in (2, 3, 4):  # they hear each other
            for other in (2, 3, 4):
                world.nodes[one].member.lost.mark_alive(other)

    if when == "proposed":
        first.offer = lambda number: breaks()  # type: ignore[method-assign]
    else:
        world.on_agreed = lambda node: breaks() if node is first else None
    for one in (3, 4):
        world.nodes[one].slow = 6.0  # they notice only after the change of the network that they are too few
    world.part([3, 4])
    world.run(30.0)
    check_views(world)
    assert world.going == goes_on
    check_settled(world)


@pytest.mark.parametrize("seed", range(5))
def test_leaving_is_no_loss(seed: int) -> None:
    world, draw = World(seed, SINGLE), random.Random(seed)
    world.run(1.0)
    for one in draw.sample(range(5), 4):
        world.end(one, None)
        world.run(draw.choice([0.0, 0.2, 3.0]))
    world.run(5.0)
    (last,) = world.going
    assert world.lost == []
    assert not world.nodes[last].member.changing


@pytest.mark.parametrize("seed", range(5))
def test_kills_alone_leave_all_others_in_one_view(seed: int) -> None:
    """This holds as long as more than half of the last view live."""
    world, draw = World(seed, [[one] for one in range(8)]), random.Random(seed)
    world.run(1.0)
    for one in draw.sample(range(8), 6):
        world.kill(one)
        world.run(draw.choice([0.5, 1.5]) if len(world.going) > 3 else 5.0)
        check_views(world)
    check_settled(world)


# -- while a lost member is a failure ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_all_know_the_same_failures_in_one_order(seed: int) -> None:
    """Ranks fail, are killed, frozen and cut off, coordinators too; only ended processes are lost."""
    world, draw = World(seed, SINGLE, None), random.Random(seed)
    world.run(1.0)
    failed, killed = set(), set()
    for _ in range(draw.randint(3, 8)):
        world.run(draw.choice([0.0, 0.01, 0.1, 0.5, 2.5, 20.0]))
        one, what = draw.choice(list(world.nodes)), draw.choice(["fail", "fail", "kill", "freeze", "part", "break"])
        if what == "fail" and world.nodes[one].runs:
            world.nodes[one].member.announce(Failure(one, "failed", 1, f"failed at {world.time:g}"))
            failed.add(one)
        elif what == "kill" and len(killed) < 3:
            world.kill(one)
            killed.add(one)
        elif what == "freeze":
            world.freeze(one)
        elif what == "part":
            world.part([one])
        elif what == "break":
            world.break_links(one)
    world.heal()
    for one in world.nodes:
        world.thaw(one)
    world.run(30.0)
    living = sorted(world.nodes.keys() - killed)
    assert world.going == living
    known = [world.nodes[one].member.reports.all() for one in living]
    assert known == known[:1] * len(living)
    assert {one.rank for one in known[0] if one.kind == "gone"} == killed
    assert failed - killed <= {one.rank for one in known[0] if one.kind == "failed"} <= failed


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_member_is_lost_while_others_begin_to_survive_that(seed: int, lost: int) -> None:
    world, draw = World(seed, PAIRS, None), random.Random(seed)
    for node in world.nodes.values():
        world.after(draw.uniform(1.0, 5.0), lambda node=node: node.runs and node.member.survive(TERMS, 0, PAIRS, None))
    world.after(draw.uniform(0.5, 5.5), lambda: world.kill(lost))
    world.run(30.0)
    check_views(world)
    check_settled(world)
    assert world.going == [one for one in world.nodes if one // 2 != lost // 2]


# -- how far the lost ones had come ------------------------------------------------------------------


def check_steps(world: World, lost: list[int], begun: float) -> None:
    """All have agreed on the steps of the lost members: at least those of a heartbeat earlier."""
    member = world.nodes[world.going[0]].member
    proposal = world.agreed[member.view.key]
    assert set(lost) <= set(proposal.steps)
    for one in lost:
        node = world.nodes[one]
        latest = min(begun, node.stopped) - member.timeout.beat - 2 * TICK - 0.1  # ticks, and delays of the network
        assert node.done(latest) <= proposal.steps[one] <= node.done(node.stopped), (one, proposal.steps)


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("lost", [[0], [3], [0, 3], [1, 3]])
@pytest.mark.parametrize("seed", range(5))
def test_what_lost_members_have_done_is_known_up_to_a_heartbeat(seed: int, lost: list[int], how: str) -> None:
    world = World(seed, [[one] for one in range(5)])
    world.run(10.0)
    for one in lost:
        getattr(world, how)(one)
    at = world.time
    world.run(15.0)
    check_settled(world)
    if 0 in lost and 3 in lost:  # only the coordinator has had messages of member 3
        member = world.nodes[1].member
        assert 0 in world.agreed[member.view.key].steps
        assert 3 not in world.agreed[member.view.key].steps
        lost = [0]
    check_steps(world, lost, at)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_lost_member_has_done_is_known_after_the_coordinator_is_lost_too(seed: int) -> None:
    """Its steps were in the coordinator's proposal; the coordinator dies before it can confirm that."""
    world = World(seed, SINGLE)
    world.run(10.0)
    world.kill(3)
    at = world.time
    world.nodes[0].member.view_change.acknowledged = lambda peer, key: world.kill(0)  # type: ignore[method-assign]
    world.run(15.0)
    check_settled(world)
    assert world.going == [1, 2, 4]
    check_steps(world, [0, 3], at)


@pytest.mark.parametrize("seed", range(5))
def test_the_last_word_of_a_member_says_how_far_it_has_come(seed: int) -> None:
    world = World(seed, SINGLE)
    world.run(10.0)
    done = world.nodes[2].done(world.time)
    world.end(2, "failed")
    world.run(15.0)
    check_settled(world)
    assert world.agreed[world.nodes[0].member.view.key].steps[2] >= done
