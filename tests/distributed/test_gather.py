"""``self.all_gather`` where ranks have different numbers of samples: losses over all samples are exact."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from oracles import oracle
from ranks import run
from tasks import Net, dataset, error, parameters, train
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.errors import DataError

BATCH, SAMPLES = 12, 53  # a last batch of 5
SHARES = [3.0, 1.0]


class Contrast(Net):
    """A contrastive loss as in SimCLR: each sample's two views must find each other among those of all samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        self.shapes: list[tuple[int, ...]] = []

    def everybodys(self, views: Tensor) -> tuple[Tensor, int]:
        """The views of all samples, and the position of this rank's first one."""
        gathered = self.all_gather(views, sync_grads=True)
        self.shapes.append(tuple(gathered.shape))
        counts = self.all_gather(torch.tensor(len(views)))
        return gathered.flatten(0, 1), int(counts[: self.global_rank].sum())

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        queries, views = (nn.functional.normalize(self.net(part)) for part in (x, x + 0.1 * torch.sin(9 * x)))
        keys, first = self.everybodys(views)
        return nn.functional.cross_entropy(queries @ keys.T / 0.2, first + torch.arange(len(x)))


class Single(Contrast):
    """One process holds all samples."""

    def everybodys(self, views: Tensor) -> tuple[Tensor, int]:
        return views, 0


def _contrast(balance: Any) -> dict[str, Any]:
    module, data = Contrast(), DataLoader(dataset(SAMPLES), batch_size=2)
    train(module, HeteroDDPStrategy(balance=balance, global_batch_size=BATCH), data, max_epochs=2)
    return {"parameters": parameters(module), "shapes": module.shapes}


def test_a_contrastive_loss_over_uneven_shares_is_that_of_one_process() -> None:
    single = oracle(Single, BATCH, SAMPLES, max_epochs=2)
    for result in run(_contrast, 2, SHARES):
        assert error(result["parameters"], parameters(single)) <= 1e-10
        assert result["shapes"] == 2 * [*[(1, 12, 4)] * 4, (1, 5, 4)]
    assert error(parameters(Single()), parameters(single)) > 1e-2  # the comparison can fail
    for result in run(_contrast, 2, "off"):
        assert error(result["parameters"], parameters(single)) <= 1e-10
        assert result["shapes"] == 2 * [*[(2, 6, 4)] * 4, (1, 5, 4)]  # Lightning's form where shares are even


class Collections(Net):
    """Gathers other collections and tensors, and some that cannot be gathered."""

    def on_train_start(self) -> None:
        rank = self.global_rank
        x = torch.arange(2.0) + 10 * rank
        self.gathered = self.all_gather({"scalar": rank, "equal": x, "flags": x[: 1 + rank] > 0, "half": x.bfloat16()})
        self.gathered["empty"] = self.all_gather(x[: 2 * rank])
        self.gathered["integers"] = self.all_gather(torch.arange(1 + rank))
        self.messages = []
        for wrong in (torch.zeros(2, 1 + rank), torch.zeros([2] * (1 + rank)), torch.zeros(2).to(self.kind(rank))):
            with pytest.raises(DataError) as raised:
                self.all_gather(wrong)
            self.messages.append(str(raised.value))

    @staticmethod
    def kind(rank: int) -> torch.dtype:
        return (torch.float32, torch.float64)[rank]


def _collections() -> tuple[Any, list[str]]:
    module = Collections()
    train(module, HeteroDDPStrategy(), DataLoader(dataset(SAMPLES), batch_size=2), limit_train_batches=1)
    return {name: tensor.tolist() for name, tensor in module.gathered.items()}, module.messages


def test_what_can_be_gathered_and_what_cannot() -> None:
    for gathered, messages in run(_collections, 2):
        assert gathered == {
            "scalar": [0, 1],
            "equal": [[0.0, 1.0], [10.0, 11.0]],
            "half": [[0.0, 1.0], [10.0, 11.0]],
            "flags": [[False, True, True]],
            "empty": [[10.0, 11.0]],
            "integers": [[0, 0, 1]],
        }
        assert "different shapes: [(2, 1), (2, 2)]" in messages[0]
        assert "balance='off'" in messages[0]
        assert "different shapes: [(2,), (2, 2)]" in messages[1]
        assert "different dtypes: ['float32', 'float64']" in messages[2]


class Broken(Contrast):
    """The loss of a rank without samples is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (float("nan") if self.global_rank == 1 else 1.0)


def _broken() -> Tensor:
    module = Broken()
    train(module, HeteroDDPStrategy(balance=[1.0, 0.0]), DataLoader(dataset(24), batch_size=6))
    return parameters(module)


def test_the_loss_of_a_padding_batch_does_not_reach_others() -> None:
    first, second = run(_broken, 2)
    assert first.isfinite().all()
    assert torch.equal(first, second)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowBackward(Contrast):
    def everybodys(self, views: Tensor) -> tuple[Tensor, int]:
        keys, first = super().everybodys(views)
        return Slow.apply(keys, 0.2 * self.global_rank), first


def _slow_backward() -> list[float]:
    module, work = SlowBackward(), []
    strategy = HeteroDDPStrategy(balance="off")
    callback = pl.callbacks.LambdaCallback(
        on_train_start=lambda *_: strategy.accounting.watchers.append(lambda lap: work.append(lap.work))
    )
    train(module, strategy, DataLoader(dataset(40), batch_size=4), callbacks=[callback])
    return work[1:]


@pytest.mark.clock
def test_waiting_for_gradients_of_gathered_samples_is_no_work() -> None:
    fast, slow = run(_slow_backward, 2)
    assert sorted(slow)[len(slow) // 2] >= 0.2
    assert sorted(fast)[len(fast) // 2] < 0.1
