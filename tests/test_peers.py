"""`benchmarks/peers`: tables of runs that are made by hand, and the end of runs."""

import argparse
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import rich.table  # noqa: F401  before modules are put back
import torch

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def _its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark's modules import each other by plain names, which other tests must not see."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "path", [str(PEERS), str(PEERS.parent / "cluster"), *sys.path])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def rank_of(steps: int, each: float, bytes_each: int, samples: int = 16) -> dict[str, Any]:
    return {
        "times": [100 + each * step for step in range(steps + 1)],
        "sent": [bytes_each * step for step in range(steps + 1)],
        "samples": [samples] * steps,
    }


def run_of(name: str, each: float, falls_at: int, steps: int = 40, bytes_each: int = 2_000_000) -> dict[str, Any]:
    """Two ranks; the loss of their mean falls from 3 to 2 at a step, that of the first one to 2.8 only."""
    ranks = [rank_of(steps, each, bytes_each), rank_of(steps, each, 1_000_000)]
    course = [[step, [2.0, 2.8] if step >= falls_at else [3.0, 3.0]] for step in range(0, steps, 8)]
    return {"contender": name, "together": True, "ranks": ranks, "course": course, "left": [1.9, 2.7]}


def test_figures_of_a_run() -> None:
    import outcome

    row = outcome.figures(run_of("ddp", 0.5, 16), outcome.Goal(2.5, 8))
    assert row.ms == pytest.approx(500)
    assert row.sent == pytest.approx(2.0)
    assert row.to_goal == pytest.approx(0.5 * 16)
    assert row.sent_to_goal == pytest.approx(2.0 * 16)
    assert (row.equal, row.left, row.steps) == (3.0, 1.9, 40)
    assert outcome.figures(run_of("ddp", 0.5, 16), outcome.Goal(1.0, 8)).to_goal == math.inf
    alone = outcome.figures(run_of("ddp", 0.5, 16), outcome.Goal(2.5, 24), alone=True)
    assert (alone.to_goal, alone.equal, alone.left) == (math.inf, 2.8, 2.7)
    assert math.isnan(outcome.figures(run_of("ddp", 0.5, 16), outcome.Goal(2.5, 80)).equal)


def test_bytes_are_counted_over_whole_intervals() -> None:
    """An exchange after every 16 steps, and 37 steps: two exchanges in 32 steps."""
    import outcome

    run, goal = run_of("local", 0.5, 16, steps=37), outcome.Goal(2.5, 8)
    for rank in run["ranks"]:
        rank["sent"] = [16_000_000 * (step // 16) for step in range(38)]
    assert outcome.figures(run, goal).sent == pytest.approx(1.0)
    assert outcome.figures({**run, "together": False}, goal).sent == pytest.approx(32 / 37)


def test_the_table_pairs_runs_and_says_what_is_not_reached() -> None:
    import outcome

    runs = [run_of("ddp", 1.0, 16), run_of("ddp", 1.0, 80), run_of("fast", 0.25, 16), run_of("fast", 0.5, 16)]
    drawn = outcome.table(runs, "ddp", outcome.Goal(2.5, 8))
    cells = {column.header: list(column.cells) for column in drawn.columns}
    assert cells["contender"] == ["ddp", "fast"]
    assert cells["ms per step"] == ["1000", "375 (250 to 500)"]
    assert cells["seconds to a loss of 2.5"] == ["not in 40 s (16.0 to not in 40 s)", "6.0 (4.0 to 8.0)"]
    assert cells["MB to it"] == ["- (32.0 to -)", "32.0"]
    # ddp's second run lasts 40 s without the loss, which the other one has after 8 s.
    assert cells["times as fast as ddp"] == ["> 1.00", "> 4.50 (4.00 to 5.00)"]


def test_ranks_that_train_alone_have_a_row_for_one_device() -> None:
    import outcome

    drawn = outcome.table([run_of("alone:inner_lr=0.002", 1.0, 16)], "ddp", outcome.Goal(2.5, 24))
    cells = {column.header: list(column.cells) for column in drawn.columns}
    assert cells["contender"] == ["alone:inner_lr=0.002", "one device:inner_lr=0.002"]
    assert cells["seconds to a loss of 2.5"] == ["16.0", "not in 40 s"]
    assert cells["loss after 24 steps"] == ["2.000", "2.800"]


def test_pairs_are_of_contenders_that_ran_for_all_seeds() -> None:
    import outcome

    runs, goal = [run_of("ddp", 1.0, 16), run_of("fast", 0.25, 8)], outcome.Goal(2.5, 8)
    [found] = outcome.pairs(runs, ["ddp", "gone"], goal)
    assert [column.header for column in found.columns] == ["times as fast to a loss of 2.5 as", "ddp"]
    assert list(found.columns[1].cells) == ["1.00", "8.00"]  # 16 steps of a second, 8 of a quarter
    assert outcome.pairs(runs, ["gone"], goal) == []


def test_the_best_learning_rate_is_that_with_the_least_loss_after_equal_steps() -> None:
    import outcome
    import systems

    names = [systems.with_rate(name, rate) for name in ("ddp", "hetero_diloco:tau=16") for rate in (1e-3, 2e-3)]
    assert names[2:] == ["hetero_diloco:tau=16,inner_lr=0.001", "hetero_diloco:tau=16,inner_lr=0.002"]
    assert [systems.without_rate(name) for name in names[1:3]] == [("ddp", 2e-3), ("hetero_diloco:tau=16", 1e-3)]
    runs = [run_of(name, 1.0, falls_at) for name, falls_at in zip(names, (8, 16, 16, 8), strict=True)]
    cells = [list(column.cells) for column in outcome.best_rates(runs, outcome.Goal(2.5, 8)).columns]
    assert cells == [[names[0], names[3]], ["2.000", "2.000"], ["3.000", "3.000"]]


def test_samples_per_second_of_ranks_at_their_own_pace() -> None:
    """One rank does 32 samples in a second, the other 160; the second one ends first, and so does the window."""
    import outcome

    ranks = [rank_of(40, 0.5, 0), rank_of(60, 0.1, 0)]
    run = {"contender": "alone", "ranks": ranks}
    assert outcome.rate(run, 2.0) == pytest.approx(32 + 160)
    assert math.isnan(outcome.rate(run, 7.0))
    half = {"contender": "ddp", "ranks": [rank_of(40, 0.5, 1000), rank_of(40, 0.5, 1000)]}
    cells = [list(column.cells) for column in outcome.shares([run, half], "alone", 2.0).columns]
    assert cells[:3] == [["alone", "ddp"], ["192", "64"], ["100.0%", "33.3%"]]


def test_all_ranks_stop_at_the_same_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import common

    monkeypatch.setenv("WORLD_SIZE", "2")
    task = common.Task(steps=100, batch=1, costs=[], seed=1, limit=5.0)
    now = [0.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    boards = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        boards.append(common.Board(tmp_path / "board", task))
    assert all(board.go_on(0) for board in boards)
    assert boards[1].go_on(30)  # the second rank is far ahead
    now[0] = 6.0
    assert boards[1].go_on(31)  # it does not decide
    assert boards[0].go_on(10)  # the first one does: 31 + 2
    assert next(step for step in range(11, 100) if not boards[0].go_on(step)) == 33
    assert boards[1].go_on(32)
    assert not boards[1].go_on(33)
    separate = common.Board(tmp_path / "other", task, together=False)
    assert separate.go_on(0)
    now[0] = 12.0
    assert not separate.go_on(7)


def test_weights_are_tested_as_the_mean_of_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import common
    from text import gpt, loss_of, windows

    torch.manual_seed(0)
    net, text = gpt(), windows()[1][:8]
    monkeypatch.setattr(common, "windows", lambda: (None, text))
    with torch.no_grad():
        expected = loss_of(net, text).item()
        before = common.flat(net)
    for rank, sign in (("0", 1), ("1", -1)):
        monkeypatch.setenv("RANK", rank)
        offset = 0.1 * sign * torch.randn(before.shape, generator=torch.Generator().manual_seed(1))
        torch.nn.utils.vector_to_parameters(before + offset, net.parameters())
        record = common.Record(every=2)
        for _ in range(3):
            record.begin(net, 4)
        record.leave(net, tmp_path)
    found = common.tested(tmp_path, 2)
    assert [step for step, _ in found["course"]] == [0, 2]
    assert found["left"][0] == pytest.approx(expected, abs=1e-3)  # up to rounding of the mean
    assert found["left"][1] > expected + 0.01  # the first rank's own
    assert not list(tmp_path.iterdir())


def test_ranks_read_parts_of_the_text_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    from text import Text, windows

    monkeypatch.setenv("WORLD_SIZE", "3")
    parts = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        parts.append(Text(10, seed=1))
    training, test = windows()
    assert sum(len(part.part) for part in parts) == len(training)
    seen = [row.tobytes() for part in parts for row in part.part.numpy()]
    assert Counter(seen) == Counter(row.tobytes() for row in training.numpy())
    read = set(seen)
    assert sum(row.tobytes() in read for row in test.numpy()) < 0.1 * len(test)  # text that many files repeat
    assert not torch.equal(parts[0].part, Text(10, seed=2).part)


def test_each_contender_has_its_system(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    import systems

    names = ["hetero_ddp", "ddp", "torch_alone", "torchft_diloco:every=16", "hivemind_local", "accelerate_local_sgd"]
    scripts = [systems.system_of(name).script.removesuffix("_job.py") for name in names]
    assert scripts == ["lightning", "lightning", "torch", "torchft", "hivemind", "accelerate"]
    assert all((PEERS / systems.system_of(name).script).exists() for name in names)
    options = argparse.Namespace(envs=tmp_path, make_envs=False)
    found = systems.interpreters(names, options)
    assert {system.script for system in found} == {"lightning_job.py", "torch_job.py"}
    output = capsys.readouterr().out
    for peer in ("torchft==0.2.0", "hivemind==1.1.12", "accelerate==1.15.0"):
        assert peer in output
    assert "Left out: torchft_diloco:every=16." in output
    commands = systems.steps_to_make(systems.system_of("torchft_diloco"), tmp_path)
    assert commands[1][-3:] == ["-c", str(systems.CONSTRAINTS), "torch"]  # before lines that could choose another


def test_without_a_seed_nothing_is_paired() -> None:
    import outcome

    runs = [run_of("ddp", 1.0, 20), run_of("fast", 0.25, 20), run_of("fast", 0.5, 20)]
    cells = {column.header: list(column.cells) for column in outcome.table(runs, "ddp", outcome.Goal(2.5, 8)).columns}
    assert cells["times as fast as ddp"] == ["1.00", ""]


@pytest.mark.parametrize(
    ("name", "words"),
    [("hetero_nod", "Unknown strategy 'hetero_nod'"), ("hetero_node:tau=16", "unknown option(s) tau")],
)
def test_an_unknown_contender_ends_the_program_before_any_run(name: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PEERS), "ddp", name], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode
    assert words in done.stderr
    assert not done.stdout


def test_an_option_that_nobody_reads_is_found() -> None:
    import plain

    options = plain.Options("every=16,evry=8")
    assert options.get("every") == "16"
    assert options.get("fragments", 2) == 2
    assert options.unread == {"evry"}
