"""What goes wrong with replicas that differ, in words."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.optim import Optimizer

from lightning_hetero._lightning import saves_by_time
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.replica import ReplicaStrategy


def unsupported(callbacks: list[Callback]) -> HeteroError | None:
    """Why a callback cannot work where replicas differ, if one of them cannot."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, Timer) or saves_by_time(callback):
            return UnsupportedError(
                f"{name} acts at certain times and asks rank 0 after every batch, which would make all replicas wait "
                "for each other. Give numbers of steps or epochs instead of times, or use hetero_ddp."
            )
    return None


def met(strategy: "ReplicaStrategy") -> "ReplicaStrategy":
    """A strategy of which the traffic is asked for.

    Raises:
        UnsupportedError: its ranks have not met yet.
    """
    if strategy.job is None:
        raise UnsupportedError(
            "strategy.traffic is there from the beginning of a fit on: it counts what exchanges have cost since the "
            "ranks have met. Ask for it during the fit, or after it."
        )
    return strategy


def unfreezing(trainer: "pl.Trainer", module: torch.nn.Module) -> HeteroError | None:
    """Why a callback cannot unfreeze what it has frozen, if there is one."""
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    for callback in trainer.callbacks if frozen else []:  # type: ignore[attr-defined]
        never = isinstance(callback, BackboneFinetuning) and (
            0 <= (trainer.max_epochs or -1) <= callback.unfreeze_backbone_at_epoch
        )
        if isinstance(callback, BaseFinetuning) and not never:
            name = type(callback).__name__
            return UnsupportedError(
                f"{name} has frozen {frozen[0]}{' and others' if len(frozen) > 1 else ''}, to unfreeze them during the "
                "fit. The strategy's averager does not say that it can go on with other parameters. Let it say so "
                f"(facts = Facts(regrows=True)), or use hetero_ddp, which {name} works with."
            )
    return None


def averages_again(options: Mapping[str, Any]) -> None:
    """Refuse options of DDP by which Lightning would average the replicas' parameters once more.

    Raises:
        ConfigurationError: names the option.
    """
    state, wrapped = options.get("ddp_comm_state"), options.get("ddp_comm_hook")
    if (period := options.get("model_averaging_period")) is not None:
        given = f"model_averaging_period={period!r}"
    elif isinstance(state, PostLocalSGDState) or wrapped is post_localSGD_hook:
        given = "post_localSGD_hook"
    else:
        return
    raise ConfigurationError(
        f"{given}: PyTorch's post-local SGD averages the parameters of all ranks a second time, each with the same "
        "weight whatever its samples. This strategy averages them by itself. Leave the option out, or use hetero_ddp."
    )


def complex_parameters(module: torch.nn.Module) -> HeteroError | None:
    """Why a model's complex parameters cannot be averaged, if it trains any."""
    names = [name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()]
    if not names:
        return None
    return UnsupportedError(
        f"{names[0]} is complex: replicas exchange real parameters only. Hold it as two real ones "
        "(torch.view_as_real), or use hetero_ddp."
    )


def two_points(optimizers: Sequence[Optimizer]) -> HeteroError | None:
    """Why an optimizer that trains at one point and is evaluated at another cannot work where replicas differ.

    Args:
        optimizers: of the fit.
    """
    for optimizer in optimizers:
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            name = type(optimizer).__name__
            return UnsupportedError(
                f"{name} has `train()` and `eval()`, as schedule-free optimizers do: it keeps a second point of the "
                "weights, its own average over time, in its state. Replicas exchange the weights only, so that after "
                f"`eval()` each would hold another model. Use hetero_ddp, under which {name} works as under ddp, or an "
                "optimizer of PyTorch with a schedule of the learning rate."
            )
    return None


def go_on_with(module: torch.nn.Module, trainable: Collection[str] | None) -> None:
    """Let the parameters be trainable that were so in a checkpoint; callbacks do not unfreeze them again.

    Args:
        module: the model.
        trainable: names of the parameters; ``None``: as they are.
    """
    if trainable is None:
        return
    frozen = []
    for name, p in module.named_parameters():
        if p.requires_grad and name not in trainable:
            frozen.append(name)
        p.requires_grad_(name in trainable)
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        rank_zero_warn(
            f"{frozen[0]}{more} had been frozen when the checkpoint was saved, and stays frozen. To go on with other "
            "trainable parameters load the weights only, or change what is trainable in on_train_epoch_start."
        )
