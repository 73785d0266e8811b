"""DDP over the ranks of one replica."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.deadline import deadline
from lightning_hetero.workload.timer import StepTimer


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

    def outgrown(self) -> bool:
        """Whether a parameter has been unfrozen since: DDP does not know of its gradients."""
        return any(p.requires_grad for p in self._frozen)

    def _sync_buffers(self) -> None:
        with self._step_timer.waiting(), deadline("share buffers"):
            super()._sync_buffers()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, as a forward pass in training does (collective)."""
        if self.will_sync_module_buffers():
            self._sync_buffers()


class ReplicaSyncBatchNorm(TorchSyncBatchNorm):
    """BatchNorm statistics over the samples of a replica.

    Args:
        group: the replica's process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the model's BatchNorm layers."""
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, self._group)
