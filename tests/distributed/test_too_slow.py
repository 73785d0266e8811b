"""A rank that slows the job down more than it helps: the log and the report say so, with the numbers."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader
from virtual_time import virtual_time

from lightning_hetero import DiLoCoStrategy, EmulatedSpeed, HeteroDDPStrategy, HeteroMonitor, HeteroStrategy
from lightning_hetero.batching.shares import Cost

TOTAL = 32  # samples of all ranks in a step
#: With its least share, one sample, the last rank takes 0.5 s; the others do all 32 in less.
TOO_SLOW = [(0.010, 0.002), (0.020, 0.004), (0.45, 0.05)]
#: Slow but useful: it takes some samples without making a step longer.
SLOW = [(0.010, 0.002), (0.020, 0.004), (0.010, 0.02)]
ALIKE = [(0.010, 0.002)] * 3


def brute_force(costs: Sequence[tuple[float, float]], least: int = 1) -> float:
    """Samples per second of the fastest split over all of these ranks."""
    lines = [Cost(*cost) for cost in costs]
    if len(lines) == 2:
        splits = [(n, TOTAL - n) for n in range(least, TOTAL - least + 1)]
    else:
        ns = range(least, TOTAL)
        splits = [(n, m, TOTAL - n - m) for n in ns for m in ns if TOTAL - n - m >= least]
    return TOTAL / min(max(line.seconds(n) for line, n in zip(lines, split, strict=True)) for split in splits)


def _fit(strategy: type[HeteroStrategy], costs: list[tuple[float, float]], root: Path, **options: Any) -> list[str]:
    """Messages in this rank's log about ranks that are too slow."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    with virtual_time():
        callbacks = [HeteroMonitor(report=root), EmulatedSpeed(costs)]
        chosen = strategy(global_batch_size=TOTAL, **options)
        fast = {**FAST, "max_steps": 60, "max_epochs": -1, "devices": len(costs)}
        trainer = pl.Trainer(strategy=chosen, callbacks=callbacks, **fast)
        trainer.fit(Net(), DataLoader(dataset(TOTAL * 20), batch_size=8))
    return [line for line in messages if "times as fast" in line]


def advice(root: Path) -> str:
    page = (root / "report.html").read_text()
    found = json.loads((root / "figures.json").read_text())["verdict"]["advice"]
    assert all(sentence.split(" (")[0] in page for sentence in found)
    return " ".join(found)


@pytest.mark.parametrize(("strategy", "options"), [(HeteroDDPStrategy, {}), (DiLoCoStrategy, {"tau": 4})])
def test_a_rank_that_is_too_slow_is_named_in_the_log_once_and_in_the_report(
    strategy: type[HeteroStrategy], options: dict[str, int], tmp_path: Path
) -> None:
    (line,), *others = run(_fit, 3, strategy, TOO_SLOW, tmp_path, **options)
    assert others == [[], []]
    without, with_it = brute_force(TOO_SLOW[:2]), brute_force(TOO_SLOW)
    for words in (line, advice(tmp_path)):
        assert f"Without rank 2 the job is {without / with_it:.1f}" in words
        numbers = words.split("times as fast (")[1].split(")")[0].split()
        assert float(numbers[0]) == pytest.approx(without, rel=0.1)
        assert numbers[1:3] == ["samples/s", "against"]
        assert float(numbers[3]) == pytest.approx(with_it, rel=0.1)
        assert "keeps its least share: " in words
        assert "global_batch_size=32" in words
    assert "min_batch_size" not in advice(tmp_path)  # the other explanation of why ranks wait


@pytest.mark.parametrize("costs", [ALIKE, SLOW], ids=["alike", "slow, but of use"])
def test_ranks_that_are_of_use_are_not_named(costs: list[tuple[float, float]], tmp_path: Path) -> None:
    assert run(_fit, 3, HeteroDDPStrategy, costs, tmp_path) == [[], [], []]
    assert "times as fast (" not in advice(tmp_path)


def test_the_least_share_that_the_user_gives_can_make_a_rank_too_slow(tmp_path: Path) -> None:
    (line,), *_ = run(_fit, 3, HeteroDDPStrategy, SLOW, tmp_path, min_batch_size=8)
    numbers = line.split("times as fast (")[1].split(")")[0].split()
    assert float(numbers[0]) == pytest.approx(brute_force(SLOW[:2], 8), rel=0.1)
    assert float(numbers[3]) == pytest.approx(brute_force(SLOW, 8), rel=0.1)


def test_the_others_could_not_take_its_samples(tmp_path: Path) -> None:
    assert run(_fit, 3, HeteroDDPStrategy, TOO_SLOW, tmp_path, max_batch_size=15) == [[], [], []]
    assert "times as fast (" not in advice(tmp_path)
