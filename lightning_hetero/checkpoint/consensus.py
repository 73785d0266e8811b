"""The consensus of a checkpoint, found while training goes on, from what is saved of the replicas."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.algorithms.base import Averager
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.checkpoint.snapshot import Snapshot, identity
from lightning_hetero.comm.all_reduce import Contribution
from lightning_hetero.errors import not_none


class BackgroundConsensus:
    """Finds the mean of the replicas on a thread, over connections of its own (made by all ranks together).

    So the link between replicas, which may be slow, does not hold up the step that is saved.

    Args:
        engine: of the fit.
        averager: the algorithm between replicas.
        serves: tells whether it still is.
    """

    def __init__(self, engine: Engine, averager: Averager, serves: Callable[[], bool]) -> None:
        self._engine, self._averager, self._serves = engine, averager, serves
        leaders = [(member.leader,) for member in engine.view.replicas]
        self._average = engine.links.background_averager(leaders) if engine.view.is_leader else None

    @property
    def serves(self) -> bool:
        """Whether the averager is still the same one."""
        return self._serves()

    def later(
        self, state: dict[str, Any], snapshot: Snapshot
    ) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], None]]:
        """Make room for the consensus in a module's state.

        Args:
            state: with this replica's values.
            snapshot: gives the memory.

        Returns:
            The state, and what finds the consensus, given this replica's own state, as soon as that is saved
            (collective over the leaders of replicas, on threads).
        """
        engine, averager = self._engine, self._averager
        known = averager.replica.included if isinstance(averager, CenteredAverager) and averager.uses_center else 0
        if not known:
            engine.note_evaluation()
        rooms, places = list[Tensor](), dict[Any, Tensor]()
        for group in averager.replica.layout if engine.view.is_leader else ():
            room, parts = snapshot.room(list(group.values()))
            rooms.append(room)
            places |= {identity(value): part for value, part in zip(group.values(), parts, strict=True)}
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = places.get(identity(value), value)
        return state, partial(self._find, rooms, list(engine.samples_per_replica()), known)

    def _find(self, rooms: list[Tensor], weights: list[int], known: int, own: Mapping[str, Any]) -> None:
        """Write the consensus into vectors; the first ``known`` ones are those of a center, which all know."""
        consensus: list[Tensor] = own["algorithm"]["reference"]
        if known < len(consensus):
            pairs = zip(rooms, consensus, strict=True)
            out = [room if room.dtype == old.dtype else torch.empty_like(old) for room, old in pairs]
            average = not_none(self._average, "the average of the leaders of replicas")
            mean = average(Contribution(own["values"], weights, consensus), out).mean
            consensus = [*consensus[:known], *mean[known:]]
        for room, vector in zip(rooms, consensus, strict=True):
            room.copy_(vector)
