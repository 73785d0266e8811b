"""litgpt: a small GPT with new weights, which learns to count, with the package's own loss."""

from typing import Any

import torch
from compare import EPOCHS, main
from lightning.pytorch import LightningModule, Trainer
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH = 32, 16


def sequences() -> tuple[TensorDataset, TensorDataset]:
    """Sequences of numbers, each with a start and a step of its own; for training and for validation."""
    drawn = torch.randperm(WORDS * WORDS, generator=torch.Generator().manual_seed(1))[:200, None]
    words = (drawn // WORDS + drawn % WORDS * torch.arange(LENGTH + 1)) % WORDS
    return TensorDataset(words[:160]), TensorDataset(words[160:])


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "padded_vocab_size": WORDS, "block_size": LENGTH}
        self.model = GPT(Config(**sizes))

    def _loss(self, batch: Any) -> torch.Tensor:
        return chunked_cross_entropy(self.model(batch[0][:, :-1]), batch[0][:, 1:].contiguous())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


def train(trainer: dict[str, Any]) -> None:
    loaders = [DataLoader(part, batch_size=8, shuffle=i == 0) for i, part in enumerate(sequences())]
    Trainer(**trainer, gradient_clip_val=1.0).fit(Language(), *loaders)


if __name__ == "__main__":
    main("litgpt", train, lambda batch: batch)
