"""The layout is the architecture: who imports whom, who knows Lightning (from the source)."""

import ast
import inspect
from collections.abc import Iterator
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
#: What each part of the package may import of the others.
MAY = {
    "workload": set(),
    "comm": {"workload"},
    "forecast": {"workload", "comm"},
    "averaging": {"comm", "forecast"},
    "engine": {"averaging", "workload", "comm"},
    "launch": {"comm"},
    "strategies": {"engine", "averaging", "forecast", "workload", "comm", "launch"},
    "config": {"strategies", "launch"},
    "callbacks": {"strategies", "engine", "workload", "comm"},
    "demo": {"strategies", "callbacks", "workload"},
    "doctor": {*("strategies", "callbacks", "engine", "averaging", "workload", "comm", "launch", "config", "forecast")},
}


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported, but for those that only type checkers read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in ast.walk(node):
                inner.only_for_types = True  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if getattr(node, "only_for_types", False):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def within(module: str) -> str | None:
    """The part of this package to which a module belongs, if to one."""
    name, _, rest = module.partition(".")
    part = rest.split(".")[0]
    return part if name == "lightning_hetero" and part in MAY else None


def imported_by(part: str) -> Iterator[tuple[str, str]]:
    """Files of a part of the package, each with a module that it imports."""
    for file, tree in TREES.items():
        if file.startswith(f"{part}/"):
            yield from ((file, module) for module in imports(tree))


@pytest.mark.parametrize("part", MAY)
def test_imports_run_one_way(part: str) -> None:
    assert [pair for pair in imported_by(part) if within(pair[1]) not in {None, part, *MAY[part]}] == []


@pytest.mark.parametrize("part", ["engine", "averaging", "workload", "comm"])
def test_only_the_face_knows_lightning(part: str) -> None:
    face = ("lightning", "pytorch_lightning")
    wrong = [
        (file, module)
        for file, module in imported_by(part)
        if module.split(".")[0] in face or module == "lightning_hetero.lightning_compat"
    ]
    assert wrong == []


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
def test_a_strategy_has_three_levels_of_ours_at_most(strategy: type) -> None:
    ours = [kind.__name__ for kind in inspect.getmro(strategy) if kind.__module__.startswith("lightning_hetero")]
    assert len(ours) <= 3, ours
