"""Where the parts of a training batch come from."""

from typing import Any

from lightning_hetero.workload.order import FixedBatches, GlobalBatches, WholeBatches, makes_whole_batches
from lightning_hetero.workload.sampler import ShareSampler
from lightning_hetero.workload.shared_stream import SharedStreamLoader
from lightning_hetero.workload.stream import Stream

Source = ShareSampler | Stream | SharedStreamLoader


def source_of(loader: Any) -> Source | None:
    """Where a loader of :class:`~lightning_hetero.strategies.loaders.Loaders` has its parts of batches from."""
    if isinstance(loader, Stream | SharedStreamLoader):
        return loader
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, ShareSampler) else None


def samples_in_order(batches: GlobalBatches) -> int:
    """Samples of an epoch; a number that is surely large enough where only batches can be counted."""
    length = len(batches.sampler)
    return length if isinstance(batches, FixedBatches) else length * 10**9 if length else 0


def with_whole_batches(loader: Any) -> Any:
    """A loader with a batch sampler, where its dataset makes whole batches from the lists of its sampler."""
    if makes_whole_batches(loader):
        batches = loader.sampler
        object.__setattr__(loader, "dataset", WholeBatches(loader.dataset))
        object.__setattr__(loader, "batch_sampler", batches)
    return loader


def with_batch_sampler(loader: Any, batch_sampler: Any) -> Any:
    """A loader with another batch sampler."""
    # DataLoader forbids this after its construction; going around it keeps subclasses and persistent workers intact.
    object.__setattr__(loader, "batch_sampler", batch_sampler)
    if isinstance(batch_sampler, ShareSampler):
        # The Trainer saves the position itself; these tell it that the loader resumes there.
        object.__setattr__(loader, "state_dict", dict)
        object.__setattr__(loader, "load_state_dict", lambda state: None)
    return loader
