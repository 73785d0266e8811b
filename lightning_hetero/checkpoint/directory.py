"""Checkpoints of sharded models: directories of ``torch.distributed.checkpoint``, as Lightning's strategies make them.

A directory holds the model and the optimizers' states in shards, which are cut anew when they are read on another
number of ranks, and all else in ``meta.pt``. Lightning's ``ModelParallelStrategy`` can read it.
"""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.object_collectives import portable
from lightning_hetero.errors import CheckpointError
from lightning_hetero.replicas.sharding import in_shards, is_dtensor

META = "meta.pt"  # as Lightning calls it
#: Of a checkpoint that was read from a directory, in memory: where its shards are.
SHARDS = "lightning_hetero_directory"


def is_directory(path: Any) -> bool:
    """Whether a path is such a checkpoint."""
    return Path(str(path)).is_dir() and (Path(str(path)) / META).is_file()


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state by the names of parameters, its tensors in shards."""
    own = getattr(optimizer, "optimizer", optimizer)
    return get_optimizer_state_dict(module, own) if own.state else _without_state(module, own)


def _without_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The same of an optimizer that has no state: PyTorch would let it step, to have one."""
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {}, "param_groups": groups}


def _named(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` by the names of parameters instead of their numbers."""
    own = _without_state(module, optimizer)["param_groups"]
    groups = [{**saved, "params": group["params"]} for saved, group in zip(state["param_groups"], own, strict=True)]
    numbers = chain(*(group["params"] for group in state["param_groups"]))
    names = dict(zip(numbers, chain(*(group["params"] for group in groups)), strict=True))
    return {"state": {names[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`_named`."""
    numbers = {name: i for i, name in enumerate(chain(*(group["params"] for group in state["param_groups"])))}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[name]: values for name, values in state["state"].items()}, "param_groups": groups}


def save(checkpoint: dict[str, Any], path: Any, group: dist.ProcessGroup | None, first: bool) -> None:
    """Write a directory, which appears when it is whole (collective over a replica).

    Args:
        checkpoint: of Lightning, the model and the optimizers' states in shards.
        path: of the directory. What is there goes.
        group: of the ranks of the replica, over gloo; ``None``: this rank is alone.
        first: whether this is the first of them.

    Raises:
        CheckpointError: the path is not local, or nothing can be written there.
    """
    if not isinstance(url_to_fs(str(path))[0], LocalFileSystem):
        raise CheckpointError(
            f"{path} is not in a local file system, to which a sharded model is saved as a directory. Give a local "
            "path; or save_distributed_checkpoint=False, which writes one file by the Trainer's plugin."
        )
    target = Path(str(path))
    if target.is_symlink() and first:
        target.unlink()
    half, old = target.with_name(f"saving-{target.name}"), target.with_name(f"former-{target.name}")
    rest = dict(checkpoint)
    parts = {"state_dict": rest.pop("state_dict")}
    parts |= {f"optimizer_{i}": state for i, state in enumerate(rest.pop("optimizer_states", []))}
    problem = _made(half, old) if first else None
    for text in [problem] if group is None else gather(problem, "whether a checkpoint's folder can be made", group):
        if text is not None:
            raise CheckpointError(f"{path} cannot be written: {text}")
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


def _made(half: Path, old: Path) -> str | None:
    """Make the folder that is to be filled; why not, if so."""
    try:
        for left in (half, old):
            shutil.rmtree(left, ignore_errors=True)
        half.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return None


def remove(path: Any) -> None:
    """Remove a directory, if one is there, before a file takes its name."""
    if Path(str(path)).is_symlink():
        Path(str(path)).unlink()
    elif is_directory(path):
        shutil.rmtree(str(path))


def gathered(checkpoint: dict[str, Any], first: bool) -> dict[str, Any]:
    """The same checkpoint as an ordinary file holds it, on the first rank of a replica (collective over the replica).

    One tensor at a time is gathered.

    Args:
        checkpoint: of Lightning, the model and the optimizers' states in shards.
        first: whether this is the first rank of the replica.
    """
    whole = _whole(checkpoint, first)
    if first and "optimizer_states" in whole:
        whole["optimizer_states"] = [_numbered(state) for state in whole["optimizer_states"]]
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


def load_shards(checkpoint: Mapping[str, Any], module: nn.Module, strict: bool) -> None:
    """The same of a checkpoint in memory, with this rank's shards."""
    own, state = module.state_dict(), checkpoint["state_dict"]
    parts = {name: in_shards(own[name], value) if is_dtensor(own.get(name)) else value for name, value in state.items()}
    module.load_state_dict(parts, strict=strict)


def load_optimizers(checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Let optimizers go on from a checkpoint's states, whatever its shards are.

    Args:
        checkpoint: as for :func:`load_model`.
        module: the model.
        optimizers: of its parameters.
    """
    path = checkpoint.get(SHARDS)
    for i, optimizer in enumerate(optimizers):
        own, options, name = getattr(optimizer, "optimizer", optimizer), StateDictOptions(), f"optimizer_{i}"
        if path is None:
            found = _named(checkpoint["optimizer_states"][i], module, own)
            options = StateDictOptions(full_state_dict=True)
        else:
            with _explained(path):
                saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
                has_state = any(key.startswith(f"{name}.state.") for key in saved)
                state = {name: get_optimizer_state_dict(module, own) if has_state else _without_state(module, own)}
                _read_into(state, path, strict=True)
            found = state[name]
        if not found["state"]:
            own.state.clear()
            for group, values in zip(own.param_groups, found["param_groups"], strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
            continue
        set_optimizer_state_dict(module, own, optim_state_dict=found, options=options)


def _read_into(state: dict[str, Any], path: str, strict: bool) -> None:
    planner = dcp.DefaultLoadPlanner(allow_partial_load=not strict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)
