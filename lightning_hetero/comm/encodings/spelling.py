"""How wires are spelled in options."""

from lightning_hetero.comm.encodings.encoding import Encoding
from lightning_hetero.comm.encodings.largest import Largest
from lightning_hetero.comm.encodings.rounded import Int4, Int8
from lightning_hetero.comm.wire import DTYPES
from lightning_hetero.errors import ConfigurationError

#: Spellings of the low-bit wires; a number such as 0.05 may stand after the colon.
LOW_BIT = ("int8", "int4", "topk:0.02")
_KNOWN = ", ".join(map(repr, (*DTYPES, *LOW_BIT)))


def encoding_of(wire: str) -> Encoding | None:
    """Make the encoding of a wire.

    Args:
        wire: ``"int8"``, ``"int4"``, ``"topk:0.02"`` (any density from 1/256 to 1) or ``"topk"``, which is the same;
            ``"fp32"``, ``"bf16"`` or ``"fp16"``: there is none.

    Raises:
        ConfigurationError: it is no wire.
    """
    if isinstance(wire, str) and wire in DTYPES:
        return None
    name, colon, density = wire.partition(":") if isinstance(wire, str) else ("", "", "")
    if name == "topk":
        return Largest(_density(wire, density if colon else "0.02"))
    if wire == "int8":
        return Int8()
    if wire == "int4":
        return Int4()
    raise ConfigurationError(f"wire={wire!r} must be one of {_KNOWN}.")


def _density(wire: str, spelled: str) -> float:
    try:
        density = float(spelled)
    except ValueError:
        density = 0.0
    if not 1 / 256 <= density <= 1:  # also refuses NaN
        raise ConfigurationError(
            f"wire={wire!r}: after the colon stands the part of the values that is sent, from 0.00390625 (1/256) to 1, "
            "such as 'topk:0.02' for 2%."
        )
    return density


def check_wire(wire: str) -> None:
    """See that an option is a wire, low-bit wires among them.

    Raises:
        ConfigurationError: it is not.
    """
    encoding_of(wire)


def only_wide_wires(wire: str, strategies: str) -> None:
    """See that an option is a wire of an algorithm that cannot take low-bit ones.

    Args:
        wire: the option.
        strategies: which cannot, and why; a clause for the message.

    Raises:
        ConfigurationError: it is not.
    """
    try:
        low = encoding_of(wire) is not None
    except ConfigurationError:
        raise ConfigurationError(f"wire={wire!r} must be one of {', '.join(map(repr, DTYPES))}.") from None
    if low:
        raise ConfigurationError(
            f"wire={wire!r}: {strategies}. Use one of {', '.join(map(repr, DTYPES))}; or hetero_node, hetero_daso, "
            "hetero_easgd, hetero_easgd_overlap, hetero_eamsgd or hetero_diloco, which also take "
            f"{', '.join(map(repr, LOW_BIT))}."
        )
