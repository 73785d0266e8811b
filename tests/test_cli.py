"""The strategies in a LightningCLI: their options are explained, and can be set from YAML and the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero


class Model(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            share = self.trainer.strategy.share
            print("shares", share.planner.shares(share.step), flush=True)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)


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
  strategy:
    class_path: lightning_hetero.HeteroDDPStrategy
    init_args:
      balance: [3.0, 1.0]
      timeout: 60
"""
DASO = """
  strategy:
    class_path: lightning_hetero.DASOStrategy
    init_args:
      ranks_per_node: 1
      wait: auto
      warmup: 1 epochs
      cooldown: 0.1
      balance: [3.0, 1.0]
"""
DASO = YAML[: YAML.index("  strategy:")].replace("max_epochs: 1", "max_epochs: 2") + DASO.lstrip("\n")
STRING = YAML[: YAML.index("  strategy:")] + "  strategy: hetero_ddp\n"


def _run(folder: Path, *arguments: str) -> str:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (YAML, [], "shares [6, 2]"),
        (YAML, ["--trainer.strategy.init_args.balance=[1.0,3.0]"], "shares [2, 6]"),
        (STRING, [], "shares [4, 4]"),
        (STRING, ["--trainer.strategy=hetero_daso"], "shares [4, 4]"),
        (DASO, ["--trainer.strategy.init_args.wire=bf16"], "shares [6, 2]"),
    ],
)
def test_training_from_yaml(tmp_path: Path, config: str, overrides: list[str], expected: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    assert expected in _run(tmp_path, "fit", "-c", "config.yaml", *overrides)


def test_options_are_explained(tmp_path: Path) -> None:
    text = _run(tmp_path, "fit", "--trainer.strategy.help", "lightning_hetero.HeteroDDPStrategy")
    flat = " ".join(text.split())
    assert "splits every global batch by measured speed" in flat
    assert "longest wait for other ranks" in flat
    text = _run(tmp_path, "fit", "--trainer.strategy.help", "lightning_hetero.DASOStrategy")
    flat = " ".join(text.split())
    for words in ("number format of background exchanges", "leaves the replica out", "longest wait for other ranks"):
        assert words in flat
