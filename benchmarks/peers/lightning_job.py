"""Rank under Lightning: its strategies, and this package's."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import common
import contenders
import lightning.pytorch as pl
import systems
import torch
import torch.distributed as dist
from text import Text, gpt, inner_optimizer, loss_of
from torch.utils.data import DataLoader

from lightning_hetero import EmulatedSpeed


class Recorded(pl.LightningModule):
    """Continues text, with a record of the fit; it ends when the board says so."""

    def __init__(self, record: common.Record, board: common.Board, rate: float) -> None:
        super().__init__()
        self.net = gpt()
        self.record, self.board, self.rate = record, board, rate

    def on_train_start(self) -> None:
        self.board.go_on(0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.record.begin(self.net, len(batch))
        loss = loss_of(self.net, batch)
        self.record.loss(loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.board.go_on(batch_idx + 1):
            self.record.times_and_bytes()
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return inner_optimizer(self.parameters(), self.rate)


def fit(contender: str, task: common.Task, board: common.Board, folder: Path) -> dict[str, Any]:
    """Train; what has been noted."""
    contender, rate = systems.without_rate(contender)
    torch.manual_seed(task.seed)
    module = Recorded(common.Record(task.every), board, rate)
    costs = task.costs
    if contenders.is_alone(contender):
        costs = [costs[int(os.environ["RANK"])]]
    slowed = EmulatedSpeed([(fixed, per_sample) for fixed, per_sample in costs])
    trainer = contenders.trainer(contender, max_steps=task.steps, max_epochs=1, callbacks=[slowed])
    trainer.fit(module, DataLoader(Text(task.batch * task.steps * len(costs), task.seed), batch_size=task.batch))
    module.record.leave(module.net, folder)
    return module.record.figures


def main() -> None:
    output, task, names = Path(sys.argv[1]), common.Task(**json.loads(sys.argv[2])), sys.argv[3:]
    with contenders.on_cluster():
        rank, world, runs = dist.get_rank(), dist.get_world_size(), []
        for index, name in enumerate(names):
            dist.barrier()
            together = not contenders.is_alone(name)
            board = common.Board(output.with_name(f"board-{index}"), task, together)
            ranks: list[Any] = [None] * world
            dist.all_gather_object(ranks, fit(name, task, board, output.parent))
            if rank == 0:
                tested = common.tested(output.parent, world)
                runs.append({"contender": name, "together": together, "ranks": ranks, **tested})
                output.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
