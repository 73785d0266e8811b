"""The same script on every node: it says nothing about how many ranks there are, or where. See README.md."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero  # noqa: F401 - makes the strategy's name known to Lightning
from lightning_hetero.callbacks.monitor import HeteroMonitor


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 1024), nn.ReLU(),
            nn.Linear(1024, 1024), nn.ReLU(),
            nn.Linear(1024, 1),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    seed_everything(1)  # every rank makes the same data
    inputs = torch.randn(8000, 32)
    targets = inputs.square().mean(1, keepdim=True)

    monitor = HeteroMonitor()
    trainer = Trainer(strategy="hetero_ddp", accelerator="auto", max_epochs=2, callbacks=[monitor], logger=False)
    trainer.fit(Regression(), DataLoader(TensorDataset(inputs, targets), batch_size=128, shuffle=True))

    rank, shares = trainer.global_rank, monitor.history[-1].shares
    print(f"rank {rank} of {trainer.world_size}, on node {trainer.node_rank}: {shares[rank]} samples per step")


if __name__ == "__main__":
    main()
