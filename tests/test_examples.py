"""The examples run as readers would run them, learn, and do what they claim; some are compared with loops by hand."""

import csv
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from html import unescape
from itertools import islice, zip_longest
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from leftovers import completed, watched
from lightning.pytorch import seed_everything
from ranks import free_port
from scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.long
@pytest.mark.parametrize("devices", ["1", "2"])
def test_digits(tmp_path: Path, devices: str) -> None:
    arguments = ["--devices", devices, "--epochs", "6"]
    if devices == "1":
        [(status, output)] = run_script(EXAMPLES / "digits.py", *arguments, folder=tmp_path)
        assert status == 0, output
    else:  # Lightning starts the other rank
        output = run([sys.executable, EXAMPLES / "digits.py", *arguments], tmp_path)
    accuracy = float(re.search(r"test accuracy: ([\d.]+)%", output).group(1))
    assert accuracy > 85
    shares = re.search(r"samples per step of each rank: \(([\d, ]+)\)", output).group(1)
    assert sum(int(share) for share in re.findall(r"\d+", shares)) == 32 * int(devices)
    with (tmp_path / re.search(r"all measurements: (.*)", output).group(1)).open() as table:
        rows = list(csv.DictReader(table))
    assert sum(bool(row["hetero/waiting"]) for row in rows) > 5
    assert f"hetero/share/rank{int(devices) - 1}" in rows[0]
    assert "samples/s" in (tmp_path / re.search(r"who waited: (.*)", output).group(1)).read_text()


@pytest.mark.long
def test_torchrun_with_two_ranks_on_one_node_and_one_on_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # which no connection gets in the meantime
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    output = run([EXAMPLES / "torchrun" / "launch.sh"], tmp_path)
    ranks = re.findall(r"rank (\d) of 3, on node (\d): (\d+) samples per step", output)
    assert sorted((int(rank), int(node)) for rank, node, _ in ranks) == [(0, 0), (1, 0), (2, 1)]
    assert sum(int(samples) for *_, samples in ranks) == 3 * 128


def run(command: list[str | Path], folder: Path) -> str:
    """Output of a command that runs in this folder."""
    done = completed(command, cwd=folder)
    return done.stdout + done.stderr


GPT_SIZES = {"text": 32 * 3200 + 1, "context": 32, "batch-size": 16, "width": 32, "layers": 1, "lr": 0.01, "write": 200}
WINDOWS = 3200 * 19 // 20  # to train on
HARMLESS = "does not have many workers|LeafSpec|tensorboardX"  # warnings that no user can act on, as in pyproject.toml


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_char_gpt(tmp_path: Path, devices: int) -> None:
    sizes = [word for name, size in GPT_SIZES.items() for word in (f"--{name}", str(size))]
    arguments = ["--devices", str(devices), "--ranks-per-node", "1", *sizes]
    results = run_script(
        EXAMPLES / "daso_char_gpt.py", *arguments, folder=tmp_path, ranks=devices if devices > 1 else None
    )
    assert [status for status, _ in results] == [0] * devices, results
    output = results[0][1]

    warnings = re.findall(r"^.*(?:\.py:\d+: |Warning).*$", output, re.MULTILINE)
    assert [warning for warning in warnings if not re.search(HARMLESS, warning)] == []
    bits, guessing = re.search(r"bits per character: ([\d.]+) \(guessing: ([\d.]+)\)", output).groups()
    assert float(guessing) == 6.61
    assert 1 < float(bits) < 4.2  # the characters' frequencies alone would give 5.2
    sample = output.split("what the model writes:\n")[1]
    assert sample.startswith("class ")
    assert len(sample) > 200
    assert len(set(sample)) > 10

    with (tmp_path / re.search(r"all measurements: (.*)", output).group(1)).open() as table:
        rows = list(csv.DictReader(table))
    assert int(rows[-1]["step"]) == WINDOWS // (16 * devices)  # no step is left out
    for rank in range(devices):
        assert any(float(row[f"hetero/samples_per_s/rank{rank}"] or 0) > 0 for row in rows)
    exchanges = int(re.search(r"(\d+) exchanges between nodes", output).group(1))
    assert exchanges > 30 if devices == 2 else exchanges == 0


def pairwise(views: torch.Tensor) -> float:
    """NT-Xent of Chen et al. (2020), pair by pair."""
    flat = [view for pair in views for view in pair]
    losses = []
    for i, anchor in enumerate(flat):
        similar = [torch.exp(anchor @ other / 0.2) for other in flat]
        others = sum(value for k, value in enumerate(similar) if k != i)
        losses.append(-torch.log(similar[i ^ 1] / others))
    return torch.stack(losses).mean().item()


@pytest.mark.long
def test_contrastive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, batch_size, epochs = 192, 12, 2
    words = f"--images {images} --batch-size {batch_size} --epochs {epochs} --shares 3 1 --seconds 0 0 --out {tmp_path}"
    results = run_script(EXAMPLES / "contrastive.py", *words.split(), folder=tmp_path, ranks=2)
    assert [status for status, _ in results] == [0, 0], results
    found = json.loads((tmp_path / "results.json").read_text())
    gathered, alone, single = (
        found["losses"][name] for name in ("samples of all ranks", "own samples only", "one process")
    )
    assert len(gathered) == len(single) == len(alone) == epochs * images // (2 * batch_size)

    # Each image once in each epoch, in global batches of one size, split unevenly.
    batches, per_epoch = found["batches"], images // (2 * batch_size)
    assert {len(batch) for batch in batches} == {2 * batch_size}
    for epoch in range(epochs):
        seen = Counter(i for batch in batches[epoch * per_epoch : (epoch + 1) * per_epoch] for i in batch)
        assert seen == Counter(range(images))
    assert {sum(shares) for shares in found["shares"]} == {2 * batch_size}
    assert all(shares == [18, 6] for shares in found["shares"])

    # The losses are those of one process, and the first one of a loop over all pairs.
    assert gathered == pytest.approx(single, abs=1e-10)
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("contrastive")
    pictures, _ = module.images(*range(10))
    model = module.Contrast(images, gathers=False)
    numbers = torch.tensor(batches[0])
    with torch.no_grad():
        views = model.views(pictures.double()[module.TEST + numbers], numbers, 0)
    assert gathered[0] == pytest.approx(pairwise(views), abs=1e-5)
    half = found["shares"][0][0]
    parts = [pairwise(part) * len(part) / len(views) for part in (views[:half], views[half:])]
    assert alone[0] == pytest.approx(sum(parts), abs=1e-5)
    assert alone[0] < gathered[0] - 0.3  # fewer views to tell apart
    assert (tmp_path / "contrastive.png").stat().st_size > 10_000


MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
no_mpi = importlib.util.find_spec("mpi4py") is None or MPIEXEC is None


@pytest.mark.long
@pytest.mark.skipif(no_mpi, reason="needs mpi4py and mpiexec: pip install mpi4py mpich")
def test_easgd_over_mpi(tmp_path: Path) -> None:
    command = [
        str(MPIEXEC),
        "-n",
        "3",
        sys.executable,
        str(EXAMPLES / "easgd_mpi.py"),
        "--epochs",
        "4",
        "--late",
        "0.03",
    ]
    done = completed(command, cwd=tmp_path)
    assert float(re.search(r"accuracy of the center on the test digits: ([\d.]+)%", done.stdout).group(1)) > 80
    rates = dict(re.findall(r"replica(\d): ([\d.]+)", done.stdout))
    assert sorted(rates) == ["0", "1", "2"]
    assert float(rates["2"]) < float(rates["0"])  # the slow one
    assert (tmp_path / re.search(r"all measurements: (.*)", done.stdout).group(1)).exists()


SAVED = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_hetero import EASGDAsyncStrategy
from lightning_hetero.callbacks import ResumableCheckpoint

strategy, model = EASGDAsyncStrategy(tau=2, moving_rate="auto", center="mpi", balance="off"), BoringModel()
saves = ResumableCheckpoint("saved", every_n_steps=1000)
trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, limit_train_batches=8, limit_val_batches=0,
                  logger=False, callbacks=[saves], enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model)
torch.save(model.state_dict(), f"final-{trainer.global_rank}.pt")
"""


@pytest.mark.skipif(no_mpi, reason="needs mpi4py and mpiexec: pip install mpi4py mpich")
def test_a_fit_over_mpi_is_saved_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "saved.py").write_text(SAVED)
    completed([str(MPIEXEC), "-n", "2", sys.executable, "saved.py"], cwd=tmp_path)
    [file] = (tmp_path / "saved").glob("*-complete.ckpt")
    saved = torch.load(file, weights_only=False)["state_dict"]
    for rank in range(2):
        final = torch.load(tmp_path / f"final-{rank}.pt")
        assert saved.keys() == final.keys()
        assert all(torch.equal(saved[name], final[name]) for name in saved)


@pytest.mark.long
def test_finetune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs, unfreeze, average, count, batch_size = 5, 1, 3, 300, 16
    names = ["hetero_ddp", "hetero_node"]
    words = (
        f"--strategies {' '.join(names)} --images {count} --batch-size {batch_size} --epochs {epochs} "
        f"--unfreeze {unfreeze} --average {average} --seconds 0.0005 0.004"
    )
    results = run_script(
        EXAMPLES / "finetune_digits.py", *words.split(), "--out", str(tmp_path), folder=tmp_path, ranks=2
    )
    assert [status for status, _ in results] == [0, 0], results
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("finetune_digits")
    pictures, labels = (part[:count] for part in module.images(*range(5, 10)))
    test = count // 5
    stored = json.loads((tmp_path / "results.json").read_text())
    for name in names:
        files = [tmp_path / name / f"epoch={epoch}.ckpt" for epoch in range(epochs + 1)]
        states = [torch.load(file, weights_only=True)["state_dict"] for file in files]
        filters = [state["backbone.0.0.weight"].double() for state in states]
        # Frozen at first, then trained.
        assert all(torch.equal(filters[0], state) for state in filters[:unfreeze])
        assert not torch.equal(filters[unfreeze - 1], filters[unfreeze])
        # Lightning averages the weights with which the last epochs begin.
        mean = torch.stack(filters[average - 2 : epochs - 1]).mean(0)
        assert (filters[-1] - mean).abs().max() < 1e-6
        assert (filters[-1] - filters[-2]).abs().max() > 1e-3
        # BatchNorm's statistics of the average are those of the training images, up to how they were cut in batches.
        model = module.DigitReader(5, 0.05)
        model.load_state_dict(states[-1])
        with torch.no_grad():
            before = model.backbone[0][0](pictures[test:]).mean((0, 2, 3))
            accuracy = (model.eval()(pictures[:test]).argmax(1) + 5 == labels[:test]).float().mean().item()
        scale = model.backbone[0][1].running_var.sqrt()
        assert ((model.backbone[0][1].running_mean - before) / scale).abs().max() < 0.05
        # The table tells the accuracy of these weights.
        assert stored[name][-1]["accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert accuracy > 0.6  # guessing: 0.2
        shown = re.search(rf"^{name} +([\d.]+)% +[\d.]+ +\((\d+), (\d+)\)$", results[0][1], re.MULTILINE)
        assert float(shown.group(1)) == pytest.approx(100 * accuracy, abs=0.06)
        fast, slow = int(shown.group(2)), int(shown.group(3))
        assert fast + slow == 2 * batch_size
        assert fast >= slow
    assert (tmp_path / "finetune.png").stat().st_size > 10_000


NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_steps.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    """Outputs would be those of one machine on one day."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.long
def test_the_notebook_runs_and_the_fast_device_takes_more(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with watched() as running:
        client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
        client.execute()
        assert running() == []
    shown = [_shown(cell) for cell in notebook.cells if cell.cell_type == "code"]
    printed = "\n".join(texts for texts, _ in shown)
    assert re.search(r"hetero_ddp +62 ms a step", printed), printed  # by hand: 10 + 52 * 1 and 10 + 12 * 4 ms
    assert re.search(r"^ddp +138 ms a step", printed, re.MULTILINE), printed  # 10 + 32 * 4
    assert "the best split of 64 samples: 52 12" in printed
    fast, slow, times = map(float, re.findall(r"(\d+) samples/s by speed, (\d+) .*: ([\d.]+) times", printed)[0])
    assert times == pytest.approx(fast / slow, abs=0.02)
    assert times > 1.4  # 2.2 by hand; less on a busy machine
    by_speed, even = (unescape(page) for _, page in shown if page)
    assert f"{fast:,.0f} samples/s" in by_speed
    assert f"{slow:,.0f} samples/s" in even
    shares = re.findall(r"<tr><td>(\d)</td><td>([\d.]+)</td>", by_speed)
    assert [rank for rank, _ in shares] == ["0", "1"]
    assert 46 <= float(shares[0][1]) <= 56
    assert re.findall(r"<tr><td>(\d)</td><td>([\d.]+)</td>", even) == [("0", "32"), ("1", "32")]
    for page, report in ((by_speed, "by_speed"), (even, "even")):
        assert "data:image/png;base64," in page
        assert (tmp_path / "reports" / report / "report.html").exists()


def _shown(cell: nbformat.NotebookNode) -> tuple[str, str]:
    """Printed text of a cell, and its HTML."""
    assert not [output for output in cell.outputs if output.output_type == "error"]
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return printed, "".join(output.data.get("text/html", "") for output in cell.outputs if "data" in output)


@pytest.mark.long
@pytest.mark.clock
def test_gossip(tmp_path: Path) -> None:
    results = run_script(EXAMPLES / "gossip.py", "--epochs", "3", "--late", "0.05", folder=tmp_path, ranks=3)
    assert [status for status, _ in results] == [0] * 3, results
    output = results[0][1]
    assert float(re.search(r"on the test digits: ([\d.]+)%", output).group(1)) > 80
    fast, slow = map(float, re.search(r"needed ([\d.]+) s for .* needs ([\d.]+) s", output).groups())
    assert fast < 0.7 * slow
    rows = re.findall(r"^ +(\d)((?: +(?:\d+|-))+)$", output, re.MULTILINE)  # the table of pairings
    table = [[0 if word == "-" else int(word) for word in row.split()] for _, row in rows]
    assert len(table) == 3
    assert sum(map(sum, table)) > 0
    assert table == [list(column) for column in zip(*table, strict=True)]  # both of a pair have counted


STEPS, FILES, CONTEXT, STREAM_BATCH = 20, 3, 32, 5


def by_hand(module, loader: str, steps: int) -> list[tuple[int, float]]:
    """Windows and loss of each step: all samples of all ranks in one batch."""
    files = module.TRAIN_FILES[:FILES]
    shards, size = ([files], 2 * STREAM_BATCH) if loader == "shared" else ([files[::2], files[1::2]], STREAM_BATCH)
    streams = [module.SourceCode(shard, CONTEXT) for shard in shards]

    def batches():
        while True:
            passes = [list(stream) for stream in streams]
            cut = [[part[i : i + size] for i in range(0, len(part), size)] for part in passes]
            for parts in zip_longest(*cut, fillvalue=[]):
                yield torch.stack([window for part in parts for (window,) in part])

    seed_everything(1, verbose=False)
    model, rows = module.StreamGPT(CONTEXT, 32, 1, lr=0.01), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps, pct_start=0.1)
    for batch in islice(batches(), steps):
        loss = model.bits([batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        rows.append((len(batch), loss.item()))
    return rows


@pytest.mark.long
@pytest.mark.parametrize("loader", ["shared", "stateful"])
def test_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str) -> None:
    words = (
        f"--loader {loader} --steps {STEPS} --files {FILES} --context {CONTEXT} --batch-size {STREAM_BATCH} --layers 1"
    )
    arguments = [*words.split(), "--seconds", "0.002", "0.01", "--out", str(tmp_path)]
    results = run_script(EXAMPLES / "stream_char_gpt.py", *arguments, folder=tmp_path, ranks=2)
    assert [status for status, _ in results] == [0, 0], results

    monkeypatch.syspath_prepend(EXAMPLES)
    truth = by_hand(importlib.import_module("stream_char_gpt"), loader, STEPS)
    runs = {}
    for name in ("straight", "resumed"):
        with (tmp_path / f"{name}.csv").open() as table:
            runs[name] = [(float(row["windows"]), float(row["bits"])) for row in csv.DictReader(table)]
            table.seek(0)
            assert {row["epoch"] for row in csv.DictReader(table)} >= {"0", "1"}
        for own, true in zip(runs[name], truth, strict=True):
            assert own == pytest.approx(true, abs=1e-3)
    if loader == "stateful":  # with even shares nothing depends on the clock
        assert runs["straight"] == runs["resumed"]
    assert truth[-1][1] < truth[0][1] - 1
    assert f"stopped after step {STEPS // 2}, in epoch 0" in results[0][1]
    assert (tmp_path / "stream.png").stat().st_size > 10_000


@pytest.mark.long
def test_sharded_gpt(tmp_path: Path) -> None:
    sizes = {"tau": 4, "save-every": 8, "batch-size": 4, "context": 16, "width": 32, "layers": 2, "lr": 0.01}
    small = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    arguments = ["--ranks-per-node", "2", "1", "--accelerator", "cpu", *small, "--out", str(tmp_path / "out")]

    def train(*more: str) -> tuple[str, list[str]]:
        results = run_script(EXAMPLES / "sharded_gpt.py", *arguments, *more, folder=tmp_path, ranks=3)
        assert [status for status, _ in results] == [0] * 3, results
        return results[0][1], [output for _, output in results]

    output, outputs = train("--steps", "16")
    held = [re.search(r"holds ([\d,]+) of ([\d,]+) parameters", text).groups() for text in outputs]
    numbers = [[int(number.replace(",", "")) for number in pair] for pair in held]
    assert numbers[0][0] + numbers[1][0] == numbers[2][0] == numbers[0][1]
    sent = [float(re.search(r"has sent to other replicas: ([\d.]+) MB in 4 ", text).group(1)) for text in outputs]
    assert sent[2] == pytest.approx(sent[0] + sent[1], abs=0.16)
    first, last = map(float, re.search(r"character: ([\d.]+) before, ([\d.]+) after", output).groups())
    assert last < first - 0.3
    assert f"checkpoint: {tmp_path}/out/step=16.ckpt, a directory of" in output

    resumed, _ = train("--steps", "24", "--resume", str(tmp_path / "out" / "step=16.ckpt"))
    assert "training starts at step 16" in resumed
    assert float(re.search(r"character: ([\d.]+) before", resumed).group(1)) == pytest.approx(last, abs=0.02)
    assert (tmp_path / "out" / "step=24.ckpt" / "meta.pt").exists()


class Printing:
    """A command that runs, and what it has printed so far.

    Args:
        folder: to work in.
        name: of the file with what it prints.
        arguments: of the example.
    """

    def __init__(self, folder: Path, name: str, arguments: list[str]) -> None:
        self._file = folder / name
        command = [sys.executable, EXAMPLES / "sharded_gpt.py", *arguments]
        with self._file.open("w") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._file.read_text()

    def wait_for(self, pattern: str, seconds: float = 200.0) -> re.Match[str]:
        """First match of the pattern in the output, as soon as it is printed."""
        until = time.monotonic() + seconds
        while (found := re.search(pattern, self.output)) is None:
            assert self.process.poll() is None, self.output[-4000:]
            assert time.monotonic() < until, self.output[-4000:]
            time.sleep(0.2)
        return found


@pytest.mark.long
def test_sharded_gpt_goes_on_without_a_replica_that_joins_again(tmp_path: Path) -> None:
    sizes = {"steps": 2000, "tau": 4, "save-every": 500, "batch-size": 1, "context": 16, "width": 32, "layers": 1}
    small = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    common = ["--accelerator", "cpu", *small, "--join-file", str(tmp_path / "job"), "--out", str(tmp_path / "out")]
    with watched() as running:
        first = Printing(tmp_path, "first", ["--ranks-per-node", "2", "2", *common])
        lost = first.wait_for(r"rank 3 \(process (\d+)\) holds")
        first.wait_for("step 25: ")
        os.kill(int(lost.group(1)), signal.SIGKILL)
        again = Printing(tmp_path, "again", ["--ranks-per-node", "2", *common])
        first.wait_for(r"Training goes on with 1 replica\(s\) with 2 rank\(s\)")
        for rank in (2, 3):
            again.wait_for(rf"rank {rank} \(process \d+\) holds")
        assert [one.process.wait(400) for one in (first, again)] == [0, 0], first.output[-4000:] + again.output[-4000:]
        assert running() == []
    begun = [int(step) for step in re.findall(r"training starts at step (\d+)", first.output)]
    assert begun[0] == 0
    assert 25 < begun[-1] < 2000
    assert "bits per character: " in first.output
