"""Sums and means over real ranks, against torch and NumPy."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run

from lightning_hetero.comm.all_reduce import Contribution, ReplicaLinks
from lightning_hetero.comm.compression import DTYPES, sum_over
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.staging import BufferPool
from lightning_hetero.errors import NotFiniteError

LIMIT = timedelta(seconds=20)
ROUNDING = {"bf16": (2.0**-8, 2.0**-134), "fp16": (2.0**-11, 2.0**-25)}  # half a place: relative; of tiny numbers


def joined(function: Callable[..., Any], *args: Any) -> Any:
    dist.init_process_group("gloo", timeout=LIMIT)
    return function(*args)


# -- sums ----------------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 7, 1001)
KINDS = [(wire, dtype) for wire in DTYPES for dtype in (torch.float32, torch.float64)]


def vector(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of both signs, over six orders of magnitude."""
    g = torch.Generator().manual_seed(100 * rank + length)
    numbers = torch.randn(length, generator=g, dtype=torch.float64)
    return (numbers * 10 ** (6 * torch.rand(length, generator=g, dtype=torch.float64) - 4)).to(dtype)


def _sums() -> list[torch.Tensor]:
    pool = BufferPool()
    return [
        sum_over(None, vector(dist.get_rank(), length, dtype).to(DTYPES[wire] or dtype), pool).clone()
        for length in LENGTHS
        for wire, dtype in KINDS
        for _ in range(2)  # the memory is used again
    ]


def one_by_one(terms: list[torch.Tensor]) -> torch.Tensor:
    """The control: an all-reduce in 16 bits."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_sum_is_rounded_once_on_the_way_there_and_once_on_the_way_back(members: int) -> None:
    results = run(joined, members, _sums)
    found = iter(zip(*results, strict=True))
    worse = 0
    for length in LENGTHS:
        for wire, dtype in KINDS:
            terms = [vector(rank, length, dtype) for rank in range(members)]
            exact, sizes = sum(term.double() for term in terms), sum(term.double().abs() for term in terms)
            sums = next(found)
            again = next(found)
            assert all(torch.equal(a, sums[0]) for a in (*sums, *again))
            assert sums[0].dtype == (DTYPES[wire] or dtype)
            off = (sums[0].double() - exact).abs()
            own = members * torch.finfo(dtype).eps * sizes  # of the additions
            if wire == "fp32":
                assert (off <= own).all()
                continue
            narrow = DTYPES[wire]
            there, tiny = ROUNDING[wire]
            rounded = sum(term.to(narrow).double() for term in terms)  # what arrives
            assert ((rounded - exact).abs() <= there * sizes + members * tiny).all()
            assert ((sums[0].double() - rounded).abs() <= there * rounded.abs() + tiny + 2 * own).all()
            naive = one_by_one([term.to(narrow) for term in terms]).double()
            worse += int(((naive - rounded).abs() > there * rounded.abs() + tiny + 2 * own).sum())
    assert worse > 100 if members > 2 else worse == 0


def test_small_terms_are_not_swallowed_one_by_one() -> None:
    # 256 + 1 is 256 in bf16, as often as one adds 1; 256 + 1 + 1 is not.
    for result in run(joined, 3, _large_and_small):
        assert result.tolist() == [258.0] * 5
    terms = [torch.tensor([term], dtype=torch.bfloat16) for term in (256.0, 1.0, 1.0)]
    assert one_by_one(terms).item() == 256.0


def _large_and_small() -> torch.Tensor:
    own = torch.full((5,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    return sum_over(None, own, BufferPool()).clone()


# -- means over replicas -------------------------------------------------------------------------------------

REPLICAS, WEIGHTS = [[0, 1], [2]], [8, 4]
SHAPES = [(1001, np.float32), (7, np.float64)]


def values(replica: int) -> list[np.ndarray]:
    draw = np.random.default_rng(replica)
    return [draw.normal(size=length).astype(dtype) for length, dtype in SHAPES]


def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.tensor(array) for array in arrays]


def copies(flats: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors, as an average overwrites its arguments."""
    return [flat.clone() for flat in flats]


def reference() -> list[torch.Tensor]:
    return tensors([np.full(length, 0.25, dtype) for length, dtype in SHAPES])


def in_numpy(weights: list[float], replicas: list[list[np.ndarray]]) -> tuple[list[np.ndarray], float]:
    """The weighted mean; the RMS distance from it."""
    shares = np.array(weights, np.float64) / np.sum(weights)
    each = [np.concatenate([part.astype(np.float64) for part in parts]) for parts in replicas]
    mean = sum(share * flat for share, flat in zip(shares, each, strict=True))
    distance = np.sqrt(sum(share * ((flat - mean) ** 2).sum() for share, flat in zip(shares, each, strict=True)))
    return np.split(mean, np.cumsum([len(part) for part in replicas[0]])[:-1]), float(distance)


def links(on_nan: Any = "error", replicas: list[list[int]] = REPLICAS) -> ReplicaLinks:
    return ReplicaLinks(dist.get_rank(), replicas, Groups.open(LIMIT), on_nan)


def _averages() -> list[Any]:
    wires = links()
    own, found = tensors(values(wires.index)), []
    found.append(wires.average(copies(own), WEIGHTS, reference()))
    found.append(wires.average(copies(own), [1, 1], reference()))
    found.append(wires.average(copies(own), [0, 3], reference()))
    for wire in DTYPES:
        for member in range(wires.members):
            out = [torch.empty_like(old) for old in reference()]
            payload = 10.0 + dist.get_rank()
            mine = Contribution(copies(own), WEIGHTS, reference(), wire, payload)
            found.append(wires.begin(mine, out, member, "away").result())
    for average in found:
        for mean, away, mine in zip(average.mean, average.away, own, strict=False):  # none in the foreground
            torch.testing.assert_close(away, mean - mine)
    assert all(average.away for average in found[3:])
    return found


def test_the_weighted_mean_of_replicas_of_2_and_1_ranks() -> None:
    results = run(joined, 3, _averages)
    cases: list[Any] = [(weights, "fp32", None) for weights in (WEIGHTS, [1, 1], [0, 3])]
    cases += [(WEIGHTS, wire, member) for wire in DTYPES for member in range(2)]
    for case, averages in zip(cases, zip(*results, strict=True), strict=True):
        weights, wire, turn = case
        mean, distance = in_numpy(weights, [values(0), values(1)])
        for average in averages:
            assert all(torch.equal(a, b) for a, b in zip(average.mean, averages[0].mean, strict=True))
            assert (average.distance, average.healthy) == (averages[0].distance, [True, True])
            there = ROUNDING.get(wire, (0.0, 0.0))[0]
            assert average.distance == pytest.approx(distance, rel=1e-5 + 4 * there)
            for new, truth, (_, dtype) in zip(average.mean, mean, SHAPES, strict=True):
                assert new.numpy().dtype == dtype
                # Each replica sends its difference from the reference, times its weight; then the sum of these is sent.
                limit = 2.1 * there * 4 + 4 * np.finfo(dtype).eps
                assert np.abs(new.double().numpy() - truth).max() <= limit
            if turn is not None:
                assert average.payloads == [10.0 + turn, 12.0]
    # Weights matter; the reference does not.
    even, uneven = (in_numpy(weights, [values(0), values(1)])[0][0] for weights in ([1, 1], WEIGHTS))
    assert np.abs(even - uneven).max() > 0.1


def broken(replica: int, bad: int, number: float) -> list[np.ndarray]:
    parts = values(replica)
    if replica == bad:
        parts[0][500] = number
    return parts


def _skip() -> tuple[Any, Any, list[int]]:
    wires = links("skip", [[0, 1], [2], [3]])
    own = tensors(broken(wires.index, 1, float("nan")))
    first = wires.average(copies(own), [3, 2, 1], reference())
    out = [torch.empty_like(old) for old in reference()]
    own = tensors(broken(wires.index, 0, float("inf")))
    second = wires.begin(Contribution(own, [3, 2, 1], reference()), out, 1, "away").result()
    return first, second, wires.traffic.skipped


def test_a_broken_replica_is_left_out() -> None:
    results = run(joined, 4, _skip)
    for first, second, skipped in results:
        assert (first.healthy, second.healthy) == ([True, False, True], [False, True, True])
        assert skipped == [1, 0]
        for average, well, weights in ((first, (0, 2), [3, 1]), (second, (1, 2), [2, 1])):
            mean, distance = in_numpy(weights, [values(i) for i in well])
            for new, truth in zip(average.mean, mean, strict=True):
                assert np.allclose(new.double().numpy(), truth, rtol=0, atol=2e-6)
            assert average.distance == pytest.approx(distance, rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(first.mean, results[0][0].mean, strict=True))


def _refuse(on_nan: str, bad: list[int], background: bool) -> list[int]:
    wires = links(on_nan, [[0, 1], [2], [3]])
    own = tensors(broken(wires.index, wires.index if wires.index in bad else -1, float("nan")))
    out = [torch.empty_like(old) for old in reference()]
    weights, old = [1, 1, 1], reference()
    with pytest.raises(NotFiniteError) as caught:
        _ = (
            wires.begin(Contribution(own, weights, old, "bf16"), out, 1).result()
            if background
            else wires.average(copies(own), weights, old, out)
        )
    good = tensors(values(wires.index))  # nothing is left in the wires
    mean = in_numpy([1, 1, 1], [values(i) for i in range(3)])[0]
    again = wires.average(good, [1, 1, 1], reference(), out).mean
    assert all(np.allclose(new.numpy(), truth, rtol=0, atol=2e-6) for new, truth in zip(again, mean, strict=True))
    return list(caught.value.replicas)


@pytest.mark.parametrize(
    ("on_nan", "bad", "background"),
    [("error", [1], False), ("error", [0, 2], False), ("error", [0], True), ("skip", [0, 1, 2], True)],
)
def test_broken_replicas_are_named_on_every_rank(on_nan: str, bad: list[int], background: bool) -> None:
    assert run(joined, 4, _refuse, on_nan, bad, background) == [bad] * 4


def _at_once() -> tuple[bool, Any, Any, Any]:
    wires = links()
    wires.prepare()  # or the first exchange would wait for the second replica, to make its groups
    many = [torch.full((100_003,), float(1 + wires.index)), torch.full((7,), float(1 + wires.index)).double()]
    old = [torch.zeros_like(part) for part in many]
    out = [torch.empty_like(part) for part in many]
    own = tensors(values(wires.index))

    def behind() -> Any:
        return wires.begin(Contribution(many, WEIGHTS, old, "bf16"), out, 1)

    # The second replica joins in the background only after the foreground is done, which must not wait for it.
    late = wires.index == 1
    exchange = None if late else behind()
    front = wires.average(copies(own), WEIGHTS, reference())
    under_way = exchange is not None and exchange.running
    dist.barrier()
    if late:
        exchange = behind()
    second = wires.average([part + 1 for part in own], WEIGHTS, reference())
    return under_way, front, second, exchange.result()


def test_a_foreground_average_while_another_is_under_way() -> None:
    mean, distance = in_numpy(WEIGHTS, [values(0), values(1)])
    results = run(joined, 3, _at_once)
    assert [under_way for under_way, *_ in results] == [True, True, False]
    for _, front, second, back in results:
        for new, moved, truth in zip(front.mean, second.mean, mean, strict=True):
            assert np.allclose(new.double().numpy(), truth, rtol=0, atol=2e-6)
            assert np.allclose(moved.double().numpy(), truth + 1, rtol=0, atol=2e-6)
        assert front.distance == pytest.approx(distance, rel=1e-5)
        assert second.distance == pytest.approx(distance, rel=1e-5)
        for part in back.mean:
            assert np.allclose(part.numpy(), 4 / 3, rtol=2.0**-7, atol=0)
            assert (part == part[0]).all()
