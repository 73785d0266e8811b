"""DDP over the ranks of one replica."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm import buckets
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.shared_mean import SharedMean
from lightning_hetero.strategies.default_groups import LentGroups
from lightning_hetero.workload.timer import StepTimer

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy

_log = logging.getLogger(__name__)


class ReplicaDDP(DistributedDataParallel):
    """PyTorch's DDP; the wait for another rank's buffers is not this rank's work.

    Args:
        timer: the strategy's.
        **kwargs: as for ``DistributedDataParallel``.
    """

    def __init__(self, timer: StepTimer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._step_timer = timer
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]

    def average_in(self, shared: SharedMean, group: dist.ProcessGroup) -> None:
        """Average gradients in shared memory.

        Args:
            shared: of the ranks of this replica.
            group: of the same ranks, for what cannot go through shared memory.
        """
        self.register_comm_hook(group, shared.hook)

    def outgrown(self) -> bool:
        """Whether a parameter has been unfrozen since: DDP does not know of its gradients."""
        return any(p.requires_grad for p in self._frozen)

    def _sync_buffers(self) -> None:
        with self._step_timer.waiting(), deadline("share buffers"):
            super()._sync_buffers()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, also where gradients accumulate (collective)."""
        if self.broadcast_buffers and self.modules_buffers:
            self._sync_buffers()


def share_buffers(model: torch.nn.Module | None) -> None:
    """Give all ranks of a replica the buffers of its first, if a DDP holds the model (collective over the replica)."""
    if isinstance(model, ReplicaDDP):
        model.share_buffers()


def take_unfrozen_in(strategy: "HeteroStrategy") -> None:
    """Wrap the model anew if a parameter has been unfrozen since it was wrapped (collective over the replica)."""
    if isinstance(strategy.model, ReplicaDDP) and strategy.model.outgrown():
        wrap_anew(strategy)


def wrap_anew(strategy: "HeteroStrategy") -> None:
    """Let DDP wait for the gradients of what is trainable now (collective over the replica)."""
    if isinstance(strategy.model, ReplicaDDP):
        strategy.model = strategy.lightning_module
        with strategy.timer.waiting(), deadline("agree on trainable parameters"):
            strategy.configure_ddp()


class BucketSize:
    """Lets the size of DDP's gradient buckets follow the link, which is measured when a model first needs it.

    Not so where the user gives ``bucket_cap_mb``; for models that travel in two buckets at most whatever the link; nor
    with deterministic algorithms, since the size decides in which order the gradients of three or more ranks are
    summed, and with that how sums are rounded.
    """

    #: Bytes of gradients up to which there is nothing to choose.
    SMALL = 2 * buckets.MEBIBYTE

    def __init__(self) -> None:
        self._travel: buckets.Travel | None = None

    def options(self, given: Mapping[str, Any], model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
        """DDP's options with a bucket size that suits the link (collective over the replica).

        Args:
            given: the options so far, with the replica's process group.
            model: to be wrapped.
            device: where its gradients are.

        Raises:
            CommunicationError: another rank did not take part in time.
        """
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        chosen = given.get("bucket_cap_mb") is not None or bool(given.get("bucket_cap_mb_list"))
        open_ = size > self.SMALL and not chosen and not torch.are_deterministic_algorithms_enabled()
        group = given["process_group"]
        if not buckets.all_agree(open_, group, device):
            return dict(given)
        if self._travel is None:
            self._travel = buckets.measure(group, device)
        cap = self._travel.bucket_mib()
        _log.info("%s: gradients travel in buckets of %s MiB", self._travel, cap or buckets.DEFAULT)
        return dict(given) if cap is None else {**given, "bucket_cap_mb": cap}


class ReplicaSyncBatchNorm(TorchSyncBatchNorm):
    """BatchNorm statistics over the samples of a replica.

    Args:
        group: the replica's process group; ``None``: it is one rank, and its BatchNorm layers stay as they are.
        lent: lends the group to layers.
    """

    def __init__(self, group: dist.ProcessGroup | None, lent: LentGroups) -> None:
        super().__init__()
        self._group, self._lent = group, lent

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the model's BatchNorm layers."""
        if self._group is None:
            return model
        converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self._lent.lend_layers(converted, self._group)
        return converted
