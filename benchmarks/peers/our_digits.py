"""What each rank of `torchft_diloco.py` runs under this package: the same task, once for each contender."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import contenders
import lightning.pytorch as pl
import network
import torch
import torch.distributed as dist
from digits import Digits, cnn
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import EmulatedSpeed


class Timed(pl.LightningModule):
    """Notes when each step begins, its loss, and what its node has sent by then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cnn()
        self.figures: dict[str, list[Any]] = {"times": [], "losses": [], "sent": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.figures["times"].append(time.perf_counter())
        self.figures["sent"].append(network.bytes_sent())
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.figures["losses"].append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def fit(contender: str, numbers: tuple[int, int, float, int]) -> dict[str, Any]:
    """Train; what `Timed` has noted."""
    steps, batch, delay, seed = numbers
    torch.manual_seed(seed)
    world, module = int(os.environ["WORLD_SIZE"]), Timed()
    trainer = contenders.trainer(
        contender, max_steps=steps, max_epochs=1, callbacks=[EmulatedSpeed([(delay, 1e-6)] * world)]
    )
    trainer.fit(module, DataLoader(Digits(batch * steps * world, seed), batch_size=batch))
    return module.figures


def main() -> None:
    output, numbers = Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    with contenders.on_cluster():
        runs = []
        for name in sys.argv[6:]:
            dist.barrier()
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, fit(name, numbers))
            runs.append({"contender": name, "ranks": ranks})
        if dist.get_rank() == 0:
            output.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
