"""A budget of host waits: how often a training step makes the host wait for the device, for every strategy.

What would wait on CUDA is counted on the training thread by a dispatch mode: reading a value, copies between device and
host that are not asynchronous, and operators whose result has a size that only the device knows.
"""

from collections import Counter
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
from mixed_tasks import MixedNet, Row
from ranks import run
from tasks import FAST, dataset
from test_mixed import ROWS, name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal"}
COPIES = {"aten::_to_copy", "aten::copy_"}
STEPS = 12


class HostWaits(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, operator = func(*args, **(kwargs or {})), func._schema.name
        tensors = [arg for arg in (*args, out) if isinstance(arg, torch.Tensor)]
        on_device = {tensor.device.type != "cpu" for tensor in tensors}
        if operator in READS and True in on_device:
            self.count[operator] += 1
        if operator in COPIES and len(on_device) == 2 and not _asynchronous(func, args, kwargs or {}):
            self.count[operator] += 1
        return out


def _asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking"))


class Budget(pl.Callback):
    """Waits of each step, from one batch's end to the next one's."""

    def __init__(self, waits: HostWaits) -> None:
        self.waits, self.steps, self.before = waits, list[int](), 0

    def on_train_batch_start(self, *_: Any) -> None:
        total = self.waits.count.total()
        self.steps.append(total - self.before)
        self.before = total


class Plain(MixedNet):
    """Logs as most users do."""

    def __init__(self, momentum: str) -> None:
        super().__init__(momentum)
        self.net = torch.nn.Sequential(*(layer for layer in self.net if not isinstance(layer, torch.nn.BatchNorm1d)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss)
        return loss


def counted(row: Row) -> list[int]:
    kind = fake_device.load_if_given()
    waits = HostWaits()
    budget = Budget(waits)
    trainer = pl.Trainer(
        strategy=row.strategy(),
        **{**FAST, "accelerator": kind, "devices": 1},
        num_nodes=len(row.nodes),
        max_steps=STEPS,
        callbacks=[budget],
    )
    with waits:
        trainer.fit(Plain(row.momentum), DataLoader(dataset(12 * STEPS), batch_size=6))
    return budget.steps[3:]


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_budget(device: str, row: Row) -> None:
    steps = run(counted, 2, row, nodes=list(row.nodes), env={"FAKE_LIBRARY": device})[0]
    print(name(row), steps)
    assert steps
