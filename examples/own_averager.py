"""An averager that is not in the package: SlowMo. docs/own_averager.md explains it line by line.

python examples/own_averager.py --devices 2                 # trains on scikit-learn's digits, each rank a replica
torchrun --nproc-per-node 4 examples/own_averager.py        # the same where torchrun starts the ranks
"""

import argparse
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetero import (
    Averager,
    ConfigurationError,
    HeteroMonitor,
    Own,
    Shared,
    StepContext,
    Traits,
    strategy_for,
    zeros,
)


# -- the algorithm, and its strategy ---------------------------------------------------------------
@dataclass
class SlowMo(Averager):
    """Replicas train apart and meet every tau steps; their mean moves on with momentum.

    With ``x`` the values that all had in common, ``m`` their mean now, and ``eta`` the mean learning rate since then::

        u <- beta u + (x - m) / eta
        x <- x - alpha eta u

    Buffers, such as BatchNorm's statistics, take the mean. The optimizers' own state is left as it is.

    Source: SlowMo, Wang, Tantia, Ballas and Rabbat 2020, algorithm 1, where eta is constant between exchanges.

    Args:
        tau: optimizer steps from one exchange to the next.
        alpha: slow learning rate, above 0.
        beta: slow momentum, at least 0 and below 1; with 0 and ``alpha=1`` this is plain averaging.
    """

    tau: int = 12
    alpha: float = 1.0
    beta: float = 0.7

    traits = Traits(needs_others=False)  # one replica alone can have slow momentum, too
    momentum = Shared(zeros)  # u, equal on all replicas; self.reference, which is x, is state of every averager
    rates = Own(lambda averager: [])  # this replica's learning rates since its latest exchange

    def __post_init__(self) -> None:
        if self.tau < 1 or self.alpha <= 0 or not 0 <= self.beta < 1:
            raise ConfigurationError(f"{self}: tau must be at least 1, alpha above 0, beta at least 0 and below 1.")

    def due(self, context: StepContext) -> bool:
        return context.step % self.tau == 0

    def before_step(self, context: StepContext) -> None:  # once per step; after_step is repeated if a loss breaks it
        self.rates = [*self.rates, self.optimizers[0].param_groups[0]["lr"]]

    def meet(self, context: StepContext) -> None:
        average = self.average(context, payload=sum(self.rates) / len(self.rates))
        eta = average.payloads[0]  # of replica 0, so that all take the same number
        vectors = self.momentum, self.reference, average.mean
        for u, x, m in zip(*(self.replica.views(each)[0] for each in vectors), strict=True):  # the parameters in them
            u.mul_(self.beta).add_(x - m, alpha=1 / eta if eta else 0.0)
            torch.sub(x, u, alpha=self.alpha * eta, out=m)
        self.adopt(average)  # the model takes it over, and it is the next x
        self.rates = []


SlowMoStrategy = strategy_for(SlowMo, name="hetero_slowmo", replica="rank")


# -- a use of it -----------------------------------------------------------------------------------
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

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_end(self):
        weights = self.all_gather(nn.utils.parameters_to_vector(self.parameters()).detach())
        self.apart = (weights - weights[0]).abs().max().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", default=4, type=int, help="ranks, unless torchrun has started them (%(default)s)")
    parser.add_argument("--tau", type=int, default=12, help="steps from one exchange to the next (%(default)s)")
    parser.add_argument("--beta", type=float, default=0.7, help="slow momentum (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (%(default)s)")
    options = parser.parse_args(arguments)

    seed_everything(1)
    torch.set_num_threads(1)  # ranks share this machine's cores
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    strategy = SlowMoStrategy(tau=options.tau, beta=options.beta)
    monitor = HeteroMonitor()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = DigitReader()
    trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True))
    [metrics] = trainer.test(model, DataLoader(test, batch_size=32), verbose=False)

    if trainer.is_global_zero:
        print(f"test accuracy: {metrics['accuracy']:.1%}")
        print(f"distance of the replicas from their mean when they last met: {monitor.exchanges[-1].distance:.2g}")
        print(f"largest difference between the ranks' final weights: {model.apart:g}")


if __name__ == "__main__":
    main()
