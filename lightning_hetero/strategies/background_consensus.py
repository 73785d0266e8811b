"""The consensus of a checkpoint, found while training goes on, from what is saved of the replicas."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_hetero.algorithms.base import Averager
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.checkpoint.snapshot import Snapshot, identity
from lightning_hetero.comm.all_reduce import Contribution
from lightning_hetero.strategies.weight_averaging import averages_weights

if TYPE_CHECKING:
    from lightning_hetero.strategies.replica import ReplicaStrategy


class BackgroundConsensus:
    """Finds the mean of the replicas on a thread, over connections of its own (made by all ranks together).

    So the link between replicas, which may be slow, does not hold up the step that is saved.

    Args:
        strategy: in a fit, of which :meth:`possible` is true.
    """

    def __init__(self, strategy: "ReplicaStrategy") -> None:
        self._strategy, self._averager, view = strategy, strategy.averager, strategy.engine.view
        leaders = [(member.leader,) for member in view.replicas]
        self._average = strategy.engine.links.background_averager(leaders) if view.is_leader else None

    @staticmethod
    def possible(strategy: "ReplicaStrategy") -> bool:
        """Whether the consensus is the mean, or a center that all know, and nobody looks at it before it is found."""
        module, callbacks = strategy.trainer.lightning_module, strategy.trainer.callbacks  # type: ignore[attr-defined]
        averager, engine = strategy.averager, strategy.engine
        if strategy.options.on_peer_loss == "continue":
            return False  # a rank that is lost would break connections within the thread
        if averager is None or not engine.averages or engine.view.count == 1 or any(map(averages_weights, callbacks)):
            return False
        if type(averager).consensus not in (Averager.consensus, CenteredAverager.consensus):
            return False
        if not _ours(type(averager).state_dict) or not _ours(type(strategy).save_checkpoint):
            return False
        hooks = [type(one).on_save_checkpoint for one in (module, *callbacks)]
        if not all(_ours(hook) or hook.__module__.startswith("lightning.") for hook in hooks):
            return False
        values = {identity(value) for value in (*module.parameters(), *module.buffers())}
        return all(identity(value) in values for value in module.state_dict().values() if isinstance(value, Tensor))

    @property
    def serves(self) -> bool:
        """Whether the averager is still the same one."""
        return self._averager is self._strategy.averager

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
        engine, averager = self._strategy.engine, self._averager
        assert averager is not None
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
        """Write the consensus into vectors.

        Args:
            rooms: the vectors.
            weights: of the replicas.
            known: how many of the vectors are those of a center, which all know.
            own: this replica's state.
        """
        assert self._average is not None
        consensus: list[Tensor] = own["algorithm"]["reference"]
        if known < len(consensus):
            pairs = zip(rooms, consensus, strict=True)
            out = [room if room.dtype == old.dtype else torch.empty_like(old) for room, old in pairs]
            mean = self._average(Contribution(own["values"], weights, consensus), out).mean
            consensus = [*consensus[:known], *mean[known:]]
        for room, vector in zip(rooms, consensus, strict=True):
            room.copy_(vector)


def _ours(function: Any) -> bool:
    return function.__module__.startswith("lightning_hetero.")
