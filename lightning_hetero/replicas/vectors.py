"""Replica values, packed into a few flat vectors: one message is far cheaper than one per layer."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter, itemgetter

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.staging import no_wait, pinned, stage_of
from lightning_hetero.replicas.sharding import Columns, is_sharded, local

#: Cuts a model into fragments; see :class:`Replica`.
Partition = Callable[[nn.Module, Mapping[str, int]], Callable[[str], int]]


_changes = attrgetter("_version")  # how often a tensor has changed in place, as autograd counts


class InPlaceChanges:
    """Learns whether parameters change in place between a snapshot and the end of the next backward pass."""

    def __init__(self) -> None:
        self._happen: bool | None = None  # None: nobody knows yet
        self._versions: list[tuple[Tensor, int]] = []

    def watch(self, parameters: Sequence[Tensor]) -> bool:
        """Watch parameters from now on; whether none is known to change."""
        self._versions += [(parameter, _changes(parameter)) for parameter in parameters]
        return self._happen is False

    def end(self, after_backward: bool) -> None:
        """Look at them; or forget them, if they were written for other reasons than a forward or backward pass."""
        versions, self._versions = self._versions, []
        if not after_backward or not versions:
            return
        changed = any(_changes(parameter) != version for parameter, version in versions)
        if changed and self._happen is False:
            rank_zero_warn(
                "A parameter has changed in place before a backward pass has ended, while its values were copied for "
                "an exchange: older and newer ones may have travelled. From now on the host waits for these copies."
            )
        self._happen = changed or bool(self._happen)


class Replica:
    """The values that replicas exchange: trainable floating parameters, and floating buffers such as BatchNorm's.

    Frozen parameters are not exchanged, nor are buffers that are not finite at first, such as masks, which have no
    mean. Tied parameters are exchanged once. Of sharded parameters the values are those of this rank's shards.

    Args:
        module: the model, on its device.
        settle: makes buffers the same on all ranks of the replica (collective over the replica). It is called before
            values are read.
        excluded: names, or patterns of names such as ``"*.norm.*"``, of values that get vectors of their own, after the
            others.
        buffers: names of the buffers that are exchanged. Default: the floating ones that are finite now.
        cut: cuts the included values into fragments, with vectors of their own: given the model and the sizes of
            parameters by name, it returns a function that gives the fragment of a name.

    Attributes:
        included: number of the vectors that come before those of excluded values.
    """

    def __init__(
        self,
        module: nn.Module,
        settle: Callable[[], None] | None = None,
        excluded: Sequence[str] = (),
        buffers: Collection[str] | None = None,
        *,
        cut: Partition | None = None,
    ) -> None:
        self._settle = settle
        self._trainable = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self._module, self._excluded, self._cut = module, excluded, cut
        parameters = [p for p in module.parameters() if p.requires_grad and p.is_floating_point()]
        if buffers is None:
            buffers = {name for name, b in module.named_buffers() if b.is_floating_point() and b.isfinite().all()}
        self._exchanged = buffers
        taken = [b for name, b in module.named_buffers() if name in buffers]
        wholes = {id(value): name for name, value in (*module.named_parameters(), *module.named_buffers())}
        left = {name for name in wholes.values() if any(fnmatchcase(name, pattern) for pattern in excluded)}
        sizes = {wholes[id(p)]: p.numel() for p in parameters if wholes[id(p)] not in left}  # alike on all ranks
        fragment_of = cut(module, sizes) if cut else lambda name: 0
        groups: tuple[dict[tuple[int, torch.dtype], list[Tensor]], ...] = {}, {}  # included, excluded
        self._names: dict[int, str] = {}
        for whole in parameters + taken:
            name, value = wholes[id(whole)], local(whole)
            self._names[id(value)] = name
            fragment = 0 if name in left else fragment_of(name)
            groups[name in left].setdefault((fragment, value.dtype), []).append(value)
        vectors = sorted(groups[False], key=itemgetter(0))
        self.included = len(vectors)
        self._fragments = [fragment for fragment, _ in vectors]
        self._groups = [*map(groups[False].__getitem__, vectors), *groups[True].values()]
        self._buffers = {id(local(buffer)) for buffer in taken}
        self._in_place = InPlaceChanges()
        self._device = next((value.device for group in self._groups for value in group), torch.device("cpu"))

    @property
    def fragments(self) -> list[slice]:
        """Of each fragment, which of the vectors are its own."""
        count = max(self._fragments, default=0) + 1
        return [slice(bisect_left(self._fragments, p), bisect_right(self._fragments, p)) for p in range(count)]

    def part(self, vectors: slice) -> "Replica":
        """The same model's replica with some of the vectors only, such as those of a fragment."""
        part = copy(self)
        part._groups, part._fragments = self._groups[vectors], self._fragments[vectors]
        part.included = len(part._groups)
        return part

    @property
    def names(self) -> list[str]:
        """Names of the values, parameters first, then buffers."""
        return [self._names[id(value)] for group in self._groups for value in group]

    @property
    def parameter_ids(self) -> dict[int, str]:
        """Names of all parameters of the model, by the ``id`` of the parameter."""
        return {id(parameter): name for name, parameter in self._module.named_parameters()}

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters that are not excluded, in the order of :meth:`views`."""
        included = (value for group in self._groups[: self.included] for value in group)
        return [self._names[id(value)] for value in included if id(value) not in self._buffers]

    def views(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of vectors that belong to parameters, and those that belong to buffers, in their shapes.

        Args:
            flats: vectors as :meth:`pack` returns them, or the first of these.
        """
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for value, part in self._places(flats):
            found[id(value) in self._buffers].append(part.view(value.shape))
        return found

    def _places(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each value of the model with its part of vectors."""
        for group, flat in zip(self._groups, flats, strict=False):
            yield from zip(group, flat.split([value.numel() for value in group]), strict=True)

    @property
    def parameter_lengths(self) -> list[int]:
        """Of each vector, how many of its values are those of parameters; these come first."""
        return [sum(v.numel() for v in group if id(v) not in self._buffers) for group in self._groups]

    @property
    def layout(self) -> list[dict[str, Tensor]]:
        """Of each vector, the model's values in it, by name."""
        return [{self._names[id(value)]: value for value in group} for group in self._groups]

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parts of vectors by the names of the values.

        Args:
            flats: vectors as :meth:`pack` returns them, or the first of these.
        """
        return {self._names[id(value)]: part for value, part in self._places(flats)}

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that were trainable when this object was made."""
        return [name for name, _, trainable in self._trainable if trainable]

    def changed(self) -> dict[str, bool]:
        """Parameters that have become trainable (true), or frozen (false), since this object was made; by name."""
        return {name: p.requires_grad for name, p, trainable in self._trainable if p.requires_grad != trainable}

    def broadcast_parameters(self, names: Sequence[str]) -> None:
        """Give all ranks rank 0's values of parameters, exchanged or not (collective).

        Args:
            names: of the parameters, the same on all ranks.
        """
        parameters = dict(self._module.named_parameters())
        if is_sharded(self._module):
            return  # nothing has changed them since all began with the same ones
        broadcast_tensors([parameters[name].data for name in names])

    @property
    def exchanged(self) -> list[str]:
        """Names of the buffers that are exchanged."""
        return sorted(self._exchanged)

    def with_current_trainable(self) -> "Replica":
        """The same model's replica with the parameters that are trainable now."""
        return self.with_buffers(self._exchanged)

    def with_buffers(self, buffers: Collection[str]) -> "Replica":
        """The same model's replica with the parameters that are trainable now, and the buffers of these names."""
        return type(self)(self._module, self._settle, self._excluded, buffers, cut=self._cut)

    def unexchanged_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that are not exchanged, such as counters and masks, by name."""
        buffers = self._module.named_buffers()
        return {name: b.detach().cpu().clone() for name, b in buffers if id(b) not in self._buffers}

    @torch.no_grad()
    def set_unexchanged_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Write buffers as :meth:`unexchanged_buffers` returns them."""
        own = dict(self._module.named_buffers())
        for name, value in buffers.items():
            own[name].copy_(value)

    def first_nonfinite(self) -> str | None:
        """The name of the first value that is not finite; ``None``: all are."""
        values = (value for group in self._groups for value in group)
        return next((self._names[id(value)] for value in values if not value.isfinite().all()), None)

    def pack(self, out: Sequence[Tensor] | None = None, flat: Callable[..., Tensor] | None = None) -> list[Tensor]:
        """A copy of the values on the host: one vector per dtype, in pinned memory where the model is on a device.

        Args:
            out: where to write them: vectors that an earlier call has returned, or the first of these. Default: new
                memory.
            flat: makes a vector of tensors. Default: :func:`flatten`.
        """
        if self._settle is not None:
            self._settle()
        if out is None:
            return [(flat or flatten)(group) for group in self._groups]
        return [flatten(group, old) for group, old in zip(self._groups, out, strict=False)]

    @torch.no_grad()
    def pack_moved(self, by: Mapping[str, tuple[Tensor, float]], out: Sequence[Tensor]) -> list[Tensor]:
        """As :meth:`pack`, of the values plus multiples of other tensors. The model itself does not change.

        Args:
            by: tensors like the values, each with its factor, by the values' names. Other values are packed as they
                are.
            out: as for :meth:`pack`.
        """
        if self._settle is not None:
            self._settle()
        stage = stage_of(self._device)
        for value, place in self._places(out):
            vectors = value.detach().reshape(-1), place
            if (found := by.get(self._names[id(value)])) is None:
                place.copy_(vectors[0], non_blocking=stage.has_streams)
                continue
            size = max(self._piece // value.element_size(), 1) if value.device.type != "cpu" else value.numel()
            parts = (vector.split(size) for vector in (*vectors, found[0].reshape(-1)))
            for own, there, other in zip(*parts, strict=True):
                there.copy_(own.add(other, alpha=found[1]), non_blocking=stage.has_streams)
        if (ready := stage.ready()) is not None:
            ready.synchronize()
        return list(out)

    @torch.no_grad()
    def snapshot(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], Callable[[], object]]:
        """Begin a copy as :meth:`pack` makes it, for which the host does not wait.

        Parameters are copied beside the next forward and backward pass; the device changes them only afterwards, if
        :meth:`before_overwrite` is called before. Buffers, which a forward pass changes, are copied first. The first
        snapshot is awaited, and so is one into new memory. All are if parameters change in place before that: values of
        two moments would travel.

        Args:
            out: as for :meth:`pack`.

        Returns:
            The vectors, and a function that waits until they hold the values, on any thread.
        """
        if self._device.type == "cpu":
            return self.pack(out), no_wait
        parameters = [value for group in self._groups for value in group if id(value) not in self._buffers]
        beside = self._in_place.watch(parameters)
        if out is None or not beside:
            return self.pack(out), no_wait
        if self._settle is not None:
            self._settle()
        stage, pairs = stage_of(self._device), list[tuple[Tensor, Tensor]]()
        for value, place in self._places(out):
            if id(value) in self._buffers:
                place.copy_(value.reshape(-1), non_blocking=stage.has_streams)
            else:
                pairs.append((value, place))
        return list(out), stage.copy_beside(pairs)

    @property
    def copies(self) -> bool:
        """Whether copies of :meth:`snapshot` may be under way."""
        return self._device.type != "cpu" and stage_of(self._device).copies

    def before_overwrite(self, after_backward: bool = False) -> None:
        """Let the device change values only after the copies of :meth:`snapshot`, without waiting for them here.

        Args:
            after_backward: whether a backward pass has ended, and nothing but a training step came since the snapshot.
        """
        if self._device.type != "cpu":
            self._in_place.end(after_backward)
            stage_of(self._device).before_overwrite()

    @property
    def _piece(self) -> int:
        """Bytes of the model that are worked on at a time on an accelerator, beside the model itself."""
        return max(sum(value.nbytes for group in self._groups for value in group) // PIECES, SMALLEST)

    def _pieces(self, flats: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Tensors of the model, and the parts of vectors that belong to them, on the model's device.

        On an accelerator it is a part of the model at a time, which takes less of its memory.
        """
        self.before_overwrite()
        limit = self._piece
        for group, flat in zip(self._groups, flats, strict=False):
            if group[0].device.type == "cpu" or flat.device == group[0].device:
                yield group, split_vector(flat, group)
                continue
            values, parts, size = list[Tensor](), list[Tensor](), 0
            for value, part in _cut(group, flat, limit):
                if values and size + value.nbytes > limit:
                    yield from self._on_device(values, parts)
                    values, parts, size = [], [], 0
                values.append(value)
                parts.append(part)
                size += value.nbytes
            yield from self._on_device(values, parts)

    def _on_device(self, values: list[Tensor], parts: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Values of one dtype, and their parts of a vector where the values are; for as long as these are used."""
        dtype = values[0].dtype
        if parts[0].device.type == "cpu" and (parts[0].dtype != dtype or not parts[0].is_pinned()):
            copies = stage_of(self._device).upload(parts, dtype, self._piece // dtype.itemsize)
        else:
            copies = [part.to(value, non_blocking=True) for value, part in zip(values, parts, strict=True)]
        yield values, copies
        copies.clear()  # else they are there beside the next ones

    @torch.no_grad()
    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Write vectors into the model.

        Args:
            flats: vectors as :meth:`pack` returns them, or the first of these, on any device, of any floating dtype.
        """
        for values, parts in self._pieces(flats):
            torch._foreach_copy_(values, parts)

    @torch.no_grad()
    def replace_nonfinite(self, flats: Sequence[Tensor]) -> None:
        """Replace the values of the model that are NaN or infinite.

        Args:
            flats: vectors with the new values, as :meth:`pack` returns them, or the first of these.
        """
        for values, parts in self._pieces(flats):
            for value, part in zip(values, parts, strict=True):
                value.copy_(torch.where(value.isfinite(), value, part))

    @torch.no_grad()
    def add(self, flats: Sequence[Tensor], factor: float) -> None:
        """Add ``factor`` times vectors to the values of the model.

        Args:
            flats: vectors as :meth:`pack` returns them, or the first of these.
            factor: by which they are multiplied.
        """
        for values, parts in self._pieces(flats):
            torch._foreach_add_(values, parts, alpha=factor)

    @torch.no_grad()
    def move_towards(self, flats: Sequence[Tensor], part: float) -> None:
        """Move the values of the model a part of the way to vectors.

        Args:
            flats: vectors as :meth:`pack` returns them, or the first of these.
            part: 0 leaves the values, 1 replaces them.
        """
        for values, parts in self._pieces(flats):
            torch._foreach_lerp_(values, parts, part)

    @contextmanager
    def with_values(self, flats: Sequence[Tensor]) -> Iterator[None]:
        """Let the model hold other values within a block.

        On the CPU its tensors are parts of the vectors, unless it is in shards. Else the values are copied there, and
        its own are kept on the host: a device has no room for a second model.

        Args:
            flats: vectors as :meth:`pack` returns them, on any device, of any floating dtype.
        """
        if self._device.type != "cpu" or is_sharded(self._module):  # the tensors of the groups are views of its own
            before = self.pack()
            try:
                self.unpack(flats)
                yield
            finally:
                self.unpack(before)
            return
        if self._settle is not None:
            self._settle()
        own = [value.data for group in self._groups for value in group]
        try:
            for group, flat in zip(self._groups, flats, strict=True):
                for value, part in zip(group, split_vector(flat, group), strict=True):
                    value.data = part.to(value)
            yield
        finally:
            for value, data in zip((value for group in self._groups for value in group), own, strict=True):
                value.data = data


def wide_dtype(flat: Tensor) -> torch.dtype:
    """The dtype for arithmetic on a vector: fp32, or its own dtype if that is wider."""
    return torch.promote_types(flat.dtype, torch.float32)


#: On an accelerator a part of the model is written at a time, so that no second copy of the model is there: one in so
#: many, but at least so many bytes.
PIECES, SMALLEST = 16, 1 << 20


def flatten(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """One vector of all elements on the host, without gradients; in pinned memory, if they are on an accelerator.

    Args:
        tensors: of one dtype, on one device.
        out: where to write it. Default: new memory.
    """
    device = tensors[0].device
    if device.type == "cpu":
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=out)
    sizes = [tensor.numel() for tensor in tensors]
    out = pinned(sum(sizes), tensors[0].dtype) if out is None else out
    stage = stage_of(device)
    for tensor, place in zip(tensors, out.split(sizes), strict=True):
        place.copy_(tensor.detach().reshape(-1), non_blocking=stage.has_streams)
    if (ready := stage.ready()) is not None:
        ready.synchronize()
    return out


def _cut(tensors: Sequence[Tensor], flat: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors and their parts of a vector; a large contiguous tensor comes in slices of ``limit`` bytes."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        own = tensor.detach()
        if own.nbytes <= limit or not own.is_contiguous():
            yield own, part.view(own.shape)
        else:
            length = max(limit // own.element_size(), 1)
            yield from zip(own.view(-1).split(length), part.split(length), strict=True)


def split_vector(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a vector, in the shapes, dtype and device of tensors that all have the same dtype and device."""
    pieces = flat.to(tensors[0].device, tensors[0].dtype).split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


@torch.no_grad()
def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of a vector into tensors."""
    torch._foreach_copy_(list(tensors), split_vector(flat, tensors))


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Give all ranks rank 0's values (collective); one message for each dtype.

    Args:
        tensors: of the same shapes and dtypes on all ranks.
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for alike in groups.values():
        unflatten(collective("receive rank 0's values", partial(_of_rank_zero, alike)), alike)


def _of_rank_zero(tensors: Sequence[Tensor]) -> Tensor:
    flat = flatten(tensors).cpu()
    dist.broadcast(flat.view(torch.uint8), 0)  # bytes: gloo does not know every dtype
    return flat


def broadcast_values(module: nn.Module) -> None:
    """Give all ranks rank 0's values of a model, frozen parameters too (collective)."""
    broadcast_tensors(tensor.data for tensor in (*module.parameters(), *module.buffers()))


@torch.no_grad()
def broadcast_shards(module: nn.Module, columns: Columns, groups: Groups) -> None:
    """Give all replicas the first one's values of a sharded model, frozen parameters too (collective).

    Args:
        module: the model.
        columns: of its ranks.
        groups: makes process groups.
    """
    values = [*module.named_parameters(), *module.named_buffers()]
    for number, ranks in enumerate(columns.ranks):
        if (group := groups.get("values of the first replica", ranks)) is None:
            continue  # there is one replica
        pieces: dict[torch.dtype, list[Tensor]] = {}
        for name, whole in values:
            value = local(whole)
            for column, start, stop in columns.cut(name, value.numel()):
                if column == number and stop > start:
                    piece = value if stop - start == value.numel() else value.view(-1)[start:stop]
                    pieces.setdefault(piece.dtype, []).append(piece)
        for alike in pieces.values():
            flat = torch.cat([piece.reshape(-1).cpu() for piece in alike])
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
            unflatten(flat, alike)


class LayoutChange:
    """Change of a layout of vectors: values keep what they had, by their names.

    Args:
        old: the layout until now.
        new: the layout from now on, of the same model.

    Attributes:
        new: the layout from now on.
        left: names of the values that only the old layout has.
    """

    def __init__(self, old: Replica, new: Replica) -> None:
        self._old, self.new = old, new
        after = set(new.names)
        self.left = [name for name in old.names if name not in after]

    @torch.no_grad()
    def write_dropped(self, flats: Sequence[Tensor]) -> None:
        """Let the model take over what the new layout no longer has.

        Args:
            flats: vectors in the old layout.
        """
        parts = self._old.by_name(flats)
        for group in self._old.layout:
            for name, value in group.items():
                if name in self.left:
                    value.copy_(parts[name].view_as(value))

    def carry(self, flats: Sequence[Tensor], fresh: float, excluded: bool) -> list[Tensor]:
        """Vectors in the new layout, on the CPU, in fp32 or wider.

        Args:
            flats: vectors in the old layout, or those of them that come before excluded values.
            fresh: times the model's value, that is what added values get. 0 suits differences and momenta.
            excluded: whether there are vectors of excluded values, too.
        """
        known = self._old.by_name(flats)
        carried = []
        for group in self.new.layout if excluded else self.new.layout[: self.new.included]:
            parts = []
            for name, value in group.items():
                part = known[name] if name in known else value.detach() * fresh
                parts.append(part.reshape(-1).to("cpu", wide_dtype(value)))
            carried.append(torch.cat(parts))
        return carried
