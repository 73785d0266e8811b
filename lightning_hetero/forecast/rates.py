"""Rates as people write them."""

import re

from lightning_hetero.errors import ConfigurationError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def bytes_per_second(text: str) -> float:
    """A rate such as ``1gbit``, ``200mbit`` or ``125MB``, in bytes per second.

    Args:
        text: a number, then ``bit``, ``B``, ``byte`` or ``bytes``, perhaps after ``k``, ``m`` or ``g``.

    Raises:
        ConfigurationError: it is none, or could be of bits as well as of bytes.

    Example::

        >>> from lightning_hetero.forecast.rates import bytes_per_second
        >>> bytes_per_second("200mbit"), bytes_per_second("1.5 GB/s")
        (25000000.0, 1500000000.0)
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([kmg]?)(bit|bits|b|byte|bytes)(?:/s)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigurationError(f"{text!r} is no rate: write 1gbit, 200mbit or 125MB")
    number, unit, what = found.groups()
    if what == "b":
        raise ConfigurationError(
            f"{text!r} can be of bits or of bytes: write {number}{unit.lower()}bit or {number}{unit.upper()}B"
        )
    return float(number) * _UNITS[unit.lower()] / (8 if what.lower().startswith("bit") else 1)
