"""Options take any sequence and any kind of number, and keep Python's own types."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hetero import (
    ConfigurationError,
    DASOStrategy,
    DiLoCoAsyncStrategy,
    DiLoCoStrategy,
    EASGDStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
    NodeAverageStrategy,
    NoLoCoStrategy,
)
from lightning_hetero.callbacks.resumable import ResumableCheckpoint


class Items(Sequence):
    """A sequence of another type, as OmegaConf's lists are."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


def kinds(value: Any) -> set[type]:
    """The types of a value and of its parts."""
    return {type(value)} | {kind for one in (value if isinstance(value, list | tuple) else ()) for kind in kinds(one)}


def kept(strategy: Any, name: str) -> Any:
    return getattr(strategy.options, name) if hasattr(strategy.options, name) else getattr(strategy, name)


ONE_EACH = [("balance", [3.0, 1.0]), ("max_batch_size", [8, 6]), ("min_batch_size", [2, 1]), ("ranks_per_node", [2, 1])]


@pytest.mark.parametrize(
    "form", [list, tuple, lambda value: Items(*value), np.array, torch.tensor, lambda v: [*map(np.array, v)]]
)
@pytest.mark.parametrize(("name", "value"), ONE_EACH)
def test_an_option_with_one_number_per_rank_takes_any_sequence(name: str, value: list, form: Any) -> None:
    got = HeteroDDPStrategy(**{name: form(value)}).options
    assert getattr(got, name) == value
    assert kinds(getattr(got, name)) == kinds(value)
    assert got == HeteroDDPStrategy(**{name: value}).options  # ranks with values of different types agree


def test_a_callback_and_amounts_of_memory_do_too() -> None:
    options = {"max_batch_size": "auto", "max_batch_memory": Items("8GiB", np.int64(1000), None)}
    assert HeteroDDPStrategy(**options).options.max_batch_memory == ["8GiB", 1000, None]
    callback = ResumableCheckpoint("folder", every_n_steps=np.int32(5), keep=np.int64(2))
    assert (callback.every_n_steps, callback.keep) == (5, 2)


@pytest.mark.parametrize("form", [tuple, lambda names: Items(*names), np.array])
def test_excluded_names_take_any_sequence(form: Any) -> None:
    names = EASGDStrategy(moving_rate=0.1, exclude=form(["*.bias", "norm*"])).exclude
    assert names == ("*.bias", "norm*")
    assert kinds(names) == {tuple, str}


NUMBERS = [
    (HeteroDDPStrategy, "global_batch_size", 8),
    (HeteroDDPStrategy, "max_batch_size", 8),
    (HeteroDDPStrategy, "min_batch_size", 2),
    (HeteroDDPStrategy, "ranks_per_node", 2),
    (HeteroDDPStrategy, "rebalance_every_n_steps", 3),
    (HeteroDDPStrategy, "timeout", 20.0),
    (NodeAverageStrategy, "every_n_steps", 5),
    (DASOStrategy, "global_every", 4),
    (DASOStrategy, "wait", 2),
    (DASOStrategy, "warmup", 7),
    (DASOStrategy, "cooldown", 0.25),
    (DASOStrategy, "threshold", 0.125),
    (EASGDStrategy, "tau", 6),
    (EASGDStrategy, "moving_rate", 0.25),
    (DiLoCoStrategy, "tau", 6),
    (DiLoCoStrategy, "outer_lr", 0.5),
    (DiLoCoStrategy, "fragments", 2),
    (DiLoCoStrategy, "delay", 2),
    (DiLoCoStrategy, "blend", 0.5),
    (DiLoCoAsyncStrategy, "tau", 6),
    (NoLoCoStrategy, "tau", 6),
    (GossipStrategy, "every_n_steps", 3),
    (GossipStrategy, "deadline", 2.5),
    (GossipStrategy, "seed", 4),
]


@pytest.mark.parametrize(("strategy", "name", "value"), NUMBERS)
def test_an_option_that_is_a_number_takes_any_kind(strategy: type, name: str, value: float) -> None:
    forms = [np.int64, np.uint8, np.array] if isinstance(value, int) else [np.float32, np.float64, Fraction]
    for form in forms:
        got = kept(strategy(**{name: form(value)}), name)
        assert got == value
        assert type(got) is type(value)


REFUSED = [
    (HeteroDDPStrategy, {"max_batch_size": True}),
    (HeteroDDPStrategy, {"global_batch_size": np.True_}),
    (HeteroDDPStrategy, {"ranks_per_node": True}),
    (HeteroDDPStrategy, {"balance": [True, 1.0]}),
    (HeteroDDPStrategy, {"balance": Items(1.0, "x")}),
    (HeteroDDPStrategy, {"balance": np.array([[1.0, 2.0]])}),
    (HeteroDDPStrategy, {"balance": np.array([1.0, math.nan])}),
    (HeteroDDPStrategy, {"max_batch_size": np.array([2.5, 1.0])}),
    (HeteroDDPStrategy, {"ranks_per_node": Items(2, 0)}),
    (EASGDStrategy, {"moving_rate": True}),
    (EASGDStrategy, {"moving_rate": 0.1, "tau": np.float64(3.0)}),
    (EASGDStrategy, {"moving_rate": 0.1, "exclude": np.array([1, 2])}),
]


@pytest.mark.parametrize(("strategy", "options"), REFUSED)
def test_what_is_no_number_of_the_kind_is_refused(strategy: type, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        strategy(**options)


@pytest.mark.parametrize("given", [[3.0, 1.0], (3.0, 1.0), Items(3.0, 1.0), np.array([3.0, 1.0])])
def test_an_option_by_position_is_refused_in_any_form(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="by name: balance="):
        HeteroDDPStrategy(given)
