"""A model and its data, which know nothing of strategies; the YAML files beside this one name them by class_path."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class DigitReader(LightningModule):
    """Reads handwritten digits.

    Args:
        width: channels of the convolution.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * 16, 10)
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0]).argmax(1)


class Digits(LightningDataModule):
    """The 1797 digits of scikit-learn.

    Args:
        batch_size: of each rank, on average: the strategy splits the sum by speed.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.held_out = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=self.batch_size)

    def test_dataloader(self):
        return self.val_dataloader()

    def predict_dataloader(self):
        return self.val_dataloader()
