"""deeptab: a perceptron on a made-up table, by the package's interface of scikit-learn's kind."""

from typing import Any

import numpy as np
import pandas as pd
from compare import main
from deeptab.configs import MLPConfig
from deeptab.models import MLPRegressor


def train(trainer: dict[str, Any]) -> None:
    draw = np.random.default_rng(1)
    table = pd.DataFrame({name: draw.normal(size=200) for name in "abc"})
    target = (table["a"] - 2 * table["b"] * table["c"] + draw.normal(0, 0.1, 200)).to_numpy()
    model = MLPRegressor(MLPConfig(layer_sizes=[16, 16], dropout=0.0))
    model.fit(table, target, batch_size=8, val_size=0.2, lr=0.01, random_state=1, **trainer)


if __name__ == "__main__":
    main("deeptab", train, lambda batch: [batch[1]])
