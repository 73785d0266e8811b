"""Callbacks that average weights over time, with every algorithm: resumed fits, asynchronous replicas, BatchNorm."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from ranks import run
from tasks import EvaluatedNet, Net, Save, dataset, error, parameters
from test_weight_averaging import APART, CALLBACKS, EMA, NODES, SHARES, fit_averaged
from torch import nn
from torch.utils.data import DistributedSampler

from lightning_hetero import (
    DASOStrategy,
    DiLoCoStrategy,
    EASGDAsyncStrategy,
    EASGDOverlapStrategy,
    EASGDStrategy,
    GossipAsyncStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
    NodeAverageStrategy,
)


class Records(pl.Callback):
    """Keeps the consensus, with the step, wherever all replicas meet, and at the ends of epochs."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []

    def look(self, trainer: pl.Trainer, module: Any) -> None:
        engine = trainer.strategy.engine
        values = engine.averager.replica.by_name(engine.consensus())
        flat = torch.cat([values[name].reshape(-1) for name, _ in module.named_parameters()])
        self.seen.append((trainer.global_step, flat))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.strategy.engine.all_met:
            self.look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.look(trainer, pl_module)


def ema_of(seen: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """The average over steps; each step has the consensus of the next meeting."""
    done, average = 0, seen[0][1]
    for step, consensus in seen:
        for _ in range(done, step):
            average = 0.8 * average + 0.2 * consensus
        done = step
    return average


# -- resume --------------------------------------------------------------------------------------------------

LOCKSTEP: list[tuple[Any, dict[str, Any]]] = [
    (NodeAverageStrategy, {"every_n_steps": 5}),
    (DASOStrategy, {"warmup": 2, "cooldown": 2, "global_every": 4, "wait": 3}),
    (DiLoCoStrategy, {"tau": 5}),
    (EASGDStrategy, {"moving_rate": "auto", "tau": 3}),
    (GossipStrategy, {"every_n_steps": 2}),
]


def _resumed(folder: str, kind: Any, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    for message in ("EMAWeightAveraging asks", "Replicas have not met"):
        warnings.filterwarnings("ignore", message)
    results, records = [], Records()
    for name, step, watch in (("ema", 12, [records]), ("swa", 18, [])):
        path, ends = f"{folder}/{name}.ckpt", []
        for others, resume in (([*watch, Save(path, step, False)], None), ([Save(path, -1, False)], path)):
            strategy, callbacks = kind(**options, **APART), [CALLBACKS[name](), *others]
            ends.append(parameters(fit_averaged(strategy, Net(), *callbacks, resume=resume, max_epochs=3)))
        results.append(tuple(ends))
    return results, records.seen


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), LOCKSTEP)
def test_an_average_of_consensuses_that_a_resumed_fit_goes_on_with(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    results = run(_resumed, 3, str(tmp_path), kind, options, nodes=[1, 1, 1])
    for result, seen in results:
        assert error(result[0][0], ema_of(seen)) <= 1e-10
        for (whole, resumed), (first, _) in zip(result, results[0][0], strict=True):
            assert torch.equal(whole, resumed)
            assert torch.equal(whole, first)


# -- replicas that never all meet within an epoch ------------------------------------------------------------


def _asynchronous(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    records, found = Records(), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["ema"] = parameters(fit_averaged(kind(**options, **APART), Net(), EMA(), records))
    asks = [str(warning.message) for warning in caught if "asks for an update after step 1," in str(warning.message)]
    found["swa"] = parameters(fit_averaged(kind(**options, **APART), Net(), CALLBACKS["swa"]()))
    by_epoch = EMA(update_starting_at_epoch=0, update_every_n_steps=0)
    found["by epoch"] = parameters(fit_averaged(kind(**options, **APART), Net(), by_epoch))  # without a warning
    return {**found, "requests": len(asks), "seen": records.seen}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"), [(EASGDAsyncStrategy, {"moving_rate": "auto", "tau": 2}), (GossipAsyncStrategy, {})]
)
def test_asynchronous_replicas_average_at_the_ends_of_epochs(kind: Any, options: dict[str, Any]) -> None:
    results = run(_asynchronous, 3, kind, options, nodes=[1, 1, 1])
    assert [result["requests"] for result in results] == [1, 0, 0]
    for result in results:
        assert error(result["ema"], ema_of(result["seen"])) <= 1e-10
        for name in ("ema", "swa", "by epoch"):
            assert torch.equal(result[name], results[0][name])


# -- BatchNorm: SWA adds an epoch that measures its statistics -----------------------------------------------


class Normed(EvaluatedNet):
    """With BatchNorm; keeps the statistics that it validates with."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16).double())
        self.statistics: list[torch.Tensor] = []

    def on_validation_end(self) -> None:
        self.statistics.append(statistics(self))


def statistics(module: Any) -> torch.Tensor:
    return torch.cat([module.net[1].running_mean, module.net[1].running_var])


def normed_by_hand(every: int, start: int, epochs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two models on 8 and 4 samples that meet every K steps: mean over the starts of epochs, and its statistics."""
    data, models, step = dataset(96), [Normed(), Normed()], 0
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    order = DistributedSampler(data, 1, 0, shuffle=True)
    average, count = torch.zeros(()), 0
    for epoch in range(epochs + 1):
        order.set_epoch(epoch)
        indices = list(order)
        if start <= epoch < epochs:
            consensus = (2 * parameters(models[0]) + parameters(models[1])) / 3
            average, count = average + (consensus - average) / (count + 1), count + 1
        if epoch == epochs:
            for model in models:
                nn.utils.vector_to_parameters(average, model.parameters())
                model.net[1].reset_running_stats()
                model.net[1].momentum = None
        for first in range(0, 96, 12):
            parts = indices[first : first + 8], indices[first + 8 : first + 12]
            for model, optimizer, part in zip(models, optimizers, parts, strict=True):
                loss = model.loss(data[part])
                if epoch < epochs:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            step += 1
            if step % every == 0 and epoch < epochs:
                pairs = [*zip(*(model.parameters() for model in models), strict=True)]
                norms = [model.net[1] for model in models]
                pairs += [tuple(getattr(n, b) for n in norms) for b in ("running_mean", "running_var")]
                for a, b in pairs:
                    mean = (2 * a.data + b.data) / 3
                    a.data.copy_(mean)
                    b.data.copy_(mean)
    return average, (2 * statistics(models[0]) + statistics(models[1])) / 3


def _normed(kind: Any, options: dict[str, Any], validates: bool) -> dict[str, torch.Tensor]:
    warnings.filterwarnings("ignore", "Replicas have not met")
    swa, module = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=1), Normed()
    fit_averaged(kind(**options), module, swa, max_epochs=3, limit_val_batches=float(validates))
    return {
        "parameters": parameters(module),
        "average": parameters(swa._average_model),
        "statistics": statistics(module),
        "validated": module.statistics[-1] if validates else statistics(module),
        "counted": module.net[1].num_batches_tracked,
    }


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("kind", "options", "nodes"),
    [
        (NodeAverageStrategy, {"every_n_steps": 3, "balance": [2.0, 1.0], "global_batch_size": 12}, [1, 1]),
        (NodeAverageStrategy, {"every_n_steps": 3, "balance": SHARES}, NODES),
        (EASGDOverlapStrategy, {"moving_rate": "auto", "tau": 3, **APART}, [1, 1, 1]),
        (GossipStrategy, APART, [1, 1, 1]),
        (HeteroDDPStrategy, {"balance": SHARES}, NODES),
    ],
)
def test_statistics_of_an_average(kind: Any, options: dict[str, Any], nodes: list[int]) -> None:
    validates = nodes != [1, 1]  # Lightning removes gradients before a validation; these must not be averaged, either
    results = run(_normed, sum(nodes), kind, options, validates, nodes=nodes)
    for result in results:
        assert torch.equal(result["parameters"], result["average"])
        assert torch.equal(result["statistics"], result["validated"])
        assert result["counted"] == 8
        for name, value in result.items():
            assert torch.equal(value, results[0][name])
    if nodes == [1, 1]:
        average, measured = normed_by_hand(3, 1, 3)
        assert error(results[0]["parameters"], average) <= 1e-10
        assert error(results[0]["statistics"], measured) <= 1e-10
