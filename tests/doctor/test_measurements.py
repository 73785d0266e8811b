"""What the doctor measures, against times that are known."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run

from lightning_hetero import doctor
from lightning_hetero.errors import CommunicationError
from lightning_hetero.planning import cluster


@pytest.mark.clock
def test_fixed_cost_and_cost_per_sample_are_told_apart() -> None:
    cost, _ = doctor.fit(lambda n: time.sleep(0.004 + 0.0005 * n), samples=32, seconds=0.5, least=3)
    assert cost.seconds(32) == pytest.approx(0.020, rel=0.2)
    assert cost.seconds(8) == pytest.approx(0.008, rel=0.3)


def test_rounds_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = [0.0], []

    def step(n: int) -> None:
        steps.append(n)
        clock[0] += (0.010 + 0.001 * n) * (1.5 if len(steps) > 20 else 1.0)  # something else begins to run

    monkeypatch.setattr(doctor.time, "perf_counter", lambda: clock[0])
    found = doctor.fit(step, samples=40, seconds=1.5, least=3)
    assert (min(found.rounds), max(found.rounds)) == pytest.approx((0.050, 0.075))
    assert len(found.rounds) == doctor.ROUNDS
    assert 0.33 < found.spread < 0.51  # half, of a median in between
    steps.clear()
    quiet = doctor.fit(step, samples=40, seconds=0.0, least=3)
    assert quiet.cost == pytest.approx((0.010, 0.001))
    assert quiet.spread == pytest.approx(0.0)
    one = doctor.fit(lambda n: step(1), samples=1, seconds=0.0, least=2)  # a single size
    assert one.cost.seconds(1) == pytest.approx(0.011)


def test_a_step_leaves_the_weights_as_they_are() -> None:
    work = doctor.built_in(4)
    before = torch.nn.utils.parameters_to_vector(work.module.parameters()).clone()
    assert doctor.measure_steps(work, torch.device("cpu"), seconds=0.0, least=4).cost.seconds(4) > 0
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(work.module.parameters()))
    assert work.size == 4 * before.numel()


def test_a_model_in_the_working_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "examples" / "cli")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    monkeypatch.setattr(sys, "argv", ["lightning-hetero"])  # installed: its own folder comes first, not this one
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # or Lightning warns
    work = doctor.of_config(Path("daso.yaml"), prepare=True, wait=lambda: None)
    assert (work.name, work.samples) == ("DigitReader", 32)


def measured(delay: float) -> cluster.MeasuredLink:
    """The link between two ranks, the second of which answers late by so many seconds."""
    dist.init_process_group("gloo")
    send = dist.send

    def late(*arguments: object) -> None:
        time.sleep(delay)
        send(*arguments)

    if dist.get_rank() == 1:
        dist.send = late
    [link] = cluster.measure_links([(0, 1)])
    return link


@pytest.mark.clock
def test_a_late_answer_is_latency() -> None:
    first, second = run(measured, 2, 0.02)
    assert first == second  # all know it
    assert first.ranks == (0, 1)
    assert 0.01 <= first.latency < 0.03  # half of the way there and back
    assert first.bandwidth > 5e6


def unanswered() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    if dist.get_rank() == 1:
        time.sleep(9)
    else:
        cluster.measure_links([(0, 1)])


def test_nobody_waits_for_ever() -> None:
    outcome = attempt(unanswered, 2)[0]
    assert isinstance(outcome.error, CommunicationError), outcome.trace
    assert "could not measure the link between ranks 0 and 1" in str(outcome.error)
