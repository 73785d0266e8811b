"""A budget of host waits: how often a training step makes the host wait for the device, for every strategy.

What would wait on CUDA is counted on the training thread. By a dispatch mode: reading a value, copies between device
and host that are not asynchronous or whose memory is pageable, and operators whose result has a size that only the
device knows. By a profiler's hook: waits for an event, a stream or the device, also for an event that has passed.
"""

import sys
import warnings
from collections import Counter
from typing import Any

import fake_device
import fake_nccl
import lightning.pytorch as pl
import pytest
import torch
from mixed_tasks import MixedNet, Row
from ranks import run
from tasks import FAST, dataset
from test_mixed import ROWS, name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from typing_extensions import Self

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal"}
COPIES = {"aten::_to_copy", "aten::copy_"}
AWAITED = {"synchronize", "_cuda_synchronize"}  # of events and streams, of a device
STEPS = 12


class HostWaits(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __enter__(self) -> Self:
        sys.setprofile(self._called)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        super().__exit__(*error)

    def _called(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in AWAITED:
            self.count[f"{function.__qualname__} in {frame.f_code.co_name}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, operator = func(*args, **(kwargs or {})), func._schema.name
        tensors = [arg for arg in (*args, out) if isinstance(arg, torch.Tensor)]
        on_device = {tensor.device.type != "cpu" for tensor in tensors}
        if operator == "fakedev::synchronize" or (operator in READS and True in on_device):
            self.count[operator] += 1
        if operator in COPIES and len(on_device) == 2 and not _asynchronous(func, args, kwargs or {}):
            self.count[operator] += 1
        elif operator in COPIES and len(on_device) == 2:
            host = next(tensor for tensor in tensors if tensor.device.type == "cpu")
            self.count["pageable memory"] += not host.is_pinned()
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


#: In each step, for what the device has found in the step before: by then it has all of the next step's passes to do.
OF_STEP_BEFORE = 1

#: By name: how often the host waits for an exchange, and how many exchanges there are in the steps that count. Between
#: exchanges it does not wait. Where speed decides when replicas exchange, they may do so after any step. Those of DASO
#: and of `hetero_easgd_overlap` in the background need no wait, but for the first one; DASO's cool-down does. Without
#: exchanges, gradients that are not finite are looked for in each step.
BUDGET = {
    "hetero_ddp": (OF_STEP_BEFORE, STEPS - 3),
    "hetero_auto": (OF_STEP_BEFORE, STEPS - 3),
    "hetero_node": (1, 3),
    "hetero_daso": (1, 2),
    "hetero_easgd": (1, 2),
    "hetero_eamsgd": (1, 2),
    "hetero_easgd_overlap": (1, 1),
    "hetero_easgd_round_robin": (1, 2),
    "hetero_easgd_async": (1, 2),
    "hetero_measgd_async": (1, 2),
    "hetero_easgd_hogwild": (1, 2),
    "hetero_gossip": (1, 4),
    "hetero_gossip_async": (1, 9),
    "hetero_gossip_push_sum": (1, 4),
    "hetero_diloco": (1, 2),
    "hetero_diloco_async": (1, 9),
    "hetero_noloco": (1, 2),
}


def counted(row: Row) -> list[int]:
    """Waits of each step, without the first ones, in which replicas meet and shares are found."""
    warnings.filterwarnings("ignore", "Ranks .* share ")
    kind = fake_device.load_if_given()
    waits = HostWaits()
    budget = Budget(waits)
    trainer = pl.Trainer(
        strategy=row.strategy(),
        **{**FAST, "accelerator": kind, "devices": 1},
        num_nodes=len(row.nodes),
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[budget],
    )
    with waits:
        loader = DataLoader(dataset(12 * STEPS), batch_size=6, pin_memory=True)
        trainer.fit(Plain(row.momentum), loader, loader)
    return budget.steps[3:]


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_host_waits_for_exchanges_only(device: str, row: Row) -> None:
    steps = run(counted, sum(row.nodes), row, nodes=list(row.nodes), env={"FAKE_LIBRARY": device})[0]
    waits, exchanges = BUDGET[row.name]
    assert len(steps) == STEPS - 3
    assert max(steps) <= waits, steps
    assert sum(steps) <= waits * exchanges, steps


@pytest.mark.parametrize("wire", ["bf16", "int8", "powersgd:2"])
def test_gradients_on_a_wire_wait_for_nothing(device: str, wire: str) -> None:
    """They are copied into pinned memory, and a thread waits for that."""
    row = Row("hetero_ddp", {"wire": wire})
    steps = run(counted, 2, row, nodes=[1, 1], env={"FAKE_LIBRARY": device})[0]
    assert len(steps) == STEPS - 3
    assert max(steps) == OF_STEP_BEFORE, steps


class Weighted(Plain):
    """Says on the device how much a batch counts."""

    def batch_weight(self, batch: Any) -> torch.Tensor:
        return batch[0].new_ones(()) * len(batch[0])


class ByRMSProp(Plain):
    """Has an optimizer that cannot leave a step out on the device."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=0.01)


#: Of `hetero_ddp`: options of the strategy, a kind of module, and how often the host waits in each step.
OPTIONS: dict[str, tuple[dict[str, Any], type[Plain], int]] = {
    "on_nan=ignore": ({"on_nan": "ignore"}, Plain, 0),
    "on_nan=skip": ({"on_nan": "skip"}, Plain, 2),
    "another optimizer": ({}, ByRMSProp, 1),
    "another optimizer, on_nan=ignore": ({"on_nan": "ignore"}, ByRMSProp, 0),
    "batch_weight": ({}, Weighted, 1 + OF_STEP_BEFORE),
    "balance=auto": ({"balance": "auto"}, Plain, OF_STEP_BEFORE),
}


def counted_with(row: Row, kind: type[Plain]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Plain", kind)
        return counted(row)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_a_budget_too(device: str, name: str) -> None:
    options, kind, waits = OPTIONS[name]
    options = dict(options)
    row = Row("hetero_ddp", options, balance=options.pop("balance", ""))
    steps = run(counted_with, 2, row, kind, nodes=[1, 1], env={"FAKE_LIBRARY": device})[0]
    assert len(steps) == STEPS - 3
    assert max(steps) == waits, steps


class Synced(Plain):
    """Logs values over all ranks in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({f"loss {number}": loss for number in range(5)}, sync_dist=True)
        self.log("most", loss, sync_dist=True, reduce_fx="max")
        if batch_idx == 0:
            self.log("on the host", torch.ones(()), sync_dist=True)  # which no library of devices takes
        return loss


def counted_syncs(row: Row, connected: bool) -> list[int]:
    if connected:
        fake_nccl.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Plain", Synced)
        return counted(row)


@pytest.mark.parametrize("connected", [True, False])
def test_logged_values_make_the_host_wait_once(fake: str, connected: bool) -> None:
    """Whatever their number: over gloo for a copy to the host, over NCCL for what was logged in the step before."""
    env, row = {"FAKE_LIBRARY": fake, "FAKE_GLOO": "stage"}, Row("hetero_ddp", {"on_nan": "ignore"})
    steps = run(counted_syncs, 2, row, connected, nodes=[1, 1], env=env)[0]
    assert len(steps) == STEPS - 3
    assert set(steps) == {1}, steps


class Reads(Plain):
    """Reads its loss in each step, as careless modules do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss.item() == loss.item()
        return loss


def counted_reads(row: Row) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Plain", Reads)
        return counted(row)


def test_a_module_that_reads_its_loss_is_over_the_budget(device: str) -> None:
    [row] = [row for row in ROWS if row.name == "hetero_node"]
    steps = run(counted_reads, 2, row, nodes=[1, 1], env={"FAKE_LIBRARY": device})[0]
    assert min(steps) == 2
