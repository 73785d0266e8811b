"""A fit goes on when a rank is lost: the weights are those that the samples of the ranks that remain give."""

import signal
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt
from tasks import FAST, Killed
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import HeteroDDPStrategy

SAMPLES, BATCH, LR = 96, 4, 0.1
DIED = (
    "has ended without an error message: killed, out of memory, its program is over, or gloo has aborted it at a "
    "collective of your own with unequal sizes or types on the ranks"
)


class Numbered(Dataset):
    """Samples that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 2, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.taken: dict[int, list[int]] = {}  # samples of each step, as it was taken

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, index = batch
        self.taken[self.trainer.global_step] = index.tolist()
        return nn.functional.mse_loss(self.net(x.double()), y.double())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)


def _fit(rank: int, step: int, workers: int) -> tuple[torch.Tensor, dict[int, list[int]], Any]:
    module = Module()
    strategy = HeteroDDPStrategy(on_peer_loss="continue", balance=[3.0, 2.0, 1.0], timeout=60)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(rank, step)], **{**FAST, "max_epochs": 2})
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True, num_workers=workers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    loss = [str(warning.message) for warning in told if "Training goes on" in str(warning.message)]
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return weights, module.taken, (trainer.global_rank, trainer.world_size, strategy.recovery.losses, loss)


@pytest.mark.parametrize(("rank", "workers"), [(2, 2)])
def test_hetero_ddp_goes_on_with_the_samples_of_those_who_remain(rank: int, workers: int) -> None:
    outcomes = attempt(_fit, 3, rank, 5, workers)
    assert outcomes[rank].exitcode == -signal.SIGKILL
    rest = [outcome.value for number, outcome in enumerate(outcomes) if number != rank]
    assert all(rest), "\n".join(outcome.trace for outcome in outcomes)
    assert torch.equal(rest[0][0], rest[1][0])
    seen = [{i for taken in (rest[0][1], rest[1][1]) for i in taken[step]} for step in range(16)]
    # Before the loss the third rank had samples, which are not among those of the others; then none is left out.
    parts = [3, 2, 1]
    del parts[rank]
    assert [len(samples) for samples in seen[:5]] == [2 * sum(parts)] * 5
    assert [len(samples) for samples in seen[9:]] == [12] * 7
    assert sorted(i for samples in seen[8:] for i in samples) >= sorted(range(SAMPLES))
    for number, (_, _, (now, world, losses, told)) in enumerate(rest):
        assert (now, world) == (number, 2)
        assert [loss.lost for loss in losses] == [{rank: DIED}]
        assert len(told) == 1
        assert f"rank {rank} {DIED}. Training goes on with 2 rank(s) after step 5" in told[0]
        assert losses[0].samples > 0
        assert f"{losses[0].samples} samples that they had still to take" in told[0]
    # One process that takes the same steps, the lost rank's part of the first five included.
    expected = _one_process(seen, rank)
    assert (rest[0][0] - expected).abs().max() < 1e-10


def _one_process(seen: list[set[int]], rank: int) -> torch.Tensor:
    data, module = Numbered(), Module()
    optimizer = module.configure_optimizers()
    order = _order_of_first_epoch()
    for step, samples in enumerate(seen):
        batch = set(order[step]) if step < 5 else samples
        assert samples <= batch
        chosen = torch.tensor(sorted(batch))
        loss = nn.functional.mse_loss(module.net(data.x[chosen].double()), data.y[chosen].double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def _order_of_first_epoch() -> list[list[int]]:
    """The global batches of the first epoch, as PyTorch's own DistributedSampler shuffles them."""
    sampler = torch.utils.data.DistributedSampler(Numbered(), num_replicas=1, rank=0, shuffle=True, seed=0)
    return [order[i : i + 12] for order in [list(sampler)] for i in range(0, SAMPLES, 12)]
