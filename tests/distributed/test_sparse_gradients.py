"""Sparse gradients: the weights of one process, wherever they are among DDP's buckets; or an error."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, parameters
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.errors import UnsupportedError

SAMPLES, BATCH, EPOCHS = 93, 12, 2


class Table(pl.LightningModule):
    """A table of vectors with sparse gradients before a layer, in the model's order, or behind it, and another one."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer, table = nn.Linear(8, 5).double(), nn.Embedding(32, 8, sparse=True).double()
        self.parts = nn.ModuleList([layer, table] if last else [table, layer])
        self.layer, self.table = layer, table
        self.more = nn.EmbeddingBag(32, 5, mode="sum", sparse=True).double()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        (words,) = batch
        hidden = self.layer(self.table(words)).tanh() + self.more(words[:, None])
        return (hidden - words[:, None] / 16).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.3)


def words() -> TensorDataset:
    return TensorDataset(torch.randint(0, 32, (SAMPLES,), generator=torch.Generator().manual_seed(1)))


def alone(last: bool, **trainer: Any) -> torch.Tensor:
    """One process on whole batches."""
    order = DistributedSampler(words(), num_replicas=1, rank=0, shuffle=True)
    module = Table(last)
    fitting = pl.Trainer(devices=1, max_epochs=EPOCHS, **FAST, **trainer)
    fitting.fit(module, DataLoader(words(), batch_size=BATCH, sampler=order))
    return parameters(module)


def _fit(last: bool, strategy: Any, **trainer: Any) -> torch.Tensor:
    module = Table(last)
    fitting = pl.Trainer(strategy=strategy, max_epochs=EPOCHS, **FAST, **trainer)
    fitting.fit(module, DataLoader(words(), batch_size=3, shuffle=True))
    return parameters(module)


def _ddp(**options: Any) -> HeteroDDPStrategy:
    return HeteroDDPStrategy(balance=[2.0, 1.0], global_batch_size=BATCH, timeout=60, **options)


WAYS: list[dict[str, Any]] = [{}, {"within": "shm"}, {"within": "gloo"}, {"ddp_comm_hook": allreduce_hook}]


def _all(last: bool) -> dict[str, torch.Tensor]:
    found = {str(way): _fit(last, _ddp(**way)) for way in WAYS}
    found["bf16"] = _fit(last, _ddp(wire="bf16"))
    found["accumulated"] = _fit(last, _ddp(), accumulate_grad_batches=2)
    return found


@pytest.mark.parametrize("last", [True, False])
def test_as_in_one_process(last: bool) -> None:
    results, truth = run(_all, 2, last), alone(last)
    accumulated = alone(last, accumulate_grad_batches=2)
    for result in results:
        for name, found in result.items():
            off = (found - (accumulated if name == "accumulated" else truth)).abs().max()
            assert off < (1e-2 if name == "bf16" else 1e-12), name


def _in_replicas() -> torch.Tensor:
    strategy = NodeAverageStrategy(every_n_steps=2, balance="off", global_batch_size=BATCH, timeout=60)
    return _fit(True, strategy)


def test_in_replicas() -> None:
    found = run(_in_replicas, 4, nodes=[2, 2])
    assert all(torch.equal(one, found[0]) for one in found)


class NoStep(pl.Callback):
    """Checks that no step begins."""

    def on_train_batch_start(self, *_: Any) -> None:
        raise AssertionError("training has begun")


def _wires() -> None:
    for wire in ("fp16", "int8", "int4", "topk:0.5", "powersgd:2"):
        with pytest.raises(UnsupportedError, match=r"the gradient of .* is sparse.*Use sparse=False"):
            _fit(True, _ddp(wire=wire), callbacks=[NoStep()])


def test_wires_that_sparse_gradients_cannot_take_are_refused_before_training() -> None:
    run(_wires, 2)
