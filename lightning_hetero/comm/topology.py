"""Topology of a job: the node and the device of each rank."""

import fcntl
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement import gather
from lightning_hetero.errors import ConfigurationError

ReplicaKind = Literal["rank", "node"]


class Place(NamedTuple):
    """Node and device of one rank.

    Attributes:
        host: hostname.
        node: number of the node: the launcher's, or by ``ranks_per_node``.
        local_rank: rank within the node, as launched.
        device: kind of device and, for an accelerator, the card's identity: two ranks may share one.
        library: what connects devices of this kind directly, with its version: ranks with different ones cannot meet
            there. Empty: nothing does, or not known.
    """

    host: str
    node: int
    local_rank: int
    device: str
    library: str = ""


@dataclass(frozen=True)
class Topology:
    """The ranks and nodes of a job.

    Attributes:
        rank: this process.
        places: one per rank.
        nodes: the ranks of each node, in the order of their lowest ranks. Nodes may differ in size.
    """

    rank: int
    places: tuple[Place, ...]
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, places: Sequence[Place]) -> "Topology":
        """The topology of ranks that live in these places."""
        nodes: dict[int, list[int]] = {}
        for other, place in enumerate(places):
            nodes.setdefault(place.node, []).append(other)
        return cls(rank, tuple(places), tuple(tuple(ranks) for ranks in nodes.values()))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this process's node."""
        return self.nodes[group_of(self.rank, self.nodes)]

    def replicas(self, kind: ReplicaKind) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, if each rank is a replica, or each node."""
        return self.nodes if kind == "node" else tuple((rank,) for rank in range(self.world))

    def islands(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The parts of ``ranks`` that NCCL can connect: at least two GPUs of one kind, each with one rank alone."""
        devices = Counter(self.places[rank].device for rank in ranks)
        kinds: dict[str, list[int]] = {}
        for rank in ranks:
            if self.places[rank].library and devices[self.places[rank].device] == 1:
                kinds.setdefault(self.places[rank].library, []).append(rank)
        return tuple(tuple(island) for island in kinds.values() if len(island) > 1)

    def shared_devices(self) -> dict[str, list[int]]:
        """The accelerators that several ranks share, with these."""
        devices: dict[str, list[int]] = {}
        for rank, place in enumerate(self.places):
            if place.device != "cpu":
                devices.setdefault(place.device, []).append(rank)
        return {device: ranks for device, ranks in devices.items() if len(ranks) > 1}

    def route(self, ranks: Sequence[int]) -> str:
        """The way of tensors of ``ranks`` between their devices, with the reason, in words."""
        backend, libraries = self.backend(ranks), sorted({self.places[rank].library for rank in ranks} - {""})
        if backend == "gloo":
            return "over gloo: all are CPUs"
        if backend == "nccl":
            return f"over NCCL: {len(ranks)} GPUs of one kind ({libraries[0]})"
        shared = [device for device, sharing in self.shared_devices().items() if len({*sharing} & {*ranks}) > 1]
        cpus = sum(self.places[rank].device == "cpu" for rank in ranks)
        reasons = [f"{cpus} of the ranks are CPUs"] * (cpus > 0)
        reasons += [f"ranks share {', '.join(shared)}"] * bool(shared)
        reasons += [f"there are several kinds ({'; '.join(libraries)})"] * (len(libraries) > 1)
        reasons = reasons or ["no library connects these devices"]
        islands = [f"ranks {list(island)} over NCCL among themselves" for island in self.islands(ranks)]
        way = ", ".join(["through the hosts' memory and gloo", *islands])
        return f"{way}: {', and '.join(reasons)}"

    def backend(self, ranks: Sequence[int]) -> str | None:
        """The backend that connects the devices of ``ranks``: ``"gloo"`` for CPUs, ``"nccl"``, or ``None``."""
        if all(self.places[rank].device == "cpu" for rank in ranks):
            return "gloo"
        return "nccl" if self.islands(ranks) == (tuple(ranks),) else None


def discover(place: Place, ranks_per_node: int | Sequence[int] | None = None, entries: Sequence[int] = ()) -> Topology:
    """Exchange places with all ranks (collective).

    Args:
        place: this rank's.
        ranks_per_node: make nodes of so many consecutive ranks, or of these numbers of ranks, whatever their hosts.
            So one machine can be tried as several nodes.
        entries: of each rank, its place among those that a list of sizes counts. Default: its number.

    Raises:
        ConfigurationError: ``ranks_per_node`` does not fit the number of ranks.
    """
    places = [Place(*other) for other in gather(tuple(place), "the topology")]
    if ranks_per_node is not None:
        world, where = len(places), [*range(len(places))]
        if entries and not isinstance(ranks_per_node, int):
            world, where = sum(ranks_per_node), [*entries]
        nodes = consecutive(world, ranks_per_node)
        places = [place._replace(node=group_of(entry, nodes)) for place, entry in zip(places, where, strict=True)]
    return Topology.of(dist.get_rank(), places)


def consecutive(world: int, ranks_per_node: int | Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Nodes of consecutive ranks.

    Args:
        world: number of ranks.
        ranks_per_node: size of all nodes, or of each.

    Raises:
        ConfigurationError: the sizes do not add up to ``world``.
    """
    if isinstance(ranks_per_node, int):
        sizes = [ranks_per_node] * (world // max(ranks_per_node, 1))
    else:
        sizes = list(ranks_per_node)
    if any(size < 1 for size in sizes) or sum(sizes) != world:
        raise ConfigurationError(
            f"ranks_per_node={ranks_per_node!r} does not fit {world} ranks: give one size that divides {world}, or a "
            "list of sizes, at least 1 each, that add up to it."
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> int:
    """The index of the group that contains a rank."""
    return next(i for i, ranks in enumerate(groups) if rank in ranks)


def place_of(device: torch.device, host: str, node: int, local_rank: int) -> Place:
    """The place of a rank that computes on a device.

    Args:
        device: with its index, if there are several.
        host: hostname.
        node: number of the node.
        local_rank: rank within the node.
    """
    if device.type != "cuda":
        return Place(host, node, local_rank, "cpu" if device.type == "cpu" else f"{device.type}:{host}:{device.index}")
    card = torch.cuda.get_device_properties(device)
    vendor = "rocm" if torch.version.hip else "cuda"
    # Slices of one card (MIG) have their own UUIDs, but share its place on the bus, by which NCCL refuses them.
    place = [getattr(card, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    bus = "" if None in place else ":".join(str(part) for part in place)
    identity = f"{vendor}:{host}:{bus or getattr(card, 'uuid', device.index)}"
    if not dist.is_nccl_available():
        return Place(host, node, local_rank, identity)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Place(host, node, local_rank, identity, f"{vendor}, NCCL {version}")


def interface_towards(address: str, interface: str | None = None) -> str:
    """The address from which this machine reaches another one. Asks the kernel, and sends nothing.

    Args:
        address: of the other machine, by name or number.
        interface: to use, if one is given.
    """
    if interface is not None:
        return address_of(interface)
    family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def use_interface(interface: str | None) -> None:
    """Let gloo and NCCL use a network interface in this process, if one is given.

    Raises:
        ConfigurationError: there is no such interface, or it has no IPv4 address.
    """
    if interface is not None:
        address_of(interface)  # raises
        os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)


_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Args:
        interface: its name, such as ``"eth0"``.

    Raises:
        ConfigurationError: there is no such interface, or it has no such address.

    Example::

        >>> address_of("lo")
        '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _ADDRESS, struct.pack("40s", interface.encode()))
        except (OSError, struct.error):
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigurationError(
                f"interface={interface!r}: {socket.gethostname()} has no network interface of that name with "
                f"an IPv4 address. It has {known}."
            ) from None
    return socket.inet_ntoa(answer[20:24])


#: Kinds of devices that have no float64, all of them (MPS) or some (XPU).
_NARROW = ("mps", "xpu")


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype in which sums over many values are taken on a device: float64, where the device has it.

    Example::

        >>> import torch
        >>> widest_float(torch.device("cpu")), widest_float(torch.device("mps"))
        (torch.float64, torch.float32)
    """
    return torch.float32 if device.type in _NARROW else torch.float64
