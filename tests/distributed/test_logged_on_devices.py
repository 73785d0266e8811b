"""Logging with ``sync_dist=True``: one message per step, also where NCCL, a fake one here, connects all ranks."""

import math
import os
import warnings
from collections import Counter
from itertools import pairwise
from typing import Any

import fake_nccl
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.comm.collectives import Collectives
from lightning_hetero.errors import DisagreementError


class Logs(Net):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.found = kind, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        rank = int(os.environ["RANK"])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("given", loss * 2, sync_dist=True, batch_size=0 if self.kind == "none" else 1 + rank)
        self.log("most", loss, sync_dist=True, reduce_fx="max")
        self.log("whole", float(rank), sync_dist=True)
        if self.kind == "other" and batch_idx == 2:
            self.log(f"of rank {rank}", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})


def fit(kind: str = "", cards: bool = True) -> tuple[list[dict[str, float]], Counter[str], list[str]]:
    """The logged values, the messages with some of them by the way they take, and the warnings."""
    warnings.filterwarnings("ignore", "Ranks .* share ")
    if cards:
        fake_nccl.install()
    sent = Counter[str]()

    def counted(name: str) -> None:
        usual = getattr(Collectives, name)

        def call(*args: Any) -> Any:
            sent[name] += 1
            return usual(*args)

        setattr(Collectives, name, call)

    counted("_reduce_on_hosts")
    counted("_reduce_on_devices")
    strategy = HeteroDDPStrategy(balance=[3.0, 1.0], timeout=60, within="gloo")
    module = Logs(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(strategy=strategy, max_epochs=1, **FAST).fit(module, DataLoader(dataset(48), batch_size=4))
    dist.barrier()
    return module.found, sent, [str(one.message) for one in caught]


def test_values_are_those_of_gloo() -> None:
    hosts, cards = run(fit, 2, cards=False), run(fit, 2)
    for (own, by_host, _), (theirs, by_card, warned) in zip(hosts, cards, strict=True):
        assert by_host == {"_reduce_on_hosts": 6}
        assert by_card == {"_reduce_on_devices": 6}
        assert not any("training_step calls" in text for text in warned)
        assert len(own) == len(theirs) == 6
        for one, other in zip(own, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-12)
            assert all(map(math.isfinite, other.values()))


def test_a_mean_of_nothing_is_explained() -> None:
    (found, _, warned), (others, *_) = run(fit, 2, "none")
    assert math.isnan(found[-1]["given"])
    assert math.isnan(others[-1]["given"])
    assert sum("its batch_size was 0 throughout" in text for text in warned) == 1


def test_ranks_that_log_different_values_learn_of_it_a_step_later() -> None:
    for outcome in attempt(fit, 2, "other"):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        for rank in range(2):
            assert f"what training_step logs as 'given', 'loss', 'most' (max), 'of rank {rank}'" in str(outcome.error)


MANY = 70  # more than a message holds


class LogsMuch(Net):
    """Logs values of all kinds, and keeps what it has logged itself."""

    def __init__(self, manual: bool, many: int = MANY) -> None:
        super().__init__()
        self.automatic_optimization, self.many = not manual, many
        self.own, self.early, self.read = list[Any](), list[float](), list[Any]()
        self.calls, self.counted = Counter[str](), list[Counter[str]]()  # of collectives; after each batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rank, x, size = self.global_rank, batch[0], len(batch[0])
        loss = self.loss(batch)
        values = {f"value {number}": x[:, number % 8].mean() * (1 + number) for number in range(self.many)}
        self.log_dict(values, on_step=True, on_epoch=True, sync_dist=True)
        with torch.inference_mode():
            narrow = x.mean().float()
            self.log("narrow", narrow, sync_dist=True)
        self.log("given", x.mean(), sync_dist=True, batch_size=2 + 3 * rank)
        self.log("of one", x.mean() if rank == 0 else x.mean() * math.nan, sync_dist=True, batch_size=1 - rank)
        self.log("integer", 10 * rank + batch_idx, sync_dist=True)
        for name in ("sum", "max", "min"):
            self.log(name, x.mean(), sync_dist=True, reduce_fx=name)
        if self.many == MANY:
            self.early.append(self.trainer.callback_metrics["narrow"].item())
            self.log("late", x.mean(), sync_dist=True)
        self.own.append((size, {name: value.item() for name, value in values.items()}, x.mean().item()))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.read.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})
        self.counted.append(Counter(self.calls))


def log_much(manual: bool, cards: bool, many: int = MANY, share: list[float] | str = "off") -> Any:
    warnings.filterwarnings("ignore", "Ranks .* share ")
    if cards:
        fake_nccl.install()
    module = LogsMuch(manual, many)
    trainer = pl.Trainer(
        strategy=HeteroDDPStrategy(balance=share, timeout=60, within="gloo"), max_epochs=1, **{**FAST, "devices": 1}
    )

    def count(name: str, usual: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            module.calls[name] += 1
            return usual(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "gather", "broadcast"):
            patch.setattr(dist, name, count(name, getattr(dist, name)))
        trainer.fit(module, DataLoader(dataset(50), batch_size=4))
    dist.barrier()
    return module.own, module.read, module.early, module.counted


@pytest.mark.parametrize("cards", [False, True])
@pytest.mark.parametrize("manual", [False, True])
def test_all_values_of_a_step_are_those_over_all_samples(manual: bool, cards: bool) -> None:
    ranks = run(log_much, 2, manual, cards, share=[3.0, 1.0])
    steps = len(ranks[0][0])
    assert steps == 7
    assert ranks[0][1] == ranks[1][1]
    for step in range(steps):
        (n, values, x), (m, others, y) = (own[step] for own, *_ in ranks)
        found = ranks[0][1][step]

        def mean(one: float, other: float, n: float = n, m: float = m) -> float:
            return (n * one + (m * other if m else 0.0)) / (n + m)

        for name, value in values.items():
            truth = mean(value, others[name])
            assert found[name] == found[f"{name}_step"] == pytest.approx(truth, rel=1e-12)
        assert found["narrow"] == pytest.approx(mean(x, y), rel=1e-6)
        assert found["given"] == pytest.approx(mean(x, y, 2, 5), rel=1e-12)
        assert found["of one"] == pytest.approx(x, rel=1e-12)
        assert found["integer"] == pytest.approx(mean(step, 10 + step), rel=1e-6)
        assert found["sum"] == pytest.approx(x + y, rel=1e-12)
        assert found["late"] == pytest.approx(mean(x, y), rel=1e-12)
        assert (found["max"], found["min"]) == pytest.approx((max(x, y), min(x, y)), rel=1e-12)
        assert n == m or abs(mean(x, y) - (x + y) / 2) > 1e-4  # the comparison can fail
    for _, read, early, _ in ranks:
        assert early == [found["narrow"] for found in read]


def test_the_number_of_messages_does_not_depend_on_that_of_values() -> None:
    for cards in (False, True):
        few, many = (run(log_much, 2, False, cards, many)[0][3] for many in (1, 30))
        assert few == many
        steps = [(after - before).total() for before, after in pairwise(few)]
        assert len(steps) == 6
        assert sorted(steps)[:5] == 5 * [1]  # after one batch ranks exchange reports, too


class ReadOnOneRank(Net):
    """Rank 0 alone looks at a value of the running step; ranks meet after that, but for what they have logged."""

    def __init__(self, meet: str) -> None:
        super().__init__()
        self.automatic_optimization, self.meet, self.early = meet != "manual_backward", meet, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, own = self.loss(batch), torch.tensor(1.0 + self.global_rank)
        self.log("own", own, sync_dist=True)
        if self.global_rank == 0:
            self.early.append(self.trainer.callback_metrics["own"].item())
        if self.meet == "all_gather":
            assert self.all_gather(own).tolist() == [1.0, 2.0]
        elif self.meet == "reduce":
            assert self.trainer.strategy.reduce(own, reduce_op="sum").item() == 3.0
        elif self.meet == "barrier":
            self.trainer.strategy.barrier()
        elif self.meet == "broadcast":
            assert self.trainer.strategy.broadcast(own.item()) == 1.0
        else:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        self.log("late", 2 * own, sync_dist=True)
        return loss


def read_on_one_rank() -> list[list[float]]:
    found = []
    for meet in ("manual_backward", "all_gather", "reduce", "barrier", "broadcast"):
        module = ReadOnOneRank(meet)
        trainer = pl.Trainer(strategy=HeteroDDPStrategy(balance="off", timeout=60), max_epochs=1, **FAST)
        trainer.fit(module, DataLoader(dataset(16), batch_size=4))
        found.append([*module.early, trainer.callback_metrics["late"].item()])
    dist.barrier()
    return found


def test_one_rank_may_read_a_value_before_ranks_meet() -> None:
    first, second = run(read_on_one_rank, 2)
    assert first == [[1.5, 1.5, 3.0]] * 5
    assert second == [[3.0]] * 5
