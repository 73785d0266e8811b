"""View of a job: its members and this rank, as a value."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from lightning_hetero.comm.topology import Place, Topology


@dataclass(frozen=True)
class ReplicaMember:
    """Member of a view: a replica and its ranks.

    Attributes:
        id: the same for as long as the replica lives, whoever else comes or goes.
        ranks: its ranks, which average gradients at every step. The first one leads: it speaks for the replica.
    """

    id: int
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that speaks for the replica."""
        return self.ranks[0]


@dataclass(frozen=True)
class View:
    """View of a job: the members, and which of them this process is.

    All that depends on who takes part is built from a view: the topology, process groups, the planner, the loaders'
    slices, the links between replicas. If somebody leaves or joins, it is built again from another view.

    Attributes:
        number: 0 for the view in which the job began, one more for each later view.
        replicas: those that take part.
        places: where each rank lives.
        rank: this process.
        ids: of each rank, the number that it had when it joined; it stays when others leave.
        ranks_leave: whether a lost rank leaves alone, as in a job of one replica, rather than with its replica.
        entries: of each rank, its place in lists that the user gave, one entry per rank; it stays when others leave or
            join. Default: its number.

    Example::

        >>> from lightning_hetero.comm.topology import Place
        >>> places = tuple(Place(f"host{rank // 2}", rank // 2, rank % 2, "cpu") for rank in range(4))
        >>> view = View(0, (ReplicaMember(0, (0, 1)), ReplicaMember(1, (2, 3))), places, rank=2)
        >>> view.replica.id, view.is_leader, view.count
        (1, True, 2)
    """

    number: int
    replicas: tuple[ReplicaMember, ...]
    places: tuple[Place, ...]
    rank: int
    ids: tuple[int, ...] = ()
    ranks_leave: bool = False
    entries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.entries:
            object.__setattr__(self, "entries", tuple(range(self.world)))

    @classmethod
    def first(cls, topology: Topology, replicas: Sequence[Sequence[int]]) -> "View":
        """The view in which a job begins: replicas get the numbers from 0 on as their ids."""
        members = tuple(ReplicaMember(number, tuple(ranks)) for number, ranks in enumerate(replicas))
        ids = tuple(range(topology.world))
        return cls(0, members, topology.places, topology.rank, ids, ranks_leave=len(members) == 1)

    def grown(self, number: int, former: Sequence[int | None]) -> "View":
        """This view as the one that follows an earlier one: replicas that took part in that keep their ids.

        Args:
            number: of this view.
            former: of each rank, the id of the replica to which it belonged; ``None`` if it is new.
        """
        kept = [former[member.leader] for member in self.replicas]
        following = count(1 + max((id for id in kept if id is not None), default=-1))
        ids = [next(following) if id is None or id in kept[:index] else id for index, id in enumerate(kept)]
        members = tuple(ReplicaMember(id, member.ranks) for id, member in zip(ids, self.replicas, strict=True))
        return replace(self, number=number, replicas=members)

    @property
    def units(self) -> list[list[int]]:
        """Units that are lost as a whole, by the ids of their ranks: replicas; or ranks, in a job of one replica."""
        ranks = [(rank,) for rank in range(self.world)] if self.ranks_leave else self.ranks
        return [[self.ids[rank] for rank in unit] for unit in ranks]

    def for_survivors(self, number: int, ids: Collection[int]) -> "View":
        """The view of the ranks that remain, renumbered in their order.

        Args:
            number: of the new view.
            ids: of the ranks that remain, this one among them. Where replicas leave as a whole, their ranks do.
        """
        kept = [rank for rank, id in enumerate(self.ids) if id in ids]
        now = {rank: new for new, rank in enumerate(kept)}
        replicas = [replace(m, ranks=tuple(now[rank] for rank in m.ranks if rank in now)) for m in self.replicas]
        return replace(
            self,
            number=number,
            replicas=tuple(member for member in replicas if member.ranks),
            places=tuple(self.places[rank] for rank in kept),
            rank=now[self.rank],
            ids=tuple(self.ids[rank] for rank in kept),
            entries=tuple(self.entries[rank] for rank in kept),
        )

    def data_parallel(self, size: int) -> "View":
        """This view as those see it who share out samples: ``size`` consecutive ranks of a replica are one.

        Args:
            size: of tensor parallelism, which divides the number of ranks of each replica; its ranks get the same
                samples.
        """
        if size == 1:
            return self
        firsts = [rank for member in self.replicas for rank in member.ranks[::size]]
        place = {rank: firsts.index(m.ranks[i - i % size]) for m in self.replicas for i, rank in enumerate(m.ranks)}
        replicas = tuple(replace(m, ranks=tuple(place[rank] for rank in m.ranks[::size])) for m in self.replicas)
        places = tuple(self.places[rank] for rank in firsts)
        ids, entries = (tuple(of[rank] for rank in firsts) for of in (self.ids, self.entries))
        return replace(self, replicas=replicas, places=places, rank=place[self.rank], ids=ids, entries=entries)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    @cached_property
    def index(self) -> int:
        """Index of this rank's replica in ``replicas``; it may change from view to view, the id does not."""
        return next(index for index, member in enumerate(self.replicas) if self.rank in member.ranks)

    def index_of(self, id: int) -> int:
        """Index of the replica with an id in ``replicas``."""
        return next(index for index, member in enumerate(self.replicas) if member.id == id)

    @property
    def replica(self) -> ReplicaMember:
        """This rank's replica."""
        return self.replicas[self.index]

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its replica."""
        return self.rank == self.replica.leader

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica."""
        return tuple(member.ranks for member in self.replicas)

    @property
    def topology(self) -> Topology:
        """The topology of the members."""
        return Topology.of(self.rank, self.places)

    def per_replica(self, per_rank: Sequence[int]) -> list[int]:
        """Sums over the ranks of each replica."""
        return [sum(per_rank[rank] for rank in member.ranks) for member in self.replicas]
