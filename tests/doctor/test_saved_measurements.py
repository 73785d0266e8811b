"""The file of ``doctor --save``: what it holds, what ``plan --from`` makes of it, and where it cannot be written."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hetero import doctor
from lightning_hetero.batching.shares import Cost
from lightning_hetero.cli import main
from lightning_hetero.doctor import RankSpeed, SlowestLinks, advise
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.planning.cluster import Cluster, LinkModel
from lightning_hetero.planning.plan import cluster_from_file
from lightning_hetero.planning.predictions import predictions
from lightning_hetero.planning.strategy_choice import AutoLimits, choose

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
    """A file with one node of two ranks, or what a test makes of it."""
    found = {"format": 1, "nodes": [[[0.01, 0.002], [0.01, 0.002]]], "samples": 8, "size": 4e6, "within": [1e-5, 1e9]}
    file = folder / "here.json"
    file.write_text(json.dumps({key: value for key, value in {**found, **changed}.items() if value != "left out"}))
    return file


def test_a_link_that_no_two_ranks_have_is_memory(tmp_path: Path) -> None:
    assert cluster_from_file(written(tmp_path, between=None)) == Cluster(
        ((Cost(0.01, 0.002),) * 2,), 16, 4e6, LinkModel(1e-5, 1e9), LinkModel(2e-5, 5e9)
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": 2}, "format 2, of a later version; this one reads up to 1"),
        ({"format": "left out"}, "is no file that the doctor has saved"),
        ({"within": None}, "is no file that the doctor has saved"),
        ({"nodes": [[[0.01, 0.002]], [[0.01, 0.002]]], "between": None}, "is no file that the doctor has saved"),
    ],
)
def test_a_file_without_a_link_that_ranks_use_or_of_a_later_format_is_refused(changed, words, tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        cluster_from_file(written(tmp_path, **changed))


def test_where_a_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("here.json", tmp_path / "here.json", written(tmp_path)):
        doctor.check_target(Path(path))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=r"--save folder: this is a folder\. Give a file"):
        doctor.check_target(Path("folder"))
    with pytest.raises(ConfigurationError, match=r"--save nodir/h\.json: there is no folder .*/nodir\."):
        doctor.check_target(Path("nodir/h.json"))
    with pytest.raises(ConfigurationError, match="there is no folder"):  # a file is none
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
