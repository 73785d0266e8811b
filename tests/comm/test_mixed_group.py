"""A process group for unlike devices: two levels against sums by NumPy, and DDP over it against one process."""

import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm import staging
from lightning_hetero.comm.groups import Groups, MixedGroup

ISLANDS: list[list[tuple[int, ...]]] = [[], [(0, 1)], [(1, 3)], [(0, 2), (1, 3)], [(0, 1, 2)]]


class Islands(Groups):
    """Connects islands over gloo: there is no NCCL here. What the levels do is the same."""

    made: list[tuple[int, ...]]

    def get(self, purpose: str, ranks: Any, backend: str = "gloo") -> dist.ProcessGroup | None:
        if purpose == "mixed, island":
            assert backend == "nccl"
            self.made = [*getattr(self, "made", []), tuple(ranks)]
        return super().get(purpose, ranks)


def _group(islands: list[tuple[int, ...]], seconds: float = 60.0) -> MixedGroup:
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    groups = Islands.open(timedelta(seconds=seconds))
    group = MixedGroup(groups, range(dist.get_world_size()), islands, dist.get_rank())
    group.kept = groups  # type: ignore[attr-defined]
    return group


def _own(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size))


def _reduced(islands: list[tuple[int, ...]]) -> dict[str, Any]:
    staging.PIECE = 4 * 100  # several pieces for each tensor
    group, rank = _group(islands), dist.get_rank()
    sums = [_own(rank, size) for size in (1, 7, 1000, 4097)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in sums]
    for work in reversed(works):
        work.wait()
    largest = torch.tensor([rank, 10 - rank, -rank])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    mean = _own(rank, 7)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    return {"sums": sums, "mean": mean, "largest": largest, "leads": group._leaders is not None}


@pytest.mark.parametrize("islands", ISLANDS)
def test_an_all_reduce_of_two_levels_is_the_sum_over_all_ranks(islands: list[tuple[int, ...]]) -> None:
    ranks = run(_reduced, 4, islands)
    for i, size in enumerate((1, 7, 1000, 4097)):
        total = np.sum([_own(rank, size).double().numpy() for rank in range(4)], axis=0)
        np.testing.assert_allclose(ranks[0]["sums"][i].numpy(), total, atol=1e-5)
        assert all(torch.equal(other["sums"][i], ranks[0]["sums"][i]) for other in ranks)  # to the last bit
    for other in ranks:
        np.testing.assert_allclose(
            other["mean"].numpy(), np.mean([_own(rank, 7) for rank in range(4)], axis=0), atol=1e-6
        )
    assert all(other["largest"].tolist() == [3, 10, 0] for other in ranks)
    followers = {rank for island in islands for rank in island[1:]}
    assert [other["leads"] for other in ranks] == [rank not in followers for rank in range(4)]


def _formats(islands: list[tuple[int, ...]]) -> Any:
    """Tensors whose values lie in another order on each rank, and sparse ones."""
    group, rank = _group(islands), dist.get_rank()
    format_ = (torch.channels_last, torch.contiguous_format)[rank % 2]
    image = _own(rank, 2 * 3 * 4 * 5).view(2, 3, 4, 5).contiguous(memory_format=format_)
    total = image.clone()
    dist.all_reduce(total, group=group)
    sent, options = image.clone(), dist.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([sent], options).wait()
    rows = [torch.empty_like(image) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, image, group=group)
    rare = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,), check_invariants=True)
    dist.all_reduce(rare, group=group)
    assert total.is_contiguous(memory_format=format_)
    return total.contiguous(), sent.contiguous(), torch.stack(rows).contiguous(), rare.to_dense()


@pytest.mark.parametrize("islands", [[], [(0, 1)]])
def test_values_keep_their_places_whatever_the_memory_format(islands: list[tuple[int, ...]]) -> None:
    images = [_own(rank, 2 * 3 * 4 * 5).view(2, 3, 4, 5) for rank in range(3)]
    for total, sent, rows, rare in run(_formats, 3, islands):
        torch.testing.assert_close(total, sum(images), atol=1e-5, rtol=0)
        assert torch.equal(sent, images[1])
        assert torch.equal(rows, torch.stack(images))
        assert rare.tolist() == [1, 1, 1, 6, 0]


def _moved(islands: list[tuple[int, ...]]) -> Any:
    group, rank = _group(islands), dist.get_rank()
    found = []
    for root in range(dist.get_world_size()):
        tensor, options = torch.full((3,), float(rank)), dist.BroadcastOptions()
        options.rootRank = root
        group.broadcast([tensor], options).wait()
        rows = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, torch.tensor([rank, root + 0.5]), group=group)
        found.append((tensor.tolist(), torch.stack(rows).tolist()))
    group.barrier().wait()
    return found


@pytest.mark.parametrize("islands", [[], [(1, 2)]])
def test_broadcasts_and_gathers(islands: list[tuple[int, ...]]) -> None:
    for found in run(_moved, 3, islands):
        assert found == [([float(root)] * 3, [[rank, root + 0.5] for rank in range(3)]) for root in range(3)]


class Branches(nn.Module):
    """Uses some branches only, which may differ between ranks, and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.branches = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        x = self.norm(x)
        return torch.stack([self.branches[branch](x) for branch in used])


def _model() -> nn.Module:
    torch.manual_seed(3)
    return Branches().double()


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _trained(islands: list[tuple[int, ...]], unused: bool) -> dict[str, torch.Tensor]:
    staging.PIECE = 64
    group, rank = _group(islands), dist.get_rank()
    model = _model()
    if rank:
        for parameter in model.parameters():
            nn.init.constant_(parameter, rank)  # rank 0's count
    options = {"find_unused_parameters": unused, "bucket_cap_mb": 0.0001}
    ddp = DistributedDataParallel(model, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        used = [rank % 2] if unused else [0, 1, 2]
        ddp(_batch(rank + 10 * step), used).square().mean((1, 2)).sum().backward()
        optimizer.step()
        if unused:
            assert model.branches[2].weight.grad is None  # no rank has used it, which all have to learn
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("islands", [[], [(0, 2)]])
def test_ddp_over_it_is_one_process(islands: list[tuple[int, ...]], unused: bool) -> None:
    ranks = run(_trained, 3, islands, unused)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(3):
            used = [rank % 2] if unused else [0, 1, 2]
            (model(_batch(rank + 10 * step), used).square().mean((1, 2)).sum() / 3).backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ranks[0][name], value.detach(), rtol=0, atol=1e-12)
        assert all(torch.equal(ranks[0][name], other[name]) for other in ranks)


def _lost(islands: list[tuple[int, ...]]) -> float:
    group, rank = _group(islands, seconds=20), dist.get_rank()
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 2:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|reset|closed"):
        dist.all_reduce(torch.ones(3), group=group)
    return time.monotonic() - began


def test_a_rank_that_ends_is_an_error_of_the_others() -> None:
    outcomes = attempt(_lost, 3, [])
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        assert outcome.value < 15  # long before the limit
