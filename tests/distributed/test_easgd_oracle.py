"""The elastic strategies against oracles in NumPy that share nothing with them but the data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from center_tasks import APART, SHARES, lines
from oracles import BATCH, SAMPLES, START, data, in_turn, order, split
from ranks import run

LR, EPOCHS = 0.01, 3  # 60 steps; every twentieth batch has 7 samples


class Course(NamedTuple):
    """Weights of the model and of the center after each step."""

    weights: np.ndarray  # steps, replicas, values
    centers: np.ndarray  # steps, values


class Worker:
    """One replica on its part of the samples, by the papers' equations: position ``x`` and velocity ``v``."""

    def __init__(self, index: int, speeds: list[float], kind: str, momentum: float, alone: bool) -> None:
        self.index, self.speeds, self.kind, self.momentum, self.alone = index, speeds, kind, momentum, alone
        self.x, self.v, self.buffer = START.copy(), np.zeros_like(START), np.zeros_like(START)
        self.samples = data()

    @property
    def shown(self) -> np.ndarray:
        """Weights of the model: under EAMSGD the point from which the next gradient is taken."""
        return self.x + self.momentum * self.v if self.kind == "eamsgd" else self.x

    def step(self, number: int, rate: float = LR) -> None:
        epoch, batch = divmod(number, -(-SAMPLES // BATCH))
        x, y = self.samples
        size = min(BATCH, SAMPLES - batch * BATCH)
        # Replicas that do not meet the others at every step get the remainder in turn.
        parts = in_turn(size, self.speeds, batch) if self.alone else split(size, self.speeds)
        first = batch * BATCH + sum(parts[: self.index])
        rows = order(epoch, SAMPLES)[first : first + parts[self.index]]
        if len(rows) == 0:
            gradient = np.zeros_like(START)
        else:
            gradient = 2 / len(rows) * x[rows].T @ (x[rows] @ self.shown - y[rows])
        moved = self.momentum * self.v - rate * gradient
        self.buffer = self.momentum * self.buffer + gradient  # as PyTorch has it: v follows the rate
        self.v = -rate * self.buffer
        self.x = self.x + (moved if self.kind == "eamsgd" else self.v)


def in_numpy(
    kind: str,
    alpha: float,
    beta: float,
    tau: int,
    momentum: float = 0.0,
    turns: bool = False,
    world: int = 3,
    mutant: str = "",
    schedule: Callable[[int], float] = lambda number: 1.0,
) -> Course:
    speeds = SHARES[world]
    workers = [Worker(i, speeds, kind, momentum, alone=turns) for i in range(world)]
    shares = np.array(speeds) / sum(speeds)
    center, weights, centers = START.copy(), [], []
    if mutant == "unweighted":
        shares = np.full(world, 1 / world)
    for number in range(EPOCHS * -(-SAMPLES // BATCH)):
        meets = (number + 1) % tau == 0 if mutant != "late" else number % tau == 0
        old = [worker.shown if mutant == "at y" else worker.x for worker in workers]
        for worker in workers:
            worker.step(number, LR * schedule(number))
        if meets:
            taken = [worker.x for worker in workers] if mutant == "after" else old
            before = center
            for worker, x, share in zip(workers, taken, shares, strict=True):
                away = x - (center if turns else before)
                worker.x = worker.x - (beta * share if mutant == "own alpha" else alpha) * away
                center = center + beta * share * away
        weights.append([worker.shown for worker in workers])
        centers.append(center)
    return Course(np.array(weights), np.array(centers))


def check(truths: list[Course], results: list[list[dict[str, Any]]]) -> None:
    for rank, fits in enumerate(results):
        for truth, result in zip(truths, fits, strict=True):
            assert len(result["path"]) == len(truth.weights) >= 50
            assert np.abs(result["path"].numpy() - truth.weights[:, rank]).max() <= 1e-10
            assert np.abs(result["final"].numpy() - truth.centers[-1]).max() <= 1e-10
            if len(result["centers"]):
                assert np.abs(result["centers"].numpy() - truth.centers).max() <= 1e-10


TAUS = (1, 3)


@pytest.mark.long
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_easgd_and_with_a_heavy_ball_measgd(momentum: float) -> None:
    pull = {"moving_rate": 0.2, "beta": 0.7}
    fits = [("easgd", {"tau": t, "model": {"momentum": momentum}, **pull}) for t in TAUS]
    truths = [in_numpy("easgd", 0.2, 0.7, t, momentum) for t in TAUS]
    fits.append(("overlap", {"tau": 3, "moving_rate": "auto", "model": {"momentum": momentum}}))
    truths.append(in_numpy("easgd", 0.9 / 3, 0.9, 3, momentum=momentum))
    check(truths, run(lines, 3, *fits, nodes=APART))


@pytest.mark.long
def test_eamsgd_as_the_paper_writes_it() -> None:
    model = {"momentum": 0.8, "nesterov": True}
    fits = [("eamsgd", {"tau": t, "moving_rate": 0.2, "beta": 0.7, "model": model}) for t in TAUS]
    check([in_numpy("eamsgd", 0.2, 0.7, t, 0.8) for t in TAUS], run(lines, 3, *fits, nodes=APART))


def drops(number: int) -> float:
    return 0.1 if number >= 5 else 1.0


def test_eamsgd_undoes_the_look_ahead_of_the_step_before_a_change_of_the_rate() -> None:
    model = {"momentum": 0.8, "nesterov": True, "schedule": drops}
    fits = [("eamsgd", {"tau": t, "moving_rate": 0.2, "beta": 0.7, "model": model}) for t in TAUS]
    truths = [in_numpy("eamsgd", 0.2, 0.7, t, 0.8, schedule=drops) for t in TAUS]
    check(truths, run(lines, 3, *fits, nodes=APART))


def test_round_robin() -> None:
    pull = {"moving_rate": 0.2, "beta": 0.7}
    fits = [("round_robin", {"tau": t, **pull}) for t in TAUS]
    check([in_numpy("easgd", 0.2, 0.7, t, turns=True) for t in TAUS], run(lines, 3, *fits, nodes=APART))


def test_measgd_of_one_worker() -> None:
    pull = {"moving_rate": 0.2, "beta": 0.7, "model": {"momentum": 0.9}}
    fits = [("measgd", {"tau": t, **pull}) for t in TAUS]
    check([in_numpy("easgd", 0.2, 0.7, t, 0.9, world=1) for t in TAUS], run(lines, 1, *fits))


@pytest.mark.parametrize("kind", ["easgd", "eamsgd"])
def test_the_oracle_tells_mistakes_apart(kind: str) -> None:
    options = {"alpha": 0.2, "beta": 0.7, "tau": 3, "momentum": 0.8}
    truth = in_numpy(kind, **options)
    wrong = [in_numpy(kind, **options, mutant=name) for name in ("unweighted", "own alpha", "late", "after")]
    wrong += [in_numpy(kind, **options, mutant="at y")] if kind == "eamsgd" else []
    changes = {"alpha": 0.21, "beta": 0.71, "tau": 4, "momentum": 0.79, "turns": True}
    wrong += [in_numpy(kind, **{**options, name: value}) for name, value in changes.items()]
    wrong.append(in_numpy("easgd" if kind == "eamsgd" else "eamsgd", **options))
    for other in wrong:
        assert np.abs(other.weights - truth.weights).max() > 1e-4
        assert np.abs(other.centers[-1] - truth.centers[-1]).max() > 1e-7


def test_nesterov_of_pytorch_is_the_papers() -> None:
    # One replica without a pull: the two ways to write EAMSGD give the same, without the package.
    worker = Worker(0, [1.0], "eamsgd", 0.8, alone=False)
    w = torch.nn.Parameter(torch.tensor(START))
    optimizer = torch.optim.SGD([w], lr=LR, momentum=0.8, nesterov=True)
    x, y = (torch.tensor(part) for part in data())
    for number in range(19):
        rows = order(0, SAMPLES)[number * BATCH : (number + 1) * BATCH]
        optimizer.zero_grad()
        ((x[rows] @ w - y[rows]) ** 2).mean().backward()
        optimizer.step()
        worker.step(number)
        assert np.abs(worker.shown - w.detach().numpy()).max() <= 1e-13
