"""Releases: the sdist and the wheel hold what they should, and the wheel works without this checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from docs_pages import ROOT, blocks
from packaging.requirements import Requirement

pytestmark = pytest.mark.long

FIT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_hetero import HeteroMonitor

trainer = Trainer(
    strategy="hetero_ddp", accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[HeteroMonitor(report="report")],
)
trainer.fit(BoringModel())
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made of it, as `make dist` makes them."""
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "_build"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel; requirements come from the environment of these tests."""
    folder = tmp_path_factory.mktemp("environment")
    [wheel] = built.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    found = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", found, "install", "--quiet", "--no-deps", "--no-index", wheel)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return found


def clean() -> dict[str, str]:
    """The variables of this process, without those by which a child would find this checkout; with MPI's library."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return {**found, "LD_LIBRARY_PATH": f"{sys.prefix}/lib:{found.get('LD_LIBRARY_PATH', '')}"}


def run(*command: object, folder: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=clean(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("lightning_hetero/")}
    kept = {str(file.relative_to(ROOT)) for file in (ROOT / "lightning_hetero").rglob("*.py")}
    assert package == kept | {"lightning_hetero/py.typed", "lightning_hetero/callbacks/report.html"}
    assert len(kept) > 100
    rest = {name.split("/", 1)[1] for name in names - package}
    assert all(name.split("/")[0].endswith(".dist-info") for name in names - package)
    assert rest == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_sdist_holds_what_its_tests_and_docs_need(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in ("Makefile", "constraints.txt", "docs/conf.py", "examples/own_averager.py", "tests/test_dist.py"):
        assert name in names
    assert not [name for name in names if name.startswith((".", "docs/_build")) or name.endswith(".pyc")]


def test_its_dependencies_are_those_of_the_project(python: Path) -> None:
    script = "from importlib.metadata import requires; print('\\n'.join(requires('lightning-hetero')))"
    needed = [line for line in run(python, "-c", script, folder=python.parent).splitlines() if "extra ==" not in line]
    text = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert text is not None
    # A build writes a requirement's conditions in an order of its own.
    declared = [line.split("#")[0] for line in text.group(1).splitlines()]
    wanted = re.findall(r'"([^"]+)"', "\n".join(declared))
    assert sorted(map(Requirement, needed), key=str) == sorted(map(Requirement, wanted), key=str)
    assert requires("lightning-hetero")  # of these tests' own environment


def test_the_readmes_first_script_runs_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    first = next(block for block in blocks("python") if block.page == ROOT / "README.md")
    assert "import lightning_hetero" in first.code
    shown = "print(lightning_hetero.__file__, type(trainer.strategy).__name__, trainer.num_devices)"
    (tmp_path / "first.py").write_text(f"{first.code}\n{shown}\n")
    where, strategy, ranks = run(python, "first.py", folder=tmp_path).split()[-3:]
    assert Path(where).is_relative_to(python.parents[1])
    assert (strategy, ranks) == ("HeteroDDPStrategy", "4")


def test_a_fit_writes_its_report(python: Path, tmp_path: Path) -> None:
    """The page is made from a file that is not a Python module."""
    (tmp_path / "fit.py").write_text(FIT)
    run(python, "fit.py", folder=tmp_path)
    [page] = (tmp_path / "report").rglob("*.html")
    assert "<h1>" in page.read_text()
    assert "$title" not in page.read_text()
    assert page.with_name("figures.json").exists()


def test_the_command_is_installed(python: Path, tmp_path: Path) -> None:
    output = run(python.parent / "lightning-hetero", "strategies", folder=tmp_path)
    assert "hetero_ddp" in output
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert run(python.parent / "lightning-hetero", "--version").split() == ["lightning-hetero", version.group(1)]


@pytest.mark.parametrize("tag", ["v9.8.7", "9.8.7"])
def test_a_tag_of_another_version_is_not_built(tag: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "constraints.txt").touch()
    ready = tmp_path / ".venv-dist" / ".ready"
    ready.parent.mkdir()
    ready.touch()
    done = subprocess.run(["make", "dist", f"TAG={tag}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"TAG={tag}, but pyproject.toml says version = " in done.stdout
    assert not (tmp_path / "dist").exists()
