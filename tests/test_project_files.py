"""CITATION.cff, SECURITY.md and all places with the version: compared with the code and the pages."""

import ast
import re
from pathlib import Path

import pytest
import yaml
from docs_pages import ROOT, rows
from packaging.requirements import Requirement

import lightning_hetero

PACKAGE = Path(lightning_hetero.__file__).parent
TREES = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
SECURITY = ROOT / "SECURITY.md"


def test_all_say_the_same_version() -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert project.group(1) == lightning_hetero.__version__ == str(CITATION["version"])


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])  # the first one installs the second
def test_the_malicious_releases_of_lightning_are_never_installed(name: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    asked = {one.name: one.specifier for one in map(Requirement, re.findall(r'"(.+)"', listed.group(1)))}
    assert [version for version in ("2.5.2", "2.6.1", "2.6.2", "2.6.3", "2.6.6") if version in asked[name]] == [
        "2.5.2",
        "2.6.1",
        "2.6.6",
    ]
    for file in ("constraints.txt", "constraints-oldest.txt"):
        [pinned] = re.findall(rf"^{name}==(.+)$", (ROOT / file).read_text(), re.MULTILINE)
        assert pinned in asked[name]
    for page in (SECURITY, ROOT / "docs" / "promises.md"):
        assert {"2.6.2", "2.6.3", "2.6.6"} <= set(re.findall(r"2\.\d\.\d", page.read_text()))


def words(text: str) -> str:
    return re.sub(r"\W+", " ", text).lower()


def test_the_citation_has_what_the_format_requires() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(CITATION)
    for reference in CITATION["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference)
        assert ("journal" if reference["type"] == "article" else "conference") in reference
        assert all({"family-names", "given-names"} == set(author) for author in reference["authors"])
    assert CITATION["license"] in (ROOT / "pyproject.toml").read_text()


def test_the_papers_are_those_of_the_page_of_sources() -> None:
    """Title, first author and year, at the strategy that the reference names."""
    sources = (ROOT / "docs" / "sources.md").read_text()
    points = {re.match(r"`(\w+)`", point).group(1): point for point in sources.split("\n* ")[1:]}  # type: ignore[union-attr]
    found = set()
    for reference in CITATION["references"]:
        [strategy] = re.findall(r"hetero_\w+", reference["notes"])
        point, first = points[strategy], reference["authors"][0]
        assert words(reference["title"]) in words(point)
        assert f"{first['given-names']} {first['family-names']}" in point
        assert str(reference["year"]) in point
        found.add(strategy)
    assert found == {"hetero_ddp", "hetero_node", "hetero_daso", "hetero_easgd", "hetero_gossip"}


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def listens(call: ast.Call) -> bool:
    """Whether a call opens a socket on which others can connect."""
    name = ast.unparse(call.func)
    if name.endswith("TCPStore"):
        return any(key.arg == "is_master" and ast.unparse(key.value) == "True" for key in call.keywords)
    return name in ("socket.create_server", "listener.listen", "listener.bind")


def unpickles(call: ast.Call) -> bool:
    """Whether a call may run code that is in what it reads."""
    name, text = ast.unparse(call.func), ast.unparse(call)
    if name in ("torch.load", "pl_load"):
        return "weights_only=True" not in text
    return name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "_Unpacker")


def files_in(row: list[str]) -> set[str]:
    return {name for cell in row[:3] for name in re.findall(r"`([\w/]+\.py)`", cell)}


@pytest.mark.parametrize(("what", "kind"), [("listens", listens), ("unpickles", unpickles)])
def test_what_the_page_lists_is_what_the_code_does(what: str, kind: object) -> None:
    does = {file for file, tree in TREES.items() if any(kind(call) for call in calls(tree))}  # type: ignore[operator]
    listed = {name for row in rows(SECURITY) for name in files_in(row)}
    assert does <= listed
    assert len(does) >= 2
    assert all((PACKAGE / name).exists() for name in listed)


def test_where_a_token_is_asked_for_it_is_compared_in_constant_time() -> None:
    own = (PACKAGE / "comm/transport.py").read_text()
    assert "hmac.compare_digest(" in own
    assert not re.search(r"\btoken\s*[!=]=", own)
    assert "pickle" not in own


def test_one_class_opens_listening_sockets() -> None:
    """Of all sockets for ranks; stores of a job are PyTorch's, and ranks of one host meet at local sockets."""
    called = {file: {ast.unparse(call.func) for call in calls(tree) if listens(call)} for file, tree in TREES.items()}
    opens = {file for file, names in called.items() if any("TCPStore" not in name for name in names)}
    assert opens == {"comm/transport.py", "comm/shared_memory.py"}
    assert "AF_UNIX" in (PACKAGE / "comm/shared_memory.py").read_text()
    assert [file for file in TREES if "listening_socket(" in (PACKAGE / file).read_text()] == ["comm/transport.py"]
