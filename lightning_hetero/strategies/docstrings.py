"""Docstrings of strategies: each option is explained where it is defined, once, and shown wherever it is an option."""

import inspect
import re
from collections.abc import Iterable, Sequence


def documented(text: str | None, averager: type, options: Sequence[str], strategies: Sequence[type]) -> str:
    """A strategy's docstring with all of its options.

    Args:
        text: what the strategy does.
        averager: explains its own options, and what it raises.
        options: names, in order.
        strategies: the strategy class and its bases, which explain the others.
    """
    kinds = (*averager.__mro__, *strategies[1:])
    known: dict[str, str] = {}
    for kind in reversed(kinds):
        known |= {name: what for name, what in section(kind.__doc__, "Args").items() if not name.startswith("*")}
    lines = [f"{name}: {known[name]}" for name in options if name in known]
    lines.append("**kwargs: further options, those of :class:`~lightning.pytorch.strategies.DDPStrategy`.")
    errors = {"ConfigurationError": "a value that cannot work."}
    for kind in reversed(averager.__mro__):
        errors |= section(kind.__doc__, "Raises")
    raised = [f"{name}: {what}" for name, what in errors.items()]
    body = without(text, ("Args", "Attributes", "Raises"))
    return f"{body}\n\nArgs:\n{_indented(lines)}\n\nRaises:\n{_indented(raised)}\n"


def section(text: str | None, title: str) -> dict[str, str]:
    """What a Google-style section of a docstring explains, by name."""
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n?)*)", inspect.cleandoc(text or ""), re.MULTILINE)
    parts = re.split(r"^ {4}(\*{0,2}\w+): ?", found.group(1), flags=re.MULTILINE) if found else []
    return {name: what.rstrip() for name, what in zip(parts[1::2], parts[2::2], strict=True)}


def without(text: str | None, titles: Iterable[str]) -> str:
    """A docstring without some of its sections."""
    clean = inspect.cleandoc(text or "")
    for title in titles:
        clean = re.sub(rf"^{title}:\n(?:(?: .*)?\n?)*", "", clean, flags=re.MULTILINE)
    return clean.strip()


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
