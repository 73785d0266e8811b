"""Sums and means over real ranks on low-bit wires: conservation, equality, bytes."""

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run

from lightning_hetero.comm import compression
from lightning_hetero.comm import compression as wire_module
from lightning_hetero.comm.all_reduce import Contribution, ReplicaLinks
from lightning_hetero.comm.compression import LOW_BIT, encoding_of
from lightning_hetero.comm.groups import Groups
from lightning_hetero.errors import NotFiniteError

LIMIT = timedelta(seconds=20)
LENGTHS, EXACT = (10_007, 5, 1), (7, 0, 1)  # of the vectors; of these, last values that are sent as they are
WEIGHTS = [3, 2, 1]


def joined(function: Any, *args: Any) -> Any:
    dist.init_process_group("gloo", timeout=LIMIT)
    return function(*args)


def links(replicas: list[list[int]], on_nan: Any = "error") -> ReplicaLinks:
    return ReplicaLinks(dist.get_rank(), replicas, Groups.open(LIMIT), on_nan)


def values(replica: int, step: int) -> list[torch.Tensor]:
    draw = np.random.default_rng([replica, step])
    scale = np.random.default_rng(replica).uniform(0.1, 1, size=max(LENGTHS))
    return [torch.tensor(1 + draw.normal(size=n) * scale[:n] + replica, dtype=torch.float32) for n in LENGTHS]


def _several(replicas: list[list[int]], wire: str, steps: int) -> Any:
    """Means of each step, in the background, by rotating members; and the residuals in the end."""
    own = links(replicas)
    reference = [torch.ones(n) for n in LENGTHS]
    feedback = own.feedback(wire, [n - m for n, m in zip(LENGTHS, EXACT, strict=True)])
    found = []
    for step in range(steps):
        out = [torch.empty(n) for n in LENGTHS]
        weights = WEIGHTS[: len(replicas)]
        mine = Contribution(values(own.index, step), weights, reference, wire, float(own.index), feedback)
        found.append([mean.clone() for mean in own.begin(mine, out, step, "difference").result().difference])
    assert feedback is not None
    return found, feedback.sent, feedback.summed, own.traffic.bytes


@pytest.mark.parametrize("wire", LOW_BIT)
@pytest.mark.parametrize("replicas", [[[0, 1], [2]], [[0], [1, 2], [3]]])
def test_means_and_residuals_add_up_to_all_differences(replicas: list[list[int]], wire: str) -> None:
    steps, count = 12, len(replicas)
    results = run(joined, sum(map(len, replicas)), _several, replicas, wire, steps)
    weights = np.array(WEIGHTS[:count]) / sum(WEIGHTS[:count])
    truth = [
        sum(w * values(r, s)[i].double() for r, w in enumerate(weights)) - 1 for s in range(steps) for i in range(3)
    ]
    for means, *_ in results:  # bitwise the same everywhere
        assert all(
            torch.equal(a, b) for m, n in zip(means, results[0][0], strict=True) for a, b in zip(m, n, strict=True)
        )
    for ranks in replicas:  # all ranks of a replica keep the same, whichever of them has exchanged
        for rank in ranks:
            for kind in (1, 2):
                kept, others = results[rank][kind], results[ranks[0]][kind]
                assert all(torch.equal(a, b) for a, b in zip(kept, others, strict=True))
    means, leaders = results[0][0], [results[ranks[0]] for ranks in replicas]
    for i, (length, exact) in enumerate(zip(LENGTHS, EXACT, strict=True)):
        arrived = sum(step[i].double() for step in means)
        whole = sum(truth[i::3])
        coded = length - exact
        left = sum(leader[1][i].double() for leader in leaders)
        if count > 2:
            left = left + torch.cat([leader[2][i].double() for leader in leaders])[:coded]
        assert (arrived[:coded] + left - whole[:coded]).abs().max() <= 1e-5 if coded else True
        assert (arrived[coded:] - whole[coded:]).abs().max() <= 1e-5 if exact else True
    if wire != "int8":
        assert (sum(step[0].double() for step in means) - sum(truth[0::3])).abs().max() > 1e-3


def _counted(count: int, wire: str, length: int) -> tuple[int, int]:
    """Bytes of one exchange: as reported, and as passed to PyTorch."""
    own, given = links([[rank] for rank in range(count)]), []
    isend, gather, reduce = dist.isend, wire_module.all_gather, dist.all_reduce

    def sending(tensor: torch.Tensor, *args: Any) -> Any:
        given.append(tensor.nbytes)
        return isend(tensor, *args)

    def gathering(out: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any:
        given.append((count - 1) * tensor.nbytes)
        return gather(out, tensor, group=group)

    def reducing(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is left to reduce")

    wire_module.dist.isend, compression.all_gather, wire_module.dist.all_reduce = sending, gathering, reducing
    mine = Contribution(
        [torch.randn(length)], [1] * count, [torch.zeros(length)], wire, feedback=own.feedback(wire, [length])
    )
    own.exchange(mine)
    wire_module.dist.isend, compression.all_gather, wire_module.dist.all_reduce = isend, gather, reduce
    return own.traffic.bytes, sum(given)


@pytest.mark.parametrize("count", [2, 3])
def test_the_bytes_that_are_reported_are_sent_and_are_those_of_theory(count: int) -> None:
    length = 6 * 64 * 4096  # whole blocks of each member's part, whatever the wire
    fp32 = 2 * (count - 1) / count * 4 * length
    parts = {"int8": 1 / 4, "int4": 1 / 8, "2bit": 1 / 16, "topk:0.02": 1 / 160, "topk:0.015625:bits=2": 1 / 256}
    for wire, part in parts.items():
        for reported, given in run(joined, count, _counted, count, wire, length):
            assert reported == given
            assert part <= reported / fp32 <= 1.02 * part


def _broken(wire: str) -> Any:
    own = links([[0], [1], [2]], "skip")
    feedback = own.feedback(wire, [1000])
    assert feedback is not None
    found = []
    for step in range(3):
        mine = torch.full((1000,), 1.0 + own.index)
        if step == 1 and own.index == 1:
            mine[7] = float("inf")
        average = own.exchange(Contribution([mine], [1, 1, 1], [torch.zeros(1000)], wire, feedback=feedback))
        found.append((average.healthy, average.mean[0].clone()))
    strict, bad = links([[0], [1], [2]]), torch.full((1000,), float("nan") if own.index == 2 else 1.0)
    before = [rest.clone() for rest in feedback.state_dict()]
    with pytest.raises(NotFiniteError) as caught:
        strict.exchange(Contribution([bad], [1, 1, 1], [torch.zeros(1000)], wire, feedback=feedback))
    untouched = all(torch.equal(a, b) for a, b in zip(before, feedback.state_dict(), strict=True))
    return found, list(caught.value.replicas), untouched


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_a_replica_that_is_not_finite_is_left_out_and_spoils_no_residual(wire: str) -> None:
    results = run(joined, 3, _broken, wire)
    for found, named, untouched in results:
        assert [healthy for healthy, _ in found] == [[True] * 3, [True, False, True], [True] * 3]
        for _, mean in found:
            assert (mean - 2).abs().max() <= 0.01
        assert (named, untouched) == ([2], True)
        assert all(torch.equal(a[1], b[1]) for a, b in zip(found, results[0][0], strict=True))


def test_one_replica_needs_no_residual() -> None:
    assert encoding_of("bf16") is None
    assert run(joined, 1, _alone) == [True]


def _alone() -> bool:
    return links([[0]]).feedback("int8", [3]) is None
