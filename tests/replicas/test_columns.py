"""Columns of sharded parameters: each value is exchanged once, by the one rank of each replica that holds it."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run

from lightning_hetero.comm.all_reduce import Contribution, ReplicaLinks
from lightning_hetero.comm.columns import LayoutInColumns
from lightning_hetero.comm.compression import LOW_BIT, encoding_of
from lightning_hetero.comm.gossip import PairResult, PairsInColumns
from lightning_hetero.comm.groups import Groups
from lightning_hetero.errors import HeteroError
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
        columns = Columns(replicas, rank, lengths)
        assert columns.ranks == sorted(set(columns.ranks))
        assert all(rank in column and len(column) == len(sizes) for column in columns.ranks)
        assert all(segment[1:] == (0, 3) for segment in columns.cut("buffer", 3))
        assert list(columns.cut("buffer", 3))
        for name in names:
            values = held[rank, name]
            for column, start, stop in columns.cut(name, len(values)):
                found.update((name, value, columns.ranks[column]) for value in values[start:stop])
    for name, count in zip(names, rows, strict=True):
        for value in range(count):
            owners = tuple(next(r for r in ranks if value in held[r, name]) for ranks in replicas)
            if len(set(sizes)) > 1:
                assert {key: n for key, n in found.items() if key[:2] == (name, value)} == {
                    (name, value, owners): len(owners)
                }
            else:
                assert found[name, value, owners] == len(owners)


# -- of what a replica knows -------------------------------------------------------------------------

ROWS_OF = {"a": 300, "b": 7}
BUFFER = 5  # values
LIMIT = timedelta(seconds=20)


class Job:
    """Ranks of replicas of these sizes, with their parts of two parameters in shards and of a buffer."""

    def __init__(self, sizes: Sequence[int]) -> None:
        firsts = [0, *accumulate(sizes)]
        self.replicas = [range(a, a + n) for a, n in zip(firsts, sizes, strict=False)]
        self.world = sum(sizes)
        self.held = list[dict[str, range]]()  # of each rank and parameter, the numbers of its values
        for n in sizes:
            ends = {name: [0, *accumulate(shards(rows, n))] for name, rows in ROWS_OF.items()}
            self.held += [{name: range(end[i], end[i + 1]) for name, end in ends.items()} for i in range(n)]

    def layout(self, rank: int) -> list[dict[str, torch.Tensor]]:
        sizes = {name: len(numbers) for name, numbers in self.held[rank].items()}
        return [{name: torch.zeros(n) for name, n in {**sizes, "buffer": BUFFER}.items()}]

    def columns(self, rank: int) -> Columns:
        lengths = [{name: len(numbers) for name, numbers in of.items()} for of in self.held]
        return Columns(self.replicas, rank, lengths)

    def links(self, rank: int) -> ReplicaLinks:
        """The network between replicas, for the rank of this process."""
        columns = self.columns(rank)
        links = ReplicaLinks(rank, self.replicas, Groups.open(LIMIT), "error", None, columns.ranks, columns.cut)
        links.lay_out(self.layout(rank))
        return links

    def part(self, whole: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
        """A rank's vector."""
        shards = [whole[name][numbers.start : numbers.stop] for name, numbers in self.held[rank].items()]
        return torch.cat([*shards, whole["buffer"]])


def drawn(seed: Sequence[int]) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(seed)
    sizes = {**ROWS_OF, "buffer": BUFFER}
    return {name: torch.tensor(draw.normal(size=n), dtype=torch.float32) for name, n in sizes.items()}


def state(job: Job, replica: int, rank: int) -> dict[str, Any]:
    """State of a rank in a replica: vectors, and an optimizer's state by the names of parameters."""
    whole = drawn([replica])
    named = {name: {"momentum": whole[name][n.start : n.stop] * 2} for name, n in job.held[rank].items()}
    return {"vectors": [job.part(whole, rank)], "outer": [{"state": named, "lr": 0.1}], "step": torch.ones(1)}


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (4, 2, 3)])
def test_state_of_another_replica_is_put_together(sizes: Sequence[int]) -> None:
    job = Job(sizes)
    layouts = [LayoutInColumns(job.layout(rank), job.columns(rank).cut) for rank in range(job.world)]
    for of, ranks in enumerate(job.replicas):
        for rank in range(job.world):
            theirs = []
            for column in job.columns(rank).ranks:
                source = column[of]
                assert source in ranks
                number = job.columns(source).ranks.index(column)
                theirs.append(layouts[source].pieces(state(job, of, source), number))
            torch.testing.assert_close(layouts[rank].whole(theirs), state(job, of, rank), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (4, 2, 3)])
def test_parts_of_vectors_come_back(sizes: Sequence[int]) -> None:
    """A buffer is in all columns, and that of the first one counts; the other parts have their own values."""
    job, whole = Job(sizes), drawn([0])
    for rank in range(job.world):
        layout, vector = LayoutInColumns(job.layout(rank), job.columns(rank).cut), job.part(whole, rank)
        parts = [layout.parts([vector], number) for number in range(len(job.columns(rank).ranks))]
        named = [dict(layout.by_name(part, number)) for number, part in enumerate(parts)]
        for name, numbers in job.held[rank].items():
            found = torch.cat([part[name] for part in named])
            torch.testing.assert_close(found, whole[name][numbers.start : numbers.stop], rtol=0, atol=0)
        assert all(torch.equal(part["buffer"], whole["buffer"]) for part in named)
        for part in named[1:]:
            part["buffer"].zero_()
        back = torch.full_like(vector, torch.nan)
        layout.put(parts, [back])
        assert torch.equal(back, vector)


class OneColumn:
    """Stands for a transport of a column: exchanges an offer with a peer that has zeros, or misses it."""

    weight = 3.0  # of the peer

    def __init__(self, like: Sequence[torch.Tensor], comes: bool) -> None:
        self.outgoing, self.comes = [torch.empty_like(part) for part in like], comes

    def offer(self, weight: float, candidates: Sequence[int], round_number: float) -> None:
        self.offered = weight, candidates, round_number

    def result(self, wait: float = 0.0) -> PairResult | None:
        theirs = [torch.zeros_like(part) for part in self.outgoing]
        return PairResult(1, self.weight, theirs, 10) if self.comes else None

    withdraw = result


@pytest.mark.parametrize("comes", [(True, True), (True, False), (False, False)])
def test_a_part_that_is_not_exchanged_stays(comes: tuple[bool, bool]) -> None:
    """A rank of the small replica offers pieces to two ranks, of which one may be late."""
    job = Job((2, 1))
    layout, [own] = LayoutInColumns(job.layout(2), job.columns(2).cut), [job.part(drawn([1]), 2)]
    columns = [OneColumn(layout.parts([own], number), there) for number, there in enumerate(comes)]
    pairs = PairsInColumns(columns, [own], layout)  # type: ignore[arg-type]
    pairs.outgoing[0].copy_(own)
    pairs.offer(2.0, [0], 7)
    assert [column.offered for column in columns] == [(2.0, [0], 7)] * 2
    assert (pairs.result() is not None) == all(comes)
    if (found := pairs.withdraw()) is None:
        assert not any(comes)
        return
    assert (found.peer, found.weight, found.sent) == (1, 3.0, 10 * sum(comes))
    first = len(job.held[0]["a"])  # values of "a" in the first column
    [theirs], stays = found.vectors, own[first : len(job.held[2]["a"])]
    assert not theirs[:first].any()
    assert torch.equal(theirs[first : len(job.held[2]["a"])], torch.zeros_like(stays) if comes[1] else stays)
    assert pairs.scale([torch.ones_like(own)], 2.0) == 1.0
    for column in columns:
        column.weight = 0.0  # the peer has begun again, and does not count
    pairs.withdraw()
    assert pairs.scale([torch.ones_like(own)], 2.0) == 0.0


def taken_over(sizes: Sequence[int]) -> list[tuple[Any, Any]]:
    """The state of each rank's replica, as received here and as expected."""
    dist.init_process_group("gloo", timeout=LIMIT)
    job, rank = Job(sizes), dist.get_rank()
    links, found = job.links(rank), []
    for of, ranks in enumerate(job.replicas):
        for source in ranks:
            found.append((links.value_of(source, state(job, links.index, rank)), state(job, of, rank)))
    with pytest.raises(HeteroError, match="a vector of 3 values was to be exchanged"):
        links.average([torch.ones(3)], [1] * len(sizes), [torch.zeros(3)])
    dist.barrier()
    return found


def test_ranks_take_over_the_state_of_another_replica() -> None:
    for rank in run(taken_over, 4, (2, 1, 1)):
        for came, expected in rank:
            torch.testing.assert_close(came, expected, rtol=0, atol=0)


# -- low-bit wires -----------------------------------------------------------------------------------

STEPS = 5


def exchanged(sizes: Sequence[int], wire: str) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """The mean of each step, the residuals, and the bytes that this rank has sent."""
    dist.init_process_group("gloo", timeout=LIMIT)
    job, rank = Job(sizes), dist.get_rank()
    links = job.links(rank)
    reference = torch.zeros(len(job.part(drawn([0]), rank)))
    feedback, means = links.feedback(wire, [len(reference) - BUFFER]), []
    for step in range(STEPS):
        own = job.part(drawn([links.index, step]), rank)
        contribution = Contribution([own], [1] * len(sizes), [reference], wire, feedback=feedback)
        means.append(links.exchange(contribution).mean[0].clone())
    assert feedback is not None
    dist.barrier()
    return means, feedback.state_dict(), links.traffic.bytes


def by_hand(sizes: Sequence[int], wire: str) -> tuple[list[dict[str, torch.Tensor]], dict[tuple[str, int], float], int]:
    """Means of whole parameters, residuals of each value and of the padding, and the number of all bytes."""
    job, encoding, count = Job(sizes), encoding_of(wire), len(sizes)
    assert encoding is not None
    owners = {
        (name, value): tuple(next(r for r in ranks if value in job.held[r][name]) for ranks in job.replicas)
        for name, rows in ROWS_OF.items()
        for value in range(rows)
    }
    means = [{name: torch.zeros(rows) for name, rows in ROWS_OF.items()} for _ in range(STEPS)]
    left = dict.fromkeys(owners, 0.0)

    def coded(rest: torch.Tensor) -> torch.Tensor:
        """The values that arrive; the residuals take their place."""
        message, arrived = torch.zeros(encoding.bytes(len(rest)), dtype=torch.uint8), torch.zeros(len(rest))
        encoding.encode(rest, message)
        encoding.add(message, arrived)
        return arrived

    sent = 0
    for index, column in enumerate(sorted(set(owners.values()))):
        mine = [value for value in owners if owners[value] == column]
        part = -(-len(mine) // count)
        rests = [torch.zeros(len(mine)) for _ in range(count)]
        sums = torch.zeros(count, part)
        sent += STEPS * count * (encoding.bytes(len(mine)) if count == 2 else 4 * encoding.bytes(part))
        for step in range(STEPS):
            total = torch.zeros(count * part)
            for replica, rest in enumerate(rests):
                own = drawn([replica, step])
                rest += torch.stack([own[name][value] for name, value in mine]) * torch.tensor(1 / count)
                if count == 2:
                    total[: len(mine)] += coded(rest)
                else:
                    padded = torch.cat([rest, torch.zeros(count * part - len(mine))])
                    total += torch.cat([coded(piece) for piece in padded.split(part)])
                    rest.copy_(padded[: len(mine)])
            if count > 2:
                sums += total.view(count, part)
                total = torch.cat([coded(row) for row in sums])
            for (name, value), found in zip(mine, total.tolist(), strict=False):
                means[step][name][value] = found
        for number, value in enumerate(mine):
            left[value] = sum(float(rest[number]) for rest in rests) + (
                float(sums.view(-1)[number]) if count > 2 else 0
            )
        if count > 2:  # a wire without a level 0 has residuals of zeros, too
            left["padding", index] = float(sums.view(-1)[len(mine) :].sum())
    return means, left, sent


@pytest.mark.long(after=2)
@pytest.mark.parametrize("sizes", [(2, 1), (2, 1, 1)])
@pytest.mark.parametrize("wire", LOW_BIT)
def test_a_low_bit_wire_carries_each_column_by_itself(sizes: Sequence[int], wire: str) -> None:
    job, results, (means, left, coded_bytes) = Job(sizes), run(exchanged, sum(sizes), sizes, wire), by_hand(sizes, wire)
    buffers = sum(len(list(job.columns(rank).cut("buffer", BUFFER))) for rank in range(job.world))
    plain = STEPS * buffers * round(2 * (len(sizes) - 1) / len(sizes) * 4 * BUFFER)
    for step, mean in enumerate(means):
        truth = sum(drawn([replica, step])["buffer"] for replica in range(len(sizes))) / len(sizes)
        for rank, (found, *_) in enumerate(results):
            expected = job.part({**mean, "buffer": truth}, rank)
            torch.testing.assert_close(found[step], expected, rtol=0, atol=1e-6)
    for name, rows in ROWS_OF.items():  # arrived values and residuals make up the sum
        exact = sum(drawn([r, step])[name] for step in range(STEPS) for r in range(len(sizes))) / len(sizes)
        arrived = sum(mean[name] for mean in means)
        rest = torch.tensor([left[name, value] for value in range(rows)])
        torch.testing.assert_close(arrived + rest, exact, rtol=0, atol=1e-5)
    residuals = sum(sum(float(each.double().sum()) for each in state) for _, state, _ in results)
    assert residuals == pytest.approx(sum(left.values()), abs=1e-5)
    assert sum(sent for *_, sent in results) == coded_bytes + plain
