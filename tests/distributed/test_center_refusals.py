"""What strategies with a center cannot do is said before the training, on every rank; and by which names they go."""

import os
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
from center_tasks import APART, STRATEGIES, Line, fit
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from ranks import attempt, run
from tasks import FAST, Net, dataset
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader

from lightning_hetero.errors import ConfigurationError, DisagreementError, UnsupportedError
from lightning_hetero.strategies import joining

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
ELASTIC = [name for name in STRATEGIES if name not in ("diloco", "node")]


# -- what a constructor refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELASTIC)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "neither is given"),
        ({"moving_rate": 0.1, "rho": 1.0}, "both are given"),
        ({"moving_rate": -1}, "moving_rate=-1"),
        ({"rho": float("nan")}, "rho=nan"),
        ({**AUTO, "beta": float("inf")}, "beta=inf"),
        ({**AUTO, "tau": 0}, "tau=0"),
        ({**AUTO, "tau": 2.0}, "tau=2.0"),
        ({**AUTO, "tau": True}, "tau=True"),
        ({**AUTO, "order": "seidel"}, "order='seidel'"),
        ({**AUTO, "replica": "gpu"}, "replica='gpu' must be one of 'rank', 'node'"),
        ({**AUTO, "exclude": "bias"}, "exclude='bias': give a list"),
        ({**AUTO, "on_nan": "ignore"}, "on_nan='ignore'"),
        ({**AUTO, "moving_rat": 1}, "unknown option"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        STRATEGIES[name](**options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("easgd", {**AUTO, "wire": "int8"}, "wire='int8' must be one of 'fp32', 'bf16', 'fp16'"),
        ("overlap", {**AUTO, "order": "gauss_seidel"}, "order='gauss_seidel': hetero_easgd_overlap"),
        ("async", {**AUTO, "center": "disk"}, "center='disk' must be one of"),
        ("async", {**AUTO, "center": "shared_memory", "wire": "bf16"}, "memory has no wire"),
        ("diloco", {"wire": "int8"}, "wire='int8'"),
        ("diloco", {"tau": -1}, "tau=-1"),
        ("diloco", {"outer_lr": 0}, "outer_lr=0"),
        ("diloco", {"outer_lr": float("nan")}, "outer_lr=nan"),
        ("diloco", {"outer_lr": -0.7}, "outer_lr=-0.7"),
        ("diloco", {"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ("diloco", {"outer_momentum": -0.1}, "outer_momentum=-0.1"),
        ("diloco", {"outer": lambda parameters: list(parameters)}, "made a list, not a torch.optim.Optimizer"),
        ("diloco", {"outer": partial(SGD, lr=-1.0)}, "does not make an optimizer"),
        ("diloco", {"outer": partial(SGD, lr=1.0), "outer_lr": 0.5}, "would have no effect"),
        ("diloco", {"outer": "sgd"}, "outer='sgd' does not make an optimizer"),
    ],
)
def test_options_of_one_that_cannot_be(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        STRATEGIES[name](**options)


@pytest.mark.parametrize("options", [{"outer_lr": "fast"}, {"outer_momentum": "much"}])
def test_words_for_the_numbers_of_diloco(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="outer_lr="):
        STRATEGIES["diloco"](**options)


# -- what all ranks refuse when they meet --------------------------------------------------------------------


class Trained(Line):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


HEAVY = partial(SGD, lr=0.01, momentum=0.9)


def _train(name: str, make: Any = HEAVY, by_rank: dict[str, Any] | None = None, **options: Any) -> None:
    rank = int(os.environ["RANK"])
    mine = {key: values[rank] for key, values in (by_rank or {}).items()}
    if mine.pop("host", None):
        joining.hostname = lambda: f"host{rank}"
    fit(name, Trained(make), epochs=1, **options, **mine)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("easgd", {"moving_rate": 1.0, "beta": 1.0}, ConfigurationError, "unstable"),
        ("easgd", {"moving_rate": 0.7}, ConfigurationError, "alpha=0.7 .* and beta=1.4"),
        ("round_robin", {"rho": 70.0}, ConfigurationError, "alpha=0.7 .* and beta=1.4"),
        ("overlap", {**AUTO, "exclude": ["*.bias"]}, ConfigurationError, "exclude: '\\*.bias' is the name of no"),
        ("eamsgd", {**AUTO, "make": partial(Adam, lr=0.01)}, UnsupportedError, "EAMSGD needs .* gave Adam"),
        ("eamsgd", {**AUTO, "make": HEAVY}, UnsupportedError, "gave SGD with {'momentum': 0.9, 'nesterov': False}"),
        ("eamsgd", {**AUTO, "make": partial(SGD, lr=0.01)}, UnsupportedError, "gave SGD with {'momentum': 0"),
        ("measgd", {**AUTO, "make": partial(HEAVY, nesterov=True)}, UnsupportedError, "'nesterov': True"),
        ("measgd", {**AUTO, "make": partial(AdamW, lr=0.01)}, UnsupportedError, "MEASGD needs .* gave AdamW"),
        ("easgd", {**AUTO, "by_rank": {"tau": [3, 4]}}, DisagreementError, "tau: rank 0: 3, rank 1: 4"),
        ("easgd", {"by_rank": {"moving_rate": [0.1, 0.2]}}, DisagreementError, "moving_rate: rank 0: 0.1, rank 1: 0.2"),
        ("async", {**AUTO, "by_rank": {"center": ["thread", "auto"]}}, DisagreementError, "center: rank 0: thread"),
        ("async", {**AUTO, "by_rank": {"debias": [True, False]}}, DisagreementError, "debias: rank 0: True"),
        ("diloco", {"by_rank": {"outer_lr": [0.7, 0.8]}}, DisagreementError, "outer: rank 0: .*0.7.*rank 1: .*0.8"),
        ("easgd", {**AUTO, "by_rank": {"exclude": [["w"], []]}}, DisagreementError, "exclude: rank 0: "),
        ("hogwild", {**AUTO, "by_rank": {"host": [1, 1]}}, UnsupportedError, "serves one host.* host0, host1"),
        (
            "async",
            {**AUTO, "center": "shared_memory", "by_rank": {"host": [1, 1]}},
            UnsupportedError,
            "Use center='thread'",
        ),
        ("async", {**AUTO, "center": "mpi"}, UnsupportedError, "center='mpi'.*mpiexec"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(name: str, options: dict[str, Any], error: type, words: str) -> None:
    for outcome in attempt(_train, 2, name, nodes=[1, 1], **options):
        assert isinstance(outcome.error, error), outcome.trace
        with pytest.raises(error, match=f"(?s){words}"):
            raise outcome.error


def _warned() -> list[list[str]]:
    said = []
    for options in ({"moving_rate": 1.2, "beta": 0.5}, {"moving_rate": 0.5, "beta": 1.2}, AUTO):
        for name in ("easgd", "async"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fit(name, Line(), epochs=1, tau=20, trainer={"limit_train_batches": 2}, **options)
            said.append([str(w.message) for w in caught if "swing past" in str(w.message)])
    return said


def test_past_one_there_is_a_warning_of_rank_0() -> None:
    first, second = run(_warned, 2, nodes=[1, 1])
    assert [len(said) for said in first] == [1, 1, 1, 1, 0, 0]
    assert not any(second)


def _several_hosts() -> str:
    rank = int(os.environ["RANK"])
    joining.hostname = lambda: f"host{rank}"
    module = Line()
    fit("async", module, epochs=1, trainer={"limit_train_batches": 2}, tau=1, **AUTO)
    return "done"


def test_auto_takes_what_serves_several_hosts() -> None:
    assert run(_several_hosts, 3, nodes=APART) == ["done"] * 3


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_strategy_strings(name: str, kind: str) -> None:
    strategy = pl.Trainer(strategy=name, **{**FAST, "devices": 2}).strategy
    assert type(strategy) is STRATEGIES[kind]
    assert strategy.launcher is not None
    for suffix, method in (("_spawn", "spawn"), ("_fork", "fork"), ("_find_unused_parameters_true", "popen")):
        assert name + suffix in StrategyRegistry.available_strategies()
        assert StrategyRegistry.get(name + suffix)._start_method == method


@pytest.mark.parametrize("kind", NAMES.values())
def test_classes_from_a_typed_configuration(kind: str) -> None:
    options: dict[str, Any] = {"tau": 7, "exclude": ["*bias"], "replica": "node", "balance": "off", "timeout": 9.0}
    options |= {"outer_lr": 0.5} if kind == "diloco" else {"moving_rate": "auto", "beta": 0.8, "order": "jacobi"}
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
