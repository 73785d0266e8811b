"""pytorch-forecasting: a temporal fusion transformer on made-up series."""

from typing import Any

import numpy as np
import pandas as pd
from compare import main
from lightning.pytorch import Trainer
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import MAE, QuantileLoss
from torch.nn import ModuleList

SERIES, LENGTH, PAST, FUTURE = 8, 46, 16, 4


def table() -> pd.DataFrame:
    """Waves with phases and heights of their own."""
    draw, times = np.random.default_rng(1), np.arange(LENGTH)
    parts = []
    for i in range(SERIES):
        wave = 5 + (1 + i) * np.sin(times / 8 * 2 * np.pi + i) + draw.normal(0, 0.1, LENGTH)
        parts.append(pd.DataFrame({"time": times, "series": str(i), "value": wave}))
    return pd.concat(parts, ignore_index=True)


def train(trainer: dict[str, Any]) -> None:
    frame = table()
    training = TimeSeriesDataSet(
        frame[frame.time < LENGTH - 6],
        time_idx="time",
        target="value",
        group_ids=["series"],
        min_encoder_length=PAST,
        max_encoder_length=PAST,
        min_prediction_length=FUTURE,
        max_prediction_length=FUTURE,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, frame, min_prediction_idx=LENGTH - 6)
    loaders = training.to_dataloader(train=True, batch_size=8), validation.to_dataloader(train=False, batch_size=4)
    options: dict[str, Any] = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4, "dropout": 0.0}
    metrics = ModuleList([MAE()])  # means over samples; for others, such as RMSE, each rank logs its own
    options |= {"loss": QuantileLoss(), "logging_metrics": metrics, "learning_rate": 0.01, "log_interval": 0}
    model = TemporalFusionTransformer.from_dataset(training, **options)
    Trainer(**trainer, gradient_clip_val=0.1).fit(model, *loaders)


if __name__ == "__main__":
    main("pytorch-forecasting", train, lambda batch: [batch[0]["encoder_cont"], batch[1][0]])
