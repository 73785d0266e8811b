"""transformers: a small BERT with new weights, which sorts made-up sequences, in batches of its own collator."""

from typing import Any

import torch
from compare import main
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, DefaultDataCollator

WORDS, LENGTH = 50, 12


def samples(count: int, seed: int) -> list[dict[str, Any]]:
    """Sequences that are of class 1 if most of their words are in the upper half."""
    words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ((words >= WORDS // 2).sum(1) > LENGTH // 2).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels.tolist(), strict=True)]


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(**batch)
        self.log("val_loss", out.loss, sync_dist=True)
        self.log("val_accuracy", (out.logits.argmax(-1) == batch["labels"]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def train(trainer: dict[str, Any]) -> None:
    train, val = (
        DataLoader(samples(count, seed), batch_size=8, shuffle=seed == 1, collate_fn=DefaultDataCollator())
        for count, seed in ((160, 1), (40, 2))
    )
    Trainer(**trainer).fit(Classifier(), train, val)


if __name__ == "__main__":
    main("transformers", train, lambda batch: [batch["input_ids"]])
