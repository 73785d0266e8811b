"""Lightning's own `ddp*` names, taken over by this package; and what a job does under either."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry
from ranks import run

from lightning_hetero import HeteroDDPStrategy

NAMES = [name for name in StrategyRegistry.available_strategies() if name.startswith("ddp")]


@contextmanager
def taken_over(**options: Any) -> Iterator[None]:
    """Lightning's names stand for `HeteroDDPStrategy` with these options."""
    before = {name: StrategyRegistry[name] for name in NAMES}
    for name, entry in before.items():
        StrategyRegistry.remove(name)
        StrategyRegistry.register(name, HeteroDDPStrategy, entry["description"], **{**entry["init_params"], **options})
    try:
        yield
    finally:
        StrategyRegistry.update(before)


def both(job: Callable[..., Any], *args: Any, balance: Any = (3.0, 1.0), **kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Results of a job on two ranks: with Lightning's `ddp`, and with ours in its place and uneven shares."""
    return run(_theirs, 2, job, *args, **kwargs), run(_ours, 2, balance, job, *args, **kwargs)


def _theirs(job: Callable[..., Any], *args: Any) -> Any:
    warnings.filterwarnings("ignore", "Using `DistributedSampler` with the dataloaders")  # which repeat samples
    return job(*args)


def _ours(balance: Any, job: Callable[..., Any], *args: Any) -> Any:
    with taken_over(balance=list(balance) if isinstance(balance, tuple) else balance):
        return job(*args)
