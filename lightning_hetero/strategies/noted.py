"""What a rank notes of its state at a step, from which checkpoints are made later."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_hetero._lightning import note
from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.center import CenteredAverager
from lightning_hetero.averaging.streaming import StreamingAverager
from lightning_hetero.comm.all_reduce import Contribution
from lightning_hetero.comm.replica import Replica
from lightning_hetero.engine import shards
from lightning_hetero.engine.checkpoint import FORMAT, KEY, described
from lightning_hetero.engine.own_state import beside_values
from lightning_hetero.strategies.background import Files
from lightning_hetero.strategies.copies import Copies, identity
from lightning_hetero.strategies.replica import ReplicaStrategy
from lightning_hetero.strategies.resumable import Resumable
from lightning_hetero.strategies.weight_averaging import averages_weights

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy

#: Hooks of a module between the end of a batch and the next optimizer step, in which people write to parameters.
BETWEEN = ("on_train_batch_end", "on_train_batch_start", "on_before_zero_grad", "on_before_backward")


class Noted:
    """What a rank notes at a step; tensors are copied then, or late.

    Args:
        copies: makes them.
        states: of this rank, for rank 0; see :class:`~lightning_hetero.strategies.apart.Report`.
        ended: which ranks have come to the end of their data.

    Attributes:
        checkpoint: on rank 0; in its ``state_dict`` there is ``None`` for what is taken from the consensus.
        state: on the leader of a replica, what that has of its own but for its values.
        values: on the leader of a replica, its values, as vectors.
    """

    def __init__(self, copies: Copies, states: tuple[dict[str, Any], list[Any], Any], ended: list[bool]) -> None:
        self._copies, self.states, self.ended = copies, states, ended
        self.checkpoint: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.values: list[Tensor] = []
        self.own: Own | None = None
        self._promised: dict[str, tuple[str, Tensor]] = {}  # by key, the value's name, and the tensor as it is now

    def add_own(self, own: "Own", late: Collection[int]) -> None:
        """Note a replica's own state; ``late`` is where the memory begins of what is copied late."""
        self.own = own
        self.state = self._copies.late(own.state, late)
        self.values = [self._copies.vector(list(group.values()), late) for group in own.replica.layout]

    def add_checkpoint(self, checkpoint: dict[str, Any], names: Mapping[Any, str], late: Collection[int]) -> None:
        """Note what Lightning saves.

        Args:
            checkpoint: on rank 0.
            names: of the values that come from the consensus, by their identity.
            late: where the memory begins of what is copied late.
        """
        weights = checkpoint["state_dict"]
        for key, value in weights.items():
            if isinstance(value, Tensor) and (name := names.get(identity(value))) is not None:
                self._promised[key] = name, value.detach()
        rest = {key: None if key in self._promised else value for key, value in weights.items()}
        self.checkpoint = self._copies.late({**checkpoint, "state_dict": rest}, late)

    def keep_promises(self, consensus: Mapping[str, Tensor]) -> None:
        """Put the consensus into the checkpoint; parts of vectors, by the names of the values."""
        weights, found = self.checkpoint["state_dict"], {}
        for key, (name, value) in self._promised.items():
            if name not in found:  # what is tied stays so
                found[name] = consensus[name].view(value.shape).to(value.dtype)
            weights[key] = found[name]


class Own:
    """A replica's own state at a step, with the tensors that are in use.

    Args:
        strategy: with replicas, in a fit.
    """

    def __init__(self, strategy: ReplicaStrategy) -> None:
        strategy.settle()
        engine, averager = strategy.engine, strategy.averager
        assert averager is not None
        self.replica: Replica = averager.replica
        self.state = beside_values(engine, strategy.optimizers, strategy.precision_plugin.state_dict())
        self.weights = list(engine.samples_per_replica())
        knows = isinstance(averager, CenteredAverager) and averager.leads
        self.known = self.replica.included if knows else 0  # vectors of the consensus that are those of the reference
        if not knows:
            engine.looked()

    def names(self) -> dict[Any, str]:
        """Names of the values that replicas exchange, by their identity."""
        return {identity(value): name for group in self.replica.layout for name, value in group.items()}


class Replicas:
    """What is to be done about replicas when they save apart (made by all ranks together).

    Args:
        strategy: with replicas, in a fit.
    """

    def __init__(self, strategy: ReplicaStrategy) -> None:
        self._strategy, self._view = strategy, strategy.engine.view
        leaders = [(member.leader,) for member in self._view.replicas]
        self._average = strategy.engine.links.averager_apart(leaders) if self._view.leads else None
        self._mean: list[Tensor] = []  # memory for it

    @classmethod
    def of(cls, strategy: "HeteroStrategy") -> "Replicas | None":
        """``None``: there is one replica."""
        return cls(strategy) if isinstance(strategy, ReplicaStrategy) else None

    @property
    def steps_begin_with_exchange(self) -> bool:
        """Whether replicas may exchange before the forward pass of a step."""
        return type(self._strategy.averager).before_step is not Averager.before_step  # type: ignore[union-attr]

    def lasts(self, trainer: "pl.Trainer") -> bool:
        """Whether what the averager holds stays as it is in the step that an optimizer takes now."""
        engine, averager = self._strategy.engine, self._strategy.averager
        assert averager is not None
        kind = type(averager)
        streams = kind.after_step is StreamingAverager.after_step and not averager.delay  # type: ignore[attr-defined]
        if kind.after_step is not Averager.after_step and not streams:
            return False
        return not averager.due(engine.context(trainer.is_last_batch)._replace(step=engine.windows + 1))

    def own(self) -> Own:
        """This replica's own state."""
        return Own(self._strategy)

    def note(self, trainer: "pl.Trainer") -> dict[str, Any]:
        """What the Trainer saves, with this replica's own weights."""
        self._strategy.noting = True
        try:
            return note(trainer)
        finally:
            self._strategy.noting = False

    def losses(self) -> list[float]:
        """What this rank's losses have been, to save it."""
        return self._strategy.engine.losses.state_dict()

    def files(self, noted: Noted, path: str, news: tuple[str, list[shards.Gone]], losses: list[Any]) -> Files:
        """What this rank writes (collective over the leaders of replicas).

        Args:
            noted: by this rank.
            path: of the checkpoint.
            news: of rank 0, for the shards.
            losses: on rank 0, those of all ranks.
        """
        strategy, view = self._strategy, self._view
        if noted.own is None:
            return []
        save = strategy._shards.follow(strategy.checkpoint_io, True, news)
        with strategy._shards.saving(strategy.checkpoint_io, path, True, background=True, save=save):
            consensus = self._consensus(noted, noted.own)
        state = {"values": noted.values, **noted.state}
        files: Files = [({"format": FORMAT, "state": state}, shards.shard_of(path, view.replica.id, save), None)]
        if view.rank == 0:
            noted.keep_promises(noted.own.replica.by_name(consensus))
            replicas = described(strategy._identity(), view, save, noted.own.replica.trainable)
            noted.checkpoint.setdefault(KEY, {"format": FORMAT})["replicas"] = replicas | {"losses": losses}
            files.append((noted.checkpoint, path, None))
        return files

    def _consensus(self, noted: Noted, own: Own) -> list[Tensor]:
        reference = noted.state["algorithm"]["reference"]
        if own.known == len(reference):
            return reference
        if [(old.shape, old.dtype) for old in self._mean] != [(old.shape, old.dtype) for old in reference]:
            self._mean = [torch.empty_like(old) for old in reference]
        assert self._average is not None
        mean = self._average(Contribution(noted.values, own.weights, reference), self._mean).mean
        return [*reference[: own.known], *mean[own.known :]]


def possible(strategy: "HeteroStrategy") -> bool:
    """Whether ranks can save apart, each at its own time; the same on all ranks."""
    trainer, module = strategy.trainer, strategy.trainer.lightning_module
    adds = strategy.adds_to_checkpoints or not _ours(type(strategy).save_checkpoint)
    if strategy.options.on_peer_loss == "continue" or adds:
        return False
    if not isinstance(strategy, ReplicaStrategy):
        return True
    averager, callbacks = strategy.averager, trainer.callbacks  # type: ignore[attr-defined]
    if averager is None or not strategy.engine.averages or strategy.engine.view.count == 1:
        return False
    kind = type(averager)
    if kind.consensus not in (Averager.consensus, CenteredAverager.consensus) or not _ours(kind.state_dict):
        return False  # they may wait for others
    others = [one for one in trainer.checkpoint_callbacks if not isinstance(one, Resumable)]
    if others:
        return False  # the model holds the consensus while they save
    if any(map(averages_weights, callbacks)) or not all(_knows(hook) for hook in (module, *callbacks)):
        return False
    values = {identity(value) for value in (*module.parameters(), *module.buffers())}
    return all(identity(value) in values for value in module.state_dict().values() if isinstance(value, Tensor))


def writes_between(trainer: "pl.Trainer") -> bool:
    """Whether something other than an optimizer's step may write to parameters between a batch's end and that."""
    module = trainer.lightning_module
    hooks = any(getattr(type(module), name) is not getattr(LightningModule, name) for name in BETWEEN)
    averages = any(map(averages_weights, trainer.callbacks))  # type: ignore[attr-defined]
    return hooks or averages or trainer.is_last_batch or not module.automatic_optimization


def _knows(hook: Any) -> bool:
    """Whether it is known what an object does with a checkpoint that is being saved: it does not look at weights."""
    own = type(hook).on_save_checkpoint
    return own.__module__.startswith("lightning.") or _ours(own)


def _ours(function: Any) -> bool:
    return function.__module__.startswith("lightning_hetero.")
