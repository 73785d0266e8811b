"""An averager of one's own: SlowMo, in about a hundred lines, of which docs/own_averager.md tells.

python examples/own_averager.py --devices 2                 # trains on scikit-learn's digits, each rank a replica
torchrun --nproc-per-node 4 examples/own_averager.py        # likewise where torchrun starts the ranks
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import StrategyRegistry
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_hetero import HeteroMonitor
from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.comm.links import ReplicaLinks
from lightning_hetero.comm.replica import Replica
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies import ReplicaStrategy


# -- the algorithm ---------------------------------------------------------------------------------
class SlowMoAverager(Averager):
    """Every tau steps the replicas' mean moves on with momentum.

    With ``x`` the values that all had in common, ``m`` their mean now, and ``eta`` the mean learning rate since then::

        u <- beta u + (x - m) / eta
        x <- x - alpha eta u

    Buffers, such as BatchNorm's statistics, take the mean. The optimizers' own state is left as it is.

    Source: SlowMo, Wang, Tantia, Ballas and Rabbat 2020, algorithm 1, where eta is constant between exchanges.

    Args:
        tau: optimizer steps from one exchange to the next.
        alpha: slow learning rate.
        beta: slow momentum.
    """

    needs_others = False  # one replica alone can have slow momentum, too

    def __init__(self, tau: int, alpha: float, beta: float) -> None:
        self.tau, self.alpha, self.beta = tau, alpha, beta
        self._rates = 0.0  # sum of the learning rates since the latest exchange

    @override
    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        super().setup(replica, links, optimizers)  # self.reference is x from here on
        starts, _ = replica.views(self.reference)
        self._slow = [torch.zeros_like(start) for start in starts]  # u, in the parameters' shapes

    @override
    def due(self, context: StepContext) -> bool:
        return context.step % self.tau == 0

    @override
    def after_step(self, context: StepContext) -> None:
        self._rates += self.optimizers()[0].param_groups[0]["lr"]
        if self.due(context):
            self.slow_step(context.samples_per_replica)

    def slow_step(self, samples_per_replica: Sequence[int]) -> None:
        """Take the mean of all replicas, and from there a step with momentum (collective)."""
        self._packed = self.replica.pack(self._packed)
        average = self.links.average(self._packed, samples_per_replica, self.reference, payload=self._rates / self.tau)
        eta = average.payloads[0]  # of replica 0, so that all reckon with the same number
        (starts, _), (means, _) = self.replica.views(self.reference), self.replica.views(average.mean)
        for u, start, mean in zip(self._slow, starts, means, strict=True):
            u.mul_(self.beta).add_(start - mean, alpha=1 / eta if eta else 0.0)
            torch.sub(start, u, alpha=self.alpha * eta, out=mean)
        self.adopt(average)  # the model takes it over, and it is the next x
        self._rates = 0.0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self._slow, "rates": self._rates}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._slow, self._rates = state["slow"], state["rates"]


# -- its strategy, and its name --------------------------------------------------------------------
class SlowMoStrategy(ReplicaStrategy):
    """Nodes train apart and meet every tau steps; their mean moves on with momentum.

    Args:
        tau: optimizer steps from one exchange to the next.
        alpha: slow learning rate, above 0.
        beta: slow momentum, at least 0 and below 1; with 0 and ``alpha=1`` it is plain averaging.
        **kwargs: as for :class:`~lightning_hetero.strategies.replica.ReplicaStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(self, tau: int = 12, alpha: float = 1.0, beta: float = 0.7, **kwargs: Any) -> None:
        if tau < 1 or alpha <= 0 or not 0 <= beta < 1:
            raise ConfigurationError(
                f"tau={tau!r}, alpha={alpha!r}, beta={beta!r}: tau must be at least 1, alpha above 0, beta in [0, 1)."
            )
        self.tau, self.alpha, self.beta = tau, alpha, beta
        super().__init__(**kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), "tau": self.tau, "alpha": self.alpha, "beta": self.beta}

    @override
    def make_averager(self) -> Averager:
        return SlowMoAverager(self.tau, self.alpha, self.beta)


StrategyRegistry.register("hetero_slowmo", SlowMoStrategy, description="averages with slow momentum")


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

    strategy = SlowMoStrategy(tau=options.tau, beta=options.beta, ranks_per_node=1)  # each rank passes for a node
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
