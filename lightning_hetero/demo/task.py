"""What the demo trains: a small network that reads handwritten digits."""

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The 1797 digits of scikit-learn, always split alike.

    Returns:
        1437 samples to train on and 360 to test on: images of shape ``(1, 8, 8)`` in [0, 1], and labels 0 to 9.
    """
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(data.target))
    train, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    return TensorDataset(*dataset[train.indices]), TensorDataset(*dataset[test.indices])


class DigitReader(LightningModule):
    """Two convolutions and a linear layer; no layer that couples samples, so any split gives the same mathematics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count what was read right."""
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, at a learning rate of 2e-3."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)
