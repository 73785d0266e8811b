"""Hydra: an application whose Trainer and strategy come from its configuration, started by torchrun and by itself."""

import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import hydra
import torch
from compare import EPOCHS, SECONDS, WORLD, Found, Watch, compare, load
from lightning.pytorch import LightningModule, seed_everything
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset

CONFIGURATION = f"""
trainer:
  _target_: lightning.pytorch.Trainer
  accelerator: cpu
  devices: {WORLD}
  max_epochs: {EPOCHS}
  strategy: ddp
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
hydra:
  run:
    dir: run
"""
DASO = "{_target_:lightning_hetero.DASOStrategy,wire:bf16,ranks_per_node:1}"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]).squeeze(1) - batch[0].prod(1)).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


@hydra.main(version_base=None, config_path=None, config_name="configuration")
def application(configuration: DictConfig) -> None:
    seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    watch = Watch(lambda batch: batch)
    trainer = hydra.utils.instantiate(configuration.trainer, callbacks=[watch])
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=8, shuffle=True))
    watch.save(Path(os.environ["RESULTS"]) / f"{trainer.global_rank}.pt")


def start(by: list[str], strategy: str) -> list[Found]:
    """Results of the application on each rank; Python gets these arguments before the file."""
    with tempfile.TemporaryDirectory(prefix="packages-") as folder:
        (Path(folder) / "configuration.yaml").write_text(CONFIGURATION)
        command = [sys.executable, *by, __file__, f"--config-dir={folder}", f"trainer.strategy={strategy}"]
        with open(Path(folder) / "log.txt", "w+") as log:
            job = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"RESULTS": folder},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                job.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)  # the ranks, too
            if job.wait():
                log.seek(0)
                print(log.read()[-4000:])
                raise RuntimeError(f"{strategy}: exit code {job.returncode}")
        return load(Path(folder))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        application()
    else:
        fits = {"ddp": partial(start, TORCHRUN, "ddp")}
        for name, strategy in ("hetero_ddp", "hetero_ddp"), ("DASOStrategy by _target_", DASO):
            fits[f"{name}, by torchrun"] = partial(start, TORCHRUN, strategy)
            fits[f"{name}, by itself"] = partial(start, [], strategy)
        compare("hydra-core", fits)
