"""Collectives that go over all ranks by default: replaced by the replica's group, or refused.

In PyTorch the default of a process group is ``dist.group.WORLD``. Where replicas train apart, that would average what
is to differ between them. This is the table:

| what has the default | here |
|---|---|
| state of a DDP communication hook: ``None``, or an object with a ``process_group`` | gets the replica's group |
| a BatchNorm layer with a ``process_group``, such as ``SyncBatchNorm`` | gets the replica's group |
| a DDP communication hook that calls a collective over all ranks | error |
| an optimizer with a ``process_group``, such as ``ZeroRedundancyOptimizer`` | refused |
| a part of the model with a ``process_group``, wrapped by itself in DDP or FSDP | refused |
| a collective over all ranks in ``training_step``, or in a hook up to the optimizer's step | a warning, once |
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.comm import waits
from lightning_hetero.comm.waits import is_world, observe_collectives
from lightning_hetero.errors import HeteroError, UnsupportedError

#: What follows where a loss is normalised over several ranks by the user.
WEIGHTED_TWICE = (
    "It is then weighted by each rank's samples once more, which is wrong where ranks have different numbers of "
    "samples. In this case, and only in this, let `batch_weight(self, batch)` of the LightningModule return 1: the "
    "ranks' losses then count alike."
)
_SUMS = ("all_reduce", "reduce")
#: A layer's group if it is to take its own rank only: its size is -1.
_NOBODY: Any = dist.GroupMember.NON_GROUP_MEMBER


class GroupOverrides:
    """Puts the replica's group where the default was, and the default back at the end of a fit."""

    def __init__(self) -> None:
        self._holders: list[Any] = []

    def lend(self, holder: Any, group: dist.ProcessGroup | None) -> None:
        """Let an object that has the default, or a group from here, go over a replica's ranks.

        Args:
            holder: with a ``process_group``.
            group: of the replica; ``None``: it is one rank.
        """
        lent = any(holder is other for other in self._holders)
        if not lent and is_world(holder.process_group):
            self._holders.append(holder)
            lent = True
        if lent:
            holder.process_group = _NOBODY if group is None else group

    def lend_layers(self, module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
        """Let BatchNorm layers that are synchronised, by default over all ranks, go over a replica's ranks."""
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and hasattr(layer, "process_group"):
                self.lend(layer, group)

    def __getstate__(self) -> dict[str, Any]:
        """For copies of a strategy, which have yet to join a job."""
        return {"_holders": []}

    def take_back(self) -> None:
        """Put the defaults back."""
        for holder in self._holders:
            holder.process_group = None
        self._holders.clear()


def register_hook(
    ddp: DistributedDataParallel,
    state: Any,
    hook: Callable[..., Any],
    group: dist.ProcessGroup,
    lent: GroupOverrides,
    several: bool,
) -> None:
    """Give DDP a user's communication hook, which may not go over all ranks where there are several replicas.

    Args:
        ddp: over the model.
        state: the user's for the hook. PyTorch's hooks take ``None``, or ``process_group=None`` in it, for all ranks.
        hook: the user's.
        group: of the replica.
        lent: lends the group to the state.
        several: whether there are several replicas.

    Raises:
        UnsupportedError: in a backward pass, where the hook calls a collective over all ranks.
    """
    if is_world(state):
        state = group
    elif hasattr(state, "process_group"):
        lent.lend(state, group)

    def refuse(name: str, own: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        if is_world(own):
            raise UnsupportedError(
                f"ddp_comm_hook {getattr(hook, '__name__', hook)} calls torch.distributed.{name} over all ranks, which "
                "would average the gradients of replicas that are to train apart. Let it use the process group that it "
                "gets as its state."
            )
        return nullcontext()

    @wraps(hook)
    def within(state: Any, bucket: dist.GradBucket) -> Any:
        with observe_collectives(refuse):
            return hook(state, bucket)

    ddp.register_comm_hook(state, within if several else hook)


def beyond(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], replica: Sequence[int]
) -> HeteroError | None:
    """The reason why a part of a model, or an optimizer, cannot be used where replicas differ, if one goes beyond them.

    Args:
        module: the model.
        optimizers: of the fit.
        replica: this rank's.
    """
    for name, holder in _holders(module, optimizers):
        group = getattr(holder, "process_group", None)
        ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
        if not set(ranks) <= set(replica):
            return UnsupportedError(
                f"{name} goes over ranks {ranks}, and replicas train apart: this one is {list(replica)}. Give it "
                "`process_group=trainer.strategy.replica_group`, or leave it out; or use hetero_ddp."
            )
    return None


def _holders(module: torch.nn.Module, optimizers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for holder in optimizers:
        yield type(holder).__name__, holder
    for name, part in module.named_modules():
        if hasattr(part, "register_comm_hook"):  # DDP and FSDP have it
            yield f"{type(part).__name__} ({name})", part


class CollectiveObserver:
    """Takes the collectives that a training step calls for waiting, and warns of those that may make a loss wrong.

    Args:
        timer: this rank's timer.
        several: whether there are several replicas.

    Attributes:
        weighed: whether the losses of ranks are weighted by their samples, and those may differ.
        met: called with the name of a collective that a training step calls by itself.
    """

    def __init__(self, timer: StepTimer, several: bool) -> None:
        self._timer, self._several, self._warned = timer, several, False
        self.weighed = False
        self.met: Callable[[str], None] = lambda name: None

    def forward(self) -> AbstractContextManager[None]:
        """A block in which a training step runs."""
        return observe_collectives(self._in_forward)

    def backward(self) -> AbstractContextManager[None]:
        """A block in which a backward pass runs."""
        return observe_collectives(self._notice)

    def hooks(self) -> AbstractContextManager[None]:
        """A block in which the hooks around a backward pass and an optimizer's step run."""
        return observe_collectives(self._in_hooks)

    def _in_hooks(self, name: str, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        return nullcontext() if waits.here()[0] else self._notice(name, group, "a hook of the training step")

    def _in_forward(self, name: str, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        own = not self._timer.is_waiting and torch._C._current_graph_task_id() == -1  # -1: in no backward pass
        if own:
            self.met(f"torch.distributed.{name}")
        if self.weighed and own and name in _SUMS and not (self._several and is_world(group)):
            self.weighed = False
            rank_zero_warn(
                f"training_step calls torch.distributed.{name}. If it divides the loss by what it gets, such as the "
                f"number of samples of all ranks, the loss is normalised over them already. {WEIGHTED_TWICE}"
            )
        return self._notice(name, group)

    @contextmanager
    def _notice(self, name: str, group: dist.ProcessGroup | None, place: str = "training_step") -> Iterator[None]:
        if self._several and not self._warned and not self._timer.is_waiting and is_world(group):
            self._warned = True
            rank_zero_warn(
                f"{place} calls torch.distributed.{name} over all ranks, while replicas train apart: in each "
                "step all wait for the slowest, and forever if one has fewer steps; a gradient that depends on the "
                "result mixes replicas. If it is meant for the ranks that average gradients, pass "
                "`group=self.trainer.strategy.replica_group`."
            )
        with self._timer.waiting():
            yield
