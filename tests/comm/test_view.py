"""A view is a value; all objects that depend on the members of a job are made from it."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero.comm.topology import Place, Topology
from lightning_hetero.comm.view import ReplicaMember, View


def places(nodes: list[int]) -> tuple[Place, ...]:
    """Ranks on nodes of these sizes."""
    return tuple(Place(f"host{node}", node, local, "cpu") for node, size in enumerate(nodes) for local in range(size))


def view(nodes: list[int], rank: int) -> View:
    """The first view of a job in which each node is a replica."""
    topology = Topology.of(rank, places(nodes))
    return View.first(topology, topology.nodes)


@pytest.mark.parametrize("rank", range(5))
def test_every_rank_finds_its_place(rank: int) -> None:
    seen = view([2, 1, 2], rank)
    expected: list[Any] = [(0, True), (0, False), (1, True), (2, True), (2, False)]
    assert (seen.replica.id, seen.is_leader) == expected[rank]
    assert (seen.world, seen.count, seen.number) == (5, 3, 0)
    assert seen.ranks == ((0, 1), (2,), (3, 4)) == seen.topology.nodes
    assert seen.per_replica([1, 2, 3, 4, 5]) == [3, 3, 9]


def test_a_replica_keeps_its_id_when_others_have_left() -> None:
    first = view([1, 1, 1], 2)
    # Replica 0 has left: its rank is gone, and those of the others are counted again.
    later = View(1, (ReplicaMember(1, (0,)), ReplicaMember(2, (1,))), first.places[1:], rank=1)
    assert first.index == first.replica.id == 2
    assert later.index == 1
    assert later.replica.id == 2
    assert later.topology.world == 2


def test_views_are_values() -> None:
    assert view([2, 2], 1) == view([2, 2], 1)
    assert view([2, 2], 1) != view([2, 2], 2)
    assert len({view([2, 2], 1), view([2, 2], 1), replace(view([2, 2], 1), number=1)}) == 2


def test_replicas_of_the_view_before_keep_their_ids() -> None:
    """Two of three replicas have remained, and two more have joined."""
    places = tuple(Place("host", 0, rank, "cpu") for rank in range(4))
    topology = Topology.of(2, places)
    view = View.first(topology, [(rank,) for rank in range(4)]).grown(5, [0, 2, None, None])
    assert [(member.id, member.ranks) for member in view.replicas] == [(0, (0,)), (2, (1,)), (3, (2,)), (4, (3,))]
    assert (view.number, view.rank, view.replica.id, view.ids) == (5, 2, 3, (0, 1, 2, 3))
    # Newcomers on a node that was there belong to its replica.
    assert [m.id for m in View.first(topology, [(0, 1), (2, 3)]).grown(1, [4, None, None, None]).replicas] == [4, 5]


def test_ranks_keep_their_places_in_lists() -> None:
    grown = replace(view([1, 1, 2], 1), entries=(1, 3, 2, 0))
    assert grown.for_survivors(7, [0, 1, 3]).entries == (1, 3, 0)
    assert replace(view([2, 2], 1), entries=(2, 3, 0, 1)).data_parallel(2).entries == (2, 0)
