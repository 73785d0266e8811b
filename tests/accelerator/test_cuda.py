"""On a machine with a CUDA device: one rank alone, and ranks that share the device, do what ranks on CPUs do."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from mixed_tasks import EPOCHS, MixedNet, Row, fit, loaders, values
from ranks import run
from tasks import FAST
from test_mixed import ROWS, name

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")


def finals(row: Row, kind: str) -> torch.Tensor:
    return torch.stack([result["final"] for result in run(fit, len(row.nodes), row, kind, nodes=list(row.nodes))])


def agree(row: Row) -> None:
    on_cuda, on_cpus = finals(row, "cuda"), finals(row, "cpu")
    assert on_cuda.isfinite().all()
    if row.limit is not None:
        assert (on_cuda - on_cpus).abs().max() <= row.limit


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_one_rank_alone(row: Row) -> None:
    agree(replace(row, nodes=(1,)))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_ranks_that_share_a_device(row: Row) -> None:
    agree(row)


def plain() -> torch.Tensor:
    module = MixedNet("")
    options: Any = {**FAST, "accelerator": "cuda", "devices": 1, "max_epochs": EPOCHS}
    torch.manual_seed(0)
    pl.Trainer(strategy="auto", num_sanity_val_steps=0, **options).fit(module, loaders()[0])
    return values(module)


def ours() -> torch.Tensor:
    module = MixedNet("")
    options: Any = {**FAST, "accelerator": "cuda", "devices": 1, "max_epochs": EPOCHS}
    torch.manual_seed(0)
    pl.Trainer(strategy="hetero_ddp", num_sanity_val_steps=0, **options).fit(module, loaders()[0])
    return values(module)


def test_one_rank_is_lightning_to_the_last_bit() -> None:
    assert torch.equal(run(plain, 1)[0], run(ours, 1)[0])
