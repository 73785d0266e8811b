"""Train with asynchronous elastic averaging; the center lives in MPI's one-sided memory, and one rank is slow.

Needs mpi4py and an MPI library, such as ``pip install mpi4py mpich``. Then::

    mpiexec -n 4 python examples/easgd_mpi.py

Without mpiexec: ``python examples/easgd_mpi.py --center shared_memory --devices 2``.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetero import EASGDAsyncStrategy, EmulatedSpeed, HeteroMonitor


class DigitReader(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.layers(images), labels)  # of the center: all replicas hold it during validation
        self.log("center_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--center", default="mpi", help="mpi, shared_memory or thread (%(default)s)")
    parser.add_argument("--devices", default="auto", help="ranks, unless mpiexec has started them (%(default)s)")
    parser.add_argument("--tau", type=int, default=4, help="steps from one exchange to the next (%(default)s)")
    parser.add_argument("--late", type=float, default=0.04, help="seconds per step of the slow rank (%(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (%(default)s)")
    options = parser.parse_args()

    seed_everything(1)
    torch.set_num_threads(1)  # ranks share this machine's cores
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    monitor = HeteroMonitor()
    strategy = EASGDAsyncStrategy(tau=options.tau, moving_rate="auto", center=options.center, balance="off")
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[monitor],
        logger=CSVLogger("."),
        log_every_n_steps=10,
        enable_model_summary=False,
    )
    # The last rank is slow; the others reach the center more often, and do not wait for it within an epoch.
    costs = [(0.005, 0.0)] * (trainer.world_size - 1) + [(options.late, 0.0)]
    trainer.callbacks.append(EmulatedSpeed(costs))
    trainer.fit(DigitReader(), DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=32))

    if trainer.is_global_zero:
        record = monitor.exchanges[-1]
        print(f"accuracy of the center on the test digits: {trainer.callback_metrics['center_accuracy']:.1%}")
        print(
            f"rank 0: {record.exchanges} exchanges with the center, {record.hidden + record.exposed:.2f} s in all, for"
        )
        print(
            f"  {record.exposed:.2f} s of which it waited; now {record.status['center_distance']:.2f} from the center"
        )
        print("exchanges per second, as rank 0 ended its first epoch:")
        first = [seen for seen in monitor.exchanges if seen.step <= trainer.num_training_batches][-1]
        for name, rate in first.status.items():
            if name.startswith("exchanges_per_s/"):
                print(f"  {name.removeprefix('exchanges_per_s/')}: {rate:.1f}")
        print(f"all measurements: {trainer.logger.log_dir}/metrics.csv")


if __name__ == "__main__":
    main()
