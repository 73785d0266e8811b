"""Autograd runs the backward pass of a device in a thread of its own: hooks and wires work there, on the rank's device.

Only a process that has not been forked has such threads, so the ranks are started by torchrun.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.strategies.table import ENTRIES

DIRECTORY = Path(__file__).parent
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gradients": ("hetero_ddp", {}),
    "a wire": ("hetero_ddp", {"wire": "int4"}),
    "PowerSGD": ("hetero_ddp", {"wire": "powersgd:2"}),
    "NaN left out": ("hetero_ddp", {"on_nan": "skip"}),
    "DASO": ("hetero_daso", {"warmup": 0, "cooldown": 0, "global_every": 2, "wait": 1, "replica": "rank"}),
    "streaming": ("hetero_diloco", {"tau": 2, "delay": 1, "replica": "rank"}),
}


class Net(pl.LightningModule):
    """Records the threads and devices in which its gradients are computed."""

    def __init__(self, nan_at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.nan_at, self.seen = nan_at, set[tuple[bool, int]]()

    def on_train_start(self) -> None:
        training = threading.get_ident()
        for parameter in self.parameters():
            parameter.register_hook(
                lambda _: self.seen.add((threading.get_ident() == training, torch.fake.current_device()))
            )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).sub(batch[1]).square().mean()
        return loss * float("nan") if batch_idx == self.nan_at and self.global_rank == 1 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(case: str, folder: Path) -> None:
    """Train on this rank, and save the weights and the threads of the backward pass."""
    name, options = CASES[case]
    accelerator = fake_device.load_if_given()
    [entry] = [entry for entry in ENTRIES if entry.name == name]
    module = Net(nan_at=3 if "on_nan" in options else -1)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=2,
        strategy=entry.strategy(balance="off", timeout=60, **options),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4))
    weights = {key: value.cpu() for key, value in module.state_dict().items()}
    torch.save({"weights": weights, "seen": module.seen}, folder / f"{trainer.global_rank}.pt")


def started(case: str, folder: Path, **env: str) -> list[dict[str, Any]]:
    """Results of both ranks, in fresh processes."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    path = os.pathsep.join([str(DIRECTORY), *sys.path])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FAKE_DEVICES": "2", **env}
    ended = subprocess.run(
        [*command, case, str(folder)], env=variables, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("case", list(CASES))
def test_the_backward_pass_in_threads_of_devices_changes_nothing(case: str, fake: str, tmp_path: Path) -> None:
    threads = started(case, tmp_path / "threads", FAKE_LIBRARY=fake, FAKE_THREADS="1")
    inline = started(case, tmp_path / "inline", FAKE_LIBRARY=fake)
    for rank, (own, other) in enumerate(zip(threads, inline, strict=True)):
        assert own["seen"] == {(False, rank)}
        assert other["seen"] == {(True, rank)}
        for name, value in own["weights"].items():
            assert torch.equal(value, other["weights"][name]), name


if __name__ == "__main__":
    fit(sys.argv[1], Path(sys.argv[2]))
