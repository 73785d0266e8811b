"""What is refused before training starts, and why; on every rank."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import is_lazy

from lightning_hetero._lightning import trainer_of, validation_interval
from lightning_hetero.comm.agreement import check_equal, gather, raise_on_all
from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.strategies import capacity
from lightning_hetero.strategies.default_groups import beyond

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy


def running(strategy: "HeteroStrategy") -> "pl.Trainer":
    """The Trainer of a strategy, if it runs something for which a dataloader can be set up.

    Raises:
        UnsupportedError: nothing is running.
    """
    trainer = trainer_of(strategy.lightning_module)
    if strategy.job is None or trainer is None or trainer.state.stage is None:
        raise UnsupportedError(
            "a dataloader was to be set up while no fit, validation, test or prediction is running. Its parts "
            "follow from where a run stands, and all ranks set it up together: pass it to one of these."
        )
    return trainer


def served(strategy: "HeteroStrategy") -> "pl.Trainer":
    """The Trainer of a strategy.

    Raises:
        UnsupportedError: it has none yet.
    """
    if (trainer := trainer_of(strategy.lightning_module)) is None:
        raise UnsupportedError(
            "strategy.trainer is there from the beginning of a fit, validation, test or prediction on: a Trainer tells "
            "its strategy of itself with the model. Ask for it there, such as in a callback's hook."
        )
    return trainer


def check_setup(strategy: "HeteroStrategy", trainer: "pl.Trainer", layer_sync: Any) -> None:
    """Refuse a Trainer and a model that would hang or be wrong (collective).

    Args:
        strategy: that is set up.
        trainer: this rank's.
        layer_sync: its plugin for BatchNorm, if any.

    Raises:
        UnsupportedError: a setting of this rank's.
        DisagreementError: another rank's, or one that differs between ranks.
    """
    assert strategy.job is not None
    view = strategy.job.view
    connected = len(view.replica.ranks) == 1 or view.topology.backend(view.replica.ranks) is not None
    check_trainer(trainer, layer_sync, strategy.root_device, view.ranks, connected)
    if trainer.state.fn == TrainerFn.FITTING and strategy.options.max_batch_size == "auto":
        raise_on_all(capacity.problem(strategy, trainer), "the search for the largest batches")
    check_model(trainer.lightning_module)


def check_beyond(strategy: "HeteroStrategy") -> None:
    """Refuse parts of a model, and optimizers, that go over the ranks of several replicas (collective).

    Args:
        strategy: that has been set up for a fit.

    Raises:
        UnsupportedError: names what goes too far.
        DisagreementError: something of another rank's.
    """
    assert strategy.job is not None
    assert strategy.lightning_module is not None
    if (view := strategy.job.view).count > 1:
        problem = beyond(strategy.lightning_module, strategy.optimizers, view.replica.ranks)
        raise_on_all(problem, "the model and its optimizers")


def check_trainer(
    trainer: "pl.Trainer",
    layer_sync: Any,
    device: torch.device,
    replicas: Sequence[Sequence[int]],
    connected: bool = True,
) -> None:
    """Refuse settings that would hang or be wrong (collective).

    Args:
        trainer: this rank's.
        layer_sync: its plugin for BatchNorm, if any.
        device: this rank's.
        replicas: the ranks of each.
        connected: whether one library connects the devices of this rank's replica.

    Raises:
        UnsupportedError: a setting of this rank's.
        DisagreementError: another rank's, or one that differs between ranks.
    """
    raise_on_all(_unsupported(trainer, layer_sync, device, connected), "the Trainer's settings")
    rows = gather((device.type, str(trainer.precision)), "precisions and devices")
    if problem := precision_problem(rows, replicas):
        raise problem
    # Under 16-mixed Lightning gives CPUs bf16-mixed.
    by_device = all(precision == ("bf16-mixed" if kind == "cpu" else "16-mixed") for kind, precision in rows)
    check_equal("the Trainer's settings", settings(trainer) | {"precision": None if by_device else trainer.precision})


def settings(trainer: "pl.Trainer") -> dict[str, Any]:
    """Settings of a Trainer that must be the same on every rank."""
    lengths = ("accumulate_grad_batches", "gradient_clip_val", "max_epochs", "max_steps")
    limits = ("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch")
    return {name: getattr(trainer, name, None) for name in (*lengths, *limits)}


def _unsupported(trainer: "pl.Trainer", layer_sync: Any, device: torch.device, connected: bool) -> HeteroError | None:
    if (seconds := validation_interval(trainer)) is not None:
        return UnsupportedError(
            f"val_check_interval is a time ({seconds} s). Each rank would go by its own clock, some would validate "
            "while others train, and the job would hang. Give a number of batches or a fraction."
        )
    own = trainer.state.fn == TrainerFn.FITTING and any(
        isinstance(layer, torch.nn.SyncBatchNorm) for layer in trainer.lightning_module.modules()
    )
    synced = "sync_batchnorm=True" if layer_sync is not None else "a SyncBatchNorm in the model" if own else None
    if synced is not None and device.type == "cpu":
        return UnsupportedError(
            f"{synced} needs GPUs: PyTorch's SyncBatchNorm does not run on CPU ranks. Set sync_batchnorm=False, and "
            "use BatchNorm; it then normalises by each rank's own part of the batch, as in DDP."
        )
    if synced is not None and not connected:
        return UnsupportedError(
            f"{synced} in a replica of unlike devices: PyTorch's SyncBatchNorm needs NCCL, which does not connect "
            "them. Set sync_batchnorm=False, and use BatchNorm; it then normalises by each rank's own part of the "
            "batch, as in DDP."
        )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        return UnsupportedError(
            "training_step(dataloader_iter) fetches batches by itself, so the weights of the batches are unknown. Take "
            "(batch, batch_idx) instead."
        )
    return None


def precision_problem(ranks: Sequence[tuple[str, str]], replicas: Sequence[Sequence[int]]) -> HeteroError | None:
    """Why ranks of these precisions cannot train together, if so.

    Args:
        ranks: device type and Lightning's precision of each; under 16-mixed Lightning gives CPUs bf16-mixed.
        replicas: the ranks of each.
    """
    for members in replicas:
        kinds = {ranks[i][0] for i in members}
        if "cpu" in kinds and len(kinds) > 1 and any(ranks[i][1] == "16-mixed" for i in members):
            devices = ", ".join(f"rank {i}: {ranks[i][0]} in {ranks[i][1]}" for i in members)
            return UnsupportedError(
                "precision='16-mixed' in a replica of CPUs and other devices: Lightning trains the CPUs in bf16-mixed "
                f"without a loss scale, and their gradients cannot be added to scaled ones ({devices}). Use precision="
                "'bf16-mixed' or 32."
            )
    return None


def check_model(module: torch.nn.Module) -> None:
    """See that all ranks hold parameters and buffers of the same names, shapes and dtypes (collective).

    Args:
        module: this rank's.

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
    check_equal("the model's parameters", described)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
