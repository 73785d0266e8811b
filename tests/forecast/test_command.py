"""The command `plan`: what it prints, what it reads, and what it refuses."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from lightning_hetero.cli import main
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.forecast.command import Wish, bytes_per_second, of_file, of_wish, plan


def printed(arguments, capsys):
    main(["plan", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 125e6), ("200mbit", 25e6), ("125MB", 125e6), ("10 Gbit/s", 1.25e9), ("5e1mb", None), ("fast", None)],
)
def test_rates(text, rate):
    if rate is None:
        with pytest.raises(ValueError, match="is no rate"):
            bytes_per_second(text)
    else:
        assert bytes_per_second(text) == rate


def test_the_cluster_that_was_described():
    cluster = of_wish(Wish(nodes=3, ranks=2, params=1e6, step=0.4, speeds=(1, 1, 0.5), batch=10, fixed=0.25))
    assert [len(node) for node in cluster.nodes] == [2, 2, 2]
    assert [cost.seconds(10) for cost in cluster.ranks] == pytest.approx([0.4, 0.4, 0.8] * 2)
    assert cluster.ranks[0].fixed == pytest.approx(0.1)
    assert (cluster.size, cluster.samples) == (4e6, 60)


def test_it_prints_all_strategies_the_best_and_why_and_what_would_help(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    picture = tmp_path / "scaling.png"
    given = [
        "--nodes",
        "8",
        "--ranks",
        "4",
        "--params",
        "25e6",
        "--link",
        "200mbit",
        "--step",
        "0.4",
        "--speeds",
        "1,1,0.5",
        "--most",
        "1024",
    ]
    text = printed([*given, "--out", str(picture)], capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "8 nodes, 32 ranks; 25 million parameters" in text
    rows = [line.split()[0] for line in text.splitlines() if "%" in line and line.startswith(("hetero_", "ddp"))]
    assert len(rows) >= 16
    assert rows[-1] in ("ddp", "hetero_easgd_round_robin")
    best = " ".join(text[text.index("Best: ") :].split())
    assert "times the samples/s of ddp" in best
    assert "a link ten times as fast: " in best
    assert "4096" in best  # 1024 nodes
    with Image.open(picture) as image:
        assert image.size[0] > 600


def test_a_measured_cluster_is_read(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    found = {"nodes": [[[0.01, 0.002]], [[0.01, 0.004]]], "samples": 32, "size": 4e6}
    file.write_text(json.dumps({**found, "within": [1e-5, 1e9], "between": [1e-4, 125e6]}))
    cluster = of_file(file)
    assert (cluster.samples, cluster.size, cluster.between.bandwidth) == (64, 4e6, 125e6)
    assert "2 nodes, 2 ranks; 1 million parameters" in printed(["--from", str(file), "--most", "2"], capsys)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"between": [1e-4, 0]}, "a bandwidth above 0"),
        ({"within": [-1, 1e9]}, "a latency of at least 0"),
        ({"nodes": [[[0.0, 0.0]]]}, "above 0 for a sample"),
        ({"samples": 1.5}, "give a whole number"),
        ({"size": 0}, "0 bytes of parameters"),
    ],
)
def test_a_measured_cluster_that_cannot_be_is_refused(tmp_path, wrong, words):
    file = tmp_path / "doctor.json"
    found = {"nodes": [[[0.01, 0.002]]], "samples": 32, "size": 4e6, "within": [1e-5, 1e9], "between": [1e-4, 1e8]}
    file.write_text(json.dumps({**found, **wrong}))
    with pytest.raises(ConfigurationError, match=words):
        of_file(file)


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": []}', '{"nodes": [[1]], "samples": 1, "size": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="is no file that the doctor has saved"):
        of_file(file)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--link", "fast"], "is no rate"),
        (["--nodes", "0"], "at least 1"),
        (["--params", "-1"], "above 0"),
        (["--speeds", "1,0"], "above 0"),
        (["--from", "nowhere.json"], "there is no file"),
        (["--wire", "int2"], "invalid choice"),
        (["--latency", "-1"], "at least 0"),
        (["--fixed", "1"], "below 1"),
        (["--latency", "nan"], "must be finite"),
        (["--out", "nowhere/scaling.png"], "in a folder that exists"),
        (["--out", "scaling.jpeg2"], "give the name of a PNG"),
        (["--nodes", "1000000"], "are more than 100000"),
        (["--link", "1.2.3gbit"], "is no rate"),
    ],
)
def test_bad_input_ends_with_one_line(options, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    assert words in f"{ended.value} {capsys.readouterr().err}"


def test_zero_latency_and_a_model_of_one_parameter_are_no_trouble():
    cluster = of_wish(Wish(nodes=1, ranks=1, params=1, step=1e-6, latency=0.0, fixed=0.0))
    console = Console(file=open(os.devnull, "w"), width=80)  # noqa: SIM115
    plan(cluster, 1, "int4", 1, None, console)
    console.file.close()
    assert math.isfinite(cluster.alone)


@pytest.mark.long
def test_what_doctor_saves_plan_reads(tmp_path: Path) -> None:
    file, environment = tmp_path / "doctor.json", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "lightning_hetero"]
    doctor = [*command, "doctor", "--devices", "2", "--accelerator", "cpu", "--save", str(file)]
    subprocess.run(doctor, check=True, capture_output=True, timeout=300, env=environment)
    cluster = of_file(file)
    assert [len(node) for node in cluster.nodes] == [2]
    assert cluster.samples == 128
    done = subprocess.run(
        [*command, "plan", "--from", str(file)], capture_output=True, text=True, timeout=300, check=True
    )
    assert "1 nodes, 2 ranks" in done.stdout
