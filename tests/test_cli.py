"""The commands: options are explained, YAML and scripts are run, and missing packages are named."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from leftovers import completed

import lightning_hetero
from lightning_hetero.cli import main
from lightning_hetero.launch import script
from lightning_hetero.strategies.table import ENTRIES

FOLDER = Path(__file__).parents[1] / "examples" / "cli"
# A script that does not mention this package or its modules.
SCRIPT = """
import sys

import lightning.pytorch as pl
import torch
from beside import SIZE
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        share, rank = self.trainer.strategy.accounting, self.trainer.global_rank
        print(f"rank {rank}: shares {share.planner.shares(share.step)}, started as {sys.argv[0]}", flush=True)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=SIZE)


if __name__ == "__main__":
    LightningCLI(Model, Data, save_config_callback=None)
"""
YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy: hetero_ddp
"""


@pytest.mark.long
def test_an_unchanged_script_of_several_processes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.py").write_text(SCRIPT)
    (tmp_path / "folder" / "beside.py").write_text("SIZE = 4")
    (tmp_path / "config.yaml").write_text(YAML)
    command = [sys.executable, "-m", "lightning_hetero", "folder/train.py", "fit", "-c", "config.yaml"]
    command += ["--trainer.strategy=hetero_gossip", "--trainer.max_steps=3"]
    done = completed(command, cwd=tmp_path)
    assert "rank 0: shares [4, 4], started as folder/train.py" in done.stdout
    assert f"rank 1: shares [4, 4], started as {tmp_path}/folder/train.py" in done.stdout


def test_a_script_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"error: there is no script train\.py in .*" + tmp_path.name):
        main(["train.py"])


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["plna"])
    assert "Did you mean plan?" in capsys.readouterr().err


def test_safe_path_keeps_all_of_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import sys; found = list(sys.path)")
    for safe, kept in ((True, ["first", "second"]), (False, ["second"])):
        monkeypatch.setattr(sys, "path", ["first", "second"])
        monkeypatch.setattr(sys, "argv", ["lightning-hetero"])
        monkeypatch.setattr(script, "_script", [])
        monkeypatch.setattr(script, "sys", SimpleNamespace(**{**vars(sys), "flags": SimpleNamespace(safe_path=safe)}))
        monkeypatch.setattr(script.runpy, "run_path", lambda *_, **__: None)
        script.run_script(str(tmp_path / "train.py"), [])
        assert script.sys.path == [str(tmp_path), *kept]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "0"], "error: there is no such Trainer (devices='0', accelerator='cpu', num_nodes=1)"),
        (["--devices", "zero"], "error: there is no such Trainer (devices='zero'"),
        (["--accelerator", "abacus"], "error: there is no such Trainer"),
        (["-c", "nowhere.yaml"], "argument -c/--config: there is no file nowhere.yaml in"),
        (["--timeout", "abc"], "argument --timeout: 'abc' must be a number of seconds above 0"),
        (["--save", "nodir/h.json"], "error: --save nodir/h.json: there is no folder"),
        (["--batch-size", "x"], "argument --batch-size: 'x' must be a whole number of at least 1"),
        (["--selftest"], "error: doctor --selftest goes without --accelerator: it takes the GPUs that it sees"),
        (["--selftest", "--batch-size", "8"], "error: doctor --selftest goes without --accelerator, --batch-size: it"),
    ],
)
def test_the_doctor_refuses_in_a_line(arguments: list[str], words: str, capsys, monkeypatch) -> None:
    for module in ("logging", "warnings"):  # which it quiets for the rest of the process
        monkeypatch.setattr(f"lightning_hetero.doctor.{module}", Mock())
    with pytest.raises(SystemExit) as raised:
        main(["doctor", "--accelerator", "cpu", *arguments])
    assert raised.value.code not in (0, None)
    assert words in capsys.readouterr().err + str(raised.value.code)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_options_are_explained(entry, monkeypatch, capsys) -> None:
    text = output(
        ["fit", "--trainer.strategy.help", f"lightning_hetero.{entry.strategy.__name__}"], monkeypatch, capsys
    )
    expected = ["splits every global batch by measured speed", "longest wait for other ranks", "default: auto"]
    if entry.replica != "world":
        expected.append("leaves the replica out")
    if entry.replica == "rank":  # by default
        expected.append("ranks of a node then average gradients at every step")
    if "easgd" in entry.name:
        expected += ["how fast the center moves", 'alpha; ``"auto"``: beta / p']
    for words in expected:
        assert words.lower() in text.lower(), words
    assert not re.search(r"(?<!, )likewise\. \(type", text)  # refers to a text that is not shown here
    assert "as for :class:" not in text


def test_a_strategys_own_options_come_first_and_ddps_only_on_request(monkeypatch, capsys) -> None:
    arguments = ["fit", "--trainer.strategy.help", "lightning_hetero.DASOStrategy"]
    text = output(arguments, monkeypatch, capsys)
    options = re.findall(r"--trainer\.strategy\.(\w+) [A-Z{]", text)
    own = ["warmup", "cooldown", "global_every", "wait"]
    assert options[:4] == own
    assert {"balance", "timeout", "start_method", "wire"} <= set(options)
    ddp = {"gradient_as_bucket_view", "static_graph", "ddp_comm_state", "accelerator"}
    assert not ddp & set(options)
    assert "To see them too, add --all-options" in text
    everything = output([*arguments, "--all-options"], monkeypatch, capsys)
    assert ddp <= set(re.findall(r"--trainer\.strategy\.(\w+) [A-Z{]", everything))


@pytest.mark.parametrize("argument", ["--trainer.strategy.help hetero_daso", "--trainer.strategy.help=hetero_daso"])
def test_the_help_of_a_strategy_by_its_string(argument: str, monkeypatch, capsys) -> None:
    text = output(["fit", *argument.split()], monkeypatch, capsys)
    assert "--trainer.strategy=lightning_hetero.DASOStrategy" in text
    assert "--trainer.strategy.warmup" in text


def test_ddps_options_still_work(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    option = "--trainer.strategy.init_args.dict_kwargs.static_graph=true"
    text = output(["fit", "-c", str(FOLDER / "daso.yaml"), option, "--print_config"], monkeypatch, capsys)
    assert "static_graph: true" in text
    for words in ("class_path: lightning_hetero.DASOStrategy", "wait: auto", "rebalance_every_n_steps: 4"):
        assert words in text  # the resulting options are printed


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["doctor", "--help"], ["demo", "--help"], ["tran"], ["tran.py"]]
)
def test_help_imports_neither_torch_nor_lightning(arguments: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'lightning', 'numpy', 'rich'} & set(sys.modules))))\n"
        f"from lightning_hetero.cli import main\nmain({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.long
def test_the_strings_are_registered_if_this_package_is_imported_before_lightning() -> None:
    """Only PyTorch is imported before. The last two parts would otherwise import each other in a circle."""
    code = """
import importlib, os, sys
import torch._dynamo, torchmetrics  # which Lightning imports: most of the time, and needed only once

assert not {"lightning", "lightning_hetero"} & set(sys.modules)
for part in ("", ".launch.observer", ".strategies.trainer_checks"):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, f"lightning_hetero{part}"
        print(f"lightning_hetero{part}")
    else:
        importlib.import_module(f"lightning_hetero{part}")
        from lightning.pytorch.strategies import StrategyRegistry

        found = StrategyRegistry["hetero_daso"]["strategy"]
        assert found is sys.modules["lightning_hetero"].DASOStrategy
        os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_names_of_the_package() -> None:
    assert set(lightning_hetero.__all__) <= set(dir(lightning_hetero))
    assert lightning_hetero.callbacks.HeteroMonitor is lightning_hetero.HeteroMonitor
    with pytest.raises(AttributeError, match="has no attribute 'Daso'"):
        lightning_hetero.Daso  # noqa: B018
    with pytest.raises(AttributeError, match=r"Did you mean HeteroDDPStrategy\?"):
        lightning_hetero.HeteroDDPStratgy  # noqa: B018


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_missing_package_is_named(command, monkeypatch) -> None:
    monkeypatch.setattr("lightning_hetero.config.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'lightning-hetero\[cli\]'"):
        main([command, "-c", "config.yaml"])


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--model=nowhere.Model", ["No module named 'nowhere'", "Classes are looked for in the working folder, here"]),
        ("--trainer.strategy=lightning_hetero.DASOStrategy", ["--trainer.strategy.class_path=lightning_hetero.DASO"]),
    ],
)
def test_what_is_wrong_is_said_without_a_page_of_options(argument, words, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["lightning-hetero"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "-c", str(FOLDER / "ddp.yaml"), argument])
    errors = capsys.readouterr().err
    for word in words:
        assert word in errors
    assert "usage:" not in errors


def output(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Output of a command that ends."""
    monkeypatch.setattr(sys, "argv", ["lightning-hetero"])
    with pytest.raises(SystemExit, match=r"^(0|None)$"):
        main(arguments)
    return " ".join(capsys.readouterr().out.split())


def test_the_strategies_are_listed(monkeypatch, capsys) -> None:
    main(["strategies"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for entry in ENTRIES:
        assert entry.name in text


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture) -> None:
    main([])
    printed = capsys.readouterr()
    assert "doctor" in printed.out
    assert not printed.err


@pytest.mark.long
def test_without_the_import_the_error_is_that_of_the_page_of_mistakes() -> None:
    code = "from lightning.pytorch import Trainer; Trainer(strategy='hetero_ddp')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    message = "You selected an invalid strategy name: `strategy='hetero_ddp'`"
    assert message in done.stderr
    page = (Path(__file__).parents[1] / "docs" / "mistakes.md").read_text()
    assert "You selected an invalid strategy name: `strategy='hetero_...'`" in page
