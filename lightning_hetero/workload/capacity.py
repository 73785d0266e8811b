"""How many samples of a batch fit into a rank's memory: the search, and how memory is written."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from lightning_hetero.errors import ConfigurationError

#: The part of the samples that fit which a rank takes: memory gets fragmented, and other samples can be longer.
USED = 0.9
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest batch that fits, by doubling until one does not, then by bisecting.

    Args:
        fits: tries a number of samples.
        least: samples to begin with.
        most: samples beyond which nothing is tried.

    Returns:
        Between ``least`` and ``most``; 0 if not even ``least`` fit.
    """
    good, bad, wanted = 0, most + 1, min(least, most)
    while bad - good > 1:
        if fits(wanted):
            good = wanted
        else:
            bad = wanted
            if bad <= least:
                return 0
        wanted = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def usable(fitting: int, least: int, most: int) -> int:
    """Samples that a rank may take, of those that fit.

    Args:
        fitting: samples that fit.
        least: what a rank takes at least.
        most: the whole batch. Where it fits, there is nothing to be careful about.
    """
    return most if fitting >= most else max(least, int(USED * fitting))


def bytes_of(name: str, value: Any) -> int | None:
    """Read an amount of memory.

    Args:
        name: of the option, for the error.
        value: bytes, or a number with a unit such as ``"8GiB"`` (1024 ** 3 bytes) or ``"500 MB"`` (1000 ** 2).

    Raises:
        ConfigurationError: it is neither, or not above 0.
    """
    if value is None:
        return None
    amount: float = value if type(value) is int else 0
    if isinstance(value, str) and (parts := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.I)):
        number, unit, binary = parts.groups()
        amount = float(number) * (1024 if binary else 1000) ** _UNITS[unit.upper()]
    if amount < 1:
        raise ConfigurationError(
            f"{name}={value!r}: give a number of bytes, or a text such as '8GiB' or '500MB', above 0."
        )
    return int(amount)


def memory_per_rank(name: str, value: Any, world: int | None = None) -> list[int | None]:
    """Read what each rank may use: one amount of memory for all ranks, or one each.

    Args:
        name: of the option, for the error.
        value: an amount, ``None``, or a list of these.
        world: number of ranks; ``None`` if nobody knows yet.

    Raises:
        ConfigurationError: an amount cannot be read, or there is not one per rank.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [bytes_of(name, value)] * (world or 1)
    if world is not None and len(value) != world:
        raise ConfigurationError(f"{name}={list(value)} gives {len(value)} limits for {world} ranks: one, or one each.")
    return [bytes_of(name, one) for one in value]
