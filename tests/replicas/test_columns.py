"""Every value of a sharded parameter is exchanged once, by the one rank of each replica that holds it."""

from collections import Counter
from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.replicas.sharding import Columns

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=3)
ROWS = st.lists(st.integers(0, 23), min_size=1, max_size=4)


def shards(rows: int, ranks: int) -> list[int]:
    """Lengths of shards by rows, as PyTorch cuts them."""
    parts = [len(part) for part in torch.arange(rows).chunk(ranks)] if rows else []
    return parts + [0] * (ranks - len(parts))


@given(SIZES, ROWS)
def test_each_value_is_exchanged_once(sizes: list[int], rows: list[int]) -> None:
    firsts = [0, *accumulate(sizes)]
    replicas = [range(a, a + n) for a, n in zip(firsts, sizes, strict=False)]
    names = [f"p{i}" for i in range(len(rows))]
    lengths = [{} for _ in range(sum(sizes))]  # type: list[dict[str, int]]
    held = dict[tuple[int, str], list[int]]()  # by rank and parameter, the numbers of the values
    for ranks in replicas:
        for name, count in zip(names, rows, strict=True):
            start = 0
            for rank, length in zip(ranks, shards(count, len(ranks)), strict=True):
                lengths[rank][name] = length
                held[rank, name] = list(range(start, start + length))
                start += length
    found = Counter[tuple[str, int, tuple[int, ...]]]()
    for rank in range(sum(sizes)):
        columns = Columns(replicas, rank, lengths, ["buffer"])
        assert columns.ranks == sorted(set(columns.ranks))
        assert all(rank in column and len(column) == len(sizes) for column in columns.ranks)
        assert [column for column, *_ in columns.cut("buffer", torch.ones(3))]
        for name in names:
            values = torch.tensor(held[rank, name], dtype=torch.int64)
            for column, piece, _ in columns.cut(name, values):
                found.update((name, int(value), columns.ranks[column]) for value in piece)
    for name, count in zip(names, rows, strict=True):
        for value in range(count):
            owners = tuple(next(r for r in ranks if value in held[r, name]) for ranks in replicas)
            if len(set(sizes)) > 1:
                assert {key: n for key, n in found.items() if key[:2] == (name, value)} == {
                    (name, value, owners): len(owners)
                }
            else:
                assert found[name, value, owners] == len(owners)
