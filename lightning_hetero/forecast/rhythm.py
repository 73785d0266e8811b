"""How often to exchange, and how long to let an exchange last, from how many steps one takes."""

import math
from collections.abc import Sequence

#: Part of the steps' time for which replicas may wait.
PRICE = 0.05


def smallest_wait(exchange: float, every: int) -> int:
    """The fewest steps that hide an exchange in the background, at most until the next one begins.

    Args:
        exchange: how long it lasts, in steps.
        every: steps between the beginnings of two exchanges.

    Returns:
        At least 1.

    Example::

        >>> from lightning_hetero.forecast.rhythm import smallest_wait
        >>> smallest_wait(2.3, every=8), smallest_wait(0.0, every=8), smallest_wait(9.5, every=8)
        (3, 1, 8)
    """
    return min(every, max(math.ceil(exchange), 1))


def smallest_tau(exchanges: Sequence[float], delay: int, longest: int | None = None) -> int:
    """The least tau with exchanges that are hidden, or for which replicas wait at most a twentieth of the time.

    Args:
        exchanges: how long that of each fragment lasts, in steps.
        delay: steps for which an exchange may last in the background.
        longest: the largest tau; ``None``: any.

    Example: two fragments of 3 steps each, waited for, or hidden behind up to 4 steps::

        >>> from lightning_hetero.forecast.rhythm import smallest_tau
        >>> smallest_tau([3.0, 3.0], delay=0), smallest_tau([3.0, 3.0], delay=4)
        (120, 6)
    """
    waited = sum(max(0.0, each - delay) for each in exchanges)
    carried = sum(exchanges) if delay else 0.0  # one exchange after another: the links carry them all within tau
    least = max(math.ceil(waited / PRICE - 1e-9), math.ceil(carried - 1e-9), delay + 1)
    return least if longest is None else min(least, longest)
