"""`hetero_daso` against an oracle in NumPy that shares nothing with it: model, SGD, DASO and its schedule."""

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from oracles import BATCH, EPOCHS, LR, MOMENTUM, NODES, SAMPLES, SPEEDS, START, Course, in_numpy, loader
from ranks import run
from tasks import FAST
from torch import nn

from lightning_hetero import DASOStrategy

# -- the package ---------------------------------------------------------------------------------------------


class Linear(pl.LightningModule):
    def __init__(self, start: np.ndarray = START, lr: float = LR, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w, self.lr = nn.Parameter(torch.tensor(start, dtype=dtype)), lr

    def weights(self) -> torch.Tensor:
        return self.w

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return ((x @ self.weights() - y) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=self.lr, momentum=MOMENTUM)


class Recorder(pl.Callback):
    """Keeps the weights, B and W after each step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.rates: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Linear, *_: Any) -> None:
        self.weights.append(pl_module.weights().detach().clone())
        status = trainer.strategy.averager.status(trainer.global_step)
        self.rates.append((status["global_every"], status["wait"]))


def train(make: Any = Linear, speeds: list[float] = SPEEDS, epochs: int = EPOCHS, **options: Any) -> dict[str, Any]:
    samples, dtype = options.pop("samples", SAMPLES), options.pop("dtype", torch.float64)
    module, recorder, trainer = make(), Recorder(), options.pop("trainer", {})
    chosen, resume = options.pop("strategy_class", DASOStrategy), options.pop("resume", None)
    strategy = chosen(balance=speeds, global_batch_size=BATCH, **options)
    callbacks = [recorder, *trainer.pop("callbacks", [])]
    instance = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": epochs, "callbacks": callbacks, **trainer})
    instance.fit(module, loader(samples, dtype), ckpt_path=resume)
    return {
        "path": torch.stack(recorder.weights).double().numpy(),
        "final": module.weights().detach().double().numpy(),
        "rates": recorder.rates,
        "traffic": vars(strategy.traffic),
    }


def check(results: list[dict[str, Any]], truth: Course, nodes: list[int] = NODES, limit: float = 1e-10) -> None:
    """Each rank has the oracle's weights at every step, and all ranks are equal at the end."""
    scale = np.linalg.norm(truth.weights[-1, 0])
    for rank, result in enumerate(results):
        node = next(i for i in range(len(nodes)) if rank < sum(nodes[: i + 1]))
        assert result["rates"] == truth.rates
        assert np.linalg.norm(result["path"] - truth.weights[:, node], axis=1).max() <= limit * scale
        assert np.linalg.norm(result["final"] - truth.weights[-1, node]) <= limit * scale
        assert np.array_equal(result["final"], results[0]["final"])


def both(options: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(mixing=mixing, **options) for mixing in ("daso", "delta")]


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("every", "wait", "warmup", "cooldown", "nodes"),
    [
        (4, 1, 12, 15, NODES),
        (3, 3, 7, 10, [2, 1]),
        (5, 4, 0, 1, NODES),
        (2, 0, 20, 9, NODES),
        (7, 5, 1, 30, NODES),
        (1, 1, 0, 1, [2, 1]),
    ],
)
def test_constant_rates(every: int, wait: int, warmup: int, cooldown: int, nodes: list[int]) -> None:
    options = {"global_every": every, "wait": wait, "warmup": warmup, "cooldown": cooldown, "patience": 99, "epochs": 5}
    options["speeds"] = SPEEDS[: sum(nodes)]
    truths = [in_numpy(mixing, **options, nodes=nodes) for mixing in ("daso", "delta")]
    assert len(truths[0].weights) == 100
    results = zip(*run(both, sum(nodes), options, nodes=nodes), strict=True)
    for truth, result in zip(truths, results, strict=True):
        check(result, truth, nodes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("look", "patience", "threshold", "changes"), [(None, 1, 0.2, 3), (7, 2, 0.05, 4), (5, 1, 0.05, 12)]
)
def test_plateaus_change_the_rates(look: int | None, patience: int, threshold: float, changes: int) -> None:
    options = {
        "global_every": 2, "wait": 1, "warmup": 12, "cooldown": 15, "max_global_every": 8,
        "patience": patience, "threshold": threshold, "schedule_every_n_steps": look,
    }  # fmt: skip
    truths = in_numpy("daso", **options), in_numpy("delta", **options)
    for truth in truths:
        rates = truth.rates
        assert sum(a != b for a, b in pairwise(rates)) >= changes
        assert {(2, 1), (1, 1), (8, 2), (4, 1)} == set(rates)
    for truth, results in zip(truths, zip(*run(both, 4, options, nodes=NODES), strict=True), strict=True):
        check(results, truth)


@pytest.mark.parametrize("mixing", ["daso", "delta"])
def test_the_oracle_tells_mistakes_apart(mixing: str) -> None:
    options = {"global_every": 4, "wait": 2, "warmup": 12, "cooldown": 15, "patience": 1}
    truth = in_numpy(mixing, **options)
    wrong = [in_numpy(mixing, **options, mutant=name) for name in ("late", "fresh", "unweighted")]
    wrong += [in_numpy(mixing, **{**options, name: options[name] + 1}) for name in options]
    wrong += [in_numpy("daso" if mixing == "delta" else "delta", **options), in_numpy(mixing, **options, momentum=0.8)]
    for other in wrong:
        assert abs(other.weights - truth.weights).max() > 1e-4
        assert abs(other.weights[-1] - truth.weights[-1]).max() > 1e-6  # still, at the end
    for look, mutant in ((None, "never restarts"), (5, "looks always")):
        rates = [in_numpy(mixing, **options, schedule_every_n_steps=look, mutant=m).rates for m in ("", mutant)]
        assert rates[0] != rates[1]
