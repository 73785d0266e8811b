"""Batches larger than a device can hold: ranks run their parts in passes, with the weights of one process."""

import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from oracles import oracle
from ranks import attempt, run
from tasks import (
    EvaluatedNet,
    Killed,
    Memory,
    Net,
    TokenNet,
    dataset,
    error,
    fits,
    one_process,
    parameters,
    rank,
    train,
)
from test_shared_stream import Plain
from test_uneven_data import ADDITIVE, PADDED, _resumed
from torch.utils.data import DataLoader
from virtual_time import virtual_time

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy, SharedStream
from lightning_hetero.batching.passes import Passes
from lightning_hetero.batching.shares import Cost, makespan, split, stepwise
from lightning_hetero.errors import NotFiniteError

FOUR = {"balance": [1.0, 4.0], "max_batch_size": 3}  # of 15 samples 3 and 12: one pass, and four


class AdamW(Net):
    def __init__(self) -> None:
        super().__init__("adamw")


#: Options of the strategy, the model, options of both fits, and options of ours.
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], dict[str, Any]]] = {
    "1:4": (FOUR, Net, {}, {}),
    "a rank without samples": ({**FOUR, "balance": [0.0, 1.0]}, Net, {}, {}),
    "measured": ({"max_batch_size": [2, 1], "rebalance_every_n_steps": 1}, Net, {}, {}),
    "accumulated, clipped": (FOUR, Net, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {}),
    "tokens": ({**FOUR, "max_batch_size": [2, 5]}, TokenNet, {}, {}),
    "tokens, accumulated": (FOUR, TokenNet, {"accumulate_grad_batches": 2}, {}),
    "AdamW, clipped, workers": (FOUR, AdamW, {"gradient_clip_val": 0.1}, {"loader": {"num_workers": 1}}),
    "unused": ({**FOUR, "find_unused_parameters": True}, Net, {}, {}),
    "skip": ({**FOUR, "on_nan": "skip"}, Net, {}, {}),
    "dealt by cost": ({**ADDITIVE, "max_batch_size": [3, 2]}, Net, {}, {}),
    "dealt by length": ({**PADDED, "max_batch_size": [3, 2]}, TokenNet, {}, {}),
}


def test_passes_come_to_what_one_process_comes_to() -> None:
    calls = {
        name: {"make": make, "batch_size": 15, "strategy": options, **both, **ours}
        for name, (options, make, both, ours) in CASES.items()
    }
    ranks = run(fits, 2, calls)
    for name, (options, make, both, _) in CASES.items():
        alone = oracle(make, 15, **both)
        truth, most = parameters(alone), options["max_batch_size"]
        assert error(truth, parameters(make())) > 1e-3, name
        for number, results in enumerate(ranks):
            assert error(results[name]["parameters"], truth) <= 1e-10, name
            sizes = [len(part) for part in results[name]["seen"]]
            assert max(sizes) <= (most if isinstance(most, int) else most[number]), name
    one, other = (results["1:4"] for results in ranks)
    assert [len(part) for part in other["seen"][:4]] == [3, 3, 3, 3]
    assert len(one["seen"]) == 21  # batches of three epochs; the other rank has four passes, and three in the tails
    assert len(other["seen"]) == 3 * (6 * 4 + 3)


# -- what is logged, and what hooks see --------------------------------------------------------------------


class Logs(Net):
    """Logs in many ways, and keeps the arguments of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        x, _, length, _ = batch
        self.log("local", loss)
        self.log("tokens", length.double().mean(), batch_size=len(x), sync_dist=True, on_epoch=True)
        self.log("total", length.double().sum(), reduce_fx="sum", sync_dist=True, on_step=True)
        self.log("most", x.max(), reduce_fx="max", sync_dist=True, on_epoch=True)
        return {"loss": loss, "samples": len(x)}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, Passes)
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, Passes)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events = [f"begins with {len(batch) if isinstance(batch, Passes) else 1}"]

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.events.append("before backward")

    def on_after_backward(self) -> None:
        self.events.append("after backward")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.events.append("before zero")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.loss_of_batch = outputs["loss"].item()


def _logged() -> Any:
    module, memory = Logs(), Memory()
    strategy = HeteroDDPStrategy(**FOUR, global_batch_size=14)
    train(module, strategy, DataLoader(dataset(14), 14), logger=memory, log_every_n_steps=1)
    row = {name: value for _, row in memory.rows for name, value in row.items()}
    return row, module.events, module.loss_of_batch, module.seen


def test_what_passes_log_counts_by_samples_and_hooks_run_once() -> None:
    (x, y, length, _), net = dataset(14).tensors, Net()
    losses = ((net.net(x) - y) ** 2).detach().squeeze()
    for number, (row, events, loss, seen) in enumerate(run(_logged, 2)):
        own = losses[[i for part in seen for i in part]]
        assert [len(part) for part in seen] == [[3], [2, 3, 3, 3]][number]
        assert row["train_step"] == pytest.approx(losses.mean().item(), rel=1e-9)
        assert row["train_epoch"] == pytest.approx(losses.mean().item(), rel=1e-9)
        assert row["local"] == pytest.approx(own.mean().item(), rel=1e-9)
        assert row["tokens_step"] == row["tokens_epoch"] == pytest.approx(length.double().mean().item(), rel=1e-9)
        assert row["total"] == length.sum().item()
        assert row["most_step"] == row["most_epoch"] == x.max().item()
        assert loss == pytest.approx(own.mean().item(), rel=1e-9)
        begins = f"begins with {(1, 4)[number]}"
        assert events == [begins, "before zero", "before backward", "after backward"]


# -- other data, other strategies --------------------------------------------------------------------------


class Listed:
    """A batch of a user's class, which cannot be cut."""

    def __init__(self, samples: list[Any]) -> None:
        assert len(samples) <= 3
        self.samples = samples


class OfLists(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(torch.utils.data.default_collate(batch.samples))


class InOrder(Plain):
    def order(self) -> list[int]:
        return list(range(len(self.data)))


class Scaled(MixedPrecision):
    """Scales losses, but computes in float64."""

    def autocast_context_manager(self) -> Any:
        return nullcontext()


def _elsewhere() -> dict[str, Any]:
    def weights(module: Net, strategy: Any, data: Any, **options: Any) -> torch.Tensor:
        train(module, strategy, data, max_epochs=2, **options)
        return parameters(module)

    four = {**FOUR, "global_batch_size": 15}
    stream = DataLoader(SharedStream(InOrder(45)), batch_size=8)
    return {
        "collated": weights(OfLists(), HeteroDDPStrategy(**four), _in_order(collate_fn=Listed)),
        "scaled": weights(
            Net(), HeteroDDPStrategy(**four), _in_order(), plugins=Scaled("16-mixed", "cpu"), gradient_clip_val=0.1
        ),
        "stream": weights(Net(), HeteroDDPStrategy(**four), stream),
        "node": weights(Net(), NodeAverageStrategy(**four, every_n_steps=1, ranks_per_node=1), _in_order()),
        "own batches": weights(Net(), HeteroDDPStrategy(**FOUR), DataLoader(dataset(45), batch_sampler=_eights())),
    }


def _in_order(**options: Any) -> DataLoader:
    return DataLoader(dataset(45), 8, sampler=range(45), **options)


def _eights() -> list[list[int]]:
    return [list(range(first, min(first + 8, 45))) for first in range(0, 45, 8)]


def test_passes_of_any_data_and_of_replicas() -> None:
    fifteens = [list(range(first, first + 15)) for first in (0, 15, 30)]
    truth, clipped = one_process(45, fifteens), one_process(45, fifteens, gradient_clip_val=0.1)
    pairs = [[*first, *second] for first, second in zip(_eights()[::2], _eights()[1::2], strict=True)]
    for found in run(_elsewhere, 2):
        assert error(found["stream"], truth) <= 1e-10
        assert error(found["node"], truth) <= 1e-10
        assert error(found["scaled"], clipped) <= 1e-10
        assert error(found["own batches"], one_process(45, pairs)) <= 1e-10
        assert error(found["collated"], truth) <= 1e-10


# -- what the planner says of a step -----------------------------------------------------------------------

FIXED, PER_SAMPLE, LIMITS, BATCH = (0.020, 0.010), (0.001, 0.004), (8, 4), 48  # a batch of four times the limits


class Emulated(Net):
    """Takes the time that its rank's device would need, in each pass."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(FIXED[self.global_rank] + PER_SAMPLE[self.global_rank] * len(batch[0]))
        return super().training_step(batch, batch_idx)


def _timed() -> Any:
    module, timings = Emulated(), list[Any]()
    options: dict[str, Any] = {"max_batch_size": list(LIMITS), "rebalance_every_n_steps": 2}

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            strategy.accounting.watchers.append(timings.append)

    with virtual_time(sys.modules[__name__]):
        strategy = HeteroDDPStrategy(global_batch_size=BATCH, **options)
        train(module, strategy, DataLoader(dataset(BATCH * 40), batch_size=24), callbacks=[Watch()])
    accounting = strategy.accounting
    shares = accounting.planner.shares(accounting.step)
    costs = [report.cost for report in accounting.reports]
    assert max(len(part) for part in module.seen) <= LIMITS[rank()]
    return shares, makespan(shares, stepwise(BATCH, costs, LIMITS)), timings[-1].work


def test_a_step_takes_as_long_as_predicted_and_shares_are_the_best() -> None:
    """Clocks are virtual: only the emulated devices take time."""
    (shares, predicted, one), (again, _, other) = run(_timed, 2)
    truth = stepwise(BATCH, [Cost(a, k) for a, k in zip(FIXED, PER_SAMPLE, strict=True)], LIMITS)
    assert shares == again
    assert makespan(shares, truth) == pytest.approx(max(one, other))
    assert predicted == pytest.approx(max(one, other), rel=0.05)
    assert makespan(shares, truth) <= 1.05 * makespan(split(BATCH, truth), truth)


# -- what is not finite ------------------------------------------------------------------------------------


class Broken(Net):
    """The loss of rank 1 is not finite in the third of four passes of the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and len(self.seen) == 7 else loss


def _broken(mode: str) -> Any:
    module, data = Broken(), DataLoader(dataset(45), 15, sampler=range(45))
    train(module, HeteroDDPStrategy(**FOUR, global_batch_size=15, on_nan=mode), data)
    return parameters(module)


def test_a_pass_that_is_not_finite() -> None:
    for outcome in attempt(_broken, 2, "error"):
        assert isinstance(outcome.error, NotFiniteError)
        assert "the loss of rank 1 was not finite" in str(outcome.error)
    whole = one_process(45, [list(range(15)), list(range(30, 45))], epochs=1)
    for found in run(_skipped, 2):
        assert error(found, whole) <= 1e-10  # the whole step is left out


def _skipped() -> torch.Tensor:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _broken("skip")
    words = [str(one.message) for one in caught if "on_nan='skip'" in str(one.message)]
    assert len(words) == (rank() == 0)
    assert all("the loss of rank 1 was not finite: no optimizer steps" in text for text in words)
    return found


# -- BatchNorm, memory, a lost rank ------------------------------------------------------------------------


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16).double())


class Small(Net):
    """Simulates devices that hold so many samples."""

    most = (5, 2)

    def loss(self, batch: Any) -> torch.Tensor:
        if len(batch[0]) > self.most[self.global_rank]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return super().loss(batch)


def _devices() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Normed(), HeteroDDPStrategy(**FOUR, global_batch_size=16), DataLoader(dataset(64), 8))
    messages = [str(one.message) for one in caught if "BatchNorm" in str(one.message)]
    module, data = Small(), DataLoader(dataset(45), 15, sampler=range(45), num_workers=1)
    strategy = HeteroDDPStrategy(global_batch_size=15, max_batch_size="auto", max_batch_memory="1TB", balance="off")
    train(module, strategy, data, max_epochs=2)
    return messages, parameters(module), [len(part) for part in module.seen], strategy.accounting.planner.high


def test_batch_norm_is_told_of_and_measured_limits_are_those_of_a_pass() -> None:
    truth = one_process(45, [list(range(first, first + 15)) for first in (0, 15, 30)])
    for number, (messages, found, sizes, high) in enumerate(run(_devices, 2)):
        assert len(messages) == 1
        assert "normalises by the samples of a pass" in messages[0]
        assert error(found, truth) <= 1e-10
        assert high == (4, 1)
        assert sizes == [[4, 4] * 6, [1] * 7 * 6][number]


def _survivors() -> Any:
    strategy = HeteroDDPStrategy(global_batch_size=15, max_batch_size=6, balance="off", on_peer_loss="continue")
    module = Net()
    train(module, strategy, DataLoader(dataset(150), 5, shuffle=True), callbacks=[Killed(2, 4)])
    return [len(part) for part in module.seen], parameters(module)


def test_ranks_that_remain_go_on_in_passes() -> None:
    one, other, _ = attempt(_survivors, 3)
    (sizes, weights), (_, same) = one.value, other.value
    assert sizes[:4] == [5, 5, 5, 5]
    assert sizes[-4:] == [4, 4, 4, 4]
    assert torch.equal(weights, same)


# -- evaluation, resuming ----------------------------------------------------------------------------------


class Evaluated(EvaluatedNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert len(batch[0]) <= 3
        super().validation_step(batch, batch_idx)


def _evaluated() -> list[int]:
    module = Evaluated()
    train(
        module, HeteroDDPStrategy(**FOUR, global_batch_size=15), DataLoader(dataset(15), 15), DataLoader(dataset(50), 8)
    )
    return module.evaluated


def test_an_evaluation_stays_within_the_limits() -> None:
    seen = [i for part in run(_evaluated, 2) for i in part]
    assert sorted(seen) == sorted([*range(50), *range(12)])  # two batches of 6 are tried before training


def test_a_run_in_passes_resumes_in_mid_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"balance": [3.0, 1.0], "max_batch_size": 3}
    for whole, resumed, _ in run(_resumed, 2, str(tmp_path / "saved.ckpt"), options):
        assert error(resumed, whole) <= 1e-10
