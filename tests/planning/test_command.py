"""The command `plan`: its output, its input, and its errors."""

import json
import re

import pytest
from PIL import Image

from lightning_hetero.cli import main
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.planning.cluster import LinkModel, bytes_per_second
from lightning_hetero.planning.plan import (
    ClusterOptions,
    cluster_from_file,
    cluster_from_file_and_options,
    cluster_from_options,
)


def printed(arguments, capsys):
    main(["plan", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 125e6),
        ("200mbit", 25e6),
        ("125MB", 125e6),
        ("125mB", 125e6),
        ("10 Gbit/s", 1.25e9),
        (".5gbit", 62.5e6),
        ("3.Mbytes", 3e6),
        ("1Gbps", 125e6),
        ("50Mbit/s", 6.25e6),
    ],
)
def test_rates(text, rate):
    assert bytes_per_second(text) == rate


@pytest.mark.parametrize("text", ["1.3B", "1300M", "1.3e9", "1.3g"])
def test_numbers_of_parameters(text, capsys):
    assert "; 1300 million parameters; " in printed(["--params", text, "--most", "2"], capsys)


RATE = "is no rate: write 1gbit, 200mbit or 125MB"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, RATE) for text in ("5e1mb", "fast", ".gbit", "1.2.3gbit", "gbit", "1", "-1gbit", "")),
        ("1Mb", "can be of bits or of bytes: write 1mbit or 1MB"),
        ("2.5gb/s", "can be of bits or of bytes: write 2.5gbit or 2.5GB"),
    ],
)
def test_what_is_no_rate(text, words):
    with pytest.raises(ConfigurationError, match=words):
        bytes_per_second(text)


def test_help_names_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = re.findall(r"--(\w+) \w+\s+(?:[^-]|-(?!-))*?\(([\w.-]+)[^)]*\)\s", capsys.readouterr().out)
    found = {name: text for name, text in shown if name in ClusterOptions._fields}
    assert set(found) == set(ClusterOptions._fields)
    for name, text in found.items():
        value = ClusterOptions()._asdict()[name]
        value = value[0] if name in ("speeds", "ranks") else value
        assert (bytes_per_second(text) if text[-1] in "tB" else float(text)) == value, name


def test_the_cluster_that_was_described():
    cluster = cluster_from_options(
        ClusterOptions(nodes=3, ranks=(2,), params=1e6, step=0.4, speeds=(1, 1, 0.5), batch=10, fixed=0.25)
    )
    assert [len(node) for node in cluster.nodes] == [2, 2, 2]
    assert [cost.seconds(10) for cost in cluster.ranks] == pytest.approx([0.4, 0.4, 0.8] * 2)
    assert cluster.ranks[0].fixed == pytest.approx(0.1)
    assert (cluster.size, cluster.samples) == (4e6, 60)


def test_nodes_of_different_sizes(capsys):
    cluster = cluster_from_options(ClusterOptions(nodes=3, ranks=(8, 4), speeds=(1, 0.5)))
    assert [len(node) for node in cluster.nodes] == [8, 4, 8]
    assert [cost.seconds(32) for cost in cluster.ranks] == pytest.approx([0.3, 0.6] * 10)
    assert "2 nodes, 12 ranks; " in printed(["--nodes", "2", "--ranks", "8,4", "--most", "2"], capsys)


def test_it_prints_all_strategies_the_best_and_why_and_what_would_help(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    picture = tmp_path / "scaling.png"
    given = "--nodes 8 --ranks 4 --params 25e6 --link 200mbit --step 0.4 --speeds 1,1,0.5 --most 1024"
    text = printed([*given.split(), "--out", str(picture)], capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "8 nodes, 32 ranks; 25 million parameters" in text
    rows = [line.split()[0] for line in text.splitlines() if "%" in line and line.startswith(("hetero_", "ddp"))]
    assert len(rows) >= 16
    assert rows[-1] == "ddp"
    best = " ".join(text[text.index("Best: ") :].split())
    assert "times the samples/s of ddp" in best
    assert "a link ten times as fast: " in best
    assert "4096" in best  # 1024 nodes
    with Image.open(picture) as image:
        assert image.size[0] > 600


NODE = [[0.01, 0.002], [0.01, 0.004]]


def saved(folder, **changed):
    """A file of two nodes of two ranks, or with a test's changes of it."""
    links = {"within": [1e-5, 1e9], "between": [1e-4, 125e6]}
    found = {"format": 1, "nodes": [NODE, NODE], "samples": 32, "size": 4e6, **links}
    file = folder / "doctor.json"
    file.write_text(json.dumps({**found, **changed}))
    return file


def test_a_measured_cluster_is_read(tmp_path, capsys):
    cluster = cluster_from_file(saved(tmp_path))
    assert (cluster.samples, cluster.size, cluster.between.bandwidth) == (128, 4e6, 125e6)
    text = printed(["--from", str(saved(tmp_path)), "--most", "2"], capsys)
    assert "2 nodes, 4 ranks; 1 million parameters" in text


def test_ranks_without_which_the_job_would_be_faster_are_named(tmp_path, capsys):
    slow = [[0.01, 0.002], [0.5, 0.004]]  # 32 samples a rank, 128 of all: 504 ms with one sample
    text = " ".join(printed(["--from", str(saved(tmp_path, nodes=[slow, slow])), "--most", "2"], capsys).split())
    # The other two take 64 samples each in 138 ms.
    assert "Without 2 ranks: 1, 3 the job is 3.65 times as fast (928 samples/s against 254): even" in text
    assert "Under hetero_ddp they get no samples once that is sure." in text
    assert "Without 2 ranks" not in printed(["--from", str(saved(tmp_path)), "--most", "2"], capsys)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"between": [1e-4, 0]}, "a bandwidth above 0"),
        ({"within": [-1, 1e9]}, "a latency of at least 0"),
        ({"nodes": [[[0.0, 0.0]]]}, "above 0 for a sample"),
        ({"samples": 1.5}, "give a whole number"),
        ({"size": 0}, "0 bytes of parameters"),
        ({"format": 2}, "format 2, of a later version"),
        ({"between": None}, "is no file that the doctor has saved .*KeyError: 'between'"),
        ({"within": None}, "is no file that the doctor has saved"),
        ({"nodes": [[1]]}, "is no file that the doctor has saved"),
        ({"format": None}, "is no file that the doctor has saved"),
        ("", "is no file that the doctor has saved"),
        ("[]", "is no file that the doctor has saved"),
    ],
)
def test_a_measured_cluster_that_cannot_be_is_refused(tmp_path, wrong, words):
    file = saved(tmp_path) if isinstance(wrong, str) else saved(tmp_path, **wrong)
    if isinstance(wrong, str):
        file.write_text(wrong)
    with pytest.raises(ConfigurationError, match=words):
        cluster_from_file(file)


def test_what_is_given_beside_a_file_counts_more_than_what_it_has(tmp_path):
    file = saved(tmp_path)
    cluster = cluster_from_file(file)
    given = {"params": 5e6, "batch": 8, "link": 1e6, "inside": 2e9, "handling": 7e9, "nodes": 3}
    found, linked = cluster_from_file_and_options(file, given)
    assert linked
    assert found.nodes == (*cluster.nodes, cluster.nodes[0])
    assert (found.size, found.samples, found.handling) == (20e6, 48, 7e9)
    assert (found.within, found.between) == (LinkModel(1e-5, 2e9), LinkModel(1e-4, 1e6))
    assert cluster_from_file_and_options(file, {"latency": 0.5})[0].between == LinkModel(0.5, 125e6)
    assert cluster_from_file_and_options(file, {}) == (cluster, True)


def test_a_link_that_was_not_measured_is_not_printed_but_asked_for(tmp_path, capsys):
    file = saved(tmp_path, nodes=[NODE], between=None)
    text = " ".join(printed(["--from", str(file)], capsys).split())
    assert "between nodes;" not in text
    assert "5000" not in text
    assert "a link ten times as fast" not in text
    assert "Weak scaling is left out: no link between nodes was measured. Give its rate, such as --link 1gbit." in text
    text = " ".join(printed(["--from", str(file), "--link", "1gbit", "--most", "2"], capsys).split())
    assert "up to 2 nodes, 125 MB/s and 0.2 ms between nodes" in text
    for options in (["--nodes", "2"], ["--latency", "0.1"], ["--out", str(tmp_path / "scaling.png")]):
        with pytest.raises(SystemExit, match="no link between nodes was measured"):
            main(["plan", "--from", str(file), *options])


@pytest.mark.parametrize("option", ["--ranks", "--step", "--speeds", "--fixed"])
def test_what_a_file_has_measured_cannot_be_given_beside_it(option, tmp_path):
    with pytest.raises(SystemExit, match=f"error: {option}: how fast the ranks are was measured"):
        main(["plan", "--from", str(saved(tmp_path)), option, "1"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--link", "fast"], "is no rate"),
        (["--nodes", "0"], "at least 1"),
        (["--params", "-1"], "above 0"),
        (["--speeds", "1,0"], "above 0"),
        (["--from", "nowhere.json"], "there is no file"),
        (["--wire", "int2"], "invalid choice"),
        (["--wire", "bf61"], "Did you mean bf16?"),
        (["--ranks", "8,0"], "at least 1"),
        (["--ranks", "8,4,2"], "numbers of 3 nodes for --nodes 2"),
        (["--latency", "-1"], "at least 0"),
        (["--fixed", "1"], "below 1"),
        (["--latency", "nan"], "must be finite"),
        (["--out", "nowhere/scaling.png"], "in a folder that exists"),
        (["--out", "scaling.jpeg2"], "give the name of a PNG"),
        (["--nodes", "1000000"], "are more than 100000"),
        (["--nodes", "10000000000000"], "are more than 100000"),  # without a list of all of them
        (["--most", "10000000000000"], "are more than 100000"),
        (["--link", "1.2.3gbit"], "is no rate"),
        (["--link", "1Mb"], "can be of bits or of bytes"),
        (["--link", "0gbit"], "above 0"),
        (["--handling", "0B"], "above 0"),
        (["--speeds", "1,1,1,0.5", "--nodes", "1", "--ranks", "3"], "4 speeds for 3 ranks"),
    ],
)
def test_bad_input_ends_with_one_line(options, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    assert words in f"{ended.value} {capsys.readouterr().err}"


def test_without_matplotlib_it_says_what_to_install_before_it_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_hetero.planning.plan.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"matplotlib: python -m pip install 'lightning-hetero\[plots\]'"):
        main(["plan", "--out", str(tmp_path / "scaling.png")])
    assert "hetero_" not in capsys.readouterr().out


def test_who_exchanges_too_seldom_is_marked_and_explained(capsys):
    slow = ["--nodes", "4", "--link", "1mbit", "--most", "2"]
    text = printed(slow, capsys)
    [row] = [line for line in text.splitlines() if line.startswith("hetero_gossip_async")]
    assert row.split()[-1] == "seldom"
    assert "seldom: it waits for nobody, and on this link it exchanges" in text
    assert "seldom" not in printed(["--nodes", "4", "--link", "10gbit", "--most", "2"], capsys)


def test_what_is_as_fast_as_ddp_is_not_told_as_a_gain(capsys):
    alone = " ".join(printed(["--nodes", "1", "--ranks", "1", "--most", "2"], capsys).split())
    assert 'Best: "ddp", and no other is faster.' in alone
    assert "1.00 times the samples/s of ddp" not in alone


def test_the_recommended_settings_are_the_first_row_with_their_price(capsys):
    text = printed(["--nodes", "8", "--link", "200mbit", "--speeds", "1,1,0.5", "--most", "2"], capsys)
    rows = [line for line in text.splitlines() if line.startswith("hetero_") and "%" in line]
    flat = " ".join(text.split())
    [name] = re.findall(r"Best: (\w+)Strategy\(", flat)
    steps = rows[0].split()[1]
    assert rows[0].split()[0].replace("_", "").replace("hetero", "") == name.lower()
    assert f"It costs: replicas train apart for {steps} steps, and may need more samples to the same loss;" in flat
    kept = rows[0].split()[7]
    assert f"{kept} MB of memory of each rank" in flat
    assert "Best that is exact" in flat


def test_a_rank_that_is_left_out_is_told_with_its_price(tmp_path, capsys):
    slow = [[0.01, 0.002], [0.5, 0.004]]
    text = " ".join(printed(["--from", str(saved(tmp_path, nodes=[slow, slow])), "--most", "2"], capsys).split())
    assert "ranks 1, 3 are left out." in text


def test_intervals_and_wires_that_are_given_are_kept(capsys):
    text = printed(["--every", "8", "--wire", "bf16", "--most", "2"], capsys)
    rows = [line.split() for line in text.splitlines() if line.startswith("hetero_e") and "%" in line]
    assert {(row[1], row[2]) for row in rows} == {("8", "bf16")}


def test_what_is_assumed_is_said_first(capsys):
    text = " ".join(printed(["--nodes", "2", "--params", "1e6", "--most", "2"], capsys).split())
    assert text.startswith("assumed, not given: --ranks 4, --step 0.3, --speeds 1, --batch 32, --fixed 0.1, ")
    assert "--nodes" not in text.split(" nodes, ")[0]
