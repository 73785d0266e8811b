"""Fabric, which has strategies of its own: these here are the Trainer's, and the error says so."""

import pytest
from lightning.fabric import Fabric

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.errors import UnsupportedError

GIVEN = {"string": "hetero_ddp", "nearly a string": "hetero_dasso", "object": HeteroDDPStrategy()}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_fabric_refuses(given) -> None:
    with pytest.raises(UnsupportedError, match="for the Trainer") as raised:
        Fabric(strategy=given, accelerator="cpu", devices=2)
    assert "lightning.pytorch.Trainer" in str(raised.value)


def test_fabrics_own_strategies_are_as_they_were() -> None:
    assert Fabric(strategy="ddp", accelerator="cpu", devices=2).world_size == 2
    with pytest.raises(ValueError, match="You selected an invalid strategy name"):
        Fabric(strategy="dpp", accelerator="cpu")
