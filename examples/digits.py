"""Train on several devices of this machine, fast and slow ones, with batches split by their measured speed.

Try it on two processor cores: ``python examples/digits.py --devices 2``.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_hetero  # noqa: F401 - makes the strategy's name known to Lightning
from lightning_hetero.callbacks.monitor import HeteroMonitor


class DigitReader(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="auto", help="how many devices to train on (%(default)s)")
    parser.add_argument("--strategy", default="hetero_ddp", help="a strategy of this package (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (%(default)s)")
    options = parser.parse_args()

    seed_everything(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(dataset, [0.8, 0.2])

    monitor = HeteroMonitor()
    trainer = Trainer(
        strategy=options.strategy,
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[monitor],
        logger=CSVLogger("."),
        log_every_n_steps=10,
    )
    model = DigitReader()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))  # 32 samples per rank, on average
    [metrics] = trainer.test(model, DataLoader(test, batch_size=32), verbose=False)

    if trainer.is_global_zero:
        print(f"test accuracy: {metrics['test_accuracy']:.1%}")
        print(f"samples per step of each rank: {monitor.history[-1].shares}")
        print(f"all measurements: {trainer.logger.log_dir}/metrics.csv")
        print(f"who was slowest and why, who waited: {trainer.logger.log_dir}/hetero_report/report.html")


if __name__ == "__main__":
    main()
