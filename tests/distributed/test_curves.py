"""Devices with curved costs, in real training with virtual clocks: shares, checkpoints, reports, messages."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader
from virtual_time import virtual_time

from lightning_hetero import EmulatedSpeed, HeteroDDPStrategy, HeteroMonitor
from lightning_hetero.batching.cost import CurveEstimator


def flat(samples: int) -> float:
    """16 ms for up to 16 samples, and 4 ms for each further one."""
    return 0.016 + 0.004 * max(0, samples - 16)


def line(samples: int) -> float:
    return 0.010 + 0.002 * samples


def staircase(samples: int) -> float:
    """8 ms for each 8 samples."""
    return 0.008 * -(-samples // 8)


def half_as_fast(samples: int) -> float:
    return 2 * staircase(samples)


Devices = list[Callable[[int], float]]
FLAT, STAIRS = ([flat, line], 32), ([staircase, half_as_fast], 48)  # devices, samples of both per step


def optimum(devices: Devices, total: int) -> float:
    first, second = devices
    return min(max(first(n), second(total - n)) for n in range(1, total))


def _fit(
    devices: Devices, total: int, steps: int, straight: bool = False, root: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    with virtual_time(), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if straight:
            patch.setattr(CurveEstimator, "curve", lambda self: None)
        monitor = HeteroMonitor(report=root)
        options = {**FAST, "max_steps": steps, "max_epochs": -1, "devices": 2}
        callbacks = [monitor, EmulatedSpeed(devices)]
        trainer = pl.Trainer(strategy=HeteroDDPStrategy(), callbacks=callbacks, **options)
        trainer.fit(Net(), DataLoader(dataset(total * 50), batch_size=total // 2), ckpt_path=resume)
        if root is not None:
            trainer.save_checkpoint(root / "last.ckpt")
    bends = [str(w.message) for w in caught if "bend down" in str(w.message)]
    return {"shares": [list(record.shares) for record in monitor.history], "bends": bends}


def slowdowns(devices: Devices, total: int, shares: list[list[int]]) -> list[float]:
    best = optimum(devices, total)
    return [max(device(n) for device, n in zip(devices, row, strict=True)) / best for row in shares]


@pytest.mark.long
@pytest.mark.parametrize(("devices", "total"), [FLAT, STAIRS], ids=["flat", "staircase"])
def test_steps_come_within_5_percent_of_the_optimum_where_a_line_loses_more_than_10(
    devices: Devices, total: int
) -> None:
    by_curve, by_line = (run(_fit, 2, devices, total, 140, straight)[0]["shares"] for straight in (False, True))
    assert all(sum(row) == total for row in (*by_curve, *by_line))
    assert max(slowdowns(devices, total, by_curve)[-10:]) <= 1.05
    late = slowdowns(devices, total, by_line)[-10:]
    if (devices, total) == FLAT:  # with stairs the first meetings find the best split by trials
        assert sum(late) / len(late) > 1.10


def test_where_times_bend_down_every_rank_says_so_once() -> None:
    first, second = run(_fit, 2, [slower, much_slower], 24, 120)
    assert first["bends"] == second["bends"]
    (text,) = first["bends"]
    assert text.startswith("Rank 1 takes 80 ms for 9 samples, more than")
    assert "balance=[...]" in text


def slower(samples: int) -> float:
    return 0.020 * -(-samples // 8)


def much_slower(samples: int) -> float:
    return 0.040 * -(-samples // 8)


def _saved_and_resumed(root: Path) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    first = _fit(*FLAT, 60, root=root)["shares"]
    torch.distributed.barrier()
    again = _fit(*FLAT, 120, resume=root / "last.ckpt")["shares"]
    torch.distributed.barrier()
    checkpoint = torch.load(root / "last.ckpt", weights_only=True)
    part = checkpoint["lightning_hetero"]  # as a version wrote it that knew only straight lines
    part["fits"] = [row[:3] for row in part["fits"]]
    part["planner"]["costs"] = [row[:2] for row in part["planner"]["costs"]]
    torch.save(checkpoint, old := root / f"old-{torch.distributed.get_rank()}.ckpt")
    return first, again, _fit(*FLAT, 120, resume=old)["shares"]


@pytest.mark.long
def test_a_checkpoint_holds_the_curve_and_one_without_it_loads(tmp_path: Path) -> None:
    for first, again, old in run(_saved_and_resumed, 2, tmp_path):
        assert max(slowdowns(*FLAT, first)[-4:]) <= 1.05
        assert max(slowdowns(*FLAT, again)) <= 1.05  # from the first step on
        assert all(sum(row) == 32 for row in old)
        assert len(old) == len(again)  # it learns the curve again
    part = torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_hetero"]
    fixed, per_sample, samples, *bends = part["fits"][0]
    assert len(bends) >= 2
    assert (fixed, per_sample, samples) == pytest.approx((0.016, 0.0, 20), abs=2)
    assert any(len(row) > 2 for row in part["planner"]["costs"])


def test_the_report_holds_the_curve(tmp_path: Path) -> None:
    run(_fit, 2, *FLAT, 60, root=tmp_path)
    (path,) = tmp_path.rglob("figures.json")
    flat_cost, slow_cost = (view["cost"] for view in json.loads(path.read_text())["views"])
    assert slow_cost["bends"] == []
    assert slow_cost["fixed"] == pytest.approx(0.010, abs=0.002)
    assert slow_cost["per_sample"] == pytest.approx(0.002, rel=0.05)
    at_32 = flat_cost["fixed"] + 32 * flat_cost["per_sample"] + sum(k * (32 - at) for at, k in flat_cost["bends"])
    assert flat_cost["bends"]
    assert at_32 == pytest.approx(flat(32), rel=0.1)
