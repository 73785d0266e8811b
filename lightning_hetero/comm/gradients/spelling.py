"""How the wires of gradients are spelled in options."""

from lightning_hetero.comm.encodings import LOW_BIT, encoding_of
from lightning_hetero.comm.wire import DTYPES
from lightning_hetero.errors import ConfigurationError

POWER_SGD = "powersgd"
#: Spellings of all wires of gradients; other numbers may stand after a colon.
GRADIENT_WIRES = (*DTYPES, *LOW_BIT, f"{POWER_SGD}:4")


def rank_of(wire: str) -> int | None:
    """The rank of the matrices that stand for gradients on a wire such as ``"powersgd:4"``; ``None`` on other wires.

    Raises:
        ConfigurationError: what stands after the colon is no rank.
    """
    name, colon, rank = wire.partition(":") if isinstance(wire, str) else ("", "", "")
    if name != POWER_SGD:
        return None
    if not colon or not (rank.isascii() and rank.isdigit()) or int(rank) < 1:
        raise ConfigurationError(
            f"wire={wire!r}: give the rank of the matrices that stand for gradients after a colon, a "
            "whole number of at least 1, such as 'powersgd:4'."
        )
    return int(rank)


def check_gradient_wire(wire: str) -> None:
    """See that an option is a wire of gradients.

    Raises:
        ConfigurationError: it is not.
    """
    if rank_of(wire) is not None:
        return
    try:
        encoding_of(wire)
    except ConfigurationError as error:
        if "after the colon" in str(error):
            raise
        known = ", ".join(map(repr, GRADIENT_WIRES))
        raise ConfigurationError(f"wire={wire!r} must be one of {known}.") from None
