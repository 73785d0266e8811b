"""The averager of docs/own_averager.md is what it says: SlowMo, against a loop by hand; and its example runs."""

import contextlib
import io
import math
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from center_tasks import lines
from oracles import START, data, order, split
from ranks import run
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # ranks inherit it
import own_averager
from own_averager import SlowMoStrategy


def rise_and_fall(step: int) -> float:
    return 0.2 + math.sin(step / 10) ** 2


def by_hand(tau: int, alpha: float, beta: float, schedule: Any, mutant: str = "") -> np.ndarray:
    """Two replicas on 8 and 4 of each 12 samples, for 60 steps: the weights of the first after each (NumPy)."""
    features, targets = (np.asarray(part) for part in data())
    start = np.array(START)
    w, u, path, rates = [start.copy(), start.copy()], np.zeros_like(start), [], []
    for step in range(60):
        epoch, batch = divmod(step, 20)
        rows = order(epoch, 235)[12 * batch : 12 * batch + 12]
        rates.append(0.01 * schedule(step))
        first = 0
        for i, part in enumerate(split(len(rows), [2.0, 1.0])):
            mine, first = rows[first : first + part], first + part
            x, y = features[mine], targets[mine]
            w[i] = w[i] - rates[-1] * 2 * x.T @ (x @ w[i] - y) / len(mine)
        if (step + 1) % tau == 0:
            mean, eta = 2 / 3 * w[0] + 1 / 3 * w[1], 1.0 if mutant == "as in BMUF" else np.mean(rates)
            u = beta * u + (start - mean) / eta
            start = start - alpha * eta * u
            w, rates = [start.copy(), start.copy()], []
        path.append(w[0])
    return np.stack(path)


def constant(step: int) -> float:
    return 1.0


def test_against_a_loop_by_hand() -> None:
    cases = [(5, 1.0, 0.7, rise_and_fall), (4, 0.8, 0.5, constant), (12, 1.0, 0.0, rise_and_fall)]
    fits = [
        (SlowMoStrategy, {"tau": tau, "alpha": alpha, "beta": beta, "model": {"schedule": schedule}})
        for tau, alpha, beta, schedule in cases
    ]
    bmuf = ("diloco", {"tau": 4, "outer": partial(SGD, lr=0.8, momentum=0.5), "model": {"schedule": constant}})
    (*results, of_bmuf), _ = run(lines, 2, *fits, bmuf, nodes=[1, 1])
    for case, result in zip(cases, results, strict=True):
        np.testing.assert_allclose(result["path"], by_hand(*case), rtol=0, atol=1e-12)
    # At a constant rate it is BMUF, which the package has; at another it is not.
    np.testing.assert_allclose(results[1]["path"], of_bmuf["path"], rtol=0, atol=1e-12)
    assert abs(by_hand(*cases[0]) - by_hand(*cases[0], "as in BMUF")).max() > 1e-4


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


def test_the_algorithm_and_its_strategy_take_45_lines() -> None:
    """Of code: no docstrings, comments or blank lines. No private name of the package, and only its top level."""
    source = Path(own_averager.__file__).read_text()
    part = source.split("# -- the algorithm")[1].split("# -- a use of it")[0]
    part = re.sub(r'^    """.*?"""$', "", part, flags=re.MULTILINE | re.DOTALL)
    code = [line for line in part.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]
    assert code[0] == "@dataclass"
    assert code[-1].startswith("SlowMoStrategy = strategy_for(")
    assert 20 < len(code) <= 45
    assert not re.search(r"\.(?!__post_init__)_\w", part)
    imports = re.findall(r"^(?:from|import) (lightning_hetero[\w.]*)", source, re.MULTILINE)
    assert imports == ["lightning_hetero"]
