"""Fragments: the places at which a model is cut, and models that cannot be cut."""

import pytest
from torch import nn

from lightning_hetero.algorithms.fragments import Partitioner, balanced_runs
from lightning_hetero.errors import ConfigurationError


def sizes(module: nn.Module) -> dict[str, int]:
    return {name: p.numel() for name, p in module.named_parameters()}


def test_blocks_of_a_model_without_blocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no module of the model has two children of the same class"):
        Partitioner("blocks")(model := nn.Sequential(nn.Linear(2, 3), nn.ReLU()), sizes(model))


@pytest.mark.parametrize(("count", "starts"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3])])
def test_runs_are_as_equal_as_they_can_be(count: int, starts: list[int]) -> None:
    assert balanced_runs([3, 1, 2, 2], count) == starts
