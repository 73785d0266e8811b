"""`on_nan='skip'`: samples with a loss or gradient that is not finite are left out of the step."""

import os
import signal
import time
import warnings
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from oracles import oracle, split
from ranks import attempt, run
from tasks import GanLike, Net, TokenNet, error, fit, parameters
from test_not_finite import FIXED, SHARES, BrokenGradient, BrokenLoss, Spy
from torch import nn

# -- leaving out ---------------------------------------------------------------------------------------------

POISON = {5, 17, 40, 41, 60, 77, 78, 79, 99}


class Poisoned(Net):
    """The loss is not finite on a rank that has one of some samples."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss * float("nan") if POISON & set(batch[3].tolist()) else loss


class PoisonedTokens(TokenNet, Poisoned):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = TokenNet.loss(self, batch)
        return loss * float("nan") if POISON & set(batch[3].tolist()) else loss


def without(base: Any) -> Any:
    """Model for one process, without the samples of the ranks whose loss would not be finite."""

    class Without(base):
        def loss(self, batch: Any) -> torch.Tensor:
            parts = torch.arange(len(batch[3])).split(split(len(batch[3]), SHARES))
            good = [rows for rows in parts if not POISON & set(batch[3][rows].tolist())]
            self.trainer.left_out = getattr(self.trainer, "left_out", 0) + len(parts) - len(good)
            rows = torch.cat(good)
            return base.loss(self, [part[rows] for part in batch])

    return Without


def _skipping(make: Any, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(make, 12, strategy={**FIXED, "on_nan": "skip"}, **options)
    return {**result, "messages": [str(w.message) for w in caught if "on_nan" in str(w.message)]}


SKIPS: list[tuple[Any, Any, dict[str, Any]]] = [
    (Poisoned, Net, {}),
    (Poisoned, Net, {"accumulate_grad_batches": 2}),
    (PoisonedTokens, TokenNet, {}),
]


def _skip_all() -> list[dict[str, Any]]:
    return [_skipping(make, **options) for make, _, options in SKIPS]


def test_leaving_out_is_one_process_without_those_samples() -> None:
    truths = [oracle(without(base), 12, **options) for _, base, options in SKIPS]
    everyone = run(_skip_all, 3)
    for results in everyone:
        for result, truth in zip(results, truths, strict=True):
            assert truth.trainer.left_out >= 15
            assert error(result["parameters"], parameters(truth)) <= 1e-10
    for result in everyone[0]:
        assert "its samples do not count (on_nan='skip'; 1 times so far)" in result["messages"][0]
        assert 4 <= len(result["messages"]) <= 6  # the 1st, 2nd, 4th, 8th and 16th time


class Normed(BrokenLoss):
    ranks = (0,)  # the rank whose statistics count

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()
        self.finite: list[bool] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, *_ = batch
        x = x * float("nan") if self.breaks(self.trainer.fit_loop.epoch_loop.batch_idx) else x
        return nn.functional.mse_loss(self.net(self.norm(x)), y)

    def on_train_batch_end(self, *_: Any) -> None:
        self.finite.append(bool(self.norm.running_mean.isfinite().all()))


class KilledBehind(pl.Callback):
    """Rank 2 is killed while the others wait for its gradients."""

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == Normed.at and trainer.global_rank == 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)


#: When a batch that is left out could leave its statistics: where others follow before the step, or it is repeated.
LEFT: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 3},
    "repeated": {"callbacks": [KilledBehind()], "max_epochs": 1},
}


def _statistics(when: str) -> list[bool]:
    module, options = Normed(), {"on_peer_loss": "continue", "timeout": 60.0} if when == "repeated" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(lambda: module, 12, strategy={**FIXED, "on_nan": "skip", **options}, **LEFT[when])
    return module.finite


@pytest.mark.parametrize("when", LEFT)
def test_no_batch_ends_with_the_statistics_of_one_that_is_left_out(when: str) -> None:
    for outcome in attempt(_statistics, 3, when)[: 2 if when == "repeated" else 3]:
        assert outcome.value, outcome.trace
        assert all(outcome.value)


class AllBroken(BrokenLoss):
    ranks = (0, 1, 2)


def _skip_more() -> list[Any]:
    module, results = Normed(), []
    _skipping(lambda: module)
    for make in (AllBroken, BrokenGradient):
        spy = Spy()
        results.append({**_skipping(make, callbacks=[spy], max_epochs=1), "path": spy.weights})
    return [torch.cat([module.norm.running_mean, module.norm.running_var, parameters(module)]), *results]


def test_statistics_hold_no_such_values_and_a_step_without_any_rank_is_left_out() -> None:
    words = "the losses of ranks 0, 1, 2 were not finite", "no optimizer steps"
    for rank, (normed, *results) in enumerate(run(_skip_more, 3)):
        assert normed.isfinite().all()
        for result, expected in zip(results, words, strict=True):
            assert result["parameters"].isfinite().all()
            moved = [not torch.equal(a, b) for a, b in zip(result["path"][:-1], result["path"][1:], strict=True)]
            assert moved == [number != 4 for number in range(1, 9)]
            assert any(expected in text for text in result["messages"]) == (rank == 0)


class Together(BrokenLoss):
    """Each loss depends on the samples of all ranks."""

    at = 2

    def loss(self, batch: Any) -> torch.Tensor:
        own = self.net(batch[0])
        everyone = self.all_gather(own, sync_grads=True).flatten(0, 1)
        return (own @ everyone.T).square().mean()


def _together() -> dict[str, Any]:
    spy = Spy()
    result = _skipping(Together, callbacks=[spy], max_epochs=1)
    return {**result, "path": spy.weights}


def test_a_loss_that_is_left_out_reaches_nobody_through_all_gather() -> None:
    for rank, result in enumerate(run(_together, 3)):
        path = result["path"]
        assert all(not torch.equal(a, b) for a, b in pairwise(path))
        assert result["parameters"].isfinite().all()
        assert len(result["messages"]) == (rank == 0)  # only the loss is not finite


class BothAtOnce(BrokenGradient, GanLike):
    """Both optimizers step after both backward passes."""

    at = 2

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = Net.loss(self, batch), self.critic(batch[0][:, :1]).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        for loss in losses:
            self.manual_backward(self.broken(loss) if self.breaks(batch_idx) else loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def broken(self, loss: torch.Tensor) -> torch.Tensor:
        return loss + sum((0 * p.sum()).sqrt() for p in self.critic.parameters())


class BothLost(BothAtOnce):
    ranks = (0, 1, 2)

    def broken(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan")


def _both() -> list[dict[str, Any]]:
    results = []
    for make in (BothAtOnce, BothLost):
        spy = Spy()
        strategy = {**FIXED, "on_nan": "skip", "find_unused_parameters": True}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(make, 12, strategy=strategy, callbacks=[spy], max_epochs=1)
        results.append(
            {"path": spy.weights, "messages": [str(w.message) for w in caught if "on_nan" in str(w.message)]}
        )
    return results


def test_no_optimizer_steps_on_what_another_has_left_out() -> None:
    words = (
        "the gradient of rank 1 was not finite although",
        "the losses of ranks 0, 1, 2 were not finite: their samples",
    )
    for rank, results in enumerate(run(_both, 3)):
        for result, expected in zip(results, words, strict=True):
            path = result["path"]
            assert path[-1].isfinite().all()
            moved = [not torch.equal(a, b) for a, b in pairwise(path)]
            assert moved == [number != 2 for number in range(1, 9)]
            if rank == 0:
                assert expected in result["messages"][0]
