"""Checkpoints of sharded models: directories of ``torch.distributed.checkpoint``, as Lightning's strategies make them.

A directory holds the model and the optimizers' states in shards, which are cut anew when they are read on another
number of ranks, and all else in ``meta.pt``. Lightning's ``ModelParallelStrategy`` can read it.
"""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

from lightning_hetero.comm.object_collectives import portable
from lightning_hetero.errors import CheckpointError
from lightning_hetero.replicas.sharding import is_dtensor

META = "meta.pt"  # as Lightning calls it
#: Of a checkpoint that was read from a directory, in memory: where its shards are.
SHARDS = "lightning_hetero_directory"


def is_directory(path: Any) -> bool:
    """Whether a path is such a checkpoint."""
    return Path(str(path)).is_dir() and (Path(str(path)) / META).is_file()


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state by the names of parameters, its tensors in shards."""
    return get_optimizer_state_dict(module, getattr(optimizer, "optimizer", optimizer))


def save(checkpoint: dict[str, Any], path: Any, group: dist.ProcessGroup | None, first: bool) -> None:
    """Write a directory, which appears when it is whole (collective over a replica).

    Args:
        checkpoint: of Lightning, the model and the optimizers' states in shards.
        path: of the directory. What is there goes.
        group: of the ranks of the replica, over gloo; ``None``: this rank is alone.
        first: whether this is the first of them.
    """
    target = Path(str(path))
    half, old = target.with_name(f"saving-{target.name}"), target.with_name(f"former-{target.name}")
    rest = dict(checkpoint)
    parts = {"state_dict": rest.pop("state_dict")}
    parts |= {f"optimizer_{i}": state for i, state in enumerate(rest.pop("optimizer_states", []))}
    if first:
        for left in (half, old):
            shutil.rmtree(left, ignore_errors=True)
        half.mkdir(parents=True)
    if group is not None:
        dist.barrier(group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's, about its own storage
        dcp.save(parts, checkpoint_id=half, process_group=group, no_dist=group is None)
    if first:
        torch.save(portable(rest), half / META)
        if target.is_dir():
            os.replace(target, old)
        elif target.exists():
            target.unlink()
        os.replace(half, target)
        shutil.rmtree(old, ignore_errors=True)


def remove(path: Any) -> None:
    """Remove a directory, if one is there, before a file takes its name."""
    if is_directory(path):
        shutil.rmtree(str(path))


def gathered(checkpoint: dict[str, Any], module: nn.Module, first: bool) -> dict[str, Any]:
    """The same checkpoint as an ordinary file holds it, on the first rank of a replica (collective over the replica).

    One tensor at a time is gathered.

    Args:
        checkpoint: of Lightning, the model and the optimizers' states in shards.
        module: the model.
        first: whether this is the first rank of the replica.
    """
    whole = _whole(checkpoint, first)
    if first:
        named = OptimStateKeyType.PARAM_ID
        states = [
            FullyShardedDataParallel.rekey_optim_state_dict(state, named, module)
            for state in whole.get("optimizer_states", [])
        ]
        whole |= {"optimizer_states": states} if states else {}
    return whole


def _whole(value: Any, keep: bool) -> Any:
    if is_dtensor(value):
        whole = value.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(value, dict):
        return type(value)((name, _whole(part, keep)) for name, part in value.items())
    if isinstance(value, list):
        return [_whole(part, keep) for part in value]
    return value


def read(path: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Contents of a directory beside the model and the optimizers, and where it is.

    Args:
        path: of the directory.
        weights_only: as for ``torch.load``.
    """
    rest = torch.load(Path(str(path)) / META, map_location="cpu", weights_only=weights_only)
    return {**rest, "state_dict": {}, "optimizer_states": [], SHARDS: str(path)}


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Errors of ``torch.distributed.checkpoint`` as ours."""
    try:
        yield
    except (CheckpointException, RuntimeError, OSError, KeyError) as error:
        causes = getattr(error, "failures", {})
        cause = next((wrapped[0] for wrapped in causes.values()), error)
        raise CheckpointError(
            f"{path} cannot be read: {type(cause).__name__}: {cause}. It lacks a file, or is of another model. Nothing "
            "has been trained; resume from another checkpoint, or copy the directory again as a whole."
        ) from error


def load_model(checkpoint: Mapping[str, Any], module: nn.Module, strict: bool) -> None:
    """Write a checkpoint's model into this one, whatever the shards of either are.

    Args:
        checkpoint: of :func:`read`; or an ordinary one, for a sharded model.
        module: the model, in shards or whole.
        strict: whether both must have the same names.
    """
    if (path := checkpoint.get(SHARDS)) is None:
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(module, dict(checkpoint["state_dict"]), options=options)
        return
    state = {"state_dict": module.state_dict()}
    with _explained(path):
        _read_into(state, path, strict)
    module.load_state_dict(state["state_dict"], strict=strict)


def load_optimizers(checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Let optimizers go on from a checkpoint's states, whatever its shards are.

    Args:
        checkpoint: as for :func:`load_model`.
        module: the model.
        optimizers: of its parameters.
    """
    path = checkpoint.get(SHARDS)
    for i, optimizer in enumerate(optimizers):
        own, options = getattr(optimizer, "optimizer", optimizer), StateDictOptions()
        if path is None:
            named = OptimStateKeyType.PARAM_NAME
            found = FullyShardedDataParallel.rekey_optim_state_dict(checkpoint["optimizer_states"][i], named, module)
            options = StateDictOptions(full_state_dict=True)
        else:
            name = f"optimizer_{i}"
            state = {name: get_optimizer_state_dict(module, own)}
            with _explained(path):
                _read_into(state, path, strict=True)
            found = state[name]
        set_optimizer_state_dict(module, own, optim_state_dict=found, options=options)


def _read_into(state: dict[str, Any], path: str, strict: bool) -> None:
    planner = dcp.DefaultLoadPlanner(allow_partial_load=not strict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)
