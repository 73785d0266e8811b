"""The wire and the turns of a center that a thread keeps."""

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from homes import EACH, LIMIT, Case, per_body
from ranks import run

from lightning_hetero.comm.all_reduce import ReplicaLinks
from lightning_hetero.comm.centers.base import Center, CenterLayout, CenterPart, CenterRule
from lightning_hetero.comm.centers.client import CenterClient
from lightning_hetero.comm.centers.thread import CenterWire, ChangeWire, NarrowCenterWire
from lightning_hetero.comm.compression import DTYPES
from lightning_hetero.comm.groups import Groups

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
narrow = pytest.mark.parametrize("wire", list(ROUNDING))


def drawn(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1001, generator=g), torch.randn(7, generator=g, dtype=torch.float64)]


# -- both ends of a wire -------------------------------------------------------------------------------------


def _ends(wire: str, mutant: bool) -> list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]]:
    """For each exchange: the client's values (as received, or true), the difference, the values known to both ends."""
    dist.init_process_group("gloo")
    rank, center, found = dist.get_rank(), drawn(0), []
    group, dtype = dist.group.WORLD, DTYPES[wire]
    end = CenterWire(group, 1 - rank) if dtype is None else NarrowCenterWire(group, 1 - rank, dtype)
    end.start(drawn(0))
    if mutant:
        end.round_difference = lambda _: None
    for step in range(20):
        values = drawn(step)
        if rank:
            assert end.fits(values)
            end.send_values(values)
            end.receive_difference(values)
            received = drawn(step)
        else:
            end.receive_values(values)
            received = [value.clone() for value in values]
            for value, c in zip(values, center, strict=True):
                value.sub_(c)
            end.round_difference(values)
            for value, c in zip(values, center, strict=True):
                c.add_(value, alpha=0.3)
            end.send_difference(values)
        known = [part.clone() for part in getattr(end, "_known", [])]
        found.append((received, values, known))
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_both_ends_of_a_wire_agree_bitwise(wire: str) -> None:
    host, client = run(_ends, 2, wire, False)
    for (received, difference, known), (truth, client_difference, known_there) in zip(host, client, strict=True):
        assert same(difference, client_difference)
        assert same(known, known_there)
        assert len(known) == (0 if wire == "fp32" else 2)
        for a, b in zip(received, truth, strict=True):
            # In 16 bits the change since the last known values is rounded once: errors do not add up over exchanges.
            assert (a - b).abs().max() <= 1.05 * ROUNDING.get(wire, 0.0) * 10


@narrow
def test_control_without_rounding_at_the_host_the_ends_differ(wire: str) -> None:
    host, client = run(_ends, 2, wire, True)
    assert not all(same(a[1], b[1]) for a, b in zip(host, client, strict=True))


# -- what is lost in rounding --------------------------------------------------------------------------------


def _approach(center: Center, layout: CenterLayout) -> tuple[list[torch.Tensor], Any]:
    """Let clients and the center each move by a quarter of the difference."""
    center.open([torch.zeros_like(value) for value in drawn(0)])
    own = drawn(layout.rank)
    for _ in range(60):
        dist.barrier()
        difference = [value.clone() for value in own]
        center.push_pull(difference, 0.25)
        for value, moved in zip(own, difference, strict=True):
            value.sub_(moved, alpha=0.25)
    dist.barrier()
    return own, center.read() if layout.rank == layout.host else None


@narrow
def test_clients_and_center_meet_far_beyond_the_rounding_of_one_exchange(wire: str) -> None:
    ranks = per_body(wire, [Case(_approach)])[0]
    center = ranks[0][1][0]
    everybody = [rank[0] for rank in ranks]
    for i in range(2):
        # The sum is conserved in spite of all rounding: clients lose as much as the center gains.
        total = center[i].double() + sum(own[i].double() for own in everybody)
        start = sum(drawn(rank)[i].double() for rank in range(3))
        assert (total - start).abs().max() < 1e-4 if i == 0 else 1e-12
        for own in everybody:
            assert (own[i] - center[i]).abs().max() < ROUNDING[wire] / 50


# -- changes in few bits -------------------------------------------------------------------------------------

LENGTHS, RESUMES, SKIPS = [900, 7], 12, 6  # of 1001 and 7 values; in these exchanges


def _changes(wire: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[torch.Tensor]]]:
    """Sums of what was meant to arrive or has arrived, the residuals, and the known values after each exchange."""
    dist.init_process_group("gloo")
    rank, known, left_out = dist.get_rank(), drawn(0), [torch.zeros(length) for length in LENGTHS]
    end = ChangeWire(dist.group.WORLD, 1 - rank, wire, CenterPart(CenterRule(), known, LENGTHS, left_out), rank == 0)
    sums, seen, table = [torch.zeros(length, dtype=torch.float64) for length in LENGTHS], [], torch.ones(2)
    end.start([*drawn(0), table])
    for step in range(60):
        center = [*drawn(100 + min(step, 20)), table]  # at rest in the end
        if step == RESUMES:
            for value in known if rank else ():
                value.add_(0.01)
            end.start(center)
        values = [*(value * 0.1 for value in drawn(step)), table.clone()]
        counts = step != SKIPS
        before = [rest.clone() for rest in left_out]
        if rank:
            meant = [value.clone() for value in values]
            end.send_values(values, counts)
            assert counts or same(before, left_out)
            end.receive_difference(values)
            for own, value in zip(known, values, strict=False):
                own.copy_(value)
            assert all(torch.equal(x[n:], y[n:]) for x, y, n in zip(values, center, LENGTHS, strict=False))  # buffers
        else:
            meant = [torch.full_like(value, math.nan) for value in values]
            end.receive_values(meant)
            assert counts or not any(part[:length].any() for part, length in zip(meant, LENGTHS, strict=False))
            values = [value.clone() for value in center]
            end.send_difference(values)
        for total, value, length in zip(sums, meant, LENGTHS, strict=False):
            total += value[:length] * counts
        received = known if rank else end._known
        seen.append([value[:length].clone() for value, length in zip(received, LENGTHS, strict=True)])
    return sums, left_out, seen


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8", "int4", "2bit", "topk:0.1"])
def test_changes_in_few_bits_all_arrive_or_are_still_to_be_sent(wire: str) -> None:
    (arrived, _, known), (meant, left_out, known_there) = run(_changes, 2, wire)
    for here, there, rest in zip(arrived, meant, left_out, strict=True):
        assert (here + rest - there).abs().max() < 1e-5
        assert rest.any()
    assert all(map(same, known, known_there))
    for value, truth, length in zip(known[-1], drawn(120), LENGTHS, strict=True):
        assert (value - truth[:length]).abs().max() < 0.02


# -- numbers that do not fit ---------------------------------------------------------------------------------


def _far(center: Center, layout: CenterLayout) -> tuple[Any, Any]:
    """A client is farther from the center than fp16 can express, but both are near the values where the ends start."""
    center.open([torch.zeros(5)])
    if layout.rank == 2:
        center.push_pull([torch.full((5,), -60000.0)], 1.0)
    dist.barrier()
    own, exchange = torch.full((5,), 60000.0), None
    if layout.rank == 1:
        exchange = center.push_pull([own], 0.5), own.clone()
    dist.barrier()
    middle = center.read() if layout.rank == layout.host else None
    dist.barrier()
    good, again = torch.zeros(5), None
    if layout.rank == 1:
        again = center.push_pull([good], 0.5), good
    dist.barrier()
    return exchange, middle, again, center.read() if layout.rank == layout.host else None


def test_a_difference_that_does_not_fit_leaves_the_center_alone() -> None:
    host, client, _ = per_body("fp16", [Case(_far)])[0]
    (exchange, _), (after, _) = client[0], host[1]
    assert not math.isfinite(exchange.square)
    assert (after[0] == -60000.0).all()
    exchange, difference = client[2]
    assert math.isfinite(exchange.square)
    assert (difference - 60000.0).abs().max() <= 2 * 60000 * ROUNDING["fp16"]


# -- a center that is set ------------------------------------------------------------------------------------


def _set(center: Center, layout: CenterLayout) -> list[torch.Tensor]:
    """As in a resumed job: open the center with other values than those that are loaded then."""
    center.open([torch.zeros_like(value) for value in drawn(0)])
    client = CenterClient(center, ReplicaLinks(layout.rank, EACH, Groups.open(LIMIT)))
    client.write([value + 100 for value in drawn(0)], [0, 0, 0])
    own = [value + 100 + 0.01 * x for value, x in zip(drawn(0), drawn(1), strict=True)]
    client.push_pull(own, 0.0)()
    return own


@narrow
def test_the_first_exchange_after_a_resume_is_as_exact_as_any(wire: str) -> None:
    for differences in per_body(wire, [Case(_set)])[0]:
        for difference, truth in zip(differences, drawn(1), strict=True):
            assert (difference - 0.01 * truth).abs().max() <= 0.01 * 4 * 3 * ROUNDING[wire] + 4e-5


# -- turns ---------------------------------------------------------------------------------------------------


def _slow_second(center: Center, layout: CenterLayout) -> list[int]:
    """Positions of this rank's exchanges among those of all ranks."""
    center.open([torch.zeros(3)])
    dist.barrier()
    when = []
    for _ in range(6):
        if layout.rank == 1:
            time.sleep(0.02)
        when.append(sum(center.push_pull([torch.ones(3)], 0.1).counts) - 1)
    dist.barrier()
    return when


@pytest.mark.parametrize("home", ["turns", "turns-bf16"])
def test_clients_are_served_in_turn_however_slow_one_is(home: str) -> None:
    assert per_body(home, [Case(_slow_second)])[0] == [list(range(rank, 18, 3)) for rank in range(3)]


def test_control_else_whoever_comes_first_is_served_first() -> None:
    ranks = per_body("thread", [Case(_slow_second)])[0]
    assert sorted(moment for rank in ranks for moment in rank) == list(range(18))
    assert ranks != [list(range(rank, 18, 3)) for rank in range(3)]
    assert ranks[1][-1] == 17
