"""Trials on a CUDA device: memory runs out there, and all memory of the trials is freed."""

import pytest
import torch
from torch import nn

from lightning_hetero.strategies.capacity import Trials, largest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIB = 2**20
SIZE = 512 * MIB  # the memory that the device is to have


class Wide(nn.Module):
    """A sample takes three layers of 1 MiB at the peak of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(MIB // 4))

    def step(self, samples):
        (torch.ones(samples, 1, device=self.scale.device) * self.scale).tanh().mean().backward()


@pytest.fixture
def small():
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(SIZE / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


def search(limit):
    """The module, and the number of samples that fit."""
    device = torch.device("cuda", 0)
    module = Wide().to(device)
    trials = Trials(module, [torch.optim.AdamW(module.parameters())], device, limit)
    before, values = torch.cuda.memory_allocated(), module.scale.tolist()
    numbers = torch.cuda.get_rng_state()
    with trials.begun():
        found = largest(lambda n: trials.fits(lambda: module.step(n)), 1, 1024)
    assert torch.cuda.memory_allocated() == before
    assert module.scale.grad is None
    assert module.scale.tolist() == values
    assert torch.equal(torch.cuda.get_rng_state(), numbers)
    return module, found


@pytest.mark.usefixtures("small")
def test_memory_that_runs_out_is_the_limit():
    module, found = search(None)
    assert SIZE / MIB / 3 * 0.6 < found <= SIZE / MIB / 3
    module.step(found)
    module.scale.grad = None
    with pytest.raises(torch.cuda.OutOfMemoryError):
        module.step(2 * found)


def test_a_given_limit_on_a_device_with_more():
    before = torch.cuda.memory_allocated()
    resident = 4  # the parameter, its gradient, and two of AdamW's
    assert search(before + (resident + 3 * 20 + 1) * MIB)[1] == 20
