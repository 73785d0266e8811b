"""Fabric, which has strategies of its own: these here are the Trainer's, and it says so."""

import pytest
from lightning.fabric import Fabric

from lightning_hetero import HeteroDDPStrategy


@pytest.mark.parametrize("strategy", ["hetero_ddp", HeteroDDPStrategy()], ids=["string", "object"])
def test_fabric_refuses(strategy) -> None:
    with pytest.raises(ValueError, match="You selected an invalid strategy name"):
        Fabric(strategy=strategy, accelerator="cpu", devices=2)
