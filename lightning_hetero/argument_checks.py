"""Checks of an option's value."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from lightning_hetero.errors import ConfigurationError


def one_of(name: str, value: object, known: Sequence[object]) -> None:
    """See that an option has one of some values.

    Raises:
        ConfigurationError: it has not.
    """
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(map(repr, known))}.")


def at_least_one(name: str, value: object, otherwise: str = "") -> None:
    """See that an option counts something: ``True`` does not, though Python takes it for 1.

    Args:
        name: of the option.
        value: which it has.
        otherwise: what else it might have been, for the message, such as ``", or None"``.

    Raises:
        ConfigurationError: it does not.
    """
    if type(value) is not int or value < 1:
        raise ConfigurationError(f"{name}={value!r} must be a whole number of at least 1{otherwise}.")


def is_number(value: object) -> bool:
    """Whether an option is a finite number; ``True`` and ``False`` are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def outer_rates(lr: object, momentum: object) -> None:
    """See that an outer step can have this learning rate and momentum.

    Raises:
        ConfigurationError: it cannot.
    """
    if not (is_number(lr) and is_number(momentum)) or lr <= 0 or not 0 <= momentum < 1:  # type: ignore[operator]
        raise ConfigurationError(
            f"outer_lr={lr!r}, outer_momentum={momentum!r}: the first must be above 0, the second at least 0 and "
            "below 1."
        )


def plain(value: Any) -> Any:
    """An option in Python's own types: numbers of any kind, and lists for arrays and other sequences.

    So ranks, checkpoints and checks need to know no others. Strings, lists and tuples keep their type.
    """
    if callable(tolist := getattr(value, "tolist", None)):  # of NumPy and PyTorch, scalars too
        return plain(tolist())
    if isinstance(value, list | tuple):
        return value if hasattr(value, "_fields") else type(value)(plain(one) for one in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(one) for one in value]
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value
