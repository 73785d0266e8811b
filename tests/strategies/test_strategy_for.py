"""A strategy made of an averager: one place for its options, in signatures, help, YAML, checks and copies."""

import copy
import inspect
import pickle
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero import Averager, ConfigurationError, ReplicaStrategy, strategy_for
from lightning_hetero.algorithms.periodic import PeriodicAverager
from lightning_hetero.config import own_options_first
from lightning_hetero.strategies.options import section
from lightning_hetero.strategies.replica import with_options_of


@dataclass
class EveryAverager(Averager):
    """Meets every so many steps.

    And says so at length.

    Args:
        every: optimizer steps from one meeting
            to the next.
        kind: of the meeting.
        strength: a number that must be given.

    Raises:
        ConfigurationError: ``every`` below 1.
        UnsupportedError: never, in fact.
    """

    every: "int" = 4  # a postponed annotation
    kind: Literal["long", "short"] = "long"
    meetings: int = field(default=0, init=False)
    strength: float = field(kw_only=True, default=0.5)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigurationError(f"every={self.every!r} must be at least 1.")

    def due(self, context):
        return context.step % self.every == 0


EveryStrategy = strategy_for(EveryAverager, name="hetero_every", replica="rank", kind="short")


def test_a_real_signature_with_the_averagers_options_first() -> None:
    parameters = inspect.signature(EveryStrategy).parameters
    names = list(parameters)
    assert names[:5] == ["every", "kind", "strength", "replica", "on_nan"]
    assert {"balance", "ranks_per_node", "timeout", "start_method"} < set(names)
    assert not {"accelerator", "ddp_comm_hook", "meetings"} & set(names)
    assert parameters["every"].annotation is int
    assert parameters["kind"].annotation == Literal["long", "short"]
    defaults = {name: parameters[name].default for name in names}
    assert (defaults["every"], defaults["kind"], defaults["strength"], defaults["replica"]) == (4, "short", 0.5, "rank")
    assert EveryStrategy.__name__ == EveryStrategy.__qualname__ == "EveryStrategy"
    assert EveryStrategy.__module__ == __name__


def test_options_reach_the_averager_and_the_strategy() -> None:
    strategy = EveryStrategy(7, strength=2.0, balance=[2.0, 1.0], on_nan="skip")
    first, second = strategy.make_averager(), strategy.make_averager()  # each fit has its own
    first.meetings = 5
    assert second.meetings == strategy.algorithm.meetings == 0
    assert strategy.algorithm == EveryAverager(7, "short", strength=2.0)
    assert strategy.options.balance == [2.0, 1.0]
    assert strategy.algorithm_options() == {
        "on_nan": "skip", "replica": "rank", "every": 7, "kind": "short", "strength": 2.0,
    }  # fmt: skip
    assert EveryStrategy(every=2, kind="long", replica="node").algorithm.kind == "long"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((0,), {}, ConfigurationError, "every=0 must be at least 1"),
        ((), {"evry": 3}, ConfigurationError, r"unknown option\(s\) evry"),
        ((1, "long", 3), {}, TypeError, "too many positional arguments"),
        ((1,), {"every": 1}, TypeError, "multiple values for argument 'every'"),
        ((), {"on_nan": "ignore"}, ConfigurationError, "on_nan='ignore' must be one of"),
        ((), {"replica": "host"}, ConfigurationError, "replica='host' must be one of 'rank', 'node'"),
    ],
)
def test_wrong_options_are_refused(arguments, options, error, words) -> None:
    with pytest.raises(error, match=words):
        EveryStrategy(*arguments, **options)


@pytest.mark.parametrize("name", ["timeout", "replica", "bucket_cap_mb", "finish", "commits", "_packed", "run"])
@pytest.mark.parametrize("is_option", [True, False])
def test_a_field_with_the_name_of_an_option_is_refused(name: str, is_option: bool) -> None:
    body = {"__annotations__": {name: int}, name: field(default=3, init=is_option), "__module__": __name__}
    kind = dataclass(type("Named", (EveryAverager,), body))
    with pytest.raises(ConfigurationError, match=rf"Named: {name} is a name that .*, such as `my_{name.lstrip('_')}`"):
        strategy_for(kind, name="hetero_named")


def test_copies() -> None:
    strategy = EveryStrategy(every=9, balance="off")
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert type(other) is EveryStrategy
        assert other.algorithm == strategy.algorithm
        assert other.options == strategy.options


def test_the_docstring_explains_every_option() -> None:
    text = EveryStrategy.__doc__
    assert text.startswith("Meets every so many steps.\n\nAnd says so at length.\n\nArgs:\n    every: optimizer steps")
    explained = section(text, "Args")
    assert list(explained) == [*list(inspect.signature(EveryStrategy).parameters)[:-1], "**kwargs"]
    assert explained["every"].split() == ["optimizer", "steps", "from", "one", "meeting", "to", "the", "next."]
    assert "``4``" not in text
    assert list(section(text, "Raises")) == ["ConfigurationError", "UnsupportedError"]


def test_the_name_is_registered_in_all_variants() -> None:
    for name in ("hetero_every", "hetero_every_spawn", "hetero_every_find_unused_parameters_true"):
        assert type(StrategyRegistry.get(name)) is EveryStrategy
    assert StrategyRegistry.get("hetero_every_fork")._start_method == "fork"
    assert "Meets every so many steps" in StrategyRegistry["hetero_every"]["description"]


def cli(monkeypatch, *arguments: str) -> LightningCLI:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's own calls
    return LightningCLI(BoringModel, args=["--seed_everything=1", *arguments], run=False, save_config_callback=None)


def test_yaml(monkeypatch, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  strategy:\n    class_path: test_strategy_for.EveryStrategy\n"
        "    init_args:\n      every: 6\n      balance: [3.0, 1.0]\n      timeout: 50\n"
        "      static_graph: true\n"
    )
    strategy = cli(monkeypatch, "--config", str(tmp_path / "config.yaml")).trainer.strategy
    assert type(strategy) is EveryStrategy
    assert strategy.algorithm == EveryAverager(6, "short")
    assert (strategy.options.balance, strategy.options.limit.total_seconds()) == ([3.0, 1.0], 50)
    assert strategy._ddp_kwargs["static_graph"] is True


def test_help(monkeypatch, capsys) -> None:
    class Shown(LightningCLI):
        def init_parser(self, **kwargs):
            return own_options_first(super().init_parser(**kwargs))

    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match=r"^(0|None)$"):
        Shown(BoringModel, args=["--trainer.strategy.help=test_strategy_for.EveryStrategy"], run=False)
    text = " ".join(capsys.readouterr().out.split())
    places = [text.index(f"--trainer.strategy.{name} ") for name in ("every", "kind", "strength", "replica", "on_nan")]
    assert places == sorted(places)
    for words in (
        "optimizer steps from one meeting to the next. (type: int, default: 4)",
        "default: short)",
        "default: rank)",
        "splits every global batch by measured speed",
        "--trainer.strategy=test_strategy_for.EveryStrategy",
    ):
        assert words in text, words
    assert "static_graph" not in text


# -- what cannot work ----------------------------------------------------------------------------------------


class NoDataclass(Averager):
    def due(self, context):
        return True


@dataclass
class NoDue(Averager):
    tau: int = 1


def with_field(name: str, kind: type = int) -> type[Averager]:
    return dataclass(type("Clash", (NoDue,), {"__annotations__": {name: kind}, name: 1, "due": NoDataclass.due}))


@pytest.mark.parametrize(
    ("averager", "words"),
    [
        (NoDataclass, "NoDataclass is no dataclass.*Put @dataclass above it"),
        (NoDue, "NoDue lacks due"),
        (dict, "is no subclass of lightning_hetero.Averager"),
        (PeriodicAverager(), "is no subclass of lightning_hetero.Averager"),
        (with_field("balance"), "Clash: balance is a name"),
        (with_field("on_nan"), "Clash: on_nan is a name"),
        (with_field("bucket_cap_mb"), "Clash: bucket_cap_mb is a name"),
        (with_field("reference"), "Clash: reference is a name"),
        (with_field("status"), "Clash: status is a name"),
        (with_field("model"), "Clash: model is a name"),
        (with_field("engine"), "Clash: engine is a name"),
    ],
)
def test_an_averager_of_which_no_strategy_can_be_made(averager, words) -> None:
    with pytest.raises(ConfigurationError, match=words):
        strategy_for(averager, name="hetero_refused")
    assert "hetero_refused" not in StrategyRegistry


@pytest.mark.parametrize(
    ("name", "defaults", "words"),
    [
        ("hetero_node", {}, "name='hetero_node' is taken by .*. Choose another name for EveryStr"),
        ("ddp", {}, "name='ddp' is taken by .*. Choose another name for EveryStr"),
        ("", {}, "name='': give the strategy's string"),
        (None, {}, "name=None: give the strategy's string"),
        ("hetero_refused", {"replica": "gpu"}, "replica='gpu' must be one of 'rank', 'node'"),
        ("hetero_refused", {"evry": 3}, "EveryAverager: evry is no option"),
    ],
)
def test_a_name_or_a_default_that_cannot_be(name: Any, defaults: dict[str, Any], words: str) -> None:
    before = {known: entry["strategy"] for known, entry in StrategyRegistry.items()}
    with pytest.raises(ConfigurationError, match=words):
        strategy_for(EveryAverager, name=name, **defaults)
    assert {known: entry["strategy"] for known, entry in StrategyRegistry.items()} == before


def test_a_module_that_runs_again_registers_its_name_again() -> None:
    again = strategy_for(EveryAverager, name="hetero_every", replica="rank", kind="short")
    assert StrategyRegistry["hetero_every"]["strategy"] is again
    assert again is not EveryStrategy


def test_a_class_by_hand() -> None:
    @with_options_of(EveryAverager, every=2)
    class ByHand(ReplicaStrategy):
        """By hand."""

    assert ByHand().algorithm.every == 2
    assert ByHand.__doc__.startswith("By hand.\n\nArgs:\n    every:")
