"""Values that an exchange of `hetero_daso` sends, and those that it does not: frozen weights, large ones, masks."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from oracles import START, in_numpy
from ranks import attempt, run
from test_daso_defects import MIXINGS, TWO, each, moved
from test_daso_oracle import Linear, check, train
from torch import nn

from lightning_hetero.errors import NotFiniteError

# -- what travels --------------------------------------------------------------------------------------------


class Parts(Linear):
    """Frozen weights between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.tensor(START)
        self.w = None
        self.a, self.frozen, self.b = (nn.Parameter(start[i:j].clone()) for i, j in ((0, 3), (3, 5), (5, 8)))
        self.frozen.requires_grad_(False)
        if os.environ["RANK"] == "1":  # rank 0's values must reach all, the frozen ones too
            for p in self.parameters():
                p.data.add_(1.0)

    def weights(self) -> torch.Tensor:
        return torch.cat([self.a, self.frozen, self.b])


def test_frozen_weights_neither_travel_nor_shift_others() -> None:
    options = {"mixing": "delta", "global_every": 4, "wait": 2, "warmup": 3, "cooldown": 2, "patience": 99}
    mask = np.array([1, 1, 1, 0, 0, 1, 1, 1])
    truth = in_numpy(**options, nodes=[1, 1], epochs=2, trainable=mask, **TWO)
    shifted = in_numpy(**options, nodes=[1, 1], epochs=2, trainable=np.roll(mask, 1), **TWO)
    calls = [{**options, "make": Parts, "wire": wire, "epochs": 2, **TWO} for wire in ("fp32", "bf16")]
    results = run(each, 2, *calls, nodes=[1, 1])
    check([exact for exact, _ in results], truth, [1, 1])
    for exact, narrow in results:
        assert moved(narrow, truth.weights[-1, 0], START) < 0.01 < 0.1 < moved(narrow, shifted.weights[-1, 0], START)
        assert np.array_equal(narrow["path"][:, 3:5], np.tile(START[3:5], (40, 1)))
        meetings = options["warmup"] + options["cooldown"] + 1  # and at the end
        assert exact["traffic"]["bytes"] == (meetings + len(truth.begun)) * 6 * 8
        assert narrow["traffic"]["bytes"] == meetings * 6 * 8 + len(truth.begun) * 6 * 2


LARGE = 1_500_001  # times 8: 12 million weights, 48 MB


def pattern() -> torch.Tensor:
    c = (torch.arange(LARGE) % 1009 + 1).float()
    return c / c.norm()


class Large(Linear):
    """A model whose weights and gradients are those of a small one, times a pattern of norm 1."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.c = pattern()
        self.w = nn.Parameter(torch.outer(self.w.detach(), self.c))

    def weights(self) -> torch.Tensor:
        return self.w @ self.c

    def on_train_end(self) -> None:
        scales = self.w.detach() / self.c
        self.spread = (scales.amax(1) - scales.amin(1)).double().numpy()
        self.ends = torch.stack([scales[:, 0], scales[:, LARGE // 2], scales[:, -1]]).double().numpy()


def _large(wire: str, options: dict[str, Any]) -> dict[str, Any]:
    module = Large()
    result = train(lambda: module, **options, **TWO, wire=wire, epochs=1, samples=96, dtype=torch.float32)
    return {**result, "spread": module.spread, "ends": module.ends}


@pytest.mark.long
@pytest.mark.parametrize(("wire", "limit"), [("fp32", 1e-4), ("bf16", 0.01)])
def test_one_large_weight(wire: str, limit: float) -> None:
    assert 8 * LARGE * 4 > 2**25
    options = {"mixing": "delta", "global_every": 2, "wait": 1, "warmup": 1, "cooldown": 0, "patience": 99}
    truth = in_numpy(**options, nodes=[1, 1], epochs=1, samples=96, **TWO)
    way = np.linalg.norm(truth.weights[-1].mean(0) - START)
    mean = (7 * truth.weights[-1, 0] + 5 * truth.weights[-1, 1]) / 12
    for result in run(_large, 2, wire, options, nodes=[1, 1]):
        assert abs(result["ends"] - mean).max() < limit * way
        assert result["spread"].max() < limit * way
        assert moved(result, mean, START) < limit


class Causal(Linear):
    """Attends to earlier features only, by a mask of minus infinities; a copy of it is not registered."""

    registered = True

    def __init__(self) -> None:
        super().__init__()
        mask = torch.full((8, 8), float("-inf"), dtype=torch.float64).triu(1)
        if self.registered:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        attention = (x.unsqueeze(2) * x.unsqueeze(1) * self.w[0] + self.mask).softmax(2)
        return (((attention @ x.unsqueeze(2)).squeeze(2) @ self.w - y) ** 2).mean()


class Unregistered(Causal):
    registered = False


class LateMask(Causal):
    """The control: a buffer that was no mask when the training began is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.mask.clone()
        self.mask.zero_()

    def on_train_start(self) -> None:
        self.mask.copy_(self.kept)


def _causal(make: Any, mixing: str) -> dict[str, Any]:
    module = make()
    before = module.mask.clone()
    result = train(lambda: module, warmup=3, cooldown=3, mixing=mixing, epochs=1, global_every=3, wait=2)
    assert torch.equal(module.mask, before) or make is LateMask
    return result


@pytest.mark.long(after=1)
@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_causal_mask_stays(mixing: str) -> None:
    results = run(_causal, 4, Causal, mixing, nodes=[2, 2])
    without = run(_causal, 4, Unregistered, mixing, nodes=[2, 2])
    for result, other in zip(results, without, strict=True):
        assert np.isfinite(result["path"]).all()
        assert np.linalg.norm(result["final"] - START) > 0.1
        assert np.array_equal(result["path"], other["path"])
        assert np.array_equal(result["final"], results[0]["final"])


def test_a_mask_that_travels_would_be_seen() -> None:
    for outcome in attempt(_causal, 4, LateMask, "delta", nodes=[2, 2]):
        assert isinstance(outcome.error, NotFiniteError), outcome.trace
