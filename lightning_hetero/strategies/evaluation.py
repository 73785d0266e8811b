"""How a batch is validated, tested or predicted: by the bare module, and what it logs counts by its samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn

from lightning_hetero._lightning import DataFetcherWrapper, evaluated_loader, fetched_batch, results_of
from lightning_hetero.comm.replica import share
from lightning_hetero.strategies.logged import count
from lightning_hetero.strategies.metrics import sync_anywhere
from lightning_hetero.workload.stream import EvaluatedStream

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


def evaluation_step(name: str, context: str) -> Callable[..., Any]:
    """Make a strategy's method that runs a step of the module on a batch.

    It goes around DDP, which would wait for the other ranks: these need not run the same number of batches.

    Args:
        name: of the strategy's method, and of the module's.
        context: the method of the precision plugin that makes the context to run in.
    """

    def step(self: "HeteroStrategy", *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else None
        fetched = _Fetched(source) if isinstance(source, DataFetcherWrapper) else None  # by the step itself
        samples = fetched or (lambda: _samples(source))
        results = results_of(self.trainer)
        count(results, self.collectives, samples, lambda: self.evaluated)
        loader = args[2] if len(args) > 2 else 0
        stream, steps = evaluated_loader(self.trainer, loader)
        own = isinstance(stream, EvaluatedStream)
        met = self.collectives.preceding(lambda: stream.before_collective(steps)) if own else nullcontext()
        with getattr(self.precision_plugin, context)(), self.collectives.weighing(samples), met:
            output = getattr(self.lightning_module, name)(*args, **kwargs)
        if results is not None:
            if loader == 0 and (len(args) < 2 or args[1] == 0):
                self.evaluated = 0.0
            found = samples()
            self.evaluated = None if found is None or self.evaluated is None else self.evaluated + found
            count(results, self.collectives, lambda: found, lambda: self.evaluated)  # the batch may go
        return output

    step.__name__ = name
    return step


_IGNORED = "_ddp_params_and_buffers_to_ignore"  # by which a module tells DDP, and Lightning, what not to share


@contextmanager
def values_shared(module: nn.Module, stage: str | None, device: torch.device) -> Iterator[None]:
    """Set a strategy up in this block; outside of a fit all ranks then have rank 0's values (collective).

    Lightning would share them on the model's device, of which gloo may know nothing. They go through the CPU instead,
    and so do the states of the model's metrics.

    Args:
        module: to be evaluated, or trained.
        stage: what the Trainer is to do. In a fit DDP, or the strategy, sees to the values.
        device: on which this rank computes.
    """
    if device.type != "cpu":
        sync_anywhere(module)
    if stage == TrainerFn.FITTING:
        yield
        return
    own, values = vars(module).get(_IGNORED), {**dict(module.named_parameters()), **dict(module.named_buffers())}
    setattr(module, _IGNORED, list(values))
    try:
        yield
    finally:
        if own is None:
            delattr(module, _IGNORED)
        else:
            setattr(module, _IGNORED, own)
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}  # on their device now
    share(value.data for name, value in values.items() if name not in (own or ()))


class _Fetched:
    """The samples of the batch that a step fetches, once it has done so; unknown if it fetches another number."""

    def __init__(self, batches: DataFetcherWrapper) -> None:
        self._fetcher, self._before = batches.data_fetcher, batches.fetched

    def __call__(self) -> float | None:
        return _samples(fetched_batch(self._fetcher)) if self._fetcher.fetched == self._before + 1 else None


def _samples(batch: Any) -> float | None:
    """The samples in a batch as Lightning counts them; ``None`` if they are unknown."""
    if isinstance(batch, Iterator):  # to look into it would use it up
        return None
    try:
        return float(extract_batch_size(batch))
    except Exception:  # a class of the user's can do anything when it is looked into
        return None
