"""Controls: with each of these mistakes the comparisons of other tests fail."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from oracles import oracle
from ranks import run
from tasks import FAST, Net, dataset, error, fit, parameters
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.timer import Activity, StepTimer


class Unweighted(HeteroDDPStrategy):
    """The plain mean over ranks, as in DDP."""

    def build(self, job: Any) -> None:
        super().build(job)
        self.accounting.weights = lambda: (1.0, float(len(self.accounting.replica)))  # type: ignore[method-assign]


class DoubleMean(HeteroDDPStrategy):
    """Weights that sum to one, which DDP then averages once more."""

    def build(self, job: Any) -> None:
        super().build(job)
        right = self.accounting.weights

        def weights() -> tuple[float, float]:
            own, total = right()
            return own, total * len(self.accounting.replica)

        self.accounting.weights = weights  # type: ignore[method-assign]


class NominalTail(HeteroDDPStrategy):
    """Weighs the last batch of an epoch as a full one."""

    def build(self, job: Any) -> None:
        super().build(job)
        share: BatchAccounting = self.accounting

        def weights() -> tuple[float, float]:
            nominal = share.planner.shares(share.step)
            return float(nominal[job.view.rank]), float(sum(nominal))

        share.weights = weights  # type: ignore[method-assign]


def reduce_a_copy(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a copy of the gradients, and leaves the gradients unchanged."""
    own, copy = bucket.buffer().clone(), bucket.buffer().clone()
    work = torch.distributed.all_reduce(copy, async_op=True)
    return work.get_future().then(lambda _: own)


MUTANTS = {
    "none": {"strategy_class": HeteroDDPStrategy},
    "unweighted mean": {"strategy_class": Unweighted},
    "double 1/W": {"strategy_class": DoubleMean},
    "nominal tail": {"strategy_class": NominalTail},
    "reduce a copy": {"strategy": {"balance": [9.0, 3.0], "ddp_comm_hook": reduce_a_copy}},
}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_weights_are_caught(mutant: str) -> None:
    truth = parameters(oracle(Net, 12))
    results = run(fit, 2, Net, 12, **{"strategy": {"balance": [9.0, 3.0]}, **MUTANTS[mutant]})
    worst = max(error(result["parameters"], truth) for result in results)
    assert worst <= 1e-10 if mutant == "none" else worst > 1e-4


def _gradient(weighted: bool) -> torch.Tensor:
    """The gradient of one batch of 12, of which the ranks take 9 and 3 samples, by plain DDP."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    module = Net()
    model = nn.parallel.DistributedDataParallel(module.net)
    x, y, *_ = dataset()[slice(0, 9) if rank == 0 else slice(9, 12)]
    (nn.functional.mse_loss(model(x), y) * (2 * len(x) / 12 if weighted else 1.0)).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.net.parameters()])


def test_plain_ddp_is_wrong_on_uneven_batches() -> None:
    module = Net()
    x, y, *_ = dataset()[0:12]
    nn.functional.mse_loss(module.net(x), y).backward()
    truth = torch.cat([p.grad.reshape(-1) for p in module.net.parameters()])
    assert error(run(_gradient, 2, False)[0], truth) > 0.2
    assert error(run(_gradient, 2, True)[0], truth) <= 1e-15


# -- time ----------------------------------------------------------------------------------------------------


class Patient(StepTimer):
    """Counts waiting as work: all ranks read the same time at the end of the backward pass."""

    def _turn_to(self, doing: Activity) -> None:
        super()._turn_to(Activity.WORK)


class CountsWaiting(HeteroDDPStrategy):
    def __init__(self) -> None:
        super().__init__()
        self.timer.__class__ = Patient  # all holders of the timer then count like this


class Sleeper(Net):
    """Costs 4 ms a batch and 1 ms a sample; on rank 1, 5 ms a sample."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.004 + (0.005 if self.global_rank == 1 else 0.001) * len(batch[0]))
        return super().training_step(batch, batch_idx)


def _balance(strategy_class: Any) -> dict[str, Any]:
    module, strategy = Sleeper(), strategy_class()
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 3})
    trainer.fit(module, DataLoader(dataset(96), batch_size=6, shuffle=True))
    return {"shares": strategy.accounting.planner.shares(strategy.accounting.step)}


@pytest.mark.clock
def test_waiting_is_no_work() -> None:
    assert run(_balance, 2, HeteroDDPStrategy)[0]["shares"] in ([10, 2], [9, 3], [11, 1])
    mutant = run(_balance, 2, CountsWaiting)[0]["shares"]
    assert mutant[0] <= 7  # the slow rank looks as fast as the others
