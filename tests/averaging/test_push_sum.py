"""Push-sum's weights: what a replica learns counts by the samples that it takes now, also none at all."""

from types import SimpleNamespace

import torch
from torch import nn

from lightning_hetero.averaging.mixing import one_peer_exponential
from lightning_hetero.averaging.push_sum import PushSumAverager
from lightning_hetero.comm.gossip.introduction import Place
from lightning_hetero.comm.replica import Replica


def averager(module: nn.Module) -> PushSumAverager:
    """The first of two replicas, of which nobody else is there."""
    found = PushSumAverager(1, one_peer_exponential, 0, "fp32", Place("127.0.0.1", "here", 1.0), skip=False)
    found.links = SimpleNamespace(index=0, count=2)
    found.replica = Replica(module)
    found._packed = found.replica.pack()
    found.reference = [torch.zeros_like(value) for value in found._packed]
    found._x = [torch.zeros_like(value) for value in found._packed]
    return found


def step(module: nn.Module, size: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size)


def test_shares_may_change_meanwhile() -> None:
    module = nn.Linear(2, 1, bias=False).double()
    one = averager(module)
    one._learn([6, 6])
    before = one._x[0].clone()
    step(module, 2.0)
    one._learn([9, 3])
    assert torch.allclose(one._x[0], before + 1.5 * 2.0)
    assert one._weight == 1.0  # weights go their own ways: their sum stays what it was


def test_no_samples() -> None:
    module = nn.Linear(2, 1, bias=False).double()
    one, start = averager(module), module.weight.detach().clone().reshape(-1)
    one._learn([0, 12])
    assert torch.equal(one._unbiased()[0], start)  # nothing has come yet
    one._add([torch.full((2,), 3.0).double()], 0.5, 1)
    assert torch.equal(one._unbiased()[0], torch.full((2,), 6.0).double())
    one.replica.unpack(one._unbiased())
    one._learn([0, 12])
    assert one._weight == 0.5  # what has come is kept
    assert torch.equal(one._x[0], torch.full((2,), 3.0).double())
