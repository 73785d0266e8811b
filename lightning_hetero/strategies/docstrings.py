"""Docstrings of strategies: each option is explained where it is defined, once, and shown wherever it is an option."""

import inspect
import re
from collections.abc import Iterable, Sequence


def documented(text: str | None, options: Iterable[str], explained_by: Sequence[type]) -> str:
    """The docstring of a strategy, with all of its options.

    Args:
        text: what the strategy does, and explanations that go before those of others.
        options: names, in order.
        explained_by: classes that explain options, and what is raised; where two explain the same, the first counts.
    """
    known: dict[str, str] = {}
    errors: dict[str, str] = {}
    for doc in (*(kind.__doc__ for kind in reversed(explained_by)), text):
        known |= {name.lstrip("*"): f"{name}: {what}" for name, what in section(doc, "Args").items()}
        errors |= section(doc, "Raises")
    known["kwargs"] = "**kwargs: further options, those of :class:`~lightning.pytorch.strategies.DDPStrategy`."
    lines = [known[name] for name in options if name in known]
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
