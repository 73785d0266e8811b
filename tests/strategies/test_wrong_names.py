"""Strings and options that were probably meant to be others: the error names the nearest, and the class to use."""

from dataclasses import dataclass
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_hetero import (
    Averager,
    ConfigurationError,
    DASOStrategy,
    DiLoCoStrategy,
    HeteroDDPStrategy,
    HeteroError,
    strategy_for,
)


@dataclass
class NeverAverager(Averager):
    """Replicas that never meet."""

    every: int = 8

    def due(self, context: Any) -> bool:
        return False


NeverStrategy = strategy_for(NeverAverager, name="hetero_never")

STRINGS = [
    ("hetero_dasso", "Did you mean 'hetero_daso'?", "lightning_hetero.DASOStrategy(...)"),
    ("hetero-ddp", "Did you mean 'hetero_ddp'?", "lightning_hetero.HeteroDDPStrategy(...)"),
    ("HeteroDDP", "Did you mean 'hetero_ddp'?", "lightning_hetero.HeteroDDPStrategy(...)"),
    ("HeteroDDPStrategy", "Did you mean 'hetero_ddp'?", "lightning_hetero.HeteroDDPStrategy(...)"),
    ("lightning_hetero.DASOStrategy", "Did you mean 'hetero_daso'?", "lightning_hetero.DASOStrategy(...)"),
    ("hetero_diloco(tau=10)", "Did you mean 'hetero_diloco'?", "lightning_hetero.DiLoCoStrategy(tau=10)"),
    ("hetero_ddp: balance=off", "Did you mean 'hetero_ddp'?", "lightning_hetero.HeteroDDPStrategy(balance=off)"),
    ("diloco", "Did you mean 'hetero_diloco'?", "lightning_hetero.DiLoCoStrategy(...)"),
    ("hetero_daso_spwan", "Did you mean 'hetero_daso_spawn'?", "lightning_hetero.DASOStrategy(...)"),
    ("hetero_nevver", "Did you mean 'hetero_never'?", f"{__name__}.NeverStrategy(...)"),
    ("hetero_qqqqqqqq", "there is no strategy of this name", "strategy_for"),
]


@pytest.mark.parametrize(("given", "near", "use"), STRINGS)
def test_a_wrong_string(given: str, near: str, use: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Trainer(strategy=given, accelerator="cpu")
    assert near in str(raised.value)
    assert use in str(raised.value)


@pytest.mark.parametrize("given", ["dpp", "fsdpp", "deepspeed_stage_9", ""])
def test_a_wrong_string_of_lightning_is_left_to_it(given: str) -> None:
    with pytest.raises(ValueError, match="invalid strategy name") as raised:
        Trainer(strategy=given, accelerator="cpu")
    assert not isinstance(raised.value, HeteroError)


def test_right_strings_and_objects_are_as_they_were() -> None:
    assert type(Trainer(strategy="hetero_never", accelerator="cpu").strategy) is NeverStrategy
    assert Trainer(strategy="ddp", accelerator="cpu", devices=2).strategy.num_processes == 2
    assert type(Trainer(strategy=DASOStrategy(), accelerator="cpu").strategy) is DASOStrategy


OPTIONS = [
    (DASOStrategy, {"globel_every": 4}, "Did you mean global_every?"),
    (HeteroDDPStrategy, {"balence": "off"}, "Did you mean balance?"),
    (HeteroDDPStrategy, {"find_unused_parameter": True}, "Did you mean find_unused_parameters?"),
    (HeteroDDPStrategy, {"mixing": "delta"}, "DASOStrategy has mixing."),
    (DiLoCoStrategy, {"every_n_steps": 2}, "NodeAverageStrategy"),
    (HeteroDDPStrategy, {"qqqqq": 2}, "unknown option(s) qqqqq: neither this strategy nor DistributedDataParallel"),
]


@pytest.mark.parametrize(("strategy", "options", "words"), OPTIONS)
def test_a_wrong_option(strategy: type, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        strategy(**options)
    assert words in str(raised.value)
