"""What to say of parameters that become trainable, or frozen, during a fit."""

from collections.abc import Iterable

#: What ranks must have done alike.
CHANGED = "the parameters that have become trainable or frozen"


def in_mid_epoch(names: Iterable[str]) -> str:
    """That it may not happen there.

    Args:
        names: of the parameters.
    """
    return (
        f"{_listed(names)} became trainable, or frozen, in mid-epoch; replicas agree on what is trainable at the "
        "beginning of an epoch. Change it there, as in on_train_epoch_start, or use hetero_ddp."
    )


def cannot_regrow(averager: str, names: Iterable[str]) -> str:
    """That an averager does not know how.

    Args:
        averager: name of its class.
        names: of the parameters.
    """
    return (
        f"{_listed(names)} became trainable, or frozen, during the fit; {averager} does not say that it can go on with "
        "other parameters. Let it say so (facts = Facts(regrows=True)), unfreeze all before the fit, or use hetero_ddp."
    )


def _listed(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first} and {len(more)} more" if more else first
