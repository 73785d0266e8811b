"""The fits of ``data/version_0_1``: version 0.1 has run them, this version goes on with them."""

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("HeteroDDPStrategy", {}),
    # B = 3 and W = 2 after 2 steps of warm-up: an exchange begins after step 5, and is under way after step 6.
    "daso": ("DASOStrategy", {"warmup": 2, "cooldown": 2, "global_every": 3, "wait": 2, "patience": 99}),
    "diloco": ("DiLoCoStrategy", {"tau": 4}),  # the last step is an outer step
}
SAVED, STEPS = 6, 12


class Small(pl.LightningModule):
    """Few parameters, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2, 1)).double()
        for i, parameter in enumerate(self.net.parameters()):
            nn.init.constant_(parameter, 0.1 * (i + 1))

    def on_train_start(self) -> None:
        self.known = self.trainer.strategy.share.cost._k  # seconds per sample that this rank has measured
        averager = getattr(self.trainer.strategy, "averager", None)
        self.pending = getattr(averager, "_pending", None) is not None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(name: str, folder: str, resume: str | None = None) -> dict[str, Any]:
    """Train, and save on the way; what this rank holds at the end, and held when it began."""
    kind, options = OPTIONS[name]
    alike = name == "ddp"  # of which version 0.1 saves no random states, but what the ranks have measured
    balance = "auto" if alike else [2.0, 1.0]
    keep = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=SAVED, filename="{step}", save_top_k=-1)
    trainer = pl.Trainer(
        strategy=getattr(lightning_hetero, kind)(balance=balance, global_batch_size=6, timeout=60, **options),
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep],
    )
    warnings.simplefilter("ignore", UserWarning)
    torch.manual_seed(trainer.global_rank)  # each rank drops out other units
    x = torch.sin(torch.arange(90, dtype=torch.float64)).reshape(30, 3)
    module = Small(0.0 if alike else 0.3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3), ckpt_path=resume)
    return {
        "weights": [value for p in module.parameters() for value in p.detach().reshape(-1).tolist()],
        "known": module.known,
        "pending": module.pending,
        "said": [str(warning.message) for warning in caught],
    }
