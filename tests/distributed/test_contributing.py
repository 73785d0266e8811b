"""The strategy that CONTRIBUTING.md builds is what the page says, against a loop by hand."""

import numpy as np
import pytest
from center_tasks import lines
from docs_pages import ROOT, blocks
from oracles import START, data, order, split
from ranks import run

[BLOCK] = [block for block in blocks("python") if block.page == ROOT / "CONTRIBUTING.md"]
exec(compile(BLOCK.code, BLOCK.name, "exec"), globals())  # PullAverager, PullStrategy; ranks do it again
PullStrategy, ConfigurationError = globals()["PullStrategy"], globals()["ConfigurationError"]


def by_hand(tau: int, pull: float, mutant: str = "") -> np.ndarray:
    """Two replicas on 8 and 4 of each 12 samples, for 60 steps: the weights of each after each step (NumPy)."""
    features, targets = (np.asarray(part) for part in data())
    w, path = [np.array(START), np.array(START)], []
    for step in range(60):
        epoch, batch = divmod(step, 20)
        rows = order(epoch, 235)[12 * batch : 12 * batch + 12]
        first = 0
        for i, part in enumerate(split(len(rows), [2.0, 1.0])):
            mine, first = rows[first : first + part], first + part
            x, y = features[mine], targets[mine]
            w[i] = w[i] - 0.01 * 2 * x.T @ (x @ w[i] - y) / len(mine)
        if (step + 1) % tau == 0:
            mean = (w[0] + w[1]) / 2 if mutant == "not by samples" else 2 / 3 * w[0] + 1 / 3 * w[1]
            w = [mean + (1 - pull) * (own - mean) for own in w]
        path.append(np.stack(w))
    return np.stack(path, 1)


def test_against_a_loop_by_hand() -> None:
    cases = [(5, 0.5), (4, 0.25), (12, 1.0)]
    fits = [(PullStrategy, {"tau": tau, "pull": pull}) for tau, pull in cases]
    for rank, results in enumerate(run(lines, 2, *fits, nodes=[1, 1])):
        for case, result in zip(cases, results, strict=True):
            np.testing.assert_allclose(result["path"], by_hand(*case)[rank], rtol=0, atol=1e-12)
        assert abs(np.asarray(results[0]["path"]) - by_hand(*cases[0], "not by samples")[rank]).max() > 1e-4


@pytest.mark.parametrize("wrong", [{"tau": 0}, {"pull": 0.0}, {"pull": 1.5}])
def test_its_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="pull above 0 and at most 1"):
        PullStrategy(**wrong)


def test_blocks_that_a_test_runs_name_a_test_that_reads_them() -> None:
    found = [block for block in blocks("python") if block.remark.startswith("runs in ")]
    for block in found:
        assert f'"{block.page.name}"' in (ROOT / block.remark.removeprefix("runs in ")).read_text()
    assert BLOCK in found
