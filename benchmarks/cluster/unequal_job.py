"""What each rank of `unequal.py` runs: every contender in turn, several times, on devices of unequal speed."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import contenders
import lightning.pytorch as pl
import torch.distributed as dist
from job import Digits, Watched
from torch.utils.data import DataLoader

from lightning_hetero import EmulatedSpeed


def fit(contender: str, model: str, steps: int, skip: int, batch: int, costs: list[list[float]]) -> dict[str, Any]:
    """Train; seconds and samples of each of this rank's steps after the first few, bytes that its node sends in one."""
    pl.seed_everything(1, verbose=False)
    if contenders.is_alone(contender):
        costs = [costs[int(os.environ["RANK"])]]
    emulated = EmulatedSpeed([(fixed, per_sample) for fixed, per_sample in costs])
    trainer = contenders.trainer(contender, max_steps=steps, max_epochs=1, callbacks=[emulated])
    module = Watched(model)
    trainer.fit(module, DataLoader(Digits(batch * steps * len(costs)), batch_size=batch, shuffle=True))
    seconds = [b - a for a, b in zip(module.starts[skip:], module.starts[skip + 1 :], strict=False)]
    sent = (module.sent[-1] - module.sent[skip]) / len(seconds)
    return {"steps": seconds, "samples": module.sizes[skip:-1], "bytes": sent}


def main() -> None:
    output, model, names = Path(sys.argv[1]), sys.argv[2], sys.argv[8:]
    repeats, steps, skip, batch = map(int, sys.argv[3:7])
    costs = json.loads(sys.argv[7])
    with contenders.on_cluster():
        everything: list[dict[str, Any]] = []
        for repeat in range(repeats):
            for name in names:
                dist.barrier()
                mine = fit(name, model, steps, skip, batch, costs)
                ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, mine)
                everything.append({"contender": name, "repeat": repeat, "ranks": ranks})
        if dist.get_rank() == 0:
            output.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
