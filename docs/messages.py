"""Lists the text of every error that the package raises, as `docs/messages.md`.

python docs/messages.py
"""

import ast
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "lightning_hetero"
HEAD = """# What errors say

Every message of the package, as it stands in the code, with `{...}` for what is filled in. Search it
for the message that you see.
What leads to them, and when: [mistakes and their messages](mistakes.md). Made by `python docs/messages.py`.
"""


def template(node: ast.expr) -> str:
    """The text of a string, or of parts put together, with ``{...}`` for what is not known before."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "{...}"


def raised(tree: ast.AST) -> list[tuple[str, str]]:
    """Class and text of the errors that a module raises, or makes for others to raise."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
            texts = [template(argument) for argument in node.args]
            found += [(node.func.id, text) for text in texts if len(text.replace("{...}", "")) > 20]
    return found


def told(tree: ast.AST) -> list[str]:
    """Texts that a module's functions return, for all ranks to raise together."""
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        docstring = ast.get_docstring(function, clean=False)
        for node in ast.walk(function):
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                text = template(node.value)
                if text != docstring and len(text.replace("{...}", "")) > 40:
                    found.append(text)
    return found


def page() -> str:
    """The page's text."""
    by_class: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for name, text in raised(tree):
            by_class.setdefault(name, set()).add(text)
        if path.stem in ("trainer_checks", "engine"):
            by_class.setdefault("Errors on all ranks together", set()).update(told(tree))
    lines = [HEAD]
    for name in sorted(by_class):
        lines += [f"## {name}", "", *(f"* `` {text.strip()} ``" for text in sorted(by_class[name])), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "messages.md").write_text(page())
