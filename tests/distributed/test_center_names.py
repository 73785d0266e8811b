"""Strategies with a center: their names, their defaults, and their warnings."""

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
from center_tasks import APART, STRATEGIES, Line, fit
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import GossipAsyncStrategy, GossipPushSumStrategy, GossipStrategy
from lightning_hetero.strategies import job

AUTO = {"moving_rate": "auto"}
NAMES = {
    "hetero_easgd": "easgd",
    "hetero_easgd_overlap": "overlap",
    "hetero_easgd_round_robin": "round_robin",
    "hetero_easgd_async": "async",
    "hetero_easgd_hogwild": "hogwild",
    "hetero_measgd_async": "measgd",
    "hetero_eamsgd": "eamsgd",
    "hetero_diloco": "diloco",
}
KINDS = {
    **{name: STRATEGIES[kind] for name, kind in NAMES.items()},
    "hetero_gossip": GossipStrategy,
    "hetero_gossip_push_sum": GossipPushSumStrategy,
    "hetero_gossip_async": GossipAsyncStrategy,
}


# -- what they choose and warn of ---------------------------------------------------------------------------


def _warned() -> list[list[str]]:
    messages = []
    for options in ({"moving_rate": 1.2, "beta": 0.5}, {"moving_rate": 0.5, "beta": 1.2}, AUTO):
        for name in ("easgd", "async"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fit(name, Line(), epochs=1, tau=20, trainer={"limit_train_batches": 2}, **options)
            messages.append([str(w.message) for w in caught if "swing past" in str(w.message)])
    return messages


def test_past_one_there_is_a_warning_of_rank_0() -> None:
    first, second = run(_warned, 2, nodes=[1, 1])
    assert [len(messages) for messages in first] == [1, 1, 1, 1, 0, 0]
    assert not any(second)


def _several_hosts() -> str:
    rank = int(os.environ["RANK"])
    job.hostname = lambda: f"host{rank}"
    module = Line()
    fit("async", module, epochs=1, trainer={"limit_train_batches": 2}, tau=1, **AUTO)
    return "done"


def test_auto_takes_what_serves_several_hosts() -> None:
    assert run(_several_hosts, 3, nodes=APART) == ["done"] * 3


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_strategy_strings(name: str, kind: type[Strategy]) -> None:
    strategy = pl.Trainer(strategy=name, **{**FAST, "devices": 2}).strategy
    assert type(strategy) is kind
    assert strategy.launcher is not None
    for suffix, method in (("_spawn", "spawn"), ("_fork", "fork"), ("_find_unused_parameters_true", "popen")):
        assert name + suffix in StrategyRegistry.available_strategies()
        assert StrategyRegistry.get(name + suffix)._start_method == method


@pytest.mark.parametrize("kind", NAMES.values())
def test_classes_from_a_typed_configuration(kind: str) -> None:
    options: dict[str, Any] = {"tau": 7, "exclude": ["*bias"], "replica": "node", "balance": "off", "timeout": 9.0}
    options |= {"outer_lr": 0.5} if kind == "diloco" else {"moving_rate": "auto", "beta": 0.8}
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    path = f"lightning_hetero.{STRATEGIES[kind].__name__}"
    parsed = parser.parse_object({"strategy": {"class_path": path, "init_args": options}})
    # The second is older versions' name for it.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made = make(parsed).strategy
    assert type(made) is STRATEGIES[kind]
    assert (made.tau, made.exclude, made.replica) == (7, ("*bias",), "node")


def _by_name(names: list[str]) -> list[list[float]]:
    found = []
    warnings.filterwarnings("ignore", "No replica has met the center in this fit: tau=50")  # of hetero_diloco
    for name in names:
        module = Net()
        trainer = pl.Trainer(strategy=name, **{**FAST, "max_epochs": 1, "limit_train_batches": 12})
        trainer.fit(module, DataLoader(dataset(96), batch_size=4))
        found.append([p.abs().sum().item() for p in module.parameters()])
    return found


def test_strings_train() -> None:
    first, second = run(_by_name, 2, [name for name in NAMES if "eamsgd" not in name], nodes=[1, 1])
    assert first == second
    assert [p.abs().sum().item() for p in Net().parameters()] not in first
