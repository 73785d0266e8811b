"""Reads the documentation: its pages, their blocks of code, commands, links, and the tests that they name."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
#: Pages that stay as they were written, with commands and tests that may be gone.
ARCHIVE = sorted((ROOT / "docs" / "archive").glob("*.md"))


class Block(NamedTuple):
    """A block of code.

    Attributes:
        page: its file.
        line: of its first line of code.
        language: as the page says.
        code: its text.
        remark: the HTML comment right before it, if any.
    """

    page: Path
    line: int
    language: str
    code: str
    remark: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages."""
    pattern = re.compile(r"(?:^<!-- ?([^\n]*?) ?-->\n+)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(page, text[: found.start(3)].count("\n") + 1, found.group(2), found.group(3), found.group(1) or "")
        for page in PAGES
        for text in [page.read_text()]
        for found in pattern.finditer(text)
        if found.group(2) in languages
    ]


def inline_commands() -> list[Block]:
    """Commands within the text of a page."""
    pattern = re.compile(r"`((?:python|bash|mpiexec|torchrun|make|pip install|lightning-hetero) [^`]+)`")
    return [
        Block(page, text[: found.start()].count("\n") + 1, "bash", found.group(1).replace("\n", " "), "")
        for page in PAGES
        for text in [prose(page)]
        for found in pattern.finditer(text)
        if "..." not in found.group()
    ]


def commands(text: str) -> list[list[str]]:
    """The commands of a block, split into words; without comments, ``sudo`` and their variables."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" (?:&&|\|\|?|;|&) ", line + " "):
            words = shlex.split(part.rstrip(" &"), comments=True)
            while words and (words[0] in ("sudo", "export") or re.match(r"[A-Z_]+=", words[0])):
                words = words[1:]
            if words:
                found.append(words)
    return found


def prose(page: Path) -> str:
    """A page without its blocks of code, line for line."""

    def blank(found: re.Match) -> str:
        return "\n" * found.group().count("\n")

    return re.sub(r"^```.*?^```$", blank, page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets within the repository of the links of a page."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if not target.startswith(("http://", "https://"))]


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of all rows of a page's tables, without the table heads."""
    for table in re.findall(r"(?:^\|.*\n?)+", page.read_text(), re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def named_tests(text: str) -> list[tuple[str, str | None]]:
    """Files of tests that a text names, with a test's name or none; names of files may be patterns."""
    return re.findall(r"`((?:tests/[\w/]*)?test_[\w*]+\.py)(?:::(test_\w+))?`", text)


def files_named(name: str) -> list[Path]:
    """Files that a name or pattern stands for."""
    return sorted(ROOT.glob(name)) if name.startswith("tests/") else sorted((ROOT / "tests").rglob(name))
