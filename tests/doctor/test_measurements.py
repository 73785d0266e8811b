"""Measurements of the doctor, against times that are known, and the file of them that `plan --from` reads."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from ranks import attempt, run

from lightning_hetero import doctor
from lightning_hetero.batching.shares import Cost
from lightning_hetero.cli import main
from lightning_hetero.doctor import RankSpeed, SlowestLinks, advise
from lightning_hetero.errors import CommunicationError, ConfigurationError
from lightning_hetero.planning import cluster
from lightning_hetero.planning.cluster import LinkModel
from lightning_hetero.planning.plan import cluster_from_file
from lightning_hetero.planning.predictions import predictions
from lightning_hetero.planning.strategy_choice import AutoLimits, choose


@pytest.mark.clock
def test_fixed_cost_and_cost_per_sample_are_told_apart() -> None:
    cost, _ = doctor.fit(lambda n: time.sleep(0.004 + 0.0005 * n), samples=32, seconds=0.5, least=3)
    assert cost.seconds(32) == pytest.approx(0.020, rel=0.2)
    assert cost.seconds(8) == pytest.approx(0.008, rel=0.3)


def test_rounds_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = [0.0], []

    def step(n: int) -> None:
        steps.append(n)
        clock[0] += (0.010 + 0.001 * n) * (1.5 if len(steps) > 20 else 1.0)  # another program begins to run

    monkeypatch.setattr(doctor.time, "perf_counter", lambda: clock[0])
    found = doctor.fit(step, samples=40, seconds=1.5, least=3)
    assert (min(found.rounds), max(found.rounds)) == pytest.approx((0.050, 0.075))
    assert len(found.rounds) == doctor.ROUNDS
    assert 0.33 < found.spread < 0.51  # 25 ms, relative to a median between 50 and 75 ms
    steps.clear()
    quiet = doctor.fit(step, samples=40, seconds=0.0, least=3)
    assert quiet.cost[:2] == pytest.approx((0.010, 0.001))
    assert quiet.spread == pytest.approx(0.0)
    one = doctor.fit(lambda n: step(1), samples=1, seconds=0.0, least=2)  # a single size
    assert one.cost.seconds(1) == pytest.approx(0.011)


def test_a_step_leaves_the_weights_as_they_are() -> None:
    work = doctor.builtin_workload(4)
    before = torch.nn.utils.parameters_to_vector(work.module.parameters()).clone()
    assert doctor.measure_steps(work, torch.device("cpu"), seconds=0.0, least=4).cost.seconds(4) > 0
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(work.module.parameters()))
    assert work.size == 4 * before.numel()


def test_a_model_in_the_working_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "examples" / "cli")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    monkeypatch.setattr(sys, "argv", ["lightning-hetero"])  # installed: its own folder comes first, not this one
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # or Lightning warns
    work = doctor.workload_from_config(Path("daso.yaml"), prepare=True, wait=lambda: None)
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


INSIDE, OUTSIDE = LinkModel(1.1e-5, 3.3e9), LinkModel(2.3e-4, 24.7e6)
SPEEDS = [RankSpeed(Cost(0.001 * rank, 0.0017), (0.10, 0.10 + 0.01 * rank, 0.10)) for rank in range(4)]
A, B, C, D = (speed.cost for speed in SPEEDS)
CLUSTERS = {
    "one node": (((0, 1, 2, 3),), SlowestLinks(INSIDE, None), ((A, B, C, D),)),
    "2x2": (((0, 1), (2, 3)), SlowestLinks(INSIDE, OUTSIDE), ((A, B), (C, D))),
    "ranks in turn": (((0, 2), (1, 3)), SlowestLinks(INSIDE, OUTSIDE), ((A, C), (B, D))),
    "4x1": (((0,), (1,), (2,), (3,)), SlowestLinks(None, OUTSIDE), ((A,), (B,), (C,), (D,))),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_plan_reads_the_cluster_that_the_doctor_advises_on(name: str, tmp_path: Path) -> None:
    nodes, links, by_hand = CLUSTERS[name]
    doctor.save_examination(tmp_path / "here.json", SPEEDS, nodes, 16, 8_000_000, links)
    read = cluster_from_file(tmp_path / "here.json")
    assert (read.nodes, read.samples, read.size) == (by_hand, 64, 8e6)
    assert links.within in (read.within, None)
    assert links.between in (read.between, None)
    measured = next(one.step for one in predictions(read) if one.name == "hetero_ddp")
    chosen = choose(read, measured, AutoLimits()).prediction
    advice = advise([A, B, C, D], nodes, 16, 8_000_000, links)
    assert advice.strategy == ('"hetero_ddp"' if chosen is None else chosen.strategy)


@pytest.mark.parametrize(("name", "absent"), [("one node", "between"), ("4x1", "within"), ("2x2", "")])
def test_a_link_that_nobody_has_measured_is_null(name: str, absent: str, tmp_path: Path) -> None:
    nodes, links, _ = CLUSTERS[name]
    doctor.save_examination(tmp_path / "here.json", SPEEDS, nodes, 16, 8_000_000, links)
    found = json.loads((tmp_path / "here.json").read_text())
    assert {way for way in ("within", "between") if found[way] is None} == {absent} - {""}
    assert found["format"] == 1
    spread = [one for node in found["spread"] for one in node]
    assert spread == pytest.approx([0.0, 0.1, 0.2, 0.3])  # 10 ms a rank, of 100 ms


def written(folder: Path, **changed: object) -> Path:
    """A file with one node of two ranks, or with a test's changes of it."""
    found = {"format": 1, "nodes": [[[0.01, 0.002], [0.01, 0.002]]], "samples": 8, "size": 4e6, "within": [1e-5, 1e9]}
    file = folder / "here.json"
    file.write_text(json.dumps({key: value for key, value in {**found, **changed}.items() if value != "left out"}))
    return file


def test_where_a_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("here.json", tmp_path / "here.json", written(tmp_path)):
        doctor.check_target(Path(path))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=r"--save folder: this is a folder\. Give a file"):
        doctor.check_target(Path("folder"))
    with pytest.raises(ConfigurationError, match=r"--save nodir/h\.json: there is no folder .*/nodir\."):
        doctor.check_target(Path("nodir/h.json"))
    with pytest.raises(ConfigurationError, match="there is no folder"):  # a file is no folder
        doctor.check_target(Path("here.json/h.json"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigurationError, match="you may not write there"):
        doctor.check_target(Path("other.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "here.json"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_rank_that_writes_looks_and_before_anything_is_measured(rank: str, monkeypatch) -> None:
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    for module in ("logging", "warnings"):  # which it quiets for the rest of the process
        monkeypatch.setattr(doctor, module, Mock())
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which a Trainer sets: put it back
    monkeypatch.setattr(doctor, "_take_part", measured := Mock())
    command = ["doctor", "--accelerator", "cpu", "--devices", "2", "--save", "nodir/h.json"]
    if rank == "0":
        with pytest.raises(SystemExit, match=r"^error: --save nodir/h\.json: there is no folder "):
            main(command)
    else:
        main(command)
    assert measured.call_count == int(rank)
