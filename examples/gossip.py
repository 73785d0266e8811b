"""Train by gossip: replicas of unlike speed average in pairs, with no center and no collective within an epoch.

python examples/gossip.py                                   # first come, first paired, beside a slow rank
python examples/gossip.py --strategy hetero_gossip          # in rounds: the two of a pair wait for each other
python examples/gossip.py --strategy hetero_gossip_push_sum
torchrun --nproc-per-node 4 examples/gossip.py              # the same where torchrun starts the ranks
"""

import argparse
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_hetero

STRATEGIES = {
    "hetero_gossip_async": lightning_hetero.GossipAsyncStrategy,
    "hetero_gossip": lightning_hetero.GossipStrategy,
    "hetero_gossip_push_sum": lightning_hetero.GossipPushSumStrategy,
}


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
        self.accuracy(self.layers(images), labels)  # of the replicas' mean, which all hold during validation
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stopwatch(Callback):
    """Print this rank's seconds for the batches of each epoch, before it met the others at its end."""

    def __init__(self):
        self.seconds = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == trainer.num_training_batches - 2:  # the last one waits for everybody
            self.seconds.append(time.perf_counter() - self.began)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--strategy", default="hetero_gossip_async", choices=STRATEGIES, help="%(default)s")
    parser.add_argument("--devices", default=4, type=int, help="ranks, unless torchrun has started them (%(default)s)")
    parser.add_argument("--every", type=int, default=4, help="steps from one exchange to the next (%(default)s)")
    parser.add_argument("--late", type=float, default=0.04, help="seconds per step of the slow rank (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (%(default)s)")
    options = parser.parse_args()

    seed_everything(1)
    torch.set_num_threads(1)  # ranks share this machine's cores
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    strategy = STRATEGIES[options.strategy](every_n_steps=options.every, balance="off")
    monitor, stopwatch = lightning_hetero.HeteroMonitor(), Stopwatch()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[monitor, stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    # The last rank is slow. balance="off" leaves its batches as large as the others', to show what waiting there is.
    costs = [(0.005, 0.0)] * (trainer.world_size - 1) + [(options.late, 0.0)]
    trainer.callbacks.append(lightning_hetero.EmulatedSpeed(costs))
    trainer.fit(DigitReader(), DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=32))

    if trainer.is_global_zero:
        record, steps = monitor.exchanges[-1], trainer.num_training_batches - 1
        print(f"accuracy of the replicas' mean on the test digits: {trainer.callback_metrics['accuracy']:.1%}")
        print(f"rank 0: {record.exchanges} exchanges; the replicas' distance from their mean is {record.distance:.2g}")
        slow, fast = options.late * steps, min(stopwatch.seconds)
        print(f"rank 0 needed {fast:.2f} s for {steps} steps beside a rank that needs {slow:.2f} s for as many.")


if __name__ == "__main__":
    main()
