"""A fit goes on when a rank is lost; its weights are those of the remaining ranks' samples."""

import os
import signal
import time
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import attempt, run
from tasks import FAST, GanLike, Killed, dataset, error, one_process, parameters
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.batching.loss import LossTracker

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


def cost(index: int) -> int:
    return 1 + 7 * index % 29


def _fit(rank: int, step: int, workers: int, options: dict[str, Any]) -> tuple[torch.Tensor, dict[int, list[int]], Any]:
    module = Module()
    strategy = HeteroDDPStrategy(on_peer_loss="continue", balance=[3.0, 2.0, 1.0], timeout=60, **options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(rank, step)], **{**FAST, "max_epochs": 2})
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True, num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    loss = [str(warning.message) for warning in caught if "Training goes on" in str(warning.message)]
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return weights, module.taken, (trainer.global_rank, trainer.world_size, strategy.recovery.losses, loss)


@pytest.mark.parametrize(("rank", "workers", "options"), [(2, 2, {}), (2, 0, {"sample_cost": cost})])
def test_hetero_ddp_goes_on_with_the_samples_of_those_who_remain(
    rank: int, workers: int, options: dict[str, Any]
) -> None:
    outcomes = attempt(_fit, 3, rank, 5, workers, options)
    assert outcomes[rank].exitcode == -signal.SIGKILL
    rest = [outcome.value for number, outcome in enumerate(outcomes) if number != rank]
    assert all(rest), "\n".join(outcome.trace for outcome in outcomes)
    assert torch.equal(rest[0][0], rest[1][0])
    seen = [{i for taken in (rest[0][1], rest[1][1]) for i in taken[step]} for step in range(16)]
    # Before the loss the samples of the third rank are not among those of the others; after it no sample is left out.
    parts = [3, 2, 1]
    del parts[rank]
    counts = [len(samples) for samples in seen[:5]]
    assert counts == [2 * sum(parts)] * 5 if not options else max(counts) < 12
    assert [len(samples) for samples in seen[9:]] == [12] * 7
    assert sorted(i for samples in seen[8:] for i in samples) >= sorted(range(SAMPLES))
    for number, (_, _, (now, world, losses, messages)) in enumerate(rest):
        assert (now, world) == (number, 2)
        assert [loss.lost for loss in losses] == [{rank: DIED}]
        assert len(messages) == 1
        assert f"rank {rank} {DIED}. Training goes on with 2 rank(s) after step 5" in messages[0]
        assert losses[0].samples > 0
        assert f"{losses[0].samples} samples that they had still to take" in messages[0]
    # The weights are those of one process with the same steps; the first five include the lost rank's samples.
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


def _fit_tail() -> torch.Tensor:
    module = Module()
    strategy = HeteroDDPStrategy(on_peer_loss="continue", balance=[1.0, 1.0, 3.0], global_batch_size=5, timeout=60)
    trainer = pl.Trainer(strategy=strategy, callbacks=[KilledBehind()], **{**FAST, "max_epochs": 1})
    data = torch.utils.data.Subset(Numbered(), range(11))  # the last batch has one sample, which rank 2 gets
    trainer.fit(module, DataLoader(data, batch_size=5))
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class KilledBehind(pl.Callback):
    """Rank 2 is killed in the last batch, when the others have run their training steps."""

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_step_of_which_a_lost_rank_has_all_samples_is_left_out() -> None:
    first, second, _ = attempt(_fit_tail, 3)
    assert None not in (first.value, second.value), first.trace + second.trace
    data, module = Numbered(), Module()
    optimizer = module.configure_optimizers()
    sampler = torch.utils.data.DistributedSampler(range(11), num_replicas=1, rank=0, shuffle=True, seed=0)
    order = list(sampler)
    for chosen in (order[:5], order[5:10]):
        optimizer.zero_grad()
        nn.functional.mse_loss(module.net(data.x[chosen].double()), data.y[chosen].double()).backward()
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    for outcome in (first, second):
        assert (outcome.value - expected).abs().max() < 1e-10


class Windows(Module):
    """Takes an optimizer step every three batches, by Lightning or by hand; rank 2 is killed within a window.

    With ``two`` optimizers both step in each batch, one after the other, and rank 2 is killed between them.
    """

    def __init__(self, manual: bool, two: bool = False, killed: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.two, self.killed = not manual, two, killed
        self.batches: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        x, y, index = batch
        mine = self.killed and self.global_rank == 2 and batch_idx == 4
        self.batches = [*self.batches[:batch_idx], index.tolist()]
        if mine and not self.two:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(self.net(x.double()), y.double())
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers() if self.two else [self.optimizers()]
        for number, optimizer in enumerate(optimizers):
            if mine and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.manual_backward(nn.functional.mse_loss(self.net(x.double()), y.double()))
            if self.two or batch_idx % 3 == 2:
                optimizer.step()
                self.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[2]] if self.two else [self.net]
        return [torch.optim.SGD(layer.parameters(), lr=LR, momentum=0.9) for layer in layers]


class Dying(Windows):
    """Rank 2 is killed in the third batch, after which ranks wait for each other's reports."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if self.global_rank == 2 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _fit_accumulating() -> tuple[torch.Tensor, list[list[int]], Any]:
    module = Dying(manual=False, killed=False)
    strategy = HeteroDDPStrategy(on_peer_loss="continue", timeout=60)
    trainer = pl.Trainer(
        strategy=strategy, accumulate_grad_batches=4, limit_train_batches=8, **{**FAST, "max_epochs": 1}
    )
    trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return weights, module.batches, strategy.recovery.losses


def test_a_rank_is_lost_where_others_wait_for_its_report_within_a_window() -> None:
    first, second, _ = attempt(_fit_accumulating, 3)
    assert None not in (first.value, second.value), first.trace + second.trace
    assert torch.equal(first.value[0], second.value[0])
    parts = [first.value[1], second.value[1]]
    data, module = Numbered(), Module()
    optimizer = module.configure_optimizers()
    seen = list[int]()
    for window in (range(4), range(4, 8)):
        optimizer.zero_grad()
        for batch in window:
            chosen = [i for part in parts for i in part[batch]]
            seen += chosen
            (nn.functional.mse_loss(module.net(data.x[chosen].double()), data.y[chosen].double()) / 4).backward()
        optimizer.step()
    # Of the first window, what the lost rank had added up is lost, too.
    assert [loss.samples for loss in first.value[2]] == [SAMPLES - len(seen)]
    assert (first.value[0] - torch.cat([p.detach().reshape(-1) for p in module.parameters()])).abs().max() < 1e-10


def _fit_windows(manual: bool, two: bool) -> tuple[torch.Tensor, list[list[int]], list[str]]:
    module = Windows(manual, two)
    strategy = HeteroDDPStrategy(on_peer_loss="continue", balance=[3.0, 2.0, 1.0], timeout=60)
    trainer = pl.Trainer(
        strategy=strategy,
        accumulate_grad_batches=1 if manual else 3,
        limit_train_batches=6,
        **{**FAST, "max_epochs": 1},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    return (
        torch.cat([p.detach().reshape(-1) for p in module.parameters()]),
        module.batches,
        [str(one.message) for one in caught],
    )


#: For each batch of the broken step: its number, and the number of ranks whose samples count; the loss is their mean.
TAKEN = {
    "automatic": [(3, 2), (4, 2), (5, 2)],  # rank 2's part of batch 3 is lost
    "by hand": [(3, 3), (4, 2), (5, 2)],
}


@pytest.mark.parametrize("how", TAKEN)
def test_gradients_of_earlier_batches_of_the_window_count_once(how: str) -> None:
    first, second, _ = attempt(_fit_windows, 3, how == "by hand", False)
    assert None not in (first.value, second.value), first.trace + second.trace
    assert torch.equal(first.value[0], second.value[0])
    parts = [first.value[1], second.value[1]]
    data, module, divided = Numbered(), Module(), 1 if how == "by hand" else 3
    optimizer = module.configure_optimizers()
    for window in ([(0, 3), (1, 3), (2, 3)], TAKEN[how]):
        optimizer.zero_grad()
        for batch, ranks in window:
            chosen = [i for part in parts for i in part[batch]] if ranks == 2 else _order_of_first_epoch()[batch]
            x, y = data.x[chosen].double(), data.y[chosen].double()
            (nn.functional.mse_loss(module.net(x), y) / divided).backward()
        optimizer.step()
    assert (first.value[0] - torch.cat([p.detach().reshape(-1) for p in module.parameters()])).abs().max() < 1e-10


def test_a_loss_between_two_optimizers_lets_neither_step_twice() -> None:
    first, second, _ = attempt(_fit_windows, 3, True, True)
    assert None not in (first.value, second.value), first.trace + second.trace
    assert torch.equal(first.value[0], second.value[0])
    assert [text for text in first.value[2] if "an optimizer had stepped in it already" in text]
    data, module = Numbered(), Windows(True, two=True)
    optimizers = module.configure_optimizers()
    for batch in range(6):
        parts = [i for part in (first.value[1], second.value[1]) for i in part[batch]]
        for number, optimizer in enumerate(optimizers):
            if (batch, number) == (4, 1):
                continue  # left out
            chosen = parts if batch > 4 else _order_of_first_epoch()[batch]
            module.zero_grad()
            nn.functional.mse_loss(module.net(data.x[chosen].double()), data.y[chosen].double()).backward()
            optimizer.step()
    assert (first.value[0] - torch.cat([p.detach().reshape(-1) for p in module.parameters()])).abs().max() < 1e-10


class Toggled(GanLike):
    """Keeps the samples of each batch, also where a step is repeated."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.seen = [*self.seen[:batch_idx], batch[3].tolist()]


def _fit_toggled() -> tuple[torch.Tensor, list[list[int]]]:
    module, options = Toggled(), {"on_peer_loss": "continue", "timeout": 60, "find_unused_parameters": True}
    callbacks, limits = [KilledBehind()], {"limit_train_batches": 6, "max_epochs": 1}
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(**options, balance="off"), callbacks=callbacks, **FAST, **limits)
    trainer.fit(module, DataLoader(dataset(96), batch_size=BATCH))
    return parameters(module), module.seen


def test_a_rank_is_lost_while_an_optimizer_is_toggled() -> None:
    first, second, _ = attempt(_fit_toggled, 3)
    assert None not in (first.value, second.value), first.trace + second.trace
    order = list(torch.utils.data.DistributedSampler(range(96), num_replicas=1, rank=0, shuffle=True))
    batches = [order[:12]]  # two steps
    batches += [a + b for a, b in zip(first.value[1][1:], second.value[1][1:], strict=True)]
    truth = one_process(96, batches, epochs=1, make=GanLike)
    assert all(error(outcome.value[0], truth) <= 1e-10 for outcome in (first, second))


class Held(pl.Callback):
    """Rank 2, a replica by itself, is killed while rank 0 waits for the gradients of rank 1, of the same replica."""

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == 3 and trainer.world_size == 3:
            if trainer.global_rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            while trainer.global_rank == 1 and not trainer.strategy.recovery.changing:
                time.sleep(0.01)


def _fit_counting_losses() -> dict[int, int]:
    counts, take = Counter[int](), LossTracker.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            LossTracker, "take", lambda self, loss, n, step: (counts.update([step]), take(self, loss, n, step))
        )
        strategy = NodeAverageStrategy(on_peer_loss="continue", every_n_steps=3, timeout=60)
        trainer = pl.Trainer(strategy=strategy, callbacks=[Held()], max_steps=6, **FAST)
        trainer.fit(Module(), DataLoader(Numbered(), batch_size=BATCH))
    return dict(counts)


def test_the_loss_of_a_repeated_step_counts_once() -> None:
    *rest, lost = attempt(_fit_counting_losses, 3, nodes=[2, 1])
    assert lost.exitcode == -signal.SIGKILL
    assert [outcome.value for outcome in rest] == [dict.fromkeys(range(6), 1)] * 2, rest[0].trace


class Logging(Module):
    """Rank 1 is killed in the third step, before what it logs there, or in the backward pass."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.calls = when, 0

    def _die(self, when: str) -> None:
        if self.global_rank == 1 and self.calls == 3 and when == self.when:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        own = torch.tensor(float(self.trainer.global_step))
        self.log("early", own, on_step=False, on_epoch=True, sync_dist=True)
        self._die("logged")
        self.log("synced", own, on_step=True, on_epoch=True, sync_dist=True)
        if self.trainer.global_step >= 2:
            self.log("late", own, on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self._die("backward")


def _fit_logging(when: str) -> tuple[dict[str, float], dict[int, list[int]]]:
    strategy = HeteroDDPStrategy(on_peer_loss="continue", balance="off", timeout=60)
    trainer, module = pl.Trainer(strategy=strategy, max_epochs=1, **FAST), Logging(when)
    trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH))
    names = "early", "synced_epoch", "late"
    return {name: trainer.callback_metrics[name].item() for name in names}, module.taken


@pytest.mark.parametrize("when", ["logged", "backward"])
def test_what_a_repeated_step_logs_counts_once_in_the_mean_of_an_epoch(when: str) -> None:
    left, lost = attempt(_fit_logging, 2, when)
    assert lost.exitcode == -signal.SIGKILL
    assert left.error is None, left.trace
    found, taken = left.value
    sizes = {step: len(samples) for step, samples in taken.items()}  # what a lost rank has logged is lost

    def mean(first: int) -> float:
        return sum(step * n for step, n in sizes.items() if step >= first) / sum(
            n for step, n in sizes.items() if step >= first
        )

    assert len(set(sizes.values())) > 1
    assert found == pytest.approx({"early": mean(0), "synced_epoch": mean(0), "late": mean(2)}, rel=1e-6)


class Validated(Module):
    """Keeps the samples of the latest validation."""

    def on_validation_epoch_start(self) -> None:
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch[2].tolist()


def _fit_validated(lost: int, whole: bool) -> list[int]:
    module, options = Validated(), {"on_peer_loss": "continue", "balance": "off", "timeout": 60}
    strategy = HeteroDDPStrategy(whole_batches=whole, **options)
    fast = {**FAST, "max_epochs": 2, "limit_val_batches": 1.0}
    trainer = pl.Trainer(strategy=strategy, callbacks=[Killed(lost, 5)], **fast)
    parts = [list(range(i, min(i + BATCH, SAMPLES))) for i in range(0, SAMPLES, BATCH)]
    trainer.fit(module, *(DataLoader(Numbered(), batch_sampler=parts) for _ in range(2)))
    return module.validated


@pytest.mark.parametrize(("lost", "whole"), [(0, False), (2, True)])
def test_after_a_loss_batches_of_a_sampler_of_the_users_are_validated_once(lost: int, whole: bool) -> None:
    outcomes = attempt(_fit_validated, 3, lost, whole)
    rest = [outcome for rank, outcome in enumerate(outcomes) if rank != lost]
    assert all(outcome.value for outcome in rest), "\n".join(outcome.trace for outcome in rest)
    assert sorted(i for outcome in rest for i in outcome.value) == list(range(SAMPLES))


def _fit_anew(module: Module) -> torch.Tensor:
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance="off", timeout=30), **{**FAST, "max_epochs": 1})
    trainer.fit(module, DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def _another_trainer_after_a_loss(lost: int) -> tuple[torch.Tensor, int, int]:
    _fit(lost, 5, 0, {})
    module = Module()
    weights = _fit_anew(module)
    return weights, module.trainer.global_rank, module.trainer.world_size


def _undisturbed() -> torch.Tensor:
    return _fit_anew(Module())


@pytest.mark.parametrize("lost", [0, 2])
def test_another_trainer_of_the_process_goes_on_with_those_who_remain(lost: int) -> None:
    outcomes = attempt(_another_trainer_after_a_loss, 3, lost)
    rest = [outcome.value for number, outcome in enumerate(outcomes) if number != lost]
    assert all(rest), "\n".join(outcome.trace for outcome in outcomes)
    assert [value[1:] for value in rest] == [(0, 2), (1, 2)]
    expected = run(_undisturbed, 2)
    assert all(torch.equal(value[0], expected[0]) for value in rest)
