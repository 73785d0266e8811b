"""Every public name says what it is, what it is given, and what it raises. Read from the source; nothing is run."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_hetero

PACKAGE = Path(lightning_hetero.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Public(NamedTuple):
    """A public module, class, function or method."""

    where: str
    node: ast.Module | ast.ClassDef | Function

    @property
    def text(self) -> str:
        return ast.get_docstring(self.node) or ""


def names() -> Iterator[Public]:
    for file in sorted(PACKAGE.rglob("*.py")):
        if not file.stem.startswith("_") or file.stem == "__init__":
            module = ast.parse(file.read_text())
            where = str(file.relative_to(PACKAGE.parent))
            yield Public(where, module)
            yield from _within(where, module)


def _within(where: str, parent: ast.Module | ast.ClassDef) -> Iterator[Public]:
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        if isinstance(node, Function) and "override" in map(ast.unparse, node.decorator_list):
            continue  # says what the method that it overrides says
        yield Public(f"{where}::{node.name}", node)
        if isinstance(node, ast.ClassDef):
            yield from _within(f"{where}::{node.name}", node)


PUBLIC = list(names())
CLASSES = [public for public in PUBLIC if isinstance(public.node, ast.ClassDef)]
ERRORS = {public.node.name for public in CLASSES if public.where.startswith("lightning_hetero/errors.py")}


def test_every_argument_of_a_class_is_explained() -> None:
    """Those of ``__init__``, and the fields of named tuples and dataclasses, by name, in their section."""
    missing = []
    for public in CLASSES:
        text = public.text
        of_init = next((n for n in public.node.body if isinstance(n, Function) and n.name == "__init__"), None)
        if of_init is not None:
            arguments = [a.arg for a in (*of_init.args.args, *of_init.args.kwonlyargs) if a.arg != "self"]
            missing += [f"{public.where}: {name}" for name in arguments if not explained(name, text)]
        if is_record(public.node):
            fields = [n.target.id for n in public.node.body if isinstance(n, ast.AnnAssign)]
            missing += [f"{public.where}: {n}" for n in fields if n[0] != "_" and not explained(n, text)]
    assert missing == []


def test_every_argument_section_is_of_arguments_that_exist() -> None:
    wrong = []
    for public in PUBLIC:
        node = public.node
        if isinstance(node, ast.ClassDef):
            node = next((n for n in node.body if isinstance(n, Function) and n.name == "__init__"), None)
        if isinstance(node, Function):
            a = node.args
            known = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None}
            wrong += [f"{public.where}: {name}" for name in section("Args", public.text) if name not in known]
    assert wrong == []


def test_every_error_that_a_function_raises_is_told() -> None:
    """If a public function itself raises one of this package's errors, a section names it."""
    missing = []
    for public in PUBLIC:
        if not isinstance(public.node, Function):
            continue
        raised = {
            n.exc.func.id
            for n in ast.walk(public.node)
            if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call) and isinstance(n.exc.func, ast.Name)
        }
        ours = {name for name in raised if name in ERRORS}
        missing += [f"{public.where}: {name}" for name in sorted(ours) if name not in section("Raises", public.text)]
    assert missing == []


def section(title: str, text: str) -> list[str]:
    """The names that a Google-style section explains."""
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n?)*)", text, re.MULTILINE)
    return re.findall(r"^ {4}\*{0,2}(\w+):", found.group(1), re.MULTILINE) if found else []


def explained(name: str, text: str) -> bool:
    return name in section("Args", text) + section("Attributes", text) or "for the meaning of each" in text


def is_record(node: ast.ClassDef) -> bool:
    of = {ast.unparse(base) for base in node.bases} | {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    return bool(of & {"NamedTuple", "dataclass"})


EXPORTED = {
    name: getattr(module, name)
    for module in (lightning_hetero.callbacks, lightning_hetero)
    for name in module.__all__
    if not name.startswith("__")
}


@pytest.mark.parametrize("name", EXPORTED)
def test_the_example_of_every_exported_name_runs(name: str, capsys: pytest.CaptureFixture) -> None:
    text = inspect.getdoc(EXPORTED[name]) or ""
    found = re.search(r"^Example.*::\n\n((?:(?: {4}.*)?\n?)+)", text, re.MULTILINE)
    assert found, f"{name} has no example"
    code = textwrap.dedent(found.group(1))
    assert name in code
    before = set(StrategyRegistry)
    try:
        exec(compile(code, f"the example of {name}", "exec"), {"__name__": f"example_of_{name}"})
    finally:
        for added in set(StrategyRegistry) - before:
            del StrategyRegistry[added]
