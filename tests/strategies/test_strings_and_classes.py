"""A strategy's string and its class, without options, are the same."""

import pytest
from lightning.pytorch import Trainer

import lightning_hetero
from lightning_hetero.strategies.table import ENTRIES


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_a_string_and_its_class_have_the_same_options(entry: object) -> None:
    strategy = getattr(lightning_hetero, entry.strategy.__name__)()
    named = Trainer(strategy=entry.name, accelerator="cpu", devices=1, logger=False).strategy
    assert type(named) is type(strategy)
    assert named.algorithm_options() == strategy.algorithm_options()
    assert named.options == strategy.options
