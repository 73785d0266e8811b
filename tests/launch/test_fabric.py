"""Fabric, which has strategies of its own: these here are the Trainer's, and it says so."""

import pytest
from lightning.fabric import Fabric

from lightning_hetero import HeteroDDPStrategy


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("hetero_ddp", r"You selected an invalid strategy name: `strategy='hetero_ddp'`"),
        (HeteroDDPStrategy(), "invalid"),
    ],
)
def test_fabric_refuses(strategy, message) -> None:
    with pytest.raises(ValueError, match=message):
        Fabric(strategy=strategy, accelerator="cpu", devices=2)
