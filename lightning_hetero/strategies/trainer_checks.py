"""Checks before training starts: Trainer, model and fit that would hang or be wrong are refused on every rank."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from lightning_hetero.algorithms.engine import listed
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.streams import Stream
from lightning_hetero.comm.agreement import check_equal, gather, raise_on_all
from lightning_hetero.comm.view import View
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError
from lightning_hetero.lightning_compat import ddp_options, saves_by_time, trainer_of, validation_interval
from lightning_hetero.replicas.sharding import is_dtensor, is_sharded
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.weight_averaging import averages_weights

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_trainer(trainer: "pl.Trainer", layer_sync: Any, device: torch.device, view: View) -> None:
    """Refuse settings that would hang or be wrong (collective).

    Args:
        trainer: this rank's.
        layer_sync: its plugin for BatchNorm, if any.
        device: this rank's.
        view: who takes part.

    Raises:
        UnsupportedError: a setting of this rank's.
        DisagreementError: another rank's, or one that differs between ranks.
    """
    ranks = view.replica.ranks
    connected = len(ranks) == 1 or view.topology.backend(ranks) is not None
    raise_on_all(_unsupported(trainer, layer_sync, device, connected), "the Trainer's settings")
    rows = gather((device.type, str(trainer.precision)), "precisions and devices")
    if problem := precision_problem(rows, view.ranks):
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
    """The reason why ranks of these precisions cannot train together, if so.

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
    sharded = " in shards" if is_dtensor(tensor) else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{sharded}"


def unsupported(callbacks: list[Callback]) -> HeteroError | None:
    """The reason why a callback cannot work where replicas differ, if one of them cannot."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, Timer) or saves_by_time(callback):
            return UnsupportedError(
                f"{name} acts at certain times and asks rank 0 after every batch, which would make all replicas wait "
                "for each other. Give numbers of steps or epochs instead of times, or use hetero_ddp."
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


def one_pass(module: "pl.LightningModule | None", of_ranks: bool) -> str:
    """The reason why a rank cannot run its part of a batch in several passes; empty if it can.

    Args:
        module: to be trained; ``None`` under Fabric.
        of_ranks: whether each rank has training data of its own.
    """
    if of_ranks:
        return "each rank reads training data of its own."
    if module is None:
        return "Fabric runs a batch at once."
    if not module.automatic_optimization:
        return "with manual optimization training_step itself lets the optimizers step, after the first pass already."
    if is_sharded(module):
        return "the model is sharded, and its ranks need each other in every forward pass."
    strategy: Any = getattr(trainer_of(module), "strategy", None)
    if strategy is not None and ddp_options(strategy).get("static_graph"):
        return "with static_graph=True DDP averages gradients in every backward pass at first."
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            return f"{name!r} is a SyncBatchNorm, for which all ranks need the same number of forward passes."
        if isinstance(part, Metric) and part.dist_sync_on_step:
            return f"{name!r} is a metric with dist_sync_on_step=True, for which all ranks need as many forward passes."
    return ""


def say_passes(planner: Planner, module: torch.nn.Module) -> None:
    """Tell the user that ranks run their parts in passes; on every rank, if BatchNorm then does another thing."""
    high = list(planner.plans[-1].high)
    rank_zero_info(
        f"A global batch of {planner.total} samples is more than all ranks take at once ({high}): ranks run their "
        "parts in several passes within a step, each of at most so many samples."
    )
    if any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        warnings.warn(
            f"max_batch_size={high} is less than a global batch of {planner.total} samples, and the model has "
            "BatchNorm: it normalises by the samples of a pass, not by all of a rank's part, and updates its running "
            "statistics once for each pass, as under accumulate_grad_batches. Use GroupNorm or LayerNorm where that "
            "matters.",
            stacklevel=2,
        )


def complex_parameters(module: torch.nn.Module) -> HeteroError | None:
    """The reason why a model's complex parameters cannot be averaged, if it trains any."""
    names = [name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()]
    if not names:
        return None
    return UnsupportedError(
        f"{names[0]} is complex: replicas exchange real parameters only. Hold it as two real ones "
        "(torch.view_as_real), or use hetero_ddp."
    )


def unshardable(callbacks: Iterable[Callback]) -> HeteroError | None:
    """The reason why a callback cannot work with a sharded model, if one of them cannot."""
    name = next((type(callback).__name__ for callback in callbacks if averages_weights(callback)), None)
    if name is None:
        return None
    return UnsupportedError(
        f"{name} with a sharded model: it averages a copy of the whole model, which no rank holds. Leave it out."
    )


def two_points(optimizers: Sequence[Optimizer]) -> HeteroError | None:
    """The reason why an optimizer with two points (train and eval) cannot work where replicas differ.

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


def restore_trainable(module: torch.nn.Module, trainable: Mapping[str, bool]) -> bool:
    """Let the parameters be trainable that were so in a checkpoint; callbacks do not unfreeze them again.

    Args:
        module: the model.
        trainable: whether a parameter was, by its name. Others stay as they are.

    Returns:
        Whether anything has changed.
    """
    changed = {n: p for n, p in module.named_parameters() if trainable.get(n, p.requires_grad) != p.requires_grad}
    for name, p in changed.items():
        p.requires_grad_(trainable[name])
    if frozen := [name for name in changed if not trainable[name]]:
        rank_zero_warn(
            f"{listed(frozen)} had been frozen when the checkpoint was saved, and stays frozen. To go on with other "
            "trainable parameters load the weights only, or change what is trainable in on_train_epoch_start."
        )
    if thawed := [name for name in changed if trainable[name]]:
        rank_zero_info(f"{listed(thawed)} is trainable again, as when the checkpoint was saved.")
    return bool(changed)


def unsurvivable(
    view: View,
    options: Options,
    sources: Sequence[Any],
    callbacks: Iterable[Callback],
    center: str | None,
    strategy: str,
    module: "pl.LightningModule",
) -> HeteroError | None:
    """The reason why a fit could not go on without a rank; ``None`` if it can.

    Args:
        view: who takes part.
        options: of the strategy.
        sources: of the training data.
        callbacks: of the Trainer.
        center: where the algorithm has its center, if it has one.
        strategy: its name.
        module: the model.
    """
    if is_sharded(module) and (why := _shards_need_all(view)) is not None:
        return UnsupportedError(f"on_peer_loss='continue' with a sharded model: {why}")
    if (meeting := _waits_while_accumulating(view, options, callbacks, module)) is not None:
        return UnsupportedError(
            f"on_peer_loss='continue' with {meeting} and accumulated gradients: the ranks of a replica then wait for "
            "each other in each batch, and one that was accumulated without a lost rank cannot be repeated. Take "
            "larger batches instead of accumulate_grad_batches, or on_peer_loss='error' with checkpoints to start "
            "again from."
        )
    found, least = len(view.units), options.min_replicas
    if found < least:
        what = "ranks" if view.ranks_leave else "replicas"
        return ConfigurationError(
            f"min_replicas={least}, but this job has {found} {what}. Start more, or ask for fewer."
        )
    own = [source for source in sources if isinstance(source, Stream)]
    if any(isinstance(getattr(source, "sampler", None), DistributedSampler) for source in own):
        return UnsupportedError(
            "on_peer_loss='continue' with a DistributedSampler that you have made: it gives each rank a fixed part of "
            "the samples, and those of a lost rank could not be given to others. Leave the DistributedSampler out, and "
            "keep use_distributed_sampler=True: this package then splits the samples, and splits them again when a "
            "rank is lost."
        )
    if options.join_file is not None and (problem := unjoinable(view, options, sources, module)) is not None:
        return UnsupportedError(f"join_file={options.join_file!r}, but nobody could join this fit: {problem}")
    names = [type(callback).__name__ for callback in callbacks if averages_weights(callback)]
    if names and view.count > 1:
        return UnsupportedError(
            f"on_peer_loss='continue' together with {', '.join(names)} under {strategy}: updates "
            "of averaged weights in which a rank is lost cannot be repeated. Leave the callback out, or use hetero_ddp."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in module.trainer.optimizers):
        return closure_again("LBFGS")
    if center == "mpi":
        return UnsupportedError(
            "on_peer_loss='continue' with center='mpi': MPI ends all ranks when one dies. Use center='thread'."
        )
    if any(view.topology.islands(ranks) for ranks in view.ranks):
        return UnsupportedError(
            "on_peer_loss='continue' with GPUs that average gradients within a replica: NCCL's groups cannot be left "
            "yet while an operation with a dead rank is pending. Make each rank a replica of its own (replica='rank'), "
            "or use on_peer_loss='error' with checkpoints to start again from."
        )
    return None


def closure_again(optimizer: str) -> HeteroError:
    """The error for an optimizer that calls its closure several times in a step, where ranks may be lost.

    Args:
        optimizer: name of its class.
    """
    return UnsupportedError(
        f"on_peer_loss='continue' with {optimizer}, which calls its closure several times in a step: parameters change "
        "between two calls, and a step in which a rank is lost could not be repeated. Take an optimizer "
        "that calls it once, such as AdamW, or on_peer_loss='error' with checkpoints to start again from."
    )


def _waits_while_accumulating(
    view: View, options: Options, callbacks: Iterable[Callback], module: "pl.LightningModule"
) -> str | None:
    """The reason why ranks of a replica wait for each other in batches that are accumulated; ``None``: they do not."""
    steps = [module.trainer.accumulate_grad_batches]
    for callback in callbacks:
        steps += callback.scheduling.values() if isinstance(callback, GradientAccumulationScheduler) else []
    if not module.automatic_optimization or max(steps) == 1 or max(map(len, view.ranks)) == 1:
        return None
    if callable(getattr(module, "batch_weight", None)):
        return "batch_weight"
    return "a sharded model" if is_sharded(module) else "on_nan='skip'" if options.on_nan == "skip" else None


def _shards_need_all(view: View) -> str | None:
    """The reason why a sharded model cannot go on without a rank, if so."""
    if view.count == 1 and view.ranks_leave:
        return (
            "the shards of a lost rank are lost, and there is no other replica. Use a strategy with several replicas, "
            "such as hetero_diloco; or on_peer_loss='error' with checkpoints to start again from."
        )
    if max(map(len, view.ranks)) > 1 and not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        return f"PyTorch {torch.__version__} cannot repeat a step that has broken. Install 2.13 or later."
    return None


def unjoinable(view: View, options: Options, sources: Sequence[Any], module: torch.nn.Module) -> str | None:
    """The reason why no process could join a fit, and what to do; ``None`` if one can.

    Args:
        view: who takes part.
        options: of the strategy.
        sources: of the training data.
        module: the model.
    """
    sizes = options.ranks_per_node
    if is_sharded(module) and (len({len(ranks) for ranks in view.ranks}) > 1 or isinstance(sizes, Sequence)):
        return (
            "the model is sharded, and a replica that joins must be of the size of all others. Give all replicas the "
            f"same number of ranks, and ranks_per_node as one number; here it is {sizes}, and replicas have "
            f"{[len(ranks) for ranks in view.ranks]} ranks."
        )
    if not any(isinstance(source, Stream) for source in sources):
        return None
    return (
        "each rank reads training data of its own, an iterable dataset or a loader that you have sharded. With other "
        "ranks these parts are others, and nobody could tell which samples are trained on already. Wrap the dataset in "
        "lightning_hetero.SharedStream, or use a map-style dataset, which this package splits."
    )


def say_what_launchers_do(name: str) -> None:
    """Say which launchers end all ranks when one of them dies, whatever the strategy of this name does."""
    agents = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if agents:
        rank_zero_info(
            f"{name}: torchrun ends all ranks of its machine when one of them dies. To go on "
            "without it, start one torchrun for each replica, or let the Trainer start the ranks."
        )
