"""gluonts: DeepAR on made-up series. Its training data is a stream of windows, drawn at random on each rank."""

import os
from typing import Any

import numpy as np
import pandas as pd
from compare import main
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator


def series(length: int) -> ListDataset:
    """Waves with phases and heights of their own, every second one for each rank: with gluonts users split the data."""
    draw, hours = np.random.default_rng(1), np.arange(length)
    waves = [5 + (1 + i) * np.sin(hours / 24 * 2 * np.pi + i) + draw.normal(0, 0.1, length) for i in range(8)]
    own = waves[int(os.environ["RANK"]) :: 2]
    return ListDataset([{"start": pd.Period("2024-01-01", "h"), "target": wave} for wave in own], freq="h")


def train(trainer: dict[str, Any]) -> None:
    estimator = DeepAREstimator(
        "h",
        prediction_length=12,
        context_length=24,
        num_layers=1,
        hidden_size=8,
        dropout_rate=0.0,
        batch_size=8,
        num_batches_per_epoch=20,
        trainer_kwargs=trainer,
    )
    estimator.train(series(400), series(436))


if __name__ == "__main__":
    main("gluonts", train, lambda batch: [batch["past_target"]])
