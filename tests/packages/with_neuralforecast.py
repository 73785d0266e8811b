"""neuralforecast: N-HiTS on made-up series. A sample is a series, of which a batch takes windows."""

from typing import Any

import numpy as np
import pandas as pd
from compare import EPOCHS, main
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

SERIES, LENGTH, BATCH = 160, 40, 8


def table() -> pd.DataFrame:
    """Waves with phases and heights of their own."""
    draw, times = np.random.default_rng(1), np.arange(LENGTH)
    parts = []
    for i in range(SERIES):
        wave = (1 + i % 8) * np.sin(times / 8 * 2 * np.pi + i) + draw.normal(0, 0.1, LENGTH)
        parts.append(pd.DataFrame({"unique_id": str(i), "ds": times, "y": wave}))
    return pd.concat(parts, ignore_index=True)


def train(trainer: dict[str, Any]) -> None:
    del trainer["max_epochs"]  # it counts in steps
    model = NHITS(
        h=4,
        input_size=16,
        max_steps=EPOCHS * SERIES // (2 * BATCH),
        val_check_steps=20,
        batch_size=BATCH,
        windows_batch_size=None,  # all windows of a batch; by default it draws some
        mlp_units=3 * [[16, 16]],
        random_seed=1,
        **trainer,
    )
    forecast = NeuralForecast([model], freq=1)
    forecast.models[0].trainer_kwargs["callbacks"] = trainer["callbacks"]  # it has copied the model and the callbacks
    forecast.fit(table(), val_size=8)


if __name__ == "__main__":
    main("neuralforecast", train, lambda batch: [batch["temporal"]])
