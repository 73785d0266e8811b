"""Algorithms of a user against loops in NumPy: SlowMo of docs/own_averager.md, and a pull towards the mean."""

import contextlib
import io
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from center_tasks import lines
from oracles import START, data, order, split
from ranks import attempt, run
from tasks import FAST, Net, dataset
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_hetero import Averager, StepContext, strategy_for
from lightning_hetero.errors import CommunicationError, ConfigurationError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # ranks inherit it
import own_averager
from own_averager import SlowMo, SlowMoStrategy


def rise_and_fall(step: int) -> float:
    return 0.2 + math.sin(step / 10) ** 2


def constant(step: int) -> float:
    return 1.0


Meet = Callable[[int, list[np.ndarray], float], list[np.ndarray]]


def by_hand(schedule: Callable[[int], float], meet: Meet) -> np.ndarray:
    """Weights (NumPy) of two replicas on 8 and 4 of each 12 samples, after each of 60 steps.

    Args:
        schedule: of the learning rate.
        meet: new weights after a step, from its number, the weights and the step's rate.
    """
    features, targets = (np.asarray(part) for part in data())
    w, path = [np.array(START), np.array(START)], []
    for step in range(60):
        epoch, batch = divmod(step, 20)
        rows = order(epoch, 235)[12 * batch : 12 * batch + 12]
        rate, first = 0.01 * schedule(step), 0
        for i, part in enumerate(split(len(rows), [2.0, 1.0])):
            mine, first = rows[first : first + part], first + part
            x, y = features[mine], targets[mine]
            w[i] = w[i] - rate * 2 * x.T @ (x @ w[i] - y) / len(mine)
        w = meet(step + 1, w, rate)
        path.append(np.stack(w))
    return np.stack(path, 1)


def slow_momentum(tau: int, alpha: float, beta: float, mutant: str = "") -> Meet:
    start, u, rates = np.array(START), np.zeros_like(np.array(START)), list[float]()

    def meet(step: int, w: list[np.ndarray], rate: float) -> list[np.ndarray]:
        nonlocal start, u
        rates.append(rate)
        if step % tau:
            return w
        mean, eta = 2 / 3 * w[0] + 1 / 3 * w[1], 1.0 if mutant == "as in BMUF" else np.mean(rates)
        rates.clear()
        u = beta * u + (start - mean) / eta
        start = start - alpha * eta * u
        return [start, start]

    return meet


def test_against_a_loop_by_hand() -> None:
    cases = [(5, 1.0, 0.7, rise_and_fall), (4, 0.8, 0.5, constant), (12, 1.0, 0.0, rise_and_fall)]
    fits = [
        (SlowMoStrategy, {"tau": tau, "alpha": alpha, "beta": beta, "model": {"schedule": schedule}})
        for tau, alpha, beta, schedule in cases
    ]
    bmuf = ("diloco", {"tau": 4, "outer": partial(SGD, lr=0.8, momentum=0.5), "model": {"schedule": constant}})
    (*results, of_bmuf), _ = run(lines, 2, *fits, bmuf, nodes=[1, 1])
    for (*options, schedule), result in zip(cases, results, strict=True):
        expected = by_hand(schedule, slow_momentum(*options))
        np.testing.assert_allclose(result["path"], expected[0], rtol=0, atol=1e-12)
    # At a constant rate it is BMUF, which the package has; at a changing rate it is not.
    np.testing.assert_allclose(results[1]["path"], of_bmuf["path"], rtol=0, atol=1e-12)
    *options, schedule = cases[0]
    wrong = by_hand(schedule, slow_momentum(*options, "as in BMUF"))
    assert abs(by_hand(schedule, slow_momentum(*options)) - wrong).max() > 1e-4


RATE = 0.05


@dataclass
class BrokenSlowMo(SlowMo):
    """At an exchange rank 2 is killed: before it, so that it breaks, or after it, which rank 0 takes for broken."""

    before: bool = True

    def meet(self, context: StepContext) -> Any:
        began, outcome = torch.cat(self.momentum), super().meet(context)
        MOMENTA[context.step] = began, torch.cat(self.momentum)
        return outcome

    def average(self, context: StepContext, payload: float = math.nan) -> Any:
        rank, breaks = int(os.environ["RANK"]), context.step == 8 and self.links.count == 3
        if breaks and self.before:
            self._fail(rank)
        found = super().average(context, payload)
        if breaks and not self.before:
            self._fail(rank)
            if rank == 0:
                raise CommunicationError("the connection has broken")
        ETAS[context.step] = found.payloads[0]
        return found

    def _fail(self, rank: int) -> None:
        time.sleep(0.5)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)


ETAS: dict[int, float] = {}  # of each exchange of this process, the mean learning rate since the one before
MOMENTA: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the momentum before each exchange, and after it
BrokenStrategy = strategy_for(BrokenSlowMo, "hetero_broken_slowmo", replica="rank")


def fit_broken(before: bool) -> tuple[dict[int, float], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    settings = {**FAST, "devices": 1, "num_nodes": 3}
    strategy = BrokenStrategy(tau=4, before=before, on_peer_loss="continue", balance="off")
    trainer = pl.Trainer(strategy=strategy, max_steps=15, **settings)
    trainer.fit(Net(lr=RATE), DataLoader(dataset(96), batch_size=6))
    return ETAS, MOMENTA


@pytest.mark.parametrize("before", [True, False])
def test_a_loss_at_an_exchange_does_not_change_the_momentum(before: bool) -> None:
    """The exchange is repeated by those that remain, or missed by one of them; the mean rate is that of all steps."""
    outcomes = attempt(fit_broken, 3, before, nodes=[1, 1, 1])
    assert outcomes[2].exitcode == -signal.SIGKILL
    for number, outcome in enumerate(outcomes[:2]):
        assert outcome.value, outcome.trace
        etas = {step: eta for step, eta in outcome.value[0].items() if step < 15}  # after the last one it is the mean
        assert etas.keys() == ({4, 8, 12} if before or number else {4, 12})
        assert list(etas.values()) == pytest.approx([RATE] * len(etas), rel=1e-12)
        momenta, of_other = outcome.value[1], outcomes[1].value[1]  # which has missed no exchange
        assert 8 not in momenta or torch.equal(momenta[8][0], momenta[4][1])
        assert momenta[4][1].any()
        assert torch.equal(momenta[12][0], of_other[8][1])


@dataclass
class PullAverager(Averager):
    """Moves each replica a part of the way to the mean every tau steps, so that no two are equal."""

    tau: int = 12
    pull: float = 0.5

    def due(self, context: StepContext) -> bool:
        return context.step % self.tau == 0

    def meet(self, context: StepContext) -> None:
        own = self.replica.pack()
        average = self.average(context)
        self.adopt(average)
        self.replica.unpack([m + (1 - self.pull) * (x.to(m) - m) for x, m in zip(own, average.mean, strict=True)])


PullStrategy = strategy_for(PullAverager, name="hetero_pull", replica="rank")


def pulled(tau: int, pull: float, parts: tuple[float, float] = (2 / 3, 1 / 3)) -> Meet:
    def meet(step: int, w: list[np.ndarray], rate: float) -> list[np.ndarray]:
        mean = parts[0] * w[0] + parts[1] * w[1]
        return w if step % tau else [mean + (1 - pull) * (own - mean) for own in w]

    return meet


def test_replicas_that_stay_apart_against_a_loop_by_hand() -> None:
    cases = [(5, 0.5), (4, 0.25), (12, 1.0)]
    fits = [(PullStrategy, {"tau": tau, "pull": pull}) for tau, pull in cases]
    for rank, results in enumerate(run(lines, 2, *fits, nodes=[1, 1])):
        for case, result in zip(cases, results, strict=True):
            np.testing.assert_allclose(result["path"], by_hand(constant, pulled(*case))[rank], rtol=0, atol=1e-12)
        wrong = by_hand(constant, pulled(*cases[0], (1 / 2, 1 / 2)))[rank]
        assert abs(np.asarray(results[0]["path"]) - wrong).max() > 1e-4


def _example(folder: str, *arguments: str) -> str:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        own_averager.main(list(arguments))
    return output.getvalue()


@pytest.mark.long
def test_the_example_learns_and_ends_with_equal_replicas(tmp_path: Path) -> None:
    printed, _ = run(_example, 2, str(tmp_path), "--epochs", "3")
    assert float(re.search(r"test accuracy: ([\d.]+)%", printed).group(1)) > 85
    assert float(re.search(r"when they last met: ([\d.e-]+)", printed).group(1)) > 0
    assert float(re.search(r"final weights: ([\d.e-]+)", printed).group(1)) == 0


def test_the_algorithm_and_its_strategy_take_30_lines() -> None:
    """Lines of code, without docstrings, comments and blank lines. They use only public names of the top level."""
    source = Path(own_averager.__file__).read_text()
    part = source.split("# -- the algorithm")[1].split("# -- a use of it")[0]
    part = re.sub(r'^    """.*?"""$', "", part, flags=re.MULTILINE | re.DOTALL)
    code = [line for line in part.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]
    assert code[0] == "@dataclass"
    assert code[-1].startswith("SlowMoStrategy = strategy_for(")
    assert 20 < len(code) <= 30
    assert not re.search(r"\.(?!__post_init__)_\w", part)
    imports = re.findall(r"^(?:from|import) (lightning_hetero[\w.]*)", source, re.MULTILINE)
    assert imports == ["lightning_hetero"]


@dataclass
class Lazy(Averager):
    """Makes a vector without a role, but not before the first exchange."""

    velocity: Any = field(default=None, init=False)

    def due(self, context: StepContext) -> bool:
        return context.step % 3 == 0

    def meet(self, context: StepContext) -> None:
        super().meet(context)
        self.velocity = [torch.zeros(3)]


LazyStrategy = strategy_for(Lazy, "LazyStrategy")


def fit_lazily() -> None:
    settings = {**FAST, "devices": 1, "num_nodes": 2}
    pl.Trainer(strategy=LazyStrategy(), max_steps=8, **settings).fit(Net(), DataLoader(dataset(96), batch_size=4))


def test_a_vector_without_a_role_that_an_exchange_makes_ends_the_fit_there() -> None:
    """Otherwise it would be lost silently when the run is resumed."""
    for outcome in attempt(fit_lazily, 2, nodes=[1, 1]):
        assert isinstance(outcome.error, ConfigurationError), outcome.trace
        assert "Lazy.velocity holds tensors, but has no role" in str(outcome.error)
