"""Sharded replicas: each rank of a replica holds a part of every parameter, as PyTorch's ``fully_shard`` makes it."""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.comm.agreement import gather, raise_on_all
from lightning_hetero.comm.columns import Segment
from lightning_hetero.comm.failures import deadline
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a ``DTensor``."""
    tensors = sys.modules.get("torch.distributed.tensor")  # importing it takes long; without it there is none
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def is_sharded(module: nn.Module | None) -> bool:
    """Whether a model has a parameter that is a ``DTensor``."""
    return module is not None and any(map(is_dtensor, module.parameters()))


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor, in the memory of the whole; a plain tensor as it is."""
    if type(tensor) is Tensor or not is_dtensor(tensor):  # the first is quick, and asked for each gradient
        return tensor
    with torch.no_grad():  # else it is another view at each call
        return tensor.to_local()


def in_shards(parameter: Any, value: Tensor) -> Tensor:
    """A rank's values, such as a momentum of its shard, as a ``DTensor`` like the parameter; others as they are.

    Args:
        parameter: a ``DTensor``.
        value: of this rank.
    """
    if is_dtensor(value) or value.shape != local(parameter).shape:
        return value
    whole = {"shape": parameter.shape, "stride": parameter.stride()}
    return type(parameter.data).from_local(value, parameter.device_mesh, parameter.placements, run_check=False, **whole)


def wrong_mesh(data: int, tensor: int, ranks: Sequence[int], former: Any = None) -> HeteroError | None:
    """The reason why the ranks of a replica do not make a mesh of these sizes, if so.

    Args:
        data: the option ``data_parallel_size``.
        tensor: the option ``tensor_parallel_size``.
        ranks: of the replica.
        former: the mesh over which the model is sharded already.
    """
    if former is not None and former.size() != len(ranks):
        return UnsupportedError(
            f"the model is sharded over {former.size()} ranks already, and this rank's replica is {list(ranks)}. Make "
            "a new module; or, where processes have joined a job, start them as nodes of their own, with another "
            "MASTER_PORT for each."
        )
    if data * tensor == len(ranks):
        return None
    return ConfigurationError(
        f"data_parallel_size={data} times tensor_parallel_size={tensor} is not {len(ranks)}, the number of ranks of "
        f"this replica, {list(ranks)}. Leave data_parallel_size='auto', and let tensor_parallel_size divide the number "
        "of ranks of each replica."
    )


def problem(module: nn.Module, mesh: Any) -> HeteroError | None:
    """The reason why a model cannot be trained as it is sharded, if so.

    Args:
        module: after its ``configure_model``.
        mesh: the device mesh of this rank's replica; ``None``: it has none.
    """
    if (name := _fsdp1(module)) is not None:
        return UnsupportedError(
            f"{name} is wrapped with FullyShardedDataParallel. Shard the model in `configure_model` with "
            "torch.distributed.fsdp.fully_shard(module, mesh=self.device_mesh['data_parallel']) instead."
        )
    if not is_sharded(module):
        return None
    if mesh is None:
        return UnsupportedError(
            "the model's parameters are sharded, but not in `configure_model`, or by ranks with unlike devices. Shard "
            "them there, over self.device_mesh['data_parallel'], which covers the ranks of the replica; and let all "
            "ranks of a replica have devices of one kind."
        )
    averages = mesh.size() > mesh.size(1)  # and does not only split layers
    plain = [name for name, p in module.named_parameters() if averages and not is_dtensor(p)]
    if plain:
        return UnsupportedError(
            f"{plain[0]!r} is not sharded, and other parameters are: its gradient would not be averaged. Call "
            "fully_shard on the whole model last, in `configure_model`: fully_shard(self, mesh=self.device_mesh"
            "['data_parallel']), or on the module that holds this parameter."
        )
    shards: list[tuple[str, Any]] = [(name, p) for name, p in module.named_parameters() if is_dtensor(p)]
    ranks = mesh.mesh.flatten().tolist()  # by the numbers that they had when it was made
    for name, p in shards:
        over = p.device_mesh.mesh.flatten().tolist()
        if p.device_mesh.ndim > 2:
            return UnsupportedError(
                f"{name!r} is sharded over a mesh of {p.device_mesh.ndim} dimensions, {tuple(p.device_mesh.shape)}. "
                "Use self.device_mesh['data_parallel'], and self.device_mesh['tensor_parallel'], only."
            )
        if not set(over) <= set(ranks):
            return UnsupportedError(
                f"{name!r} is sharded over ranks {over}, and this rank's replica is {ranks}. In "
                "`configure_model` pass mesh=self.device_mesh['data_parallel'] to fully_shard, which takes all ranks "
                "without a mesh."
            )
    return None


def _fsdp1(module: nn.Module) -> str | None:
    """The name of a module that the older FSDP wraps, if there is one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    kind = fsdp.FullyShardedDataParallel
    return next((name or type(part).__name__ for name, part in module.named_modules() if isinstance(part, kind)), None)


def forget_step(module: nn.Module) -> None:
    """Let a sharded model forget a step that has broken within it."""
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "reset_iter_state")]
    for part in parts:
        with suppress(RuntimeError, AttributeError):  # no forward pass begins with it
            part.reset_iter_state()


def keep_in_shards(module: nn.Module) -> None:
    """Let a sharded model be in shards again after each forward pass of a part that no backward pass follows.

    Else ``fully_shard`` keeps the parameters of the outermost module as a whole until its next backward pass: after an
    evaluation they would be taken for the rank's own, and the next step would compute with those of the consensus; and
    who unfreezes a parameter would unfreeze a copy, for one step.

    Args:
        module: the model.
    """
    for part in module.modules():
        if hasattr(part, "reshard") and not vars(part).get("kept_in_shards"):
            part.register_forward_hook(torch.compiler.disable(_reshard))  # as the hooks of fully_shard are
            part.kept_in_shards = True  # type: ignore[assignment]


def _reshard(part: Any, inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in part.parameters()):
        part.reshard()


class ShardTraffic:
    """Moves parameters and gradients within a replica for ``fully_shard``, and counts as waiting what waits for others.

    Args:
        group: of the ranks of the replica, for tensors of its device.
        waiting: a block in which this rank waits; where the device has streams, one whose end they wait for.
        beside: a block whose work is in a stream of its own; ``None``: the device has none.
        look: looks at this rank's own gradients, before they are averaged.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        waiting: Callable[[], AbstractContextManager[None]],
        beside: Callable[[], AbstractContextManager[None]] | None,
        look: Callable[[Sequence[Tensor]], object],
    ) -> None:
        self._zeros, self._group, self._look = False, group, look
        self._waiting, self._beside = waiting, beside

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gather parameters from their shards (collective over the replica)."""
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with (self._beside or self._waiting)(), deadline("gather parameters from their shards"):
            return gather(*args, **kwargs)

    def reduce_scatter(self, output: Tensor, own: Tensor, **kwargs: Any) -> Any:
        """Average gradients into shards (collective over the replica)."""
        if self._zeros:
            own.zero_()
        self._look([own])
        reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with (self._beside or self._waiting)():
            return reduce(output, own, **kwargs)

    @contextmanager
    def zeros(self) -> Iterator[None]:
        """Backward passes in this block count zeros as this rank's gradients, whatever its loss is."""
        self._zeros = True
        try:
            yield
        finally:
            self._zeros = False

    def share_unsharded(self, module: nn.Module) -> None:
        """Give all ranks of the replica what its first has of all that is not sharded (collective over it)."""
        for value in (*module.parameters(), *module.buffers()):
            if not is_dtensor(value):
                dist.broadcast(value.detach(), group=self._group, group_src=0)

    def on_any_rank(self, flag: bool | Tensor) -> bool | Tensor:
        """Whether a flag is true on any rank of the replica (collective over it); beyond the CPU a tensor."""
        found = (flag if isinstance(flag, Tensor) else torch.tensor(flag)).to(torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found) if found.device.type == "cpu" else found.bool()

    def serve(self, module: nn.Module) -> None:
        """Move what all parts of a model need that ``fully_shard`` has sharded.

        Raises:
            UnsupportedError: this version of PyTorch does not let it.
        """
        parts: list[Any] = [part for part in module.modules() if hasattr(part, "set_requires_gradient_sync")]
        for part in parts:  # that fully_shard has sharded
            if not hasattr(part, "set_custom_reduce_scatter"):
                raise UnsupportedError(
                    f"sharded models need PyTorch 2.9 or later; this is {torch.__version__}. Install a later one."
                )
            part.set_custom_all_gather(_Message(self.all_gather))
            part.set_custom_reduce_scatter(_Message(self.reduce_scatter))
            if self._beside is not None:
                self._time_stream(part)

    def _time_stream(self, part: Any) -> None:
        """Count as waiting what a device's stream waits for the parameters of a part."""
        for group in getattr(part._get_fsdp_state(), "_fsdp_param_groups", ()):
            group.wait_for_unshard = self._waits(type(group).wait_for_unshard.__get__(group))

    def _waits(self, method: Callable[[], None]) -> Callable[[], None]:
        @wraps(method)
        def waited() -> None:
            with self._waiting():
                method()

        return waited


class _Message:
    """A collective and its memory, as ``fully_shard`` asks for."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self._collective = collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        """Call the collective."""
        return self._collective(output_tensor, input_tensor, **kwargs)


class Columns:
    """Columns of ranks, one of each replica, that hold the same intervals of parameters, and exchange them.

    Where replicas are of one size, a rank exchanges all that it has with the ranks at its place in the other replicas.
    Else parameters are cut where a shard of any replica ends: a rank of a small replica exchanges pieces of its shards
    with several ranks of a larger one.

    Args:
        replicas: the ranks of each replica.
        rank: this process.
        lengths: of each rank, the number of values that it holds of each sharded parameter, by name. Of all else, such
            as buffers, every rank holds the whole, which is in all of its columns.

    Attributes:
        ranks: the columns of this rank, in the order in which all ranks work through theirs.
        alike: whether this rank exchanges all values in one column.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[int]],
        rank: int,
        lengths: Sequence[dict[str, int]],
    ) -> None:
        self.alike, self._rank = len({len(ranks) for ranks in replicas}) == 1, rank
        most = max(len(ranks) for ranks in replicas)
        places = [tuple(ranks[place % len(ranks)] for ranks in replicas) for place in range(most)]
        own = {place for place in places if rank in place}
        self._intervals: dict[str, list[tuple[tuple[int, ...], int, int]]] = {}
        if not self.alike:
            for name in lengths[rank]:
                self._intervals[name] = [piece for piece in _matched(name, replicas, lengths) if rank in piece[0]]
                own |= {column for column, *_ in self._intervals[name]}
        self.ranks: list[tuple[int, ...]] = sorted(own)

    @classmethod
    def of(cls, module: nn.Module, replicas: Sequence[Sequence[int]], rank: int) -> "Columns":
        """The columns of a model that is sharded over the ranks of each replica (collective over all ranks).

        Args:
            module: the model.
            replicas: the ranks of each replica.
            rank: this process.

        Raises:
            UnsupportedError: replicas are of different sizes, and a parameter is sharded by another dimension than its
                first, or over two dimensions of a mesh.
        """
        sharded = {name: p for name, p in module.named_parameters() if is_dtensor(p)}
        odd = [name for name, p in sharded.items() if not _by_rows(p)]
        if len({len(ranks) for ranks in replicas}) > 1:
            raise_on_all(_not_by_rows(odd[0], replicas) if odd else None, "the model's shards")
        lengths = gather({name: local(p).numel() for name, p in sharded.items()}, "the sizes of shards")
        return cls(replicas, rank, lengths)

    def cut(self, name: str, length: int) -> Iterator[Segment]:
        """The segments of a value that this rank exchanges with different ranks.

        Args:
            name: of the parameter or buffer.
            length: number of values that this rank holds of it.
        """
        if (pieces := self._intervals.get(name)) is None:
            yield from (Segment(column, 0, length) for column in range(len(self.ranks)))
            return
        for ranks, start, stop in pieces:
            first = pieces[0][1]
            yield Segment(self.ranks.index(ranks), start - first, stop - first)

    def __str__(self) -> str:
        """The plan in one line, for the log."""
        if self.alike:
            return "each rank exchanges its shards with the ranks at its place in the other replicas"
        parts = [f"{len(column)} ranks {list(column)}" for column in self.ranks]
        return f"rank {self._rank} exchanges pieces of its shards with {'; '.join(parts)}"


def _by_rows(parameter: Any) -> bool:
    placements = parameter.placements
    return parameter.device_mesh.ndim == 1 and all(type(p).__name__ == "Shard" and p.dim == 0 for p in placements)


def _not_by_rows(name: str, replicas: Sequence[Sequence[int]]) -> HeteroError:
    return UnsupportedError(
        f"{name!r} is not sharded by its first dimension alone, and replicas are of {[len(r) for r in replicas]} "
        "ranks. Where replicas differ in size, use fully_shard on self.device_mesh['data_parallel'] only, with its own "
        "placement; or give all replicas the same number of ranks (ranks_per_node)."
    )


def _matched(
    name: str, replicas: Sequence[Sequence[int]], lengths: Sequence[dict[str, int]]
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The pieces into which all replicas together cut a parameter: who holds it, and its interval."""
    ends = [list(accumulate(lengths[rank][name] for rank in ranks)) for ranks in replicas]
    start = 0
    for stop in sorted({end for of_replica in ends for end in of_replica}):
        if stop > start:
            held = [ranks[bisect_right(of, start)] for ranks, of in zip(replicas, ends, strict=True)]
            yield tuple(held), start, stop
        start = stop
