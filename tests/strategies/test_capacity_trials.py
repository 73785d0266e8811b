"""Trials of batches: their memory is that by hand, and they leave no changes."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.capacity import Footprint, Trials, largest, preserve_state, usable
from lightning_hetero.strategies.options import memory_per_rank

CPU = torch.device("cpu")
BIG = 20_000  # float64 numbers of a parameter
STATES = {  # an optimizer, and the memory of its state, relative to that of the parameters
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
}


class Known(nn.Module):
    """A model of known memory: 24 kB per sample at its peak, and up to four times its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1000, dtype=torch.float64))
        self.big = nn.Parameter(torch.ones(BIG, dtype=torch.float64))

    def step(self, samples: int) -> None:
        x = torch.zeros(samples, 1, dtype=torch.float64)
        # The backward pass of tanh needs its output, the gradient of that, and the gradient of its input.
        ((x * self.w).tanh().mean() + self.big.sum()).backward()


def bytes_by_hand(samples: int, states: int) -> int:
    return (2 + states) * 8 * (1000 + BIG) + samples * (3 * 8000 + 8)


@pytest.mark.parametrize(
    ("name", "wanted"), [("sgd", 0), ("sgd", 1), ("sgd", 64), ("momentum", 37), ("adamw", 2), ("adamw", 16)]
)
def test_what_fits_is_what_fits_by_hand(name, wanted):
    make, states = STATES[name]
    limit = bytes_by_hand(wanted, states) + 12_000  # half a sample more
    brute = max((n for n in range(1, 65) if bytes_by_hand(n, states) <= limit), default=0)
    module = Known()
    trials = Trials(module, [make(module.parameters())], CPU, limit)
    tried = []

    def fits(samples: int) -> bool:
        tried.append(samples)
        return trials.fits(lambda: module.step(samples))

    with trials.begun():
        assert largest(fits, 1, 64) == brute == wanted
    assert len(tried) == len(set(tried)) <= 12


def test_what_was_freed_is_not_counted():
    x = torch.zeros(1000)  # 4000 bytes
    with Footprint([x, x.view(10, 100), None]) as footprint:
        for _ in range(5):
            y = x.exp()
            del y
        assert footprint.peak == 8000
        z = x.exp()
        z = z.exp()
        assert footprint.peak == 12000
        assert z.view(10, 100).mul_(2).sum() > 0
        assert footprint.peak == 12000


@pytest.mark.parametrize(("least", "most"), [(1, 32), (2, 32), (1, 1), (3, 31), (4, 2)])
def test_the_search_is_exact_and_short(least, most):
    for fitting in range(35):
        tried = []
        found = largest(lambda n: tried.append(n) or n <= fitting, least, most)  # noqa: B023
        assert found == max((n for n in range(min(least, most), most + 1) if n <= fitting), default=0)
        assert all(min(least, most) <= n <= most for n in tried)
        assert len(tried) == len(set(tried)) <= 11


def test_the_margin():
    assert [usable(n, 2, 64) for n in (2, 3, 10, 63, 64)] == [2, 2, 9, 56, 64]


def test_amounts_of_memory():
    written = [5, "5", "2kB", "2 KiB", "1.5GiB", "500MB", "1tib", None]
    read = [5, 5, 2000, 2048, 3 * 2**29, 500_000_000, 2**40, None]
    assert memory_per_rank(written) == read
    assert memory_per_rank(["1kB", None, 7], 3) == [1000, None, 7]
    assert memory_per_rank("1kB", 2) == [1000, 1000]
    for value in ("much", "", 0, -1, 1.5, True, "0B", "8 XB", [3, "?"]):
        with pytest.raises(ConfigurationError, match="8GiB"):
            memory_per_rank(value)
    with pytest.raises(ConfigurationError, match="2 limits for 3 ranks"):
        memory_per_rank([1, 2], 3)


class Changing(nn.Module):
    """Has all kinds of state that a training step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.metric, self.generator = MeanMetric(), torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(2), np.random.default_rng(3)
        self.count, self.seen, self.names, self.sums = 0, [1, [2]], {"a"}, {"x": torch.zeros(2), "deep": [deque([1])]}
        self.other = [nn.Linear(1, 1)]  # not registered
        self.view = torch.zeros(1).expand(3)
        self.helper = SimpleNamespace(free=True)

    def change(self) -> None:
        self.net(torch.rand(8, 3)).sum().backward()
        self.metric.update(torch.rand(3) + float(np.random.rand()) + random.random())
        self.numbers()
        self.count += 1
        self.new = self.count
        self.seen.append(3)
        self.seen[1].append(4)
        self.names.add("b")
        self.sums["x"] += 1
        self.sums["deep"][0].append(5)
        self.sums["y"] = 1
        self.net[1].running_mean = torch.ones(4)
        self.net[0].bias.data.add_(1)
        self.net[0].weight.data = torch.ones(4, 3)
        self.net[3].bias.requires_grad_(False)
        self.other[0].bias.data.zero_()
        self.eval()
        del self.helper

    def numbers(self) -> tuple:
        own = torch.rand(1, generator=self.generator).item(), self.python.random(), self.numpy.random()
        return *own, torch.rand(1).item(), random.random(), float(np.random.rand())


def described(module: Changing, optimizer: torch.optim.Optimizer) -> str:
    """Description in which every change is visible."""
    values = {**module.state_dict(keep_vars=True), "other": module.other[0].bias, "x": module.sums["x"]}
    rows = {name: (id(t), t.data_ptr(), t.requires_grad, t.grad, t.tolist()) for name, t in values.items()}
    plain = module.count, module.seen, module.names, repr(module.sums), module.helper, module.training
    own = {name: id(value) for name, value in vars(module).items() if name not in ("count", "training")}
    return repr((rows, plain, own, module.metric.update_count, optimizer.state_dict()))


@pytest.mark.parametrize("filled", [False, True])
def test_nothing_stays(filled):
    torch.manual_seed(0)
    module = Changing()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    if filled:
        module.net(torch.rand(8, 3)).sum().backward()
        optimizer.step()
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    before = described(module, optimizer)
    with preserve_state(module, optimizer):
        expected = module.numbers()
    trials = Trials(module, [optimizer], CPU, None)
    with trials.begun():
        assert trials.fits(module.change)
        assert len(optimizer.state) == 6  # there while it is tried
        assert described_differs(module, optimizer, before)
    assert described(module, optimizer) == before
    assert module.numbers() == expected
    assert not stepped
    optimizer.step()
    assert stepped  # the user's hooks are back


def described_differs(module: Changing, optimizer: torch.optim.Optimizer, before: str) -> bool:
    module.helper = None  # it was deleted
    return described(module, optimizer) != before


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("out of memory"), MemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_running_out_of_memory_is_an_answer_and_other_errors_are_none(error):
    def step(failure: Exception) -> None:
        raise failure

    module = nn.Linear(1, 1)
    trials = Trials(module, [torch.optim.SGD(module.parameters())], CPU, None)
    with trials.begun():
        assert trials.fits(lambda: None)
        assert not trials.fits(lambda: step(error))
        with pytest.raises(RuntimeError, match="shapes"):
            trials.fits(lambda: step(RuntimeError("shapes")))
        assert trials.fits(lambda: None)
