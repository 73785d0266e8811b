"""`hetero_diloco` against a loop by hand, and as plain averaging if the outer step is plain."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import APART, Line, fit, lines
from oracles import data, order, split
from ranks import run
from tasks import Net, dataset
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader


def by_hand(
    outer: Callable[[Iterable[Any]], torch.optim.Optimizer],
    tau: int,
    mutant: str = "",
    wire: Callable[[int, torch.Tensor], torch.Tensor] = lambda replica, part: part,
) -> Any:
    """Two replicas on 8 and 4 of each 12 samples, for 60 steps; the center after each step, and at the end.

    Args:
        outer: the outer optimizer of these parameters.
        tau: steps of a round.
        mutant: a mistake.
        wire: the part of a replica's change that arrives.
    """
    models = [Line(momentum=0.9), Line(momentum=0.9)]
    inner = [model.configure_optimizers() for model in models]
    center = nn.Parameter(models[0].w.detach().clone())
    optimizer, path = outer([center]), []
    x, y = (torch.tensor(part) for part in data())
    for step in range(60):
        epoch, batch = divmod(step, 20)
        rows, first = order(epoch, 235)[12 * batch : 12 * batch + 12], 0
        for model, own, part in zip(models, inner, split(len(rows), [2.0, 1.0]), strict=True):
            mine, first = rows[first : first + part], first + part
            own.zero_grad()
            model.training_step((x[mine], y[mine]), 0).backward()
            own.step()
        path.append(center.detach().clone())
        weights = (1 / 2, 1 / 2) if mutant == "unweighted" else (2 / 3, 1 / 3)
        if (step + 1) % tau == 0:
            with torch.no_grad():
                parts = [w * (model.w - center) for w, model in zip(weights, models, strict=True)]
                center.grad = -sum(wire(i, part) for i, part in enumerate(parts))
                optimizer.step()
                for model in models:
                    model.w.copy_(center)
            path[-1] = center.detach().clone()
    # The fit ends with the mean; right after an outer step all replicas are equal to the center.
    return torch.stack(path), sum(w * model.w.detach() for w, model in zip(weights, models, strict=True))


NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
ADAMW = partial(AdamW, lr=0.05, weight_decay=0.1)
BALL = partial(SGD, lr=0.9, momentum=0.5)


def test_against_a_loop_by_hand() -> None:
    model = {"momentum": 0.9}
    settings: list[tuple[Any, int, dict[str, Any]]] = [
        (NESTEROV, 5, {}),  # the default
        (partial(SGD, lr=0.5, momentum=0.8, nesterov=True), 3, {"outer_lr": 0.5, "outer_momentum": 0.8}),
        (ADAMW, 7, {"outer": ADAMW}),  # four steps come after the last outer step
        (BALL, 4, {"outer": BALL}),  # BMUF
    ]
    results = run(lines, 2, *[("diloco", {"tau": t, "model": model, **o}) for _, t, o in settings], nodes=[1, 1])
    for rank in results:
        for (outer, tau, _), result in zip(settings, rank, strict=True):
            truth, final = by_hand(outer, tau)
            assert (result["centers"] - truth).abs().max() <= 1e-12
            assert (result["path"][tau - 1 :: tau] - truth[tau - 1 :: tau]).abs().max() <= 1e-12
            assert (result["final"] - final).abs().max() <= 1e-12
    for wrong in (by_hand(NESTEROV, 5, "unweighted"), by_hand(partial(NESTEROV, nesterov=False), 5)):
        assert (wrong[1] - by_hand(NESTEROV, 5)[1]).abs().max() > 1e-4


@pytest.mark.long
def test_a_plain_outer_step_is_periodic_averaging() -> None:
    model = {"momentum": 0.9}
    diloco = {"tau": 3, "outer_lr": 1.0, "outer_momentum": 0.0, "model": model}
    named = {"tau": 3, "outer": partial(SGD, lr=1.0), "model": model}
    fits = [("node", {"every_n_steps": 3, "model": model}), ("diloco", diloco), ("diloco", named)]
    fits.append(("diloco", {"tau": 3, "model": model}))  # a control
    for node, *same, other in run(lines, 3, *fits, nodes=APART):
        for result in same:
            assert (result["path"] - node["path"]).abs().max() <= 1e-12
            assert (result["final"] - node["final"]).abs().max() <= 1e-12
        assert (other["path"] - node["path"]).abs().max() > 1e-3


class Normed(Net):
    """Has BatchNorm, and keeps its statistics from before the step's exchange."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.before: list[torch.Tensor] = []

    def statistics(self) -> torch.Tensor:
        return torch.cat([self.net[1].running_mean, self.net[1].running_var])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.before.append(self.statistics())
        return loss


class After(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.seen.append(pl_module.statistics())


def _normed(**options: Any) -> list[torch.Tensor]:
    module, after = Normed(), After()
    loader = DataLoader(dataset(96), batch_size=4, shuffle=True)
    fit("diloco", module, loader, epochs=1, trainer={"callbacks": [after]}, **options)
    return [torch.stack(module.before), torch.stack(after.seen)]


@pytest.mark.parametrize("outer", [None, ADAMW])
def test_statistics_take_the_mean_and_not_an_outer_step(outer: Any) -> None:
    (a, after), (b, other) = run(_normed, 2, tau=4, outer=outer, nodes=[1, 1])
    assert torch.allclose(after[3::4], (2 * a + b)[3::4] / 3, rtol=0, atol=1e-13)
    assert torch.equal(after[3::4], other[3::4])
    assert not torch.equal(after[2], other[2])


def _shapes() -> list[list[tuple[int, ...]]]:
    seen = []

    def outer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        seen.append([tuple(p.shape) for p in parameters])
        return AdamW(parameters, lr=0.01)

    module = Normed()
    fit("diloco", module, DataLoader(dataset(96), batch_size=4), epochs=1, tau=4, outer=outer)
    return [seen[-1], [tuple(p.shape) for p in module.parameters()]]


def test_the_outer_optimizer_sees_parameters_in_the_models_shapes() -> None:
    [[seen, model]] = run(_shapes, 1)
    assert seen == model == [(6, 8), (6,), (6,), (6,), (1, 6), (1,)]
