"""The demo, run as a whole: three trainings in processes of their own, a table, a picture, and nothing left behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import completed, watched
from matplotlib.image import imread

from lightning_hetero.cli import main
from lightning_hetero.demo.demo import DEVICES, Result, Step, run_alone

DEMO = [sys.executable, "-m", "lightning_hetero", "demo"]


@pytest.mark.clock
@pytest.mark.long
def test_demo(tmp_path: Path) -> None:
    command = [*DEMO, "--epochs", "2", "--out", str(tmp_path)]
    done = completed(command)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr == ""  # no noise

    text = done.stdout
    assert "ddp: Epoch 1: " in text
    assert "hetero_ddp: Epoch 1: " in text
    assert "hetero_daso: Epoch 1: " in text
    for row in ("│ ddp ", "│ hetero_ddp ", "│ hetero_daso ", "│ the bound "):
        assert row in text
    assert "Emulated" in text
    assert f"{tmp_path}/demo.png" in text.replace("\n", "")

    for name in ("hetero_ddp", "hetero_daso"):
        assert "Rank 3 is the slowest, because of its compute" in (tmp_path / name / "report.html").read_text()

    picture = imread(tmp_path / "demo.png")
    assert min(picture.shape[:2]) > 600
    assert len({tuple(pixel) for pixel in picture[::7, ::7].reshape(-1, picture.shape[2]).tolist()}) > 20

    ddp, hetero, daso = (Result.load(tmp_path / f"{name}.json") for name in ("ddp", "hetero_ddp", "hetero_daso"))
    assert ddp.shares == [16, 16, 16, 16]
    assert sum(hetero.shares) == 64
    assert hetero.shares[0] > hetero.shares[2] > hetero.shares[3]
    assert ddp.epoch_seconds / hetero.epoch_seconds > 1.25
    assert hetero.waiting() < ddp.waiting()
    # The global batches are the same, and so are the weights, to rounding.
    assert ddp.accuracy > 0.8
    assert hetero.accuracy == pytest.approx(ddp.accuracy, abs=0.006)
    assert daso.shares[0] > daso.shares[3]
    assert ddp.epoch_seconds / daso.epoch_seconds > 1.1
    assert daso.accuracy > 0.8


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    with watched() as running:
        demo = subprocess.Popen(
            [*DEMO, "--epochs", "100", "--out", str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        deadline = time.monotonic() + 200
        while len(running(patience=0)) < 1 + len(DEVICES):  # the demo and its ranks
            assert time.monotonic() < deadline
            assert demo.poll() is None
            time.sleep(0.2)
        demo.send_signal(number)
        demo.communicate(timeout=400)
        assert demo.returncode not in (0, None)
        assert running() == []
    assert not (tmp_path / "demo.png").exists()


def test_a_failed_training_ends_the_demo_and_its_processes() -> None:
    script = "import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.exit(3)"
    with watched() as running:
        with pytest.raises(SystemExit, match="exit status 3"):
            run_alone([sys.executable, "-c", script])
        assert running() == []


@pytest.mark.parametrize("arguments", [["demo", "--epochs", "0"], ["demo", "--epochs", "many"], ["dem"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: lightning-hetero" in capsys.readouterr().err


def test_what_a_result_says(tmp_path: Path) -> None:
    steps = [Step(i // 5, 0.1 * i + (i >= 5), samples=8, work=0.06, wait=0.02) for i in range(10)]
    other = [step._replace(samples=4, work=0.02, wait=0.06) for step in steps]
    result = Result("ddp", 0.9, [steps, other])
    result.save(tmp_path / "ddp.json")
    assert Result.load(tmp_path / "ddp.json") == result
    assert result.steps_per_epoch == 5
    assert result.epoch_seconds == pytest.approx(0.5)  # the second between the epochs does not count
    assert result.shares == [8, 4]
    assert result.waiting() == pytest.approx(0.5)
    assert result.waiting(0) == pytest.approx(0.25)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_hetero.demo.demo.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"matplotlib and sklearn: .* install 'lightning-hetero\[examples\]'"):
        main(["demo", "--out", str(tmp_path)])
