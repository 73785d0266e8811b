"""A loss that is normalised over the samples of all ranks: `batch_weight` of 1 leaves it as it is."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from oracles import oracle
from ranks import run
from tasks import Net, error, fit, parameters
from torchmetrics import MeanMetric


class ByHand(Net):
    """A sum over own samples, divided by the samples of all, times the number of ranks, over which ddp averages."""

    def loss(self, batch: Any) -> torch.Tensor:
        errors = (self.net(batch[0]) - batch[1]).pow(2).flatten()
        if not dist.is_initialized():
            return errors.mean()
        size = torch.tensor(float(len(errors)))
        dist.all_reduce(size)
        return errors.sum() / size * self.trainer.world_size


class ByMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric(dist_sync_on_step=True).set_dtype(torch.float64)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.mean((self.net(batch[0]) - batch[1]).pow(2).flatten()) * self.trainer.world_size


class OneByHand(ByHand):
    def batch_weight(self, batch: Any) -> int:
        return 1


class OneByMetric(ByMetric):
    def batch_weight(self, batch: Any) -> int:
        return 1


class LoggedOnly(ByMetric):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = Net.loss(self, batch)
        self.mean(loss.detach())
        return loss


def _result(make: Any, accumulate: int, balance: Any) -> tuple[torch.Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(make, 12, 98, strategy={"balance": balance}, accumulate_grad_batches=accumulate)
    return result["parameters"], [str(w.message) for w in caught if "normalised over" in str(w.message)]


def _all() -> list[Any]:
    uneven = [3.0, 1.0]
    cases: list[tuple[Any, int, Any]] = [(OneByHand, 1, uneven), (OneByHand, 3, uneven), (OneByMetric, 1, uneven)]
    cases += [(ByHand, 1, uneven), (ByMetric, 1, uneven), (LoggedOnly, 1, uneven), (ByMetric, 1, "off")]
    return [_result(*case) for case in cases]


def test_a_batch_weight_of_one_leaves_it_as_it_is() -> None:
    # 98 samples in batches of 12: of the last 2 samples each rank has one.
    truth, accumulated = parameters(oracle(Net, 12, 98)), parameters(oracle(Net, 12, 98, accumulate_grad_batches=3))
    for rank, results in enumerate(run(_all, 2)):
        values, messages = zip(*results, strict=True)
        assert error(values[0], truth) <= 1e-6
        assert error(values[1], accumulated) <= 1e-6
        assert error(values[2], truth) <= 1e-6
        assert min(error(value, truth) for value in values[3:5]) > 1e-3  # weighted twice
        assert error(values[5], truth) <= 1e-6
        once = int(rank == 0)
        assert [len(texts) for texts in messages] == [0, 0, 0, once, once, 0, 0]
        for texts, cause in zip(messages[3:5], ("torch.distributed.all_reduce", "the metric `mean`"), strict=True):
            assert all(cause in text and "`batch_weight(self, batch)`" in text for text in texts)
