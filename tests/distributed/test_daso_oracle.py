"""`hetero_daso` against an oracle in NumPy that shares nothing with it: model, SGD, DASO and its schedule."""

from itertools import pairwise
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from ranks import run
from tasks import FAST
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_hetero import DASOStrategy

NODES, SPEEDS, BATCH = [2, 2], [5.0, 2.0, 3.0, 2.0], 12  # ranks per node; shares of the ranks; samples of them all
SAMPLES, EPOCHS, LR, MOMENTUM = 235, 7, 0.01, 0.9  # 20 batches an epoch, the last of 7 samples; 140 steps
START = np.linspace(-1.0, 1.0, 8)


def data(samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(samples, 8)) * np.linspace(0.5, 1.5, 8)
    return x, x @ draw.normal(size=8) + 0.5 * draw.normal(size=samples)


def order(epoch: int, samples: int) -> np.ndarray:
    return np.random.default_rng(epoch).permutation(samples)


# -- the oracle ----------------------------------------------------------------------------------------------


class Course(NamedTuple):
    """What happens by the end of each step: every node's weights, B and W; and the steps at which exchanges began."""

    weights: np.ndarray
    rates: list[tuple[int, int]]
    begun: list[int]


def split(size: int, speeds: list[float]) -> list[int]:
    """Samples for each rank: one at a time, to the rank that would be done first."""
    parts = [0] * len(speeds)
    for _ in range(size):
        first = min(range(len(speeds)), key=lambda i: ((parts[i] + 1) / speeds[i], i))
        parts[first] += 1
    return parts


def in_numpy(
    mixing: str,
    global_every: int,
    wait: int,
    warmup: int,
    cooldown: int,
    max_global_every: int = 8,
    patience: int = 2,
    threshold: float = 0.05,
    schedule_every_n_steps: int | None = None,
    *,
    nodes: list[int] = NODES,
    speeds: list[float] = SPEEDS,
    epochs: int = EPOCHS,
    samples: int = SAMPLES,
    start: np.ndarray = START,
    trainable: Any = 1.0,
    lr: float = LR,
    momentum: float = MOMENTUM,
    mutant: str = "",
) -> Course:
    x, y = data(samples)
    count, batches = len(nodes), -(-samples // BATCH)
    total = epochs * batches
    firsts = np.cumsum([0, *nodes])

    def of_nodes(size: int) -> list[int]:
        parts = split(size, speeds)
        return [sum(parts[a:b]) for a, b in pairwise(firsts)]

    shares = np.array(of_nodes(BATCH)) / BATCH
    if mutant == "unweighted":
        shares = np.full(count, 1 / count)
    w, v = np.tile(start, (count, 1)), np.zeros((count, len(start)))
    every, hold, best, stalled = global_every, wait, np.inf, 0
    flight: Any = None  # the step, the wait, the nodes' values then
    since, loss, seen = 0, 0.0, 0
    path, rates, begun = [], [], []

    def mixed(step: int) -> np.ndarray:
        began, _, then = flight
        stale = step - began
        if mutant == "fresh":
            stale = 0
        total_sum = count * (shares @ then)
        if mixing == "daso":
            return (2 * stale * w + total_sum) / (2 * stale + count)
        return w + count / (2 * stale + count) * (total_sum / count - then)

    for step in range(1, total + 1):
        epoch, batch = divmod(step - 1, batches)
        first, indices = batch * BATCH, order(epoch, samples)
        size = min(BATCH, samples - first)
        for node, part in enumerate(of_nodes(size)):
            rows, first = indices[first : first + part], first + part
            off = x[rows] @ w[node] - y[rows]
            loss, seen = loss + (off**2).sum(), seen + part
            v[node] = momentum * v[node] + 2 / part * x[rows].T @ off * trainable
            w[node] = w[node] - lr * v[node]
        cycling = warmup < step <= total - cooldown
        if flight and (not cycling or step - flight[0] >= flight[1]):
            w, flight = mixed(step), None
        if not cycling:
            w = np.tile(shares @ w, (count, 1))
        else:
            since += 1
            if since >= every:
                flight, since = (step, hold + (mutant == "late"), w.copy()), 0
                begun.append(step)
                if flight[1] == 0:
                    w, flight = mixed(step), None
        if step % (schedule_every_n_steps or batches) == 0:
            mean = loss / seen
            if mutant != "never restarts":
                loss, seen = 0.0, 0
            cycling = cycling or mutant == "looks always"
            if cycling and (best == np.inf or mean < (1 - threshold) * best):
                best, stalled = mean, 0
            elif cycling:
                stalled += 1
                if stalled == patience:
                    stalled = 0
                    if every > 1:
                        every, hold = every // 2, hold and max(hold // 2, 1)
                    else:
                        every, hold = max_global_every, max(max_global_every // 4, 1)
        path.append(w.copy())
        rates.append((every, hold))
    return Course(np.array(path), rates, begun)


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


class Order(Sampler):
    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        return iter(order(self.epoch, self.samples).tolist())


def loader(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> DataLoader:
    x, y = (torch.tensor(part, dtype=dtype) for part in data(samples))
    return DataLoader(TensorDataset(x, y), batch_size=3, sampler=Order(samples))


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
    """Every rank, at every step, and all alike at the end."""
    scale = np.linalg.norm(truth.weights[-1, 0])
    for rank, result in enumerate(results):
        node = next(i for i in range(len(nodes)) if rank < sum(nodes[: i + 1]))
        assert result["rates"] == truth.rates
        assert np.linalg.norm(result["path"] - truth.weights[:, node], axis=1).max() <= limit * scale
        assert np.linalg.norm(result["final"] - truth.weights[-1, node]) <= limit * scale
        assert np.array_equal(result["final"], results[0]["final"])


def both(options: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(mixing=mixing, **options) for mixing in ("daso", "delta")]


@pytest.mark.parametrize(
    ("every", "wait", "warmup", "cooldown"), [(4, 1, 12, 15), (3, 3, 7, 10), (5, 4, 0, 1), (2, 0, 20, 9), (7, 5, 1, 30)]
)
def test_constant_rates(every: int, wait: int, warmup: int, cooldown: int) -> None:
    options = {"global_every": every, "wait": wait, "warmup": warmup, "cooldown": cooldown, "patience": 99, "epochs": 5}
    truths = in_numpy("daso", **options), in_numpy("delta", **options)
    assert len(truths[0].weights) == 100
    for truth, results in zip(truths, zip(*run(both, 4, options, nodes=NODES), strict=True), strict=True):
        check(results, truth)


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
