"""chemprop: a message-passing network on molecular graphs, which learns the number of atoms of chains."""

from typing import Any

import numpy as np
from chemprop import data, models, nn
from compare import main
from lightning.pytorch import Trainer


def molecules(count: int, seed: int) -> data.MoleculeDataset:
    """Chains of carbon with an oxygen, a nitrogen or a sulphur somewhere, and a size that depends on both."""
    draw = np.random.default_rng(seed)
    points = []
    for i in range(count):
        before, after, kind = *draw.integers(1, 9, 2), draw.integers(3)
        value = (before + after + 4 * kind) / 10 + 1e-4 * i  # otherwise samples would be equal
        points.append(data.MoleculeDatapoint.from_smi("C" * before + "ONS"[kind] + "C" * after, np.array([value])))
    return data.MoleculeDataset(points)


def train(trainer: dict[str, Any]) -> None:
    loaders = [
        data.build_dataloader(molecules(n, seed), batch_size=8, shuffle=seed == 1) for n, seed in ((160, 1), (40, 2))
    ]
    message, readout = nn.BondMessagePassing(d_h=16, depth=2), nn.RegressionFFN(input_dim=16, hidden_dim=16)
    model = models.MPNN(message, nn.MeanAggregation(), readout, batch_norm=False, warmup_epochs=1)
    Trainer(**trainer).fit(model, *loaders)


if __name__ == "__main__":
    main("chemprop", train, lambda batch: [batch.Y])
