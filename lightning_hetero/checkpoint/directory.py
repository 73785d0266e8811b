"""Checkpoints of sharded models: directories of ``torch.distributed.checkpoint``, as Lightning's strategies make them.

A directory holds the model and the optimizers' states in shards, which are cut anew when they are read on another
number of ranks, and all else in ``meta.pt``. Lightning's ``ModelParallelStrategy`` can read it.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from lightning_hetero.checkpoint.format import explain_unreadable
from lightning_hetero.checkpoint.writer import atomic_write
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.object_collectives import pack_value, portable, unpack_value
from lightning_hetero.errors import CheckpointError
from lightning_hetero.replicas.sharding import in_shards, is_dtensor

META, INDEX = "meta.pt", ".metadata"  # as Lightning and PyTorch call them
#: Of a checkpoint that was read from a directory, in memory: where its shards are.
SHARDS = "lightning_hetero_directory"


def is_directory(path: Any) -> bool:
    """Whether a path is such a checkpoint."""
    return any((Path(str(path)) / name).is_file() for name in (META, INDEX))


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


class DirectoryWriter:
    """Writes a directory, which appears when it is whole (made by the ranks of a replica together).

    Each rank writes its shards, which needs nobody else and may happen in a thread, and then the first one the rest.

    Args:
        checkpoint: of Lightning, the model and the optimizers' states in shards. It stays as it is until it is written.
        path: of the directory. What is there goes.
        group: of the ranks of the replica, over gloo; ``None``: this rank is alone.
        first: whether this is the first of them.

    Raises:
        CheckpointError: the path is not local, or nothing can be written there.
    """

    def __init__(self, checkpoint: dict[str, Any], path: Any, group: dist.ProcessGroup | None, first: bool) -> None:
        if not isinstance(url_to_fs(str(path))[0], LocalFileSystem):
            raise CheckpointError(
                f"{path} is not in a local file system, to which a sharded model is saved as a directory. Give a local "
                "path; or save_distributed_checkpoint=False, which writes one file by the Trainer's plugin."
            )
        self._target, self._half, self._rest = Path(str(path)), half_of(path), dict(checkpoint)
        parts = {"state_dict": self._rest.pop("state_dict")}
        parts |= {f"optimizer_{i}": state for i, state in enumerate(self._rest.pop("optimizer_states", []))}
        self._planner, self._files = dcp.DefaultSavePlanner(), dcp.FileSystemWriter(self._half)
        _raise_on_replica(self._made if first else lambda: None, path, group)
        self._planner.set_up_planner(parts, self._files.storage_meta(), first)
        self._files.set_up_storage_writer(first)
        own = self._files.prepare_local_plan(self._planner.create_local_plan())
        plans = [own] if group is None else gather(own, "which shards there are to save", group)
        plans, self._index = self._planner.create_global_plan(plans)  # the same on every rank
        self._place = 0 if group is None else dist.get_group_rank(group, dist.get_rank())
        self._plan = self._planner.finish_plan(self._files.prepare_global_plan(plans)[self._place])
        self._written = [self._half / f".written-{number}" for number in range(len(plans))]

    @property
    def steps(self) -> list[Callable[[], None]]:
        """The work of this rank: the last step of the first rank comes after all of the others'."""
        return [self.write, self.finish] if self._place == 0 else [self.write]

    def _made(self) -> None:
        """Make the folder that is to be filled."""
        for left in (self._half, former_of(self._target)):
            shutil.rmtree(left, ignore_errors=True)
        self._half.mkdir(parents=True)

    def write(self) -> None:
        """Write the shards of this rank.

        Raises:
            CheckpointError: they cannot be written.
        """
        with _not_saved(self._target):
            results = self._files.write_data(self._plan, self._planner).wait()
            self._written[self._place].write_bytes(pack_value(results))

    def finish(self) -> None:
        """Write what all ranks have in common, and give the directory its name; on the first rank, after all others.

        Raises:
            CheckpointError: it cannot be written. A checkpoint that was there before is unchanged.
        """
        with _not_saved(self._target):
            self._files.finish(self._index, [unpack_value(file.read_bytes()) for file in self._written])
            for shards in self._written:
                shards.unlink()
            with atomic_write(self._half / META) as file:
                torch.save(portable(self._rest), file)
            old = former_of(self._target)
            if self._target.is_symlink() or self._target.is_file():
                self._target.unlink()
            elif self._target.exists():
                os.replace(self._target, old)
            os.replace(self._half, self._target)
            shutil.rmtree(old, ignore_errors=True)


def save(checkpoint: dict[str, Any], path: Any, group: dist.ProcessGroup | None, first: bool) -> None:
    """Write a directory at once (collective over a replica); arguments and errors as of :class:`DirectoryWriter`."""
    write, *finish = DirectoryWriter(checkpoint, path, group, first).steps
    _raise_on_replica(write, path, group)
    for step in finish:
        step()


def half_of(path: Any) -> Path:
    """The name of a directory until it is whole."""
    return Path(str(path)).with_name(f"saving-{Path(str(path)).name}")


def former_of(path: Any) -> Path:
    """The name of a directory that another one of the same name has just taken the place of."""
    return Path(str(path)).with_name(f"former-{Path(str(path)).name}")


def _raise_on_replica(step: Callable[[], None], path: Any, group: dist.ProcessGroup | None) -> None:
    """Take a step; if one rank of the replica cannot, that is an error on all of them (collective over it)."""
    problem: Exception | None = None
    try:
        step()
    except (OSError, CheckpointError) as error:
        problem = error
    everyone = [] if group is None else gather(problem and str(problem), "whether a checkpoint can be written", group)
    if isinstance(problem, CheckpointError):
        raise problem
    for text in [problem and str(problem), *everyone]:
        if text is not None:
            raise CheckpointError(text if str(path) in text else f"{path} cannot be written: {text}")


@contextmanager
def _not_saved(path: Path) -> Iterator[None]:
    """Errors of writing as ours."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # PyTorch's of a full disk is the second
        raise CheckpointError(
            f"{path} could not be saved: {error}. A checkpoint that was there before is unchanged. Make room, or save "
            "to another place."
        ) from error


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


def lacking(path: Any) -> str | None:
    """The name of a file with shards that a directory lacks, or that was cut off; ``None``: all are whole."""
    folder = Path(str(path))
    try:
        with explain_unreadable(path):
            index = dcp.FileSystemReader(folder).read_metadata()
    except (FileNotFoundError, CheckpointError):
        return INDEX
    ends = {META: 1}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else -1 for name in ends}
    return next((name for name, end in sorted(ends.items()) if sizes[name] < end), None)


def read(path: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Contents of a directory beside the model and the optimizers, and where it is.

    Args:
        path: of the directory.
        weights_only: as for ``torch.load``.

    Raises:
        CheckpointError: a file is missing.
    """
    if (name := lacking(path)) is not None:
        raise CheckpointError(
            f"{path} cannot be read: it lacks a file, or one was cut off: {name}. Nothing has been trained; resume "
            "from another checkpoint, or copy the directory again as a whole."
        )
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
