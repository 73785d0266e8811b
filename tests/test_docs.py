"""READMEs and pages in docs/: their code runs, their links resolve, and all that they name exists."""

import argparse
import contextlib
import importlib.util
import inspect
import io
import os
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import sklearn.datasets  # noqa: F401  before modules are put back: its compiled parts cannot be loaded twice
import torch
from docs_pages import (
    ARCHIVE,
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    commands,
    files_named,
    inline_commands,
    links,
    named_tests,
    prose,
    rows,
)
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero

sys.path.insert(0, str(ROOT / "tests" / "distributed"))
from ranks import run
from virtual_time import virtual_time

ON_RANKS = "runs on 2 ranks"
OWN = {"train.py"}  # scripts of the reader's
OF_LIGHTNING_CLI = {"fit", "validate", "test", "predict"}
#: Programs of the system, with options that this test does not know.
OTHERS = (
    "apt|cat|cd|chmod|docker|hostname|ip|kill|kubectl|ls|pre-commit|ray|ruff|sbatch|scancel|scp|scontrol|squeue|srun|ssh|"
    "sysctl|tail|uv|wg|wg-quick"
)

PYTHON = [block for block in blocks("python") if not block.remark.startswith(("not run", ON_RANKS))]
COMMANDS = [
    (block, words) for block in (*blocks("bash", "sh", "console"), *inline_commands()) for words in commands(block.code)
]


# -- blocks of Python ----------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("block", PYTHON, ids=[block.name for block in PYTHON])
def test_python_blocks_run(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on the first of several nodes; Trainers are made, but start no ranks."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("fit", "validate", "test", "predict"):
        monkeypatch.setattr(pl.Trainer, name, _only_its_arguments(getattr(pl.Trainer, name)))
    monkeypatch.chdir(tmp_path)
    module = Module()
    torch.save({"state_dict": module.state_dict()}, "model.ckpt")
    ours = {name: getattr(lightning_hetero, name) for name in lightning_hetero.__all__}
    names = {**vars(pl), **ours, "torch": torch, "module": module, "model": module}
    names["loader"] = names["train_loader"] = DataLoader(TensorDataset(torch.randn(8, 2)))
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block.code, block.name, "exec"), names)


def _only_its_arguments(function: Any) -> Any:
    signature = inspect.signature(function)
    return lambda *args, **kwargs: signature.bind(*args, **kwargs) and None


def test_few_blocks_are_not_run_and_say_why() -> None:
    remarks = {block.name: block.remark for block in blocks("python") if block.remark.startswith("not run")}
    assert all(re.match(r"not run: \w{3}", remark) for remark in remarks.values()), remarks
    assert len(remarks) <= 2, remarks
    assert len(PYTHON) > 10


def _script(code: str, folder: str) -> str:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as output, virtual_time():
        exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def test_the_first_script_runs_and_finds_the_fast_rank(tmp_path: Path) -> None:
    [block] = [block for block in blocks("python") if block.remark == ON_RANKS]
    printed, _ = run(_script, 2, block.code, str(tmp_path))
    shares = [tuple(map(int, pair)) for pair in re.findall(r"shares \((\d+), (\d+)\)", printed)]
    assert shares[0] == (32, 32)
    assert 50 <= shares[-1][0] <= 54  # 52 by hand; shares do not move for the last few percent of a step
    assert sum(shares[-1]) == 64


# -- commands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=[f"{b.name} {' '.join(w)[:60]}" for b, w in COMMANDS])
def test_commands_exist_and_take_these_options(
    block: Block, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Only options are parsed; nothing is run."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", _read_and_stop(argparse.ArgumentParser.parse_args))
    monkeypatch.setattr(StrategyRegistry, "register", lambda *args, **kwargs: None)  # what an example adds, stays out
    for word in words:  # whatever the program
        if re.match(r"(examples|benchmarks|docs|tests|lightning_hetero)/", word) and "*" not in word:
            assert (ROOT / word).exists() or word.startswith("docs/_build"), word
    try:
        _check(words, monkeypatch)
    except SystemExit:
        pytest.fail(f"{block.name}: {' '.join(words)}\n{capsys.readouterr().err}")


class Read(Exception):  # noqa: N818 - no error
    """The options were read without an error."""


def _read_and_stop(parse: Any) -> Any:
    def read(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        raise Read

    return read


def _check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), rest[0]
    elif program == "pip":
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            for name in extra.split(","):
                assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), name
    elif program in ("mpiexec", "mpirun"):
        first = rest.index("-n")
        assert rest[first + 1].isdigit()
        _check(rest[first + 2 :], monkeypatch)
    elif program == "torchrun" or rest[:2] == ["-m", "torch.distributed.run"]:
        _check_torchrun(rest if program == "torchrun" else rest[2:], monkeypatch)
    elif program == "lightning-hetero":
        assert "lightning-hetero = " in (ROOT / "pyproject.toml").read_text()
        _check_module("lightning_hetero", rest, monkeypatch)
    elif program.startswith("python") and rest[0] == "-m":
        _check_module(rest[1], rest[2:], monkeypatch)
    elif program.startswith("python"):
        _check_script(rest[0], rest[1:], monkeypatch)
    elif program == "bash" or "/" in program:
        path = ROOT / (rest[0] if program == "bash" else program)
        assert path.exists(), path
        assert program == "bash" or os.access(path, os.X_OK), f"{path} cannot be executed"
    else:
        assert re.fullmatch(OTHERS, program), f"{program}: let this test know how to check it"


def _check_torchrun(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    options, _ = get_args_parser().parse_known_args(arguments)
    if options.module:
        _check_module(options.training_script, options.training_script_args, monkeypatch)
    else:
        _check_script(options.training_script, options.training_script_args, monkeypatch)


def _check_module(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec(name) is not None, name
    if name == "lightning_hetero" and arguments and arguments[0].endswith(".py"):
        _check_script(arguments[0], arguments[1:], monkeypatch)
    elif name == "lightning_hetero" and arguments and arguments[0] not in OF_LIGHTNING_CLI:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Read):
            runpy.run_module(name, run_name="__main__")


def _check_script(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if name in OWN:
        return
    path = ROOT / name
    assert path.exists(), path
    source = (path / "__main__.py" if path.is_dir() else path).read_text()
    if "import ray" in source and "ray" not in packages_distributions():
        for option in (word for word in arguments if word.startswith("--")):
            assert f'.add_argument("{option}"' in source, option
    elif arguments and (".parse_args(" in source or "jobs.options(" in source):
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        sys.path.insert(0, str(path if path.is_dir() else path.parent))
        with pytest.raises(Read):
            runpy.run_path(str(path), run_name="__main__")
    else:
        assert not arguments or "LightningCLI" in source, f"{path} takes no options"


# -- links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES + ARCHIVE, ids=[str(page.relative_to(ROOT)) for page in PAGES + ARCHIVE])
def test_links_resolve(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), f"{link}: there are {sorted(anchors(target))}"


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    docs = [page for page in PAGES + ARCHIVE if page.is_relative_to(index.parent) and page != index]
    pages = {str(page.relative_to(index.parent).with_suffix("")) for page in docs}
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(), re.MULTILINE | re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(pages)
    assert {link.removesuffix(".md") for link in links(index) if not link.startswith("images/")} == pages


# -- tests that pages name -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_named_tests_exist(page: Path) -> None:
    text = prose(page)
    for name, function in named_tests(text):
        files = files_named(name)
        assert files, f"{name}: no such file"
        if function:
            assert any(f"def {function}(" in file.read_text() for file in files), f"{name} has no {function}"
    for ending in re.findall(r"`\.\.\.(\w+)`", text):
        assert any(re.search(rf"def test_\w+{ending}\(", file.read_text()) for file in files_named("test_*.py")), ending


def test_every_mistake_is_provoked_by_a_test() -> None:
    """The error of each row is in the test file that a comment in the row names, or in test_refusals.py."""
    checked = 0
    for error, remedy in rows(ROOT / "docs" / "mistakes.md"):
        named = [name for name, _ in named_tests(error)] or ["test_refusals.py"]
        files = [file for name in named for file in files_named(name)]
        for kind in re.findall(r"`(\w+Error)`", re.sub(r'".*?"', "", error)):
            assert any(kind in file.read_text() for file in files), f"{error}: {kind} is not in {named}"
            assert hasattr(lightning_hetero.errors, kind)
            checked += 1
        assert remedy
    assert checked > 45


def test_every_error_is_in_the_table() -> None:
    named = {kind for row in rows(ROOT / "docs" / "mistakes.md") for kind in re.findall(r"`(\w+Error)`", row[0])}
    kinds = {name for name, kind in vars(lightning_hetero.errors).items() if inspect.isclass(kind)}
    assert kinds - {"HeteroError"} == named


@pytest.mark.parametrize("page", ["mistakes.md", "features.md"])
def test_pages_show_no_tests(page: str) -> None:
    """Names of tests are only in the source of the pages."""
    assert not named_tests(re.sub(r"<!--.*?-->", "", (ROOT / "docs" / page).read_text()))


def test_every_feature_names_its_test() -> None:
    for row in rows(ROOT / "docs" / "features.md"):
        assert named_tests(row[0]) or "the same" in row[0], row
