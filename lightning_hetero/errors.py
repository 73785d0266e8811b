"""One family of errors: each says what was wrong, where, the values, and what to do."""

import typing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

_T = typing.TypeVar("_T")  # the module has no other classes than errors


class HeteroError(Exception):
    """Base of every error that this package raises on purpose.

    Example::

        from lightning_hetero import HeteroDDPStrategy, HeteroError

        try:
            HeteroDDPStrategy(balance=[3.0, -1.0])
        except HeteroError as error:
            print(error)
    """

    on_every_rank = False  #: Whether all ranks raise it at the same point: then none of them is lost to the others.

    of_ranks: tuple[int, ...] = ()  #: Of an error that all ranks raise, on which of them the fault is, where known.

    def of_all(self, ranks: "Iterable[int]" = ()) -> "Self":
        """This error, which all ranks raise at the same point.

        Args:
            ranks: on which the fault is; empty: not known.
        """
        self.on_every_rank, self.of_ranks = True, tuple(ranks)
        return self


class ConfigurationError(HeteroError, ValueError):
    """An option of a strategy or callback has a value that cannot work.

    Example::

        from lightning_hetero import ConfigurationError, DASOStrategy

        try:
            DASOStrategy(global_every=0)
        except ConfigurationError as error:  # also a ValueError
            print(error)
    """


class ShareError(ConfigurationError):
    """Shares or limits that no split of the batch can satisfy."""


class DataError(HeteroError, ValueError):
    """A dataset, dataloader or batch that cannot be split or weighed."""


class UnsupportedError(HeteroError, RuntimeError):
    """A feature of Lightning or PyTorch that is refused here, with the reason."""


class DisagreementError(HeteroError, RuntimeError):
    """Ranks of one job differ in something that must be the same on all."""


class JoinRefusedError(DisagreementError):
    """A running job does not let this process take part: something of it does not fit."""


class LaunchError(HeteroError, RuntimeError):
    """The launcher's environment does not describe a job."""


class CommunicationError(HeteroError, RuntimeError):
    """Another rank did not answer within the deadline, or its connection broke."""


class MembershipLostError(CommunicationError):
    """This process does not take part in its job any more: the others go on without it, or too few remain."""


class CheckpointError(HeteroError, RuntimeError):
    """A checkpoint that cannot be written, or read."""


class NotFiniteError(HeteroError, RuntimeError):
    """A replica's values are infinite or NaN.

    Args:
        replicas: those that are, counted from 0.
        message: more about them, if known.
    """

    def __init__(self, replicas: list[int], message: str | None = None) -> None:
        super().__init__(message or f"replica(s) {replicas} hold values that are not finite.")
        self.replicas = replicas

    def __reduce__(self) -> tuple[type, tuple[list[int], str]]:
        return type(self), (self.replicas, str(self))


def not_none(value: "_T | None", what: str) -> "_T":
    """A value that is always there at this point.

    Args:
        value: it.
        what: its name, for the message.

    Raises:
        HeteroError: it is ``None``, because of a fault in this package or a class derived from one of it.
    """
    if value is None:
        raise HeteroError(
            f"{what} is missing, where it must be there. This is a fault of lightning_hetero, or of a class derived "
            "from one of its: please report it with this traceback."
        )
    return value
