"""Columns of ranks: which of its values a rank exchanges with which ranks, where replicas are of unequal size."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Segment(NamedTuple):
    """Segment of a vector or a value, which a rank exchanges with one rank of each other replica.

    Attributes:
        column: number of the column of these ranks.
        start: number of its first value.
        stop: number of the first value after it.
    """

    column: int
    start: int
    stop: int


#: Gives the segments of a value, from its name and the number of values that this rank holds of it.
Cut = Callable[[str, int], Iterable[Segment]]
#: Of each vector, the values in it, by name; see ``Replica.layout``.
Layout = Sequence[Mapping[str, Tensor]]


class Piece(NamedTuple):
    """Part of a vector, or of a value, that one column exchanges.

    Attributes:
        of: number of the vector, or name of the value.
        values: of the column.
    """

    of: int | str
    values: Tensor


class LayoutInColumns:
    """Layout of vectors, whose values a rank exchanges in several columns.

    Args:
        layout: of the vectors.
        cut: gives the segments of a value.
    """

    def __init__(self, layout: Layout, cut: Cut) -> None:
        self._layout, self._cut = layout, cut
        self._segments: dict[int | str, list[Segment]] = {}  # that were asked for

    def of(self, vectors: Sequence[int]) -> "LayoutInColumns":
        """The layout of some of the vectors only, given by their numbers."""
        return LayoutInColumns([self._layout[number] for number in vectors], self._cut)

    def segments(self, of: int | str) -> list[Segment]:
        """The segments of a vector, given by its number, or of a value, given by its name; those of values in order."""
        if of not in self._segments:
            self._segments[of] = list(self._cut_up(of))
        return self._segments[of]

    def _cut_up(self, of: int | str) -> Iterator[Segment]:
        at = 0
        for name, value in ({of: self._values[of]} if isinstance(of, str) else self._layout[of]).items():
            for column, start, stop in self._cut(name, value.numel()):
                yield Segment(column, at + start, at + stop)
            at += value.numel()

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        return {name: value for vector in self._layout for name, value in vector.items()}

    def parts(self, vectors: Sequence[Tensor], column: int) -> list[Tensor]:
        """The parts of vectors of this layout that a column exchanges: new memory."""
        return [join(vector, self.segments(i), column) for i, vector in enumerate(vectors)]

    def by_name(self, parts: Sequence[Tensor], column: int) -> Iterator[tuple[str, Tensor]]:
        """The values in :meth:`parts`, each after its name."""
        for part, values in zip(parts, self._layout, strict=False):
            of_values = [
                [s for s in self._cut(name, value.numel()) if s.column == column] for name, value in values.items()
            ]
            lengths = [sum(stop - start for _, start, stop in segments) for segments in of_values]
            yield from zip(values, part.split(lengths), strict=True)

    def put(self, parts: Sequence[Sequence[Tensor]], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Vectors from their parts in all columns. Of what is in several ones, such as buffers, the first one counts.

        Args:
            parts: of each column, as :meth:`parts` gives them.
            out: where to write the vectors. Default: new memory.
        """
        if out is None:
            out = [part.new_empty(size) for size, part in zip(self.sizes, parts[0], strict=True)]
        for column in reversed(range(len(parts))):
            for i, (part, vector) in enumerate(zip(parts[column], out, strict=True)):
                spread(part, vector, self.segments(i), column)
        return list(out)

    def pieces(self, state: Any, column: int, name: str | None = None) -> Any:
        """State, with what a column exchanges in the place of its tensors.

        These are lists of vectors, and tensors in the shape of a value, in a dictionary under its name. All else stays.

        Args:
            state: lists, tuples and dictionaries, to any depth.
            column: its number.
            name: of the value to which all of the state belongs.
        """
        if isinstance(state, dict):
            return {
                key: self.pieces(each, column, key if isinstance(key, str) and key in self._values else name)
                for key, each in state.items()
            }
        if isinstance(state, list) and _sizes(state) == self.sizes[: len(state)]:
            return [Piece(i, join(each, self.segments(i), column)) for i, each in enumerate(state)]
        if isinstance(state, (list, tuple)):
            return type(state)(self.pieces(each, column, name) for each in state)
        if isinstance(state, Tensor) and name is not None and state.shape == self._values[name].shape:
            return Piece(name, join(state.reshape(-1), self.segments(name), column))
        return state

    def whole(self, pieces: Sequence[Any]) -> Any:
        """State of this rank from what its columns have sent.

        Args:
            pieces: of each column, what :meth:`pieces` has returned on a rank of another replica.
        """

        def assembled(first: Any, *others: Any) -> Any:
            if not isinstance(first, Piece):
                return first
            shape = self._values[first.of].shape if isinstance(first.of, str) else (self.sizes[first.of],)
            found = torch.empty(shape, dtype=first.values.dtype)
            for column, piece in enumerate((first, *others)):
                spread(piece.values, found.view(-1), self.segments(first.of), column)
            return found

        return tree_map(assembled, *pieces, is_leaf=lambda leaf: isinstance(leaf, Piece))

    @property
    def sizes(self) -> list[int]:
        """Of each vector, the number of its values."""
        return [sum(value.numel() for value in vector.values()) for vector in self._layout]


def _sizes(state: Sequence[Any]) -> list[int] | None:
    """The lengths of vectors; ``None``: these are no vectors."""
    vectors = state and all(isinstance(each, Tensor) and each.dim() == 1 for each in state)
    return [len(each) for each in state] if vectors else None


def join(vector: Tensor, segments: Iterable[Segment], column: int) -> Tensor:
    """The values of a vector that a column exchanges: new memory.

    Args:
        vector: of this rank.
        segments: of it.
        column: its number.
    """
    return torch.cat([vector[:0], *(vector[start:stop] for number, start, stop in segments if number == column)])


def spread(values: Tensor, vector: Tensor, segments: Iterable[Segment], column: int) -> None:
    """Write the values of a column to where :func:`join` takes them from."""
    at = 0
    for number, start, stop in segments:
        if number == column:
            vector[start:stop] = values[at : at + stop - start]
            at += stop - start
