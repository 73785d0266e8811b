"""Memory of a join for the ranks that train, and the states that each rank keeps."""

import ctypes
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from growing import LATE, WaitsForOthers, fit, grow, values
from ranks import attempt, free_port
from tasks import FAST
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero

WIDTH = 2048


class Large(pl.LightningModule):
    """A model of 33 MB, with an optimizer that holds as much again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def _memory(name: str) -> float:
    """Bytes of this process: ``VmRSS``, now, or ``VmHWM``, at the peak."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return float(line.split()[1]) * 1024


class Peak(pl.Callback):
    """Keeps the memory of training before and after the join, and the peak between the two."""

    def __init__(self) -> None:
        self.world, self.before, self.peak = 0, 0.0, 0.0
        self.after = deque[float](maxlen=6)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.world_size > (self.world or (2 if os.environ.get(LATE) else trainer.world_size)):
            self.peak = _memory("VmHWM")
        if self.peak:
            self.after.append(_memory("VmRSS"))
        else:
            self.before = max(self.before, _memory("VmRSS"))
        self.world = trainer.world_size
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again


def _memory_of_a_join(strategy: str, options: dict[str, Any], file: str) -> tuple[float, float]:
    """Peak above the memory of training, and growth of that by the join, in copies of the model."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    until = time.monotonic() + 120
    while os.environ.get(LATE) and not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.02)
    chosen = getattr(lightning_hetero, strategy)(on_peer_loss="continue", timeout=60, join_file=file, **options)
    peak, module = Peak(), Large()
    waits = [] if os.environ.get(LATE) else [WaitsForOthers(1)]
    trainer = pl.Trainer(strategy=chosen, callbacks=[peak, *waits], **{**FAST, "max_epochs": 3})
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=4))
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    assert peak.peak
    after = min(peak.after)
    training = peak.before or after
    return (peak.peak - training) / size, (after - training) / size


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("HeteroDDPStrategy", {}), ("DiLoCoStrategy", {"replica": "rank", "tau": 3})],
)
def test_a_join_takes_the_memory_of_two_models_at_most(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    outcomes = grow(2, 1, _memory_of_a_join, strategy, {"balance": "off", **options}, str(tmp_path / "job"))
    found = values(outcomes)
    assert max(peak for peak, _ in found) < 2.2
    assert max(kept for _, kept in found) < 0.3  # nobody keeps the checkpoint


@pytest.mark.long
def test_each_rank_of_a_node_keeps_its_optimizer_state(tmp_path: Path) -> None:
    """Ranks of a node have the same state, also after a join, with any of them as the node's leader."""
    port = str(free_port())

    def env_of(rank: int) -> dict[str, str]:
        if rank < 4:
            return {"WORLD_SIZE": "4"}
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
        return {**alone, "MASTER_PORT": port, LATE: "1"}

    options = {"balance": "off", "every_n_steps": 3}
    arguments = "NodeAverageStrategy", options, str(tmp_path / "job"), 1
    seen = values(attempt(fit, 5, *arguments, nodes=[2, 2, 1], env_of=env_of))
    assert [one.starts[-1][1:] for one in seen] == [(rank, 5) for rank in range(5)]
    own = [one.momenta for one in seen]
    assert not torch.equal(own[0][0], own[2][0])
    assert [torch.equal(*own[rank]) for rank in range(4)] == [True] * 4
    assert torch.equal(own[4][0], own[0][0])
