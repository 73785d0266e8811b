"""Digests of the weights after each step: an oracle for changes of the code that must not change numbers.

``python tests/trajectories.py`` records them in ``trajectories.json``; ``test_trajectories.py`` compares. All
strings are here whose numbers do not depend on which rank comes first. Data and shares are fixed. The model computes
with single products and sums, in the order in which they are written, so that no machine's vector length matters.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_hetero.strategies.table import ENTRIES

RECORD = Path(__file__).with_name("trajectories.json")
WORLD, NODES, STEPS = 4, [2, 2], 24
SHARES = [3.0, 1.0, 2.0, 2.0]
_DASO = {"warmup": 4, "cooldown": 4, "global_every": 4, "wait": 2, "schedule_every_n_steps": 6, "patience": 1}
_ELASTIC = {"tau": 3, "moving_rate": 0.2}

#: By name: the string, its options, and the optimizer.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ddp": ("hetero_ddp", {}, "adamw"),
    "ddp-gloo": ("hetero_ddp", {"within": "gloo"}, "momentum"),
    "ddp-int8": ("hetero_ddp", {"wire": "int8"}, "momentum"),
    "auto": ("hetero_auto", {"exact": True}, "momentum"),
    "node": ("hetero_node", {"every_n_steps": 5}, "momentum"),
    "node-optimizer": ("hetero_node", {"every_n_steps": 5, "average_optimizer_state": True}, "adamw"),
    "node-bf16": ("hetero_node", {"every_n_steps": 5, "wire": "bf16"}, "momentum"),
    "daso": ("hetero_daso", _DASO, "momentum"),
    "daso-delta": ("hetero_daso", {**_DASO, "mixing": "delta", "wire": "bf16"}, "momentum"),
    "easgd": ("hetero_easgd", _ELASTIC, "momentum"),
    "easgd-node": ("hetero_easgd", {**_ELASTIC, "replica": "node"}, "momentum"),
    "easgd-overlap": ("hetero_easgd_overlap", _ELASTIC, "momentum"),
    "easgd-round-robin": ("hetero_easgd_round_robin", _ELASTIC, "momentum"),
    "eamsgd": ("hetero_eamsgd", _ELASTIC, "nesterov"),
    "gossip": ("hetero_gossip", {}, "momentum"),
    "gossip-ring": ("hetero_gossip", {"topology": "ring", "overlap": False, "every_n_steps": 2}, "momentum"),
    "push-sum": ("hetero_gossip_push_sum", {}, "momentum"),
    "diloco": ("hetero_diloco", {"tau": 6}, "adamw"),
    "diloco-int4": ("hetero_diloco", {"tau": 4, "wire": "int4"}, "momentum"),
    "diloco-streaming": ("hetero_diloco", {"tau": 6, "fragments": 2, "delay": 2, "blend": 0.5}, "adamw"),
    "noloco": ("hetero_noloco", {"tau": 4}, "adamw"),
    "noloco-node": ("hetero_noloco", {"tau": 4, "replica": "node"}, "momentum"),
}


class Line(torch.nn.Module):
    """A linear function of two numbers."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, x: float, y: float) -> torch.Tensor:
        return self.weights[0] * x + self.weights[1] * y + self.weights[2]


class Model(pl.LightningModule):
    """A product of two lines, of six parameters."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.first, self.second = Line([0.3, -0.7, 0.2]), Line([0.9, 0.4, -0.1])
        self.optimizer = optimizer
        self.digests: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for x, y, target in batch:
            difference = self.first(x, y) * self.second(x, y) - target
            loss = loss + difference * difference
        return loss / len(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.digests.append(self.digest())

    def digest(self) -> str:
        values = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        return hashlib.sha256(values).hexdigest()[:12]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.02, foreach=False)
        nesterov = self.optimizer == "nesterov"
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.8, nesterov=nesterov, foreach=False)


def data() -> list[list[float]]:
    """One sample a row, of numbers that need no library to be drawn."""
    draw, rows = 1, []
    for _ in range(STEPS * 8):
        row = []
        for _ in range(3):
            draw = draw * 16807 % 2147483647
            row.append(draw / 2147483647 * 2 - 1)
        rows.append(row)
    return rows


def trajectories(names: list[str]) -> dict[str, list[str]]:
    """Train each case on this rank; returns the digests after each step and at the end of the fit."""
    by_name = {entry.name: entry for entry in ENTRIES}
    found = {}
    for name in names:
        string, options, optimizer = CASES[name]
        entry = by_name[string]
        strategy = entry.strategy(**{**options, "balance": SHARES, "rebalance_every_n_steps": 1000, "timeout": 60})
        module = Model(optimizer)
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = DataLoader(data(), batch_size=2, collate_fn=list)
        trainer.fit(module, loader)
        found[name] = [*module.digests, module.digest()]
    return found


def run_all(names: list[str]) -> dict[str, list[list[str]]]:
    """Of each case, one list of digests per rank."""
    from ranks import run

    ranks = run(trajectories, WORLD, names, nodes=NODES)
    return {name: [rank[name] for rank in ranks] for name in names}


def main() -> None:
    """Record all cases."""
    sys.path.insert(0, str(Path(__file__).parent / "distributed"))
    found = run_all(list(CASES))
    RECORD.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
