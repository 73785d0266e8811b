"""What is refused before training starts, and why; on every rank."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_hetero.comm.agreement import agree, together
from lightning_hetero.errors import HeteroError, UnsupportedError

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_trainer(trainer: "pl.Trainer", layer_sync: Any, device: torch.device) -> None:
    """Refuse settings that would hang or be wrong (collective).

    Raises:
        UnsupportedError: a setting of this rank's.
        DisagreementError: another rank's, or one that differs between ranks.
    """
    together(_unsupported(trainer, layer_sync, device), "the Trainer's settings")
    settings = ("precision", "accumulate_grad_batches", "gradient_clip_val", "max_epochs", "max_steps")
    limits = ("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch")
    agree("the Trainer's settings", {name: getattr(trainer, name, None) for name in (*settings, *limits)})


def _unsupported(trainer: "pl.Trainer", layer_sync: Any, device: torch.device) -> HeteroError | None:
    if (seconds := getattr(trainer, "_val_check_time_interval", None)) is not None:
        return UnsupportedError(
            f"val_check_interval is a time ({seconds} s). Each rank would go by its own clock, some would validate "
            "while others train, and the job would hang. Give a number of batches or a fraction."
        )
    if layer_sync is not None and device.type == "cpu":
        return UnsupportedError(
            "sync_batchnorm=True needs GPUs: PyTorch's SyncBatchNorm does not run on CPU ranks. Set "
            "sync_batchnorm=False; BatchNorm then normalises by each rank's own part of the batch, as in DDP."
        )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        return UnsupportedError(
            "training_step(dataloader_iter) fetches batches by itself, so that their weights cannot be told. Take "
            "(batch, batch_idx) instead."
        )
    return None


def check_model(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """See that all ranks hold parameters and buffers of the same names, shapes and dtypes (collective).

    Args:
        module: this rank's.
        group: the ranks; default: all.

    Raises:
        DisagreementError: names the parameter, and what each rank has.
    """
    described = {
        f"parameter {name}": _describe(p) + (" frozen" if not p.requires_grad else "")
        for name, p in module.named_parameters()
        if not is_lazy(p)
    }
    described |= {f"buffer {name}": _describe(b) for name, b in module.named_buffers() if not is_lazy(b)}
    described["order"] = ", ".join(described)  # DDP reduces in this order
    agree("the model's parameters", described, group)


def samples_in(batch: Any) -> float:
    """The first dimension that all tensors of a batch share.

    Raises:
        ValueError: there is none, or the tensors differ.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim > 0}
    if len(sizes) != 1:
        raise ValueError(f"its tensors have first dimensions {sorted(sizes)}" if sizes else "it holds no tensors")
    return float(sizes.pop())


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
