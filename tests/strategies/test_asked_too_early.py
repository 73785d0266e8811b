"""What a strategy has only once ranks have met, and what it is called."""

from pathlib import Path

import pytest

from lightning_hetero import DiLoCoStrategy, GossipStrategy, HeteroDDPStrategy
from lightning_hetero.errors import UnsupportedError


@pytest.mark.parametrize("kind", [HeteroDDPStrategy, DiLoCoStrategy])
def test_there_is_no_trainer_before_a_fit(kind: type) -> None:
    with pytest.raises(UnsupportedError, match=r"strategy\.trainer is there from the beginning of a fit"):
        _ = kind().trainer


def test_there_is_no_traffic_before_a_fit() -> None:
    with pytest.raises(UnsupportedError, match=r"strategy\.traffic is there from the beginning of a fit"):
        _ = DiLoCoStrategy().traffic


def test_the_topology_of_gossip_is_its_option() -> None:
    assert GossipStrategy(topology="ring").topology == "ring"
    assert GossipStrategy().topology == "random"
    assert GossipStrategy(topology="ring").cluster is None  # no job yet


@pytest.mark.parametrize("file", ["there/job", Path("there/job")])
def test_a_join_file_may_be_a_path(file: str | Path) -> None:
    assert HeteroDDPStrategy(on_peer_loss="continue", join_file=file).options.join_file == str(Path("there/job"))
