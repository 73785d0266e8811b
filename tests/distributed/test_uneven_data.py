"""Batches dealt by costs of samples: the weights are those of one process, and each sample counts once."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from oracles import oracle
from ranks import run
from tasks import FAST, Net, Save, TokenNet, dataset, error, fits, parameters
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hetero import GossipAsyncStrategy, HeteroDDPStrategy, HeteroMonitor, NodeAverageStrategy
from lightning_hetero.batching.cost import CostEvidence

COSTS = [1 + 7 * i % 29 + 60 * (i % 17 == 0) for i in range(101)]  # of few samples very much
ADDITIVE: dict[str, Any] = {"sample_cost": COSTS}
PADDED: dict[str, Any] = {"sample_cost": COSTS, "cost": "padded"}


class AdamW(Net):
    def __init__(self) -> None:
        super().__init__("adamw")


class WithCosts(Net):
    """Has a hook with the costs of samples."""

    def sample_cost(self, index: int) -> int:
        return COSTS[index]


#: Options of the strategy, the model, options of both fits, and options of ours.
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], dict[str, Any]]] = {
    "additive": ({**ADDITIVE, "balance": "off"}, Net, {}, {}),
    "padded": ({**PADDED, "balance": "off"}, Net, {}, {}),
    "additive, measured": ({**ADDITIVE, "rebalance_every_n_steps": 1}, WithCosts, {}, {}),
    "padded, measured, workers": ({**PADDED, "rebalance_every_n_steps": 1}, Net, {}, {"loader": {"num_workers": 1}}),
    "additive, changed mid-run": (ADDITIVE, Net, {}, {"changes": {3: [5.0, 1.0, 1.0], 17: [1.0, 8.0, 0.0]}}),
    "padded, changed mid-run": (PADDED, Net, {}, {"changes": {3: [5.0, 1.0, 1.0], 17: [0.0, 8.0, 1.0]}}),
    "additive, accumulated, clipped": (ADDITIVE, Net, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {}),
    "padded, accumulated, tokens": (PADDED, TokenNet, {"accumulate_grad_batches": 2}, {}),
    "additive, tokens": ({**ADDITIVE, "max_batch_size": 7}, TokenNet, {}, {}),
    "padded, AdamW": ({**PADDED, "min_batch_size": 2}, AdamW, {}, {}),
    "additive, AdamW, clipped": (ADDITIVE, AdamW, {"gradient_clip_val": 0.1}, {}),
}


def batches_of(epochs: int) -> list[list[int]]:
    """The global batches of one process: 101 samples, 12 in a batch, the last one with 5."""
    order, found = DistributedSampler(range(101), num_replicas=1, rank=0), list[list[int]]()
    for epoch in range(epochs):
        order.set_epoch(epoch)
        found += BatchSampler(order, 12, False)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_deal_by_cost_comes_to_what_one_process_comes_to(world: int) -> None:
    calls = {}
    for name, (options, make, both, ours) in CASES.items():
        if "changes" in ours:
            ours = {"changes": {step: shares[:world] for step, shares in ours["changes"].items()}}
        calls[name] = {"make": make, "batch_size": 12, "strategy": options, **both, **ours}
    ranks = run(fits, world, calls)
    for name, (_, make, both, _) in CASES.items():
        truth = parameters(oracle(make, 12, **both))
        assert error(truth, parameters(make())) > 1e-3, name
        for results in ranks:
            assert error(results[name]["parameters"], truth) <= 1e-10, name
        for step, batch in enumerate(batches_of(3)):  # each sample once; a padding batch repeats one
            parts = [results[name]["seen"][step] for results in ranks]
            assert {i for part in parts for i in part} == set(batch), name
            assert sum(map(len, parts)) - len(batch) in range(world), name
    for step, batch in enumerate(batches_of(3)):
        parts = [results["additive"]["seen"][step] for results in ranks]
        sums = [sum(COSTS[i] for i in part) for part in parts]
        assert max(sums) <= sum(sums) / world + max(COSTS[i] for i in batch)  # a split by samples is not
    counts = [len(part) for part in ranks[0]["additive"]["seen"]]
    assert len(set(counts)) > 2
    assert max(counts) > 12 / world


#: Strategies whose replicas differ: they meet now and then, or keep their own pace, as their plans do.
REPLICAS = [
    (NodeAverageStrategy, {"ranks_per_node": 1, "every_n_steps": 2}),
    (GossipAsyncStrategy, {"replica": "rank"}),
]


def _replicas(folder: str) -> list[tuple[list[list[int]], Any]]:
    found = []
    for kind, options in REPLICAS:
        module, monitor = Net(), HeteroMonitor(report=f"{folder}/{kind.__name__}")
        strategy = kind(**ADDITIVE, **options, global_batch_size=12, rebalance_every_n_steps=1)
        trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 6, "callbacks": [monitor]})
        trainer.fit(module, DataLoader(dataset(), batch_size=2, shuffle=True))
        found.append((module.seen, monitor.summary and monitor.summary.verdict.sentences))
    return found


def test_replicas_that_differ_take_each_sample_once(tmp_path: Path) -> None:
    for ranks in zip(*run(_replicas, 2, str(tmp_path)), strict=True):
        parts = [seen for seen, _ in ranks]
        assert [sorted({i for part in step for i in part}) for step in zip(*parts, strict=True)] == [
            sorted(batch) for batch in batches_of(6)
        ]
        assert len({len(part) for part in parts[0]}) > 2
        sentences = ranks[0][1]
        assert sentences[-1].startswith("Step times are within"), sentences


# -- resuming ----------------------------------------------------------------------------------------------


def _resumed(path: str, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Parameters of a whole run and of a resumed one, and their samples."""

    def fit(ckpt: str | None, *callbacks: pl.Callback) -> Net:
        module = Net()
        trainer = pl.Trainer(
            strategy=HeteroDDPStrategy(global_batch_size=12, **options),
            **{**FAST, "max_epochs": 3, "callbacks": list(callbacks)},
        )
        trainer.fit(module, DataLoader(dataset(), batch_size=2, shuffle=True), ckpt_path=ckpt)
        return module

    whole, resumed = fit(None, Save(path, 13, stop=False)), fit(path)
    return parameters(whole), parameters(resumed), (whole.seen[13:], resumed.seen)


@pytest.mark.parametrize("options", [ADDITIVE, PADDED], ids=["additive", "padded"])
def test_a_run_resumes_in_mid_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    shares: dict[str, Any] = {**options, "balance": [3.0, 1.0]}
    for whole, resumed, (rest, seen) in run(_resumed, 2, str(tmp_path / "saved.ckpt"), shares):
        assert error(resumed, whole) <= 1e-10
        assert seen == rest
        assert len(rest) == 27 - 13


# -- costs that explain nothing ----------------------------------------------------------------------------


def _with_useless_costs() -> tuple[torch.Tensor, list[int], list[str], bool]:
    CostEvidence.off = lambda self: (0.4, 0.02)  # type: ignore[method-assign]
    module = Net()
    strategy = HeteroDDPStrategy(global_batch_size=12, sample_cost=COSTS, rebalance_every_n_steps=2, balance="auto")
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 3})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(dataset(), batch_size=2, shuffle=True))
    messages = [str(warning.message) for warning in caught if "said to cost" in str(warning.message)]
    plans = strategy.accounting.planner.plans
    starts = [plan.start for plan in plans if plan.by_samples]
    return parameters(module), [len(part) for part in module.seen], messages, starts[0] if starts else 0


def test_costs_that_do_not_explain_times_are_left_with_one_warning() -> None:
    truth, ranks = parameters(oracle(Net, 12)), run(_with_useless_costs, 2)
    for weights, *_ in ranks:
        assert error(weights, truth) <= 1e-10
    assert [len(messages) for _, _, messages, _ in ranks] == [1, 0]
    start = ranks[0][3]
    assert 0 < start == ranks[1][3]
    assert "(off by up to 40% and 2%). Batches are split by samples from step" in ranks[0][2][0]
    for _, counts, *_ in ranks:
        assert len(set(counts[:start])) > 1


def _several() -> list[str]:
    module = Both()
    data = {name: DataLoader(dataset(), batch_size=6, shuffle=True) for name in "ab"}
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(sample_cost=COSTS), **{**FAST, "max_epochs": 1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    return [str(warning.message) for warning in caught if "Several training loaders" in str(warning.message)]


class Both(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch["a"]) + self.loss(batch["b"])


def test_several_loaders_are_split_by_samples() -> None:
    [first, second] = run(_several, 2)
    assert len(first) == 1
    assert "whatever these cost" in first[0]
    assert not second
