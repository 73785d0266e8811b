"""What kinds of training loaders there are, and which of them cannot be split."""

from typing import Any, Literal

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader

from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.workload.order import has_own_batches
from lightning_hetero.workload.shared_stream import SharedStream

#: Batches of a map-style dataset, which any rank can take; of each rank's own, with sizes that can be chosen; or not.
#: Or a stream that all ranks read alike.
Kind = Literal["map", "shared stream", "resizable stream", "stream"]


def kind_of(loader: object, sharded_by_user: bool, sized_by_user: bool, balance_iterable: bool) -> Kind:
    """What kind of training loader this is.

    Args:
        loader: of the user's.
        sharded_by_user: whether it yields this rank's part of the data.
        sized_by_user: whether the user has given shares, a batch size or limits.
        balance_iterable: whether measured shares may move where ranks have data of their own.

    Raises:
        UnsupportedError: it cannot be what the options ask for.
    """
    if not isinstance(loader, DataLoader):
        return "stream"
    if getattr(loader, "in_order", True) is False and loader.num_workers > 1:
        raise UnsupportedError(
            "DataLoader(in_order=False) delivers batches in any order, so the weights of the batches are unknown. "
            "Use in_order=True."
        )
    if isinstance(loader.dataset, SharedStream):
        if loader.batch_size is None:
            raise UnsupportedError(
                "a DataLoader of a SharedStream needs a batch_size: the strategy makes the batches. Give one."
            )
        return "shared stream"
    if has_iterable_dataset(loader) or sharded_by_user:
        resizable = has_iterable_dataset(loader) and sized_len(loader) is None and loader.batch_size is not None
        if resizable and (balance_iterable or sized_by_user):
            return "resizable stream"
        if sized_by_user:
            raise UnsupportedError(
                "fixed shares, global_batch_size and limits per rank need batches that can be sized here: those of "
                "a map-style dataset, or of an iterable one without a length. Yours are sized by your own "
                "DataLoader: remove these options, or set its batch_size on each rank."
            )
        if balance_iterable:
            raise UnsupportedError(
                "balance_iterable=True needs an iterable dataset without a length, and a DataLoader with a "
                "batch_size: here the sizes of batches, or their number, are settled. Remove the option, or the "
                "dataset's `__len__`."
            )
        return "stream"
    if problem := no_batches(loader, "training"):
        raise problem
    return "map"


def no_batches(loader: DataLoader, name: str) -> HeteroError | None:
    """Why a loader of a map-style dataset has no batches that can be split, if so."""
    otherwise = "or shard the data yourself and set Trainer(use_distributed_sampler=False)."
    if loader.batch_sampler is None:
        return UnsupportedError(
            f"the {name} DataLoader has batch_size=None: the dataset makes the batches, and there is nothing to split. "
            "Give a batch_size; a sampler of lists of indices (torch.utils.data.BatchSampler), if the dataset takes "
            f"lists; {otherwise}"
        )
    if has_own_batches(loader) and sized_len(loader.batch_sampler) is None:
        return UnsupportedError(
            f"the {name} DataLoader's batch sampler {type(loader.batch_sampler).__name__} has no length, so that "
            f"nobody knows how many batches an epoch has. Give it a `__len__`, {otherwise}"
        )
    return None


def described(loader: Any, kind: Kind, agreed: bool) -> dict[str, Any]:
    """What must be the same on every rank, by what a message calls it.

    Args:
        loader: a training or evaluation loader.
        kind: of training loader, or ``"map"``.
        agreed: whether rank 0 sends the order of the samples.
    """
    if kind == "stream":
        return {}
    if kind != "map":  # a plan needs to know the size of all ranks' batches together
        return {"batch_size": loader.batch_size}
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return {
        # Rank 0 sends such an order when it is drawn: with workers at once, without them at the first batch.
        "num_workers above 0, with a sampler of yours": agreed and loader.num_workers > 0,
        "samples": sized_len(loader.dataset),
        "batch_size": loader.batch_size,
        "batch sampler": type(loader.batch_sampler).__name__,
        "its batches": sized_len(loader.batch_sampler) if has_own_batches(loader) else None,
        "drop_last": loader.drop_last,
        "sampler": type(sampler).__name__,
        "seed (seed_everything)": getattr(sampler, "seed", None),
    }
