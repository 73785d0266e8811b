"""scvi-tools: a variational autoencoder of made-up counts of genes, which takes strategies by their strings."""

from typing import Any

import numpy as np
import scvi
from anndata import AnnData
from compare import main


def train(trainer: dict[str, Any]) -> None:
    scvi.settings.seed = 1  # for the split into cells for training and for validation, equal on all ranks
    draw = np.random.default_rng(1)
    kinds = draw.gamma(1.0, 2.0, (3, 20))
    cells = AnnData(draw.poisson(kinds[draw.integers(3, size=200)]).astype(np.float32))
    scvi.model.SCVI.setup_anndata(cells)
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=2, dropout_rate=0.0, use_batch_norm="none")
    model.train(**trainer, batch_size=8, train_size=0.8, check_val_every_n_epoch=1)


if __name__ == "__main__":
    main("scvi-tools", train, lambda batch: [batch["X"]], unused=True)
