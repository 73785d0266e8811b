"""The layout of the package, read from the source: imports between files and folders, and names."""

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import lightning
import pytest
from lightning.pytorch.strategies import DDPStrategy

import lightning_hetero
from lightning_hetero import lightning_compat
from lightning_hetero.strategies.table import ENTRIES

PACKAGE = Path(lightning_hetero.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in FILES}

#: The subclass of Lightning's strategy.
BASE = "strategies/base.py"
#: Files and folders of the package, each of which imports earlier ones only.
ORDER = (
    *(
        "version",
        "errors",
        "argument_checks",
        "checkpoint_sections",
        "comm",
        "replicas",
        "batching",
        "algorithms",
    ),
    *("lightning_compat", "checkpoint", "planning", "launch", "registration", "strategies", "config", "callbacks"),
    *("demo", "doctor", "selftest", "cli"),
)
#: They know nothing of Lightning.
WITHOUT_LIGHTNING = ORDER[: ORDER.index("lightning_compat")]
ROOT = "lightning_hetero"


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported, those included that only type checkers read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from {f"{base}.{name.name}" if f"{base}.{name.name}" in MODULES else base for name in node.names}


def module_of(file: str) -> str:
    return f"{ROOT}/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(file): file for file in TREES}
#: Of each module the others of this package that it imports.
GRAPH = {name: {other for other in imports(TREES[file]) if other in MODULES} for name, file in MODULES.items()}


def part_of(module: str) -> str:
    return module.split(".")[1]


def test_files_form_a_dag() -> None:
    """No two files import each other, by whatever way, type checkers' imports included."""
    TopologicalSorter(GRAPH).prepare()  # raises CycleError, with the circle


def test_a_circle_would_be_found() -> None:
    other = {**GRAPH, f"{ROOT}.errors": {f"{ROOT}.cli"}}
    with pytest.raises(CycleError):
        TopologicalSorter(other).prepare()


def test_folders_import_earlier_ones_only() -> None:
    face = {ROOT, f"{ROOT}.__main__"}  # they import what users name
    assert {part_of(name) for name in GRAPH if name not in face} == set(ORDER)
    wrong = [
        (name, other)
        for name, others in GRAPH.items()
        for other in others - {ROOT}
        if name not in face and ORDER.index(part_of(other)) > ORDER.index(part_of(name))
    ]
    assert wrong == []
    assert [name for name, others in GRAPH.items() if ROOT in others] == []


def test_only_the_face_knows_lightning() -> None:
    inner = [name for name in GRAPH if name != ROOT and part_of(name) in WITHOUT_LIGHTNING]
    assert len(inner) > 50
    known = [(name, other) for name in inner for other in imports(TREES[MODULES[name]])]
    assert [pair for pair in known if pair[1].split(".")[0] in ("lightning", "pytorch_lightning")] == []


def test_a_class_name_exists_once() -> None:
    names = Counter(n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


RIDDLES = {"What", "Who", "Whom", "Whose", "Where", "When", "How", "Which", "Why"}


def test_docstrings_say_what_a_thing_is() -> None:
    """The first sentence names it; none is a question without its mark."""
    assert [file for file, tree in TREES.items() if not ast.get_docstring(tree)] == []
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [(file, n) for file, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, kinds)]
    first = [(file, ast.get_docstring(n) or "") for file, n in nodes]
    assert [(file, text) for file, text in first if text and text.split()[0].rstrip(",:.") in RIDDLES] == []


def private(name: str) -> bool:
    """Whether a name is private."""
    return name.startswith("_") and not name.startswith("__")


def test_private_names_of_lightning_are_in_one_file() -> None:
    theirs = set()
    for folder in ("pytorch", "fabric"):
        for file in (Path(lightning.__file__).parent / folder).rglob("*.py"):
            theirs |= set(filter(private, names_made(ast.parse(file.read_text()))))
    assert len(theirs) > 500
    wrong: list[tuple[str, int, str]] = []
    for file, tree in TREES.items():
        if file == "lightning_compat.py":
            continue
        ours = set(names_made(tree)) - inherited_by(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
                wrong += [(file, node.lineno, name.name) for name in node.names if private(name.name)]
            if isinstance(node, ast.Attribute) and node.attr in theirs - ours:
                wrong.append((file, node.lineno, node.attr))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
                named = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
                wrong += [(file, node.lineno, name) for name in named if name in theirs - ours]
    assert [where for where in wrong if where[0] != BASE or where[2] not in lightning_compat.INHERITED] == []


def inherited_by(file: str) -> set[str]:
    """The private names that instances of a file's classes have from Lightning, so that they are not its own."""
    return set(filter(private, (*dir(DDPStrategy), *vars(DDPStrategy())))) if file == BASE else set()


def names_made(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and attributes that a module makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize(
    "strategy", dict.fromkeys(entry.strategy for entry in ENTRIES), ids=lambda strategy: strategy.__name__
)
def test_a_strategy_has_four_levels_of_ours_at_most(strategy: type) -> None:
    ours = [kind.__name__ for kind in inspect.getmro(strategy) if kind.__module__.startswith("lightning_hetero")]
    assert len(ours) <= 4, ours
