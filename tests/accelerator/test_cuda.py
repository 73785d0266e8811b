"""On a machine with a CUDA device: one rank alone, and ranks that share the device, do what ranks on CPUs do."""

import warnings
from dataclasses import replace
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
from mixed_tasks import BATCH, EPOCHS, MixedNet, Row, fit, loaders, values
from ranks import run
from tasks import FAST
from test_mixed import ROWS, name
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")


def fitted(row: Row, kind: str) -> torch.Tensor:
    if kind == "cuda":
        fake_device.load(kind)
    return fit(row, kind)["final"]


def agree(row: Row) -> None:
    on_cuda, on_cpus = (
        torch.stack(run(fitted, len(row.nodes), row, kind, nodes=list(row.nodes))) for kind in ("cuda", "cpu")
    )
    assert on_cuda.isfinite().all()
    if row.limit is not None:
        assert (on_cuda - on_cpus).abs().max() <= 100 * row.limit


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_one_rank_alone(row: Row) -> None:
    agree(replace(row, nodes=(1,)))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_ranks_that_share_a_device(row: Row) -> None:
    agree(row)


class FusedNet(MixedNet):
    """Has a fused optimizer, as ``on_nan="error"`` needs one on a device."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def alone(strategy: str, on_nan: str = "error") -> torch.Tensor:
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")  # of Lightning's own ddp
    module = (FusedNet if on_nan == "error" else MixedNet)("")
    options: Any = {**FAST, "accelerator": "cuda", "devices": 1, "max_epochs": EPOCHS}
    torch.manual_seed(0)
    training, evaluation = loaders()
    whole = DataLoader(training.dataset, batch_size=BATCH, shuffle=True)
    own = strategy if strategy == "ddp" else HeteroDDPStrategy(on_nan=on_nan)
    pl.Trainer(strategy=own, **options).fit(module, whole, evaluation)
    return values(module)


@pytest.mark.parametrize("on_nan", ["error", "ignore"])
def test_one_rank_is_lightnings_ddp_to_the_last_bit(on_nan: str) -> None:
    assert torch.equal(run(alone, 1, "ddp", on_nan)[0], run(alone, 1, "hetero_ddp", on_nan)[0])
