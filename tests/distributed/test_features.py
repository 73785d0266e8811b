"""Checkpoints that go elsewhere, ranks on nodes of unlike size, and ranks that Lightning starts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from scripts import run_script
from tasks import FAST, Net, Save, dataset, parameters, train
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy


def _portable(path: str) -> None:
    data = DataLoader(dataset(96), batch_size=4, shuffle=True)
    train(Net(), HeteroDDPStrategy(), data, max_epochs=2, callbacks=[Save(path, 10, False)])


def test_checkpoints_load_without_this_strategy(tmp_path: Path) -> None:
    path = str(tmp_path / "step=10.ckpt")
    run(_portable, 2, path)
    assert "lightning_hetero" in torch.load(path, weights_only=True)
    trainer = pl.Trainer(devices=1, **{**FAST, "max_epochs": 3})
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        trainer.fit(Net(), DataLoader(dataset(96), batch_size=8), ckpt_path=path)
    assert trainer.current_epoch == 3


def _nodes(**options: Any) -> dict[str, Any]:
    module, strategy = Net(), HeteroDDPStrategy(**options)
    train(module, strategy, DataLoader(dataset(96), batch_size=4, shuffle=True), max_epochs=2)
    cluster = strategy.cluster
    return {"nodes": cluster.nodes, "node": cluster.node, "weights": parameters(module), "seen": module.seen}


def test_nodes_with_different_numbers_of_ranks() -> None:
    results = run(_nodes, 3, nodes=[2, 1])
    assert [result["nodes"] for result in results] == [((0, 1), (2,))] * 3
    assert [result["node"] for result in results] == [(0, 1), (0, 1), (2,)]
    assert torch.equal(results[0]["weights"], results[2]["weights"])
    assert sorted(i for r in results for batch in r["seen"] for i in batch) == sorted(list(range(96)) * 2)
    # One machine, tried as several nodes.
    assert [result["nodes"] for result in run(_nodes, 3, ranks_per_node=[1, 2])] == [((0,), (1, 2))] * 3


SCRIPT = """
import torch, lightning_hetero, lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def on_train_end(self):
        if self.trainer.is_global_zero:
            print("ranks", len(self.trainer.strategy.accounting.planner.shares(0)))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    for strategy in STRATEGIES:
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **quiet)
        trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4))
"""


@pytest.mark.long
@pytest.mark.parametrize("names", [["hetero_ddp"], ["hetero_ddp_fork", "hetero_ddp_spawn"]], ids=lambda names: names[0])
def test_lightning_starts_the_ranks(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("STRATEGIES", repr(names)))
    [(status, output)] = run_script(tmp_path / "train.py", folder=tmp_path)
    assert status == 0, output
    assert output.count("ranks 2") == len(names)


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_when_a_rank_that_lightning_started_fails_its_name_is_said(tmp_path: Path, failing: int) -> None:
    script = SCRIPT.replace("STRATEGIES", "[lightning_hetero.HeteroDDPStrategy()]").replace(
        "        return self.net",
        f"        if batch_idx == 1 and self.global_rank == {failing}:\n"
        f"            raise ValueError('a fault of rank {failing}')\n"
        "        return self.net",
    )
    (tmp_path / "train.py").write_text(script)
    # A process that ends as Python does, as its output at the exit counts. PyTorch's warnings are left out: a thread
    # that asks rank 0's store may see it end first.
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    status, output = done.returncode, done.stdout + done.stderr
    assert f"a fault of rank {failing}" in output
    assert status == 1, output  # by its own error, not killed
    report = output[output.index(f"lightning_hetero: rank {failing} of 2 on ") :].splitlines()
    assert report[0].endswith("failed:")
    assert len(report) <= 12  # four lines of the traceback's frames
    assert output.count("Traceback") == 1
    assert f"rank {1 - failing} of 2" in report[-1]
    assert f"ended because rank {failing} failed with ValueError: a fault of rank {failing}." in report[-1]
