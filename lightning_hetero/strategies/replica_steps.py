"""How replicas that train apart take their steps, and are brought together by an averager."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim.optimizer import Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.checks import one_of
from lightning_hetero.comm.agreement import raise_on_all
from lightning_hetero.comm.links import ReplicaLinks, Traffic
from lightning_hetero.comm.replica import Replica
from lightning_hetero.comm.topology import Topology
from lightning_hetero.errors import NotFiniteError, UnsupportedError
from lightning_hetero.strategies.hetero import HeteroStrategy
from lightning_hetero.strategies.losses import Losses
from lightning_hetero.strategies.replica_ddp import ReplicaDDP
from lightning_hetero.strategies.replica_guards import (
    about,
    averages_again,
    complex_parameters,
    unfreezing,
    unsupported,
)
from lightning_hetero.workload.stream import Stream

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ReplicaSteps(HeteroStrategy):
    """The part of a strategy with several replicas that trains: its averager is asked before and after every step.

    Args:
        on_nan: what to do when replicas meet and one holds values that are not finite: ``"error"`` raises on every
            rank before they spread; ``"skip"`` leaves the replica out and lets it go on with the mean of the others,
            or the center where there is one, or under gossip the values with which all began.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.hetero.HeteroStrategy`.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    averager: Averager | None = None
    of_the_job: ClassVar[tuple[str, ...]] = (*HeteroStrategy.of_the_job, "averager", "_links", "_losses", "_replicas")

    def __init__(self, on_nan: Literal["error", "skip"] = "error", **kwargs: Any) -> None:
        one_of("on_nan", on_nan, ("error", "skip"))
        averages_again(kwargs)
        super().__init__(on_nan=on_nan, **kwargs)

    @property
    def traffic(self) -> Traffic:
        """What exchanges between replicas have cost since the ranks have met."""
        return self._links.traffic

    def status(self) -> dict[str, float | str]:
        """The algorithm's own numbers and words, by name, such as its phase; empty outside of a fit."""
        return {} if self.averager is None else self.averager.status(self._windows)

    @property
    def pairings(self) -> list[list[int]] | None:
        """Of each replica, its completed exchanges with each; under gossip, once a fit has ended, else nothing."""
        return None if self.averager is None else self.averager.pairings

    @abstractmethod
    def make_averager(self) -> Averager:
        """The algorithm between replicas, of this strategy's options."""

    @override
    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        return topology.nodes

    @override
    def _join(self, topology: Topology) -> None:
        super()._join(topology)
        self._replicas = self.replicas(topology)
        self.share.patient = len(self._replicas) > 1
        self._links = ReplicaLinks(
            topology.rank, self._replicas, self.options.timeout, "skip" if self.on_nan == "skip" else "error"
        )
        self._losses = Losses()
        self._windows = 0  # optimizer steps since the start of the fit
        self._window_open = False

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        raise_on_all(unsupported(trainer.callbacks), "the Trainer's callbacks")  # type: ignore[attr-defined]
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            raise_on_all(complex_parameters(self.lightning_module), "the model")
            self._share_values(self.lightning_module)
            self._window_open = False  # an earlier fit may have ended in one
            self.averager = self.make_averager()
            self.averager.setup(self.make_replica(self.lightning_module), self._links, lambda: self.optimizers)
            if self._averages:
                raise_on_all(unfreezing(trainer, self.lightning_module), "the Trainer's callbacks")
            self._say()

    def _say(self) -> None:
        """Tell the user what the averager has to say."""
        if self.averager is not None and self.averager.warning is not None:
            rank_zero_warn(self.averager.warning)
            self.averager.warning = None

    def make_replica(self, module: torch.nn.Module) -> Replica:
        """What replicas exchange."""
        return Replica(module, self._settle)

    @property
    def _averages(self) -> bool:
        """Whether an averager is at work."""
        return self.averager is not None and (self._links.count > 1 or not self.averager.needs_others)

    def _settle(self) -> None:
        if isinstance(self.model, ReplicaDDP):  # between two forward passes its ranks hold different buffers
            self.model.share_buffers()

    def _share_values(self, module: torch.nn.Module) -> None:
        """Give all ranks rank 0's values, frozen parameters too (collective)."""
        for tensor in (*module.parameters(), *module.buffers()):
            value = tensor.detach().cpu()
            dist.broadcast(value, 0)
            tensor.data.copy_(value)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if isinstance(loader, Stream) and self._links.count > 1:
            raise UnsupportedError(
                f"{type(self).__name__} needs map-style datasets: with iterable ones, or shards of your own, replicas "
                "could not run the same number of steps without waiting for each other at each. Use hetero_ddp."
            )
        return loader

    # -- steps -------------------------------------------------------------------------------------

    def context(self, epoch_ends: bool) -> StepContext:
        """What all ranks know alike about the latest optimizer step."""
        return StepContext(self._windows, epoch_ends, self._planned())

    def _planned(self) -> list[int]:
        shares = self.share.planner.shares(self.share.step)
        samples_per_replica = [sum(shares[rank] for rank in ranks) for ranks in self._replicas]
        # Nothing is planned before the training data has been looked at, as in the sanity check.
        return samples_per_replica if any(samples_per_replica) else [len(ranks) for ranks in self._replicas]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._window_open and self.averager is not None:
            self._window_open = True
            self._before_window()
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._after_window()
        return output

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self._after_window()
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        windows = self._trainer.accumulate_grad_batches  # by which the Trainer has divided the loss
        self._losses.take(closure_loss * windows, self.share.current().samples, self._windows)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _before_window(self) -> None:
        assert self.averager is not None
        if self._averages and (names := self.averager.replica.changed()):
            more = " and others" if len(names) > 3 else ""
            raise UnsupportedError(
                f"{', '.join(names[:3])}{more} became trainable, or frozen, during the fit; replicas exchange what was "
                "trainable at its start. Unfreeze all before the fit, with a learning rate of 0 if need be, or use "
                "hetero_ddp."
            )
        if self._averages:
            with self._timer.waiting(exchange=True), self._meeting():
                self.averager.before_step(self.context(epoch_ends=False))

    def _after_window(self) -> None:
        assert self.averager is not None
        self._windows += 1
        self._window_open = False
        if self._averages:
            context = self.context(self._epoch_ends())
            met = self.averager.blocking and self.averager.due(context)
            with self._timer.waiting(exchange=True), self._meeting():
                self.averager.after_step(context)
            self._say()
            if met:
                self.share.listen()  # all are here now

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Say more about replicas that are not finite than what they tell each other; on all ranks alike."""
        skipped = len(self.traffic.skipped)
        try:
            yield
        except NotFiniteError as error:
            assert self.averager is not None
            mine = self.averager.replica.broken(), self._losses.broken_at
            if self.averager.lockstep:
                seen = self._links.gather(mine)
            else:  # nobody else knows
                seen = [mine if rank == self.global_rank else (None, None) for rank in range(self.world_size)]
            message = about(error.replicas, self._replicas, self._windows, seen, self.averager.fresh_start)
            raise NotFiniteError(error.replicas, message) from None
        for replica in self.traffic.skipped[skipped:]:
            assert self.averager is not None
            warn = rank_zero_warn if self.averager.lockstep else warnings.warn
            warn(
                f"Replica {replica} (ranks {list(self._replicas[replica])}) was left out of the average after step "
                f"{self._windows}: its values were not finite. It goes on with {self.averager.fresh_start}."
            )

    def _epoch_ends(self) -> bool:
        return self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    @override
    def _report_due(self, step: int) -> bool:
        # Only where replicas meet anyway: reports at other steps would make the fast ones wait.
        if self.averager is None:
            return False
        if self._links.count == 1:
            return super()._report_due(step)
        after = self.context(self._epoch_ends())._replace(step=self._windows + 1)
        return not self._trainer.fit_loop._should_accumulate() and self.averager.due(after)
