"""Properties of the elastic strategies that hold for any data: exactly, or bit for bit."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from center_tasks import APART, Line, StartAt, fit, line, lines, same
from oracles import data, loader, order
from ranks import run
from tasks import parameters
from torch import nn

PULL = {"moving_rate": 0.2, "beta": 0.7}
NESTEROV = {"momentum": 0.8, "nesterov": True}


# -- bit for bit ---------------------------------------------------------------------------------------------


def alone(rank: int) -> torch.Tensor:
    """A rank's run by itself, on its samples of each batch."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first, last, path = [0, 6, 8][rank], [6, 8, 12][rank], []
    x, y = (torch.tensor(part) for part in data(228))
    for epoch in range(2):
        for start in range(0, 228, 12):
            rows = order(epoch, 228)[start + first : start + last]
            optimizer.zero_grad()
            model.training_step((x[rows], y[rows]), 0).backward()
            optimizer.step()
            path.append(parameters(model))
    return torch.stack(path)


def _untied() -> tuple[list[dict[str, Any]], list[str]]:
    kinds = ("easgd", "overlap", "async", "round_robin")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fits = [line(kind, tau=2, moving_rate=0.0, data=loader(228), epochs=2) for kind in kinds]
    return fits, [text for text in map(str, (w.message for w in caught)) if "No replica has met the center" in text]


def test_without_a_pull_runs_are_independent_and_send_nothing() -> None:
    for rank, (results, warned) in enumerate(run(_untied, 3, nodes=APART)):
        assert len(warned) == (4 if rank == 0 else 0)
        for result in results:
            assert torch.equal(result["path"], alone(rank))
            assert result["traffic"]["bytes"] == result["traffic"]["exchanges"] == 0
            assert torch.equal(result["final"], Line().w)  # the center has not moved
    assert not torch.equal(alone(0), alone(1))


def by_hand(tau: int) -> list[torch.Tensor]:
    """One replica and its center, for 20 steps."""
    model = Line()
    center = model.w.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = (torch.tensor(part) for part in data())
    path = []
    for number in range(20):
        rows = order(0, 235)[12 * number : 12 * number + 12]
        old = model.w.detach().clone()
        optimizer.zero_grad()
        model.training_step((x[rows], y[rows]), 0).backward()
        optimizer.step()
        if (number + 1) % tau == 0:
            away = old - center
            with torch.no_grad():
                model.w.add_(away, alpha=-0.2)
            center.add_(away, alpha=0.7)
        path.append(model.w.detach().clone())
    return [torch.stack(path), center]


def test_one_worker_is_a_loop_by_hand_whatever_the_strategy() -> None:
    options = {**PULL, "tau": 3, "epochs": 1, "model": {"momentum": 0.9}}
    kinds = ["easgd", "overlap", "round_robin", "async", "measgd", "hogwild"]
    path, center = by_hand(3)
    [results] = run(lines, 1, *[(kind, options) for kind in kinds], ("async", {**options, "center": "thread"}))
    for result in results:
        assert torch.equal(result["path"], path)
        assert torch.equal(result["final"], center)
    assert not torch.equal(by_hand(2)[1], center)


@pytest.mark.long
def test_overlap_changes_no_bit() -> None:
    settings = [
        {"tau": 1},
        {"tau": 3, "trainer": {"accumulate_grad_batches": 2}},
        {"tau": 3, "wire": "bf16", "model": {"momentum": 0.9}},
    ]
    fits = [(kind, {**PULL, "epochs": 2, **options}) for options in settings for kind in ("easgd", "overlap")]
    for results in run(lines, 3, *fits, nodes=APART):
        for plain, overlapped in zip(results[::2], results[1::2], strict=True):
            assert len(plain["centers"]) == 40
            assert same(plain, overlapped)
        assert not same(results[0], results[2])  # a control


# -- what counts as a replica, and as a step -----------------------------------------------------------------


def test_ranks_of_a_node_stay_alike() -> None:
    node = {"replica": "node", "tau": 2, **PULL, "epochs": 1}
    fits = [("easgd", node), ("overlap", node), ("async", node), ("async", {**node, "center": "thread"})]
    fits += [("eamsgd", {**node, "model": NESTEROV}), ("diloco", {"replica": "node", "tau": 2, "epochs": 1})]
    first, second, third = run(lines, 3, *fits, nodes=[2, 1])
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a["path"], b["path"])
        assert torch.equal(a["final"], c["final"])
        assert not torch.equal(a["path"][:-1], c["path"][:-1])


def test_a_node_counts_by_its_samples() -> None:
    # Two nodes that take 8 and 4 of 12 samples are two ranks that do.
    node, rank = run(line, 3, "easgd", replica="node", tau=2, nodes=[2, 1], **PULL)[::2]
    for one, other in zip(run(line, 2, "easgd", tau=2, **PULL), (node, rank), strict=True):
        assert (one["path"] - other["path"]).abs().max() <= 1e-12


# -- alpha by the learning rate ------------------------------------------------------------------------------


class TwoGroups(Line):
    """Two groups; the second one has another learning rate, which does not change alpha."""

    def __init__(self, schedule: Any) -> None:
        super().__init__(schedule=schedule)
        self.more = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * 0

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w], "lr": 0.05}, {"params": [self.more], "lr": 3.0}]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def falls(step: int) -> float:
    return 1 / (1 + step)


@pytest.mark.parametrize("kind", ["easgd", "round_robin"])
def test_rho_goes_by_the_learning_rate_of_the_step_and_of_the_first_group(kind: str) -> None:
    options = {"rho": 4.0, "beta": 0.5, "tau": 1, "epochs": 1}
    paths = [result["path"].numpy() for result in run(_scheduled, 2, kind, nodes=[1, 1], **options)]
    start = TwoGroups(falls).w.detach().numpy()
    w, c = np.array([1.0, -2.0]), 0.0
    for step in range(20):
        old = c
        for i, share in enumerate([2 / 3, 1 / 3]):
            away = w[i] - (old if kind == "easgd" else c)
            c = c + 0.5 * share * away
            w[i] -= 4.0 * 0.05 * falls(step) * away
        for i, path in enumerate(paths):
            assert np.abs(path[step, :8] - start - w[i]).max() <= 1e-12


def _scheduled(kind: str, **options: Any) -> dict[str, Any]:
    return fit(kind, TwoGroups(falls), trainer={"callbacks": [StartAt([1.0, -2.0])]}, **options)
