"""darts: N-BEATS on made-up series. It imports `pytorch_lightning`, and its batches are dataclasses with slots."""

from typing import Any

import numpy as np
from compare import EPOCHS, main
from darts import TimeSeries
from darts.models import NBEATSModel


def series(length: int) -> list[TimeSeries]:
    """Waves with phases and heights of their own."""
    draw, times = np.random.default_rng(1), np.arange(length)
    waves = [(1 + i) * np.sin(times / 8 * 2 * np.pi + i) + draw.normal(0, 0.1, length) for i in range(8)]
    return [TimeSeries.from_values(wave.astype(np.float32)) for wave in waves]


def train(trainer: dict[str, Any]) -> None:
    model = NBEATSModel(
        input_chunk_length=16,
        output_chunk_length=4,
        num_stacks=2,
        num_blocks=1,
        num_layers=2,
        layer_widths=16,
        batch_size=8,
        n_epochs=EPOCHS,
        random_state=1,
        pl_trainer_kwargs=trainer,
    )
    model.fit(series(39), val_series=series(24))


if __name__ == "__main__":
    main("darts", train, lambda batch: [batch.past_target, batch.future_target])
