"""Handwritten digits without end, and a network that reads them. Nothing of Lightning in here."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class Digits(Dataset):
    """Handwritten digits, each time with other noise, for as many samples as it takes.

    Args:
        samples: how many.
        seed: of the order; ``None``: as scikit-learn has them.
    """

    def __init__(self, samples: int, seed: int | None = None) -> None:
        images, labels = handwritten(training=True)
        order = torch.arange(len(images))
        if seed is not None:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        self.images, self.labels, self.samples = images[order], labels[order], samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = self.images[index % len(self.images)]
        return image + 0.2 * torch.randn(image.shape, generator=generator), self.labels[index % len(self.images)]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        first = torch.tensor(indices) % len(self.images)
        noise = torch.randn(len(indices), 1, 8, 8, generator=torch.Generator().manual_seed(indices[0]))
        return list(zip(self.images[first] + 0.2 * noise, self.labels[first], strict=True))


def cnn() -> nn.Module:
    """2.15 million parameters: 8.6 MB for every exchange."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 2060),
        nn.ReLU(),
        nn.Linear(2060, 10),
    )


def handwritten(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels; those of the test are never trained on."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    chosen = torch.arange(len(images)) % 5 != 0
    chosen = chosen if training else ~chosen
    return images[chosen], torch.tensor(data.target)[chosen]
