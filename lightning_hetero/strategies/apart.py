"""Saves without a word between the ranks' training: each notes its own state, and threads do all the rest.

At a step after which a checkpoint is due, no rank waits for another one. Each notes what belongs to the step, and a
thread copies the tensors while the next forward and backward passes only read them; what is left is copied right before
the optimizer changes them. The threads then tell rank 0 what it needs of each rank, find the consensus of the replicas
over connections of their own, and write.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hetero._lightning import note
from lightning_hetero.comm import failures
from lightning_hetero.comm.objects import packed, unpacked
from lightning_hetero.engine import loader_states, random_states
from lightning_hetero.engine.shards import Gone
from lightning_hetero.errors import CheckpointError, CommunicationError
from lightning_hetero.strategies.background import BackgroundFiles, Files
from lightning_hetero.strategies.copies import Copies
from lightning_hetero.strategies.noted import Noted, Replicas, writes_between

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy

_CHANGED = (
    "parameters were written to after the step at which they were to be saved, and before the next one, by something "
    "other than the optimizer. Nothing was replaced. Write to parameters in on_train_batch_end of the LightningModule, "
    "or give background=False."
)


class Report(NamedTuple):
    """What rank 0 must know of a rank to save.

    Attributes:
        problem: why the rank could not save, if it could not.
        takes_part: whether it has noted its state; not while it still writes the checkpoint before.
        states: its random states, where its loaders stand, and what its losses have been.
        news: for the shards; that of rank 0 counts.
    """

    problem: str | None
    takes_part: bool
    states: tuple[dict[str, Any], list[Any], Any] | None = None
    news: tuple[str, list[Gone]] = ("", [])


class Apart:
    """Saves without a word between the ranks' training.

    Args:
        strategy: in a fit; :func:`possible` says whether this works with it.
        files: writes, on threads.
        store: of the job, with keys of its own.
        limit: longest wait for another rank, seconds.
    """

    def __init__(self, strategy: "HeteroStrategy", files: BackgroundFiles, store: dist.Store, limit: float) -> None:
        self._strategy, self._files, self._store, self._limit = strategy, files, store, limit
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._replicas = Replicas.of(strategy)
        self._copies = Copies()
        self._number = self._forgotten = 0  # of saves, the same on every rank; rank 0 has forgotten the first ones
        self._step = 0  # of the latest save
        self._stopped = False

    @property
    def steps_begin_with_exchange(self) -> bool:
        """Whether replicas may exchange before the forward pass of a step."""
        return self._replicas is not None and self._replicas.steps_begin_with_exchange

    def finish_copies(self) -> None:
        """What has been noted is about to change, or could be."""
        self._copies.finish()

    def finish_copies_for_step(self, trainer: "pl.Trainer") -> None:
        """What has been noted is about to be changed by an optimizer, and perhaps by an exchange after its step."""
        lasting = self._replicas is not None and self._replicas.lasts(trainer)
        self._copies.finish(lasting=not lasting)

    def stop(self) -> None:
        """Others may have gone: wait for none of them any more."""
        self._stopped = True

    def save(self, trainer: "pl.Trainer", path: str, then: Callable[[], Any]) -> int | None:
        """Begin to save; on all ranks at the same step, which need not wait for each other.

        Args:
            trainer: at the end of a batch.
            path: of the checkpoint.
            then: called on rank 0 once it is complete on all ranks.

        Returns:
            A step at which nothing is saved, since a rank still writes the checkpoint before; this one or the last.

        Raises:
            CheckpointError: on every rank, if one could not write what was to be saved two saves ago.
        """
        files, number = self._files, self._number + 1
        before, self._number, self._step = self._step, number, trainer.global_step
        saved = number == 1 or self._saved(number - 1)
        problem = files.problem()
        if problem is not None or files.busy:
            self._tell(number, Report(None if problem is None else str(problem), takes_part=False))
            return self._step if problem is None else None
        self._copies.rewind()
        noted = self._note(trainer)
        files.begin(f"apart {number}", lambda: self._complete(noted, number, path), then)
        return None if saved else before

    def _note(self, trainer: "pl.Trainer") -> Noted:
        strategy = self._strategy
        own = None if self._replicas is None else self._replicas.own()
        checkpoint = note(trainer) if self._replicas is None else self._replicas.note(trainer)
        strategy._rank_state.add_common(checkpoint, strategy)
        device = strategy.root_device
        losses = None if self._replicas is None else self._replicas.losses()
        states = random_states.current(device), loader_states.current(strategy.share), losses
        late = () if writes_between(trainer) else _storages(own and own.state, strategy.optimizers)
        self._copies.lasting = () if own is None else _storages(own.state["algorithm"], ())
        noted = Noted(self._copies, states, list(strategy.share.ended))
        if own is not None and strategy.job is not None and strategy.job.view.leads:
            noted.add_own(own, late)
        if self._rank == 0:
            noted.add_checkpoint(checkpoint, {} if own is None else own.names(), late)
        strategy.timer.restart()  # it is no part of a step's time
        return noted

    # -- on a thread -------------------------------------------------------------------------------

    def _complete(self, noted: Noted, number: int, path: str) -> Files | None:
        """What this rank is to write; ``None``: nothing is saved."""
        self._copies.work()
        changed = _CHANGED if self._copies.changed else None
        news = self._strategy._shards.news() if self._rank == 0 else ("", [])
        reports = self._tell(number, Report(changed, changed is None, noted.states, news))
        if changed is not None:
            raise CheckpointError(changed)
        decision, losses = self._decided(number), ()
        if not decision.takes_part:
            return None
        if reports:  # on rank 0
            random, loaders, losses = zip(*(report.states for report in reports if report.states), strict=True)
            if self._world > 1:
                random_states.put(noted.checkpoint, list(random))
                loader_states.put(noted.checkpoint, list(loaders), noted.ended)
        if self._replicas is None:
            return [(noted.checkpoint, path, None)] if self._rank == 0 else []
        return self._replicas.files(noted, path, decision.news, list(losses))

    def _tell(self, number: int, own: Report) -> list[Report]:
        """Tell rank 0 of this rank. Rank 0 says what comes of it: if it takes part, once all have told it.

        Returns:
            On rank 0 the reports of all, if it takes part.
        """
        if self._rank:
            self._put(f"{number}/{self._rank}", own)
            return []
        reports, keys = [own], [f"{number}/{rank}" for rank in range(1, self._world)]
        if own.takes_part:
            try:
                self._await(keys)
            except Exception as error:
                self._put(f"{number}/decided", Report(f"rank 0 could not save: {error}", takes_part=False))
                raise
            reports += [unpacked(self._store.get(key)) for key in keys]
        told = [f"rank {i} could not save: {report.problem}" for i, report in enumerate(reports) if report.problem]
        decision = Report(told[0] if told else None, all(report.takes_part for report in reports), news=own.news)
        self._put(f"{number}/decided", decision)
        if own.takes_part:  # so all have told what they have to, up to this save
            self._forget(number)
        return reports

    def _put(self, key: str, report: Report) -> None:
        self._store.set(key, packed(report))  # type: ignore[arg-type]  # it takes bytes, too

    def _forget(self, number: int) -> None:
        self._forgotten, first = number, self._forgotten + 1
        for old in range(first, number + 1):
            for key in (f"{old}/{rank}" for rank in range(1, self._world)):
                self._store.delete_key(key)

    def _decided(self, number: int) -> Report:
        self._await([f"{number}/decided"])
        return unpacked(self._store.get(f"{number}/decided"))

    def _await(self, keys: list[str]) -> None:
        until, pause = time.monotonic() + self._limit, 0.001
        while keys and not self._store.check(keys):
            if (failure := failures.first(0.0)) is not None:
                raise CommunicationError(f"rank {self._rank} of {self._world} could not save: {failure}")
            if self._stopped or time.monotonic() > until:
                raise CheckpointError("another rank has not come to the step at which all save. Nothing was replaced.")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _saved(self, number: int) -> bool:
        """Whether all took part in a save; an error on all ranks alike if one could not."""
        decision = self._decided(number)
        if decision.problem is not None:
            raise self._files.problem() or CheckpointError(decision.problem)
        return decision.takes_part


def _storages(state: Any, optimizers: Iterable[Any]) -> set[int]:
    """Where the memory begins of what only steps change: what optimizers hold, and the tensors of a replica's state."""
    held = [leaf for one in optimizers for leaf in tree_leaves([one.param_groups, list(one.state.values())])]
    tensors = [leaf for leaf in (*tree_leaves(state), *held) if isinstance(leaf, Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}
