"""`hetero_daso` against loops written by hand with NumPy's means only."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from oracles import oracle
from ranks import run
from tasks import FAST, Net, dataset, error, fit, fits, parameters
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import DASOStrategy

DASO = {"strategy_class": DASOStrategy}
NODES, SHARES, SIZES = [2, 1], [3.0, 1.0, 2.0], (8, 4)  # ranks per node; shares per rank; samples per node of 12


def by_hand(
    rule: str, every: int, wait: int, warmup: int, cooldown: int, epochs: int, sizes: tuple[int, ...] = SIZES
) -> torch.Tensor:
    """One model per node; constant B and W; all of section 'algorithm' of the paper, with weighted nodes."""
    data, models = dataset(96), [Net() for _ in sizes]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    order, step, total = DistributedSampler(data, 1, 0, shuffle=True), 0, epochs * 8
    count, weights = len(sizes), [size * len(sizes) / 12 for size in sizes]
    pending, since = None, 0

    def values() -> list[torch.Tensor]:
        return [parameters(model) for model in models]

    def put(new: list[torch.Tensor]) -> None:
        for model, flat in zip(models, new, strict=True):
            torch.nn.utils.vector_to_parameters(flat.clone(), model.parameters())

    def mix() -> None:
        started, total_sum, snapshots = pending
        s = step - started
        if rule == "daso":
            put([(2 * s * x + total_sum) / (2 * s + count) for x in values()])
        else:
            put([x + count / (2 * s + count) * (total_sum / count - o) for x, o in zip(values(), snapshots)])  # noqa: B905

    for epoch in range(epochs):
        order.set_epoch(epoch)
        indices = list(order)
        for batch in range(0, 96, 12):
            first = batch
            for model, optimizer, size in zip(models, optimizers, sizes, strict=True):
                optimizer.zero_grad()
                model.loss(data[indices[first : first + size]]).backward()
                optimizer.step()
                first += size
            step += 1
            cycling = warmup < step <= total - cooldown
            if pending and (not cycling or step - pending[0] >= wait):
                mix()
                pending = None
            if not cycling:
                mean = sum(w * x for w, x in zip(weights, values(), strict=True)) / count
                put([mean] * count)
                continue
            since += 1
            if since >= every:
                since = 0
                now = values()
                pending = (step, sum(w * x for w, x in zip(weights, now, strict=True)), now)
    return values()[0]


def call(**options: Any) -> dict[str, Any]:
    """A fit with nodes of 8 and 4 samples."""
    strategy = {"patience": 99, "balance": SHARES, **options}
    return {"make": Net, "batch_size": 12, "samples": 96, "strategy": strategy, **DASO}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("rule", ["daso", "delta"])
def test_against_a_loop_by_hand(rule: str) -> None:
    truths, calls = {}, {}
    for every, wait, warmup, cooldown in [(4, 1, 4, 4), (3, 3, 2, 5), (1, 1, 0, 1), (5, 2, 0, 3)]:
        case = f"every {every}, wait {wait}, warmup {warmup}, cooldown {cooldown}"
        truths[case] = by_hand(rule, every, wait, warmup, cooldown, 3)
        calls[case] = call(mixing=rule, global_every=every, wait=wait, warmup=warmup, cooldown=cooldown)
    of_ranks = run(fits, 3, calls, nodes=NODES)
    for results in of_ranks:
        for case, truth in truths.items():
            assert error(results[case]["parameters"], truth) <= 1e-10, case
            assert torch.equal(results[case]["parameters"], of_ranks[0][case]["parameters"]), case


def test_narrow_wires_round_the_exchange_only() -> None:
    limits = {"bf16": 0.02, "fp16": 0.003}
    calls = {wire: call(warmup=2, cooldown=2, mixing="delta", wire=wire) for wire in limits}
    truth = by_hand("delta", 4, 1, 2, 2, 3)
    for results in run(fits, 3, calls, nodes=NODES):
        for wire, limit in limits.items():
            assert 0 < error(results[wire]["parameters"], truth) < limit, wire


def test_blocking_at_every_step_is_flat_data_parallel() -> None:
    truth = parameters(oracle(Net, 12, 96))
    strategy = {"warmup": 0, "cooldown": 0, "global_every": 1, "wait": 0, "max_global_every": 1, "balance": SHARES}
    for result in run(fit, 3, Net, 12, 96, nodes=NODES, strategy=strategy, **DASO):
        assert error(result["parameters"], truth) <= 1e-10


def test_a_single_node_says_so_and_trains_alone() -> None:
    truth = parameters(oracle(Net, 12, 96))
    for result in run(fit, 2, Net, 12, 96, strategy={"balance": [2.0, 1.0]}, **DASO):
        assert error(result["parameters"], truth) <= 1e-10


class Logging(Net):
    """Logs a level that rises on one rank as it falls on the other: its mean stays."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[tuple[int, int]] = []

    def on_train_epoch_end(self) -> None:
        schedule = self.trainer.strategy.averager.schedule
        self.rates.append((schedule.every, schedule.wait))
        self.log("level", 10.0 + self.current_epoch * (1 if self.global_rank else -1))


def _monitored() -> list[tuple[int, int]]:
    warnings.filterwarnings("ignore", ".*recommended to use.*sync_dist=True")
    module = Logging()
    strategy = DASOStrategy(balance="off", global_batch_size=12, warmup=0, cooldown=0, patience=1, monitor="level")
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 4})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4))
    return module.rates


def test_the_monitored_metric_is_the_mean_of_all_ranks() -> None:
    for rates in run(_monitored, 2, nodes=[1, 1]):
        assert rates == [(4, 1), (4, 1), (2, 1), (1, 1)]
