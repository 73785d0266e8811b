"""Names of strategies, right and wrong ones, and of options; what there is before a fit; and Fabric."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

import lightning_hetero
from lightning_hetero import (
    Averager,
    ConfigurationError,
    DASOStrategy,
    DiLoCoStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
    HeteroError,
    HeteroFabricStrategy,
    strategy_for,
)
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies.table import ENTRIES


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


def test_a_class_in_place_of_an_instance() -> None:
    with pytest.raises(ConfigurationError, match=r"strategy=DASOStrategy is a class: give .* strategy=DASOStrategy\("):
        Trainer(strategy=DASOStrategy, accelerator="cpu")


@pytest.mark.parametrize("given", ["dpp", "fsdpp", "deepspeed_stage_9", ""])
def test_a_wrong_string_of_lightning_is_left_to_it(given: str) -> None:
    with pytest.raises(ValueError, match="invalid strategy name") as raised:
        Trainer(strategy=given, accelerator="cpu")
    assert not isinstance(raised.value, HeteroError)


def test_right_strings_and_objects_are_as_they_were() -> None:
    assert type(Trainer(strategy="hetero_never", accelerator="cpu").strategy) is NeverStrategy
    assert Trainer(strategy="ddp", accelerator="cpu", devices=2).strategy.num_processes == 2
    assert type(Trainer(strategy=DASOStrategy(), accelerator="cpu").strategy) is DASOStrategy


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_a_string_and_its_class_have_the_same_options(entry: object) -> None:
    strategy = getattr(lightning_hetero, entry.strategy.__name__)()
    named = Trainer(strategy=entry.name, accelerator="cpu", devices=1, logger=False).strategy
    assert type(named) is type(strategy)
    assert named.algorithm_options() == strategy.algorithm_options()
    assert named.options == strategy.options


@pytest.mark.parametrize(
    ("kind", "name"), [(HeteroDDPStrategy, "trainer"), (DiLoCoStrategy, "trainer"), (DiLoCoStrategy, "traffic")]
)
def test_what_is_there_only_from_the_beginning_of_a_fit(kind: type, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"strategy\.{name} is there from the beginning of a fit"):
        getattr(kind(), name)


def test_the_topology_of_gossip_is_its_option() -> None:
    assert GossipStrategy(topology="ring").topology == "ring"
    assert GossipStrategy().topology == "random"
    assert GossipStrategy(topology="ring").cluster is None  # no job yet


@pytest.mark.parametrize("file", ["there/job", Path("there/job")])
def test_a_join_file_may_be_a_path(file: str | Path) -> None:
    assert HeteroDDPStrategy(on_peer_loss="continue", join_file=file).options.join_file == str(Path("there/job"))


GIVEN = {"string": "hetero_daso", "nearly a string": "hetero_dasso", "object": HeteroDDPStrategy()}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_fabric_refuses(given) -> None:
    with pytest.raises(UnsupportedError, match="for the Trainer") as raised:
        Fabric(strategy=given, accelerator="cpu", devices=2)
    assert "lightning.pytorch.Trainer" in str(raised.value)
    assert "strategy='hetero_ddp' or HeteroFabricStrategy(...)" in str(raised.value)


def test_fabrics_own_strategies_are_as_they_were() -> None:
    assert Fabric(strategy="ddp", accelerator="cpu", devices=2).world_size == 2
    assert isinstance(Fabric(strategy="hetero_ddp", accelerator="cpu", devices=2).strategy, HeteroFabricStrategy)
    with pytest.raises(ValueError, match="You selected an invalid strategy name"):
        Fabric(strategy="dpp", accelerator="cpu")


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
