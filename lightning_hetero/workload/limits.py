"""Shares and limits that the user has given, checked."""

import math
from collections.abc import Sequence

from lightning_hetero.errors import ConfigurationError, ShareError


def fixed_shares(balance: Sequence[float], world: int) -> list[float]:
    """Check relative shares given by the user.

    Raises:
        ConfigurationError: not one per rank, or a value that is negative, NaN, infinite, or all zero.
    """
    if not all(isinstance(share, int | float) and not isinstance(share, bool) for share in balance):
        raise ConfigurationError(f"balance={list(balance)}: shares are numbers, one per rank.")
    shares = [float(share) for share in balance]
    if len(shares) != world:
        raise ConfigurationError(
            f"balance={list(balance)} gives {len(shares)} shares for {world} ranks: give one each."
        )
    if not all(math.isfinite(s) and s >= 0 for s in shares) or not any(shares):
        raise ConfigurationError(
            f"balance={list(balance)}: shares are relative speeds, finite, at least 0, and not all 0."
        )
    return shares


def per_rank(name: str, value: int | Sequence[int], world: int) -> tuple[int, ...]:
    """Check limits given by the user: one number for all ranks, or one each.

    Raises:
        ConfigurationError: not whole numbers of at least 0, or not one per rank.
    """
    if not isinstance(value, int | list | tuple):
        raise ConfigurationError(f"{name}={value!r}: give a whole number of samples, or a list with one per rank.")
    limits = (value,) * world if isinstance(value, int) else tuple(value)
    if len(limits) != world:
        raise ConfigurationError(
            f"{name}={list(limits)} gives {len(limits)} limits for {world} ranks: one, or one each."
        )
    if any(type(n) is not int or n < 0 for n in limits):
        raise ConfigurationError(f"{name}={list(limits)}: limits are whole numbers of samples, at least 0.")
    return limits


def check_limits(low: Sequence[int], high: Sequence[int]) -> None:
    """See that no rank must take more than it may.

    Raises:
        ShareError: one must.
    """
    if any(least > most for least, most in zip(low, high, strict=True)):
        raise ShareError(f"min_batch_size={list(low)} exceeds max_batch_size={list(high)} on some rank.")
