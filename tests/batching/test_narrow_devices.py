"""Devices without float64, as MPS: sums on them stay in fp32, and so do their results."""

import pytest
import torch
import torch.distributed as dist
from ranks import run

from lightning_hetero.batching import accounting
from lightning_hetero.batching.loss import LossTracker
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.comm import collectives
from lightning_hetero.comm.collectives import Collectives
from lightning_hetero.comm.topology import widest_float


@pytest.mark.parametrize(("kind", "narrow"), [("cpu", False), ("cuda", False), ("mps", True), ("xpu", True)])
def test_which_devices_have_float64(kind: str, narrow: bool) -> None:
    assert widest_float(torch.device(kind)) == (torch.float32 if narrow else torch.float64)


def _narrow() -> tuple[torch.Tensor, float]:
    dist.init_process_group("gloo")
    for module in (collectives, accounting):
        module.widest_float = lambda device: torch.float32  # type: ignore[attr-defined]
    rank = dist.get_rank()
    own = Collectives(StepTimer(torch.device("cpu")).waiting, lambda: False, lambda: True)
    mean = own.reduce(torch.tensor([rank, 3]), None, "mean")
    found = LossTracker()
    found.take(torch.tensor(1.0 + rank), samples=1.0 + 2 * rank, step=0)
    return mean, found.mean_over_ranks()


def test_means_on_such_a_device() -> None:
    for mean, loss in run(_narrow, 2):
        assert mean.dtype == torch.float32
        assert mean.tolist() == [0.5, 3.0]
        assert loss == pytest.approx((1 * 1 + 2 * 3) / 4)
