"""Strategies whose replicas train apart: what is validated, saved and left is the consensus of all."""

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.topology import Topology
from lightning_hetero.strategies import replica_state
from lightning_hetero.strategies.replica_steps import ReplicaSteps

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ReplicaStrategy(ReplicaSteps):
    """Base of strategies with several replicas, such as nodes, whose ranks average gradients at every step.

    Between replicas an averager brings parameters together. What is validated, saved as the model's weights, and left
    at the end of a fit is the consensus of all replicas.

    Args:
        on_nan: what to do when replicas meet and one holds values that are not finite: ``"error"`` raises on every
            rank before they spread; ``"skip"`` leaves the replica out and lets it go on with the mean of the others,
            or the center where there is one, or under gossip the values with which all began.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.hetero.HeteroStrategy`.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    @override
    def _join(self, topology: Topology) -> None:
        super()._join(topology)
        self._own: list[Tensor] | None = None  # this replica's values while the model holds the consensus
        self._looked: tuple[int, int] | None = None  # at the consensus: at which step, and after how many exchanges
        self._warned = False  # that looks come more often than exchanges

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if trainer.state.fn == TrainerFn.FITTING and not any(isinstance(c, _FinishFirst) for c in callbacks):
            callbacks.insert(0, _FinishFirst())  # so that others see the final weights
        super().setup(trainer)

    # -- the consensus -----------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._hold_consensus()

    @override
    def on_validation_end(self) -> None:
        # The Trainer calls this after the callbacks' hooks: what they have saved is what was validated.
        if self.averager is not None and self._own is not None:
            self.averager.replica.unpack(self._own)
            self._own = None
        super().on_validation_end()

    def _hold_consensus(self) -> None:
        if self._averages and self._own is None:
            assert self.averager is not None
            self._own = self.averager.replica.pack()
            self.averager.replica.unpack(self._consensus())

    def _consensus(self) -> list[Tensor]:
        assert self.averager is not None
        with self._meeting():
            values = self.averager.consensus(self._planned())
        self._note_look()
        return values

    def _note_look(self) -> None:
        """Warn, once, if validation or checkpoints come more often than exchanges."""
        assert self.averager is not None
        before, meetings = self._looked, self.averager.meetings
        if meetings is None or self._trainer.sanity_checking:
            return
        self._looked = self._windows, meetings
        if before is None or self._warned:
            return
        step, exchanges = before
        if meetings == exchanges and self._windows > step:
            self._warned = True
            rank_zero_warn(
                f"Replicas have not met between step {step} and step {self._windows}, at which validation or a "
                f"checkpoint looks at them again. Between exchanges it sees {self.averager.between}. Look less often "
                "(check_val_every_n_epoch, val_check_interval, every_n_train_steps), or lower tau."
            )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Collective: the Trainer asks for it on all ranks when it saves. Not once it is interrupted: ranks may be gone.
        if not self._averages or self._own is not None or self._trainer.state.fn != TrainerFn.FITTING or self._alone():
            return super().lightning_module_state_dict()
        assert self.averager is not None
        with self.averager.replica.holding(self._consensus()):
            return deepcopy(dict(super().lightning_module_state_dict()))

    def finish(self) -> None:
        """Make all replicas equal, at the end of the fit (collective)."""
        if self._averages:
            assert self.averager is not None
            with self._meeting():
                self.averager.finish(self._planned())
            self._say()
            assert self.lightning_module is not None
            self._share_values(self.lightning_module)  # also what does not travel

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.averager is not None and not self._alone():
            with self._meeting():
                algorithm = self.averager.state_dict()
            replica = self.averager.replica
            values = replica.pack() if self._own is None else self._own
            scaler = self.precision_plugin.state_dict()
            state = values, replica.kept(), self.optimizers, scaler, self._windows, algorithm
            own = replica_state.of_replica(*state) if self._links.leads else None
            replica_state.gather_into(checkpoint, type(self).__name__, own, self._losses)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.averager is not None
        mine = replica_state.find(checkpoint, type(self).__name__, self._links.index, self._links.count)
        if isinstance(mine, str):
            rank_zero_warn(f"{mine} All replicas start from the checkpoint's weights, with its optimizers' state.")
            assert self.lightning_module is not None
            by_hand = not self.lightning_module.automatic_optimization
            progress = self._trainer.fit_loop.epoch_loop.batch_progress.total
            self._windows = progress.processed if by_hand else self._trainer.global_step  # type: ignore[attr-defined]
            return
        self._windows = replica_state.restore(mine, self.averager, self.optimizers, self._losses)
        self.precision_plugin.load_state_dict(mine["precision"])

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.averager is not None:
            self._looked = None

    @override
    def teardown(self) -> None:
        if self.averager is not None:
            self.averager.close()
            self.averager = self._own = None
        super().teardown()


class _FinishFirst(Callback):
    """Lets replicas be equal before any other callback sees the end of training."""

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            strategy.finish()
