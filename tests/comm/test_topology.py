"""Topology of ranks and nodes, from places made by hand."""

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm import topology as module
from lightning_hetero.comm.job import _entries
from lightning_hetero.comm.topology import Place, Topology, address_of, consecutive, discover, place_of
from lightning_hetero.errors import ConfigurationError, HeteroError

NCCL = "cuda, NCCL 2.27.5"
GPU_0, GPU_1, CPU = ("cuda:a:uuid-0", NCCL), ("cuda:a:uuid-1", NCCL), "cpu"
FAR, ROCM, OLD = ("cuda:b:uuid-9", NCCL), ("rocm:c:uuid-5", "rocm, NCCL 2.27.5"), ("cuda:d:uuid-7", "cuda, NCCL 2.21.5")


def topology(nodes, rank=0, devices=None):
    """Topology of ranks on nodes as given."""
    places = {}
    for node, ranks in enumerate(nodes):
        for local, r in enumerate(ranks):
            device = devices[r] if devices else CPU
            places[r] = Place(f"host-{node}", node, local, *(device if isinstance(device, tuple) else (device,)))
    return Topology(rank, tuple(places[r] for r in sorted(places)), tuple(map(tuple, nodes)))


@pytest.fixture
def discovered(monkeypatch):
    """Run ``discover`` on one rank as if the others had sent the given places."""

    def run(places, rank=0, ranks_per_node=None, entries=()):
        sent = []
        monkeypatch.setattr(module, "gather", lambda mine, what: sent.append(mine) or [tuple(p) for p in places])
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        found = discover(places[rank], ranks_per_node, entries)
        assert sent == [tuple(places[rank])]
        return found

    return run


# -- nodes of consecutive ranks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "ranks_per_node", "nodes"),
    [
        (1, 1, ((0,),)),
        (4, 1, ((0,), (1,), (2,), (3,))),
        (4, 2, ((0, 1), (2, 3))),
        (4, 4, ((0, 1, 2, 3),)),
        (6, 2, ((0, 1), (2, 3), (4, 5))),
        (6, [1, 3, 2], ((0,), (1, 2, 3), (4, 5))),  # nodes of unequal size
        (3, (2, 1), ((0, 1), (2,))),
    ],
)
def test_consecutive_ranks(world, ranks_per_node, nodes):
    assert consecutive(world, ranks_per_node) == nodes


@pytest.mark.parametrize(
    ("world", "ranks_per_node"),
    [(4, 3), (4, 5), (4, 0), (4, -2), (4, [1, 2]), (4, [2, 3]), (4, [4, 0]), (4, [5, -1]), (4, [])],
)
def test_sizes_that_do_not_fit_are_refused_with_both_values(world, ranks_per_node):
    with pytest.raises(ConfigurationError) as caught:
        consecutive(world, ranks_per_node)
    assert f"ranks_per_node={ranks_per_node!r}" in str(caught.value)
    assert f"{world} ranks" in str(caught.value)
    assert isinstance(caught.value, HeteroError)


# -- discovery ---------------------------------------------------------------------------------------


def place(host, node, local_rank, device=CPU):
    return Place(host, node, local_rank, device)


def test_nodes_are_in_the_order_of_their_lowest_rank(discovered):
    # Neither by name nor by the launcher's number: rank 0 is on node 7, "zeta".
    places = [place("zeta", 7, 0), place("alpha", 3, 0), place("zeta", 7, 1), place("mid", 5, 0), place("alpha", 3, 1)]
    found = discovered(places, rank=3)
    assert found.nodes == ((0, 2), (1, 4), (3,))
    assert found.node == (3,)
    assert found.world == 5
    assert found.rank == 3
    assert found.places == tuple(places)


def test_the_launchers_node_counts_and_not_the_hostname(discovered):
    # Containers may share a hostname, and a node may have two.
    places = [place("box", 0, 0), place("box", 1, 0), place("box-ib", 0, 1), place("box", 1, 1)]
    assert discovered(places).nodes == ((0, 2), (1, 3))


@pytest.mark.parametrize(("ranks_per_node", "nodes"), [(2, ((0, 1), (2, 3))), ([1, 3], ((0,), (1, 2, 3)))])
def test_one_machine_can_be_tried_as_several_nodes(discovered, ranks_per_node, nodes):
    found = discovered([place("box", 0, i) for i in range(4)], rank=1, ranks_per_node=ranks_per_node)
    assert found.nodes == nodes
    assert found.node == nodes[[1 in node for node in nodes].index(True)]


def test_ranks_that_have_joined_are_on_the_nodes_of_the_entries_that_were_free(discovered):
    # Of nodes of 2, 1 and 1 ranks rank 0 is lost, and comes back: the others are ranks 0 to 2 then.
    assert _entries([1, 2, 3, None]) == (1, 2, 3, 0)
    assert _entries([3, None, 0, None]) == (3, 1, 0, 2)
    assert discovered([place("box", 0, i) for i in range(4)], 0, [2, 1, 1], (1, 2, 3, 0)).nodes == ((0, 3), (1,), (2,))
    assert discovered([place("box", 0, i) for i in range(4)], 0, 2, (1, 2, 3, 0)).nodes == ((0, 1), (2, 3))


def test_a_wrong_size_is_refused(discovered):
    with pytest.raises(ConfigurationError, match="does not fit 4 ranks"):
        discovered([place("box", 0, i) for i in range(4)], ranks_per_node=3)


@pytest.mark.parametrize(("rank", "node"), [(0, (0, 3)), (3, (0, 3)), (1, (1,)), (4, (2, 4, 5)), (2, (2, 4, 5))])
def test_the_own_node_among_nodes_of_unequal_size(rank, node):
    assert topology([(0, 3), (1,), (2, 4, 5)], rank).node == node


# -- backends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "ranks", "backend", "islands"),
    [
        ([GPU_0, GPU_1], [0, 1], "nccl", [(0, 1)]),
        ([GPU_0, FAR], [0, 1], "nccl", [(0, 1)]),
        ([GPU_0[0], GPU_1[0]], [0, 1], None, []),  # PyTorch was built without NCCL
        ([GPU_0, GPU_0], [0, 1], None, []),  # two ranks on one card, which NCCL refuses
        ([GPU_0, GPU_0, GPU_1, FAR], [0, 1, 2, 3], None, [(2, 3)]),
        ([GPU_0, CPU], [0, 1], None, []),
        ([GPU_0, CPU, GPU_1], [0, 2], "nccl", [(0, 2)]),  # the GPUs among a mixed job
        ([CPU, GPU_0, CPU, GPU_1, FAR], [0, 1, 2, 3, 4], None, [(1, 3, 4)]),
        ([GPU_0, GPU_1, ROCM], [0, 1, 2], None, [(0, 1)]),  # NVIDIA's and AMD's, which are both "cuda" for PyTorch
        ([GPU_0, OLD], [0, 1], None, []),  # versions that may not understand each other
        ([CPU, CPU], [0, 1], "gloo", []),
        (["mps:a:None", "mps:b:None"], [0, 1], None, []),
    ],
)
def test_nccl_only_among_gpus_of_one_kind_that_are_not_shared(devices, ranks, backend, islands):
    found = topology([tuple(range(len(devices)))], devices=devices)
    assert found.backend(ranks) == backend
    assert list(found.islands(ranks)) == islands


@pytest.mark.parametrize(("hip", "vendor"), [(None, "cuda"), ("6.2", "rocm")])
def test_a_device_is_known_by_its_card_and_by_what_connects_it(monkeypatch, hip, vendor):
    class Properties:
        uuid = "1234-5678"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    place = place_of(torch.device("cuda", 0), "box", 1, 2)
    assert place == ("box", 1, 2, f"{vendor}:box:1234-5678", f"{vendor}, NCCL 2.27.5")
    assert place_of(torch.device("cuda", 0), "other", 1, 2).device != place.device
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert place_of(torch.device("cuda", 0), "box", 1, 2) == (*place[:4], "")


def test_slices_of_one_card_are_one_card(monkeypatch):
    class Slice:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 65, 0

        def __init__(self, uuid):
            self.uuid = uuid

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Slice(f"MIG-{device.index}"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    first, second = (place_of(torch.device("cuda", number), "box", 0, number) for number in range(2))
    assert first.device == second.device
    both = topology([(0, 1)], devices=[(first.device, first.library), (second.device, second.library)])
    assert both.islands([0, 1]) == ()
    assert both.backend([0, 1]) is None


def test_other_devices_are_known_by_kind_and_index():
    assert place_of(torch.device("cpu"), "box", 0, 1) == ("box", 0, 1, "cpu", "")
    assert place_of(torch.device("xpu", 3), "box", 0, 1) == ("box", 0, 1, "xpu:box:3", "")


def test_the_address_of_an_interface():
    assert address_of("lo") == "127.0.0.1"
    for name in ("eth99", "a name that is far too long for an interface of any system"):
        with pytest.raises(ConfigurationError, match=f"interface='{name}'.*It has .*lo"):
            address_of(name)
