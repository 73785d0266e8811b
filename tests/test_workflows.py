"""Workflows on GitHub: their commands are in the Makefile, their versions are the project's; publishing of docs."""

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_pages import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

FOLDER = ROOT / ".github" / "workflows"
FILES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
VERSIONS = runpy.run_path(str(ROOT / "docs" / "versions.py"))


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    return [(file, name, job) for file, content in FILES.items() for name, job in content["jobs"].items()]


def steps(job: dict[str, Any], key: str) -> list[Any]:
    return [step[key] for step in job["steps"] if key in step]


def makes() -> list[tuple[str, str]]:
    """Each call of make: the job, and the arguments."""
    return [
        (f"{file}/{name}", line.removeprefix("make "))
        for file, name, job in jobs()
        for text in steps(job, "run")
        for line in text.splitlines()
        if line.startswith("make ")
    ]


def pythons(job: dict[str, Any]) -> list[str]:
    """The versions of Python on which a job runs."""
    found = [step.get("python-version") for step in steps(job, "with") if "python-version" in step]
    matrix = job.get("strategy", {}).get("matrix", {}).get("python-version", [])
    return [version for name in found for version in (matrix if "matrix." in name else [name])]


# -- what they run ---------------------------------------------------------------------------------


def test_all_three_are_there() -> None:
    assert set(FILES) == {"docs", "release", "tests"}
    assert {target for _, line in makes() for target in [line.split()[0]]} == {
        *("lint", "test", "test-oldest", "test-long", "test-ray", "docs", "dist")
    }


@pytest.mark.parametrize(("job", "line"), makes(), ids=[f"{job} {line}" for job, line in makes()])
def test_what_make_is_asked_for_is_in_the_makefile(job: str, line: str) -> None:
    target, *variables = line.split()
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert target in phony.group(1).split()
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
    for variable in variables:
        name, equals, _ = variable.partition("=")
        assert equals
        assert re.search(rf"\$\({name}[):,]", MAKEFILE), f"{name} is no variable of the Makefile"


# -- versions --------------------------------------------------------------------------------------


def test_the_tests_run_on_each_version_of_python_that_the_project_names() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    least = re.search(r'requires-python = ">=(3\.\d+)"', PROJECT)
    assert least is not None
    assert named[0] == least.group(1)
    minors = [int(version.split(".")[1]) for version in named]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert pythons(FILES["tests"]["jobs"]["test"]) == named
    assert pythons(FILES["tests"]["jobs"]["oldest"]) == [named[0]]
    assert pythons(FILES["tests"]["jobs"]["newest"]) == [named[-1]]
    for file, name, job in jobs():
        assert set(pythons(job)) <= set(named), f"{file}/{name}"
    assert f'target-version = "py{least.group(1).replace(".", "")}"' in PROJECT
    assert f'python_version = "{least.group(1)}"' in PROJECT


def test_each_pinned_version_can_be_installed_on_each_python_that_takes_it() -> None:
    pins = [Requirement(line) for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    seen = 0
    for pin in pins:
        with contextlib.suppress(metadata.PackageNotFoundError):  # what the documentation needs is not installed
            needs = SpecifierSet(metadata.metadata(pin.name)["Requires-Python"] or "")
            taken = [one for one in named if pin.marker is None or pin.marker.evaluate({"python_version": one})]
            assert all(needs.contains(f"{one}.20") for one in taken), f"{pin} needs Python {needs}"
            seen += pin.specifier.contains(metadata.version(pin.name))
    assert seen > 10


@pytest.mark.parametrize("torch", ["", "2.4.0"])
def test_the_constraints_of_the_oldest(torch: str, tmp_path: Path) -> None:
    """They are made as in the Makefile: each package is pinned once."""
    for name in ("constraints.txt", "constraints-oldest.txt", "Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    ready = re.search(r"^\t@(awk .*?constraints.txt)$", MAKEFILE, re.MULTILINE | re.DOTALL)
    assert ready is not None
    command = ready.group(1).replace("$(OLDEST_TORCH)", torch).replace("$(OLDEST)/", "made-").replace("$$", "$")
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    lines = [line for line in (tmp_path / "made-constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")]
    pins = dict(re.fullmatch(r"([\w-]+)==([^;]+)(?:;.*)?", line).groups() for line in lines)  # type: ignore[union-attr]
    usual = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["lightning"] == "2.5.2"
    assert pins["torch"] == (torch or usual["torch"])
    assert pins["pytest"] == usual["pytest"]
    assert sum(line.startswith(("torch=", "lightning=")) for line in lines) == 2


# -- rights ----------------------------------------------------------------------------------------


def test_only_what_must_write_may() -> None:
    """The default is to read; only one job has each further right."""
    assert all(content["permissions"] == {"contents": "read"} for content in FILES.values())
    rights = {f"{file}/{name}": job["permissions"] for file, name, job in jobs() if "permissions" in job}
    assert rights == {"docs/publish": {"contents": "write"}, "release/publish": {"id-token": "write"}}


def test_a_release_is_built_from_its_tag_and_published_without_a_password() -> None:
    content = FILES["release"]
    assert content[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    publish = content["jobs"]["publish"]
    assert {"build", "test"} == set(publish["needs"])
    assert publish["environment"] == "pypi"
    assert steps(publish, "uses")[-1] == "pypa/gh-action-pypi-publish@release/v1"
    text = (FOLDER / "release.yml").read_text()
    assert "secrets." not in text
    assert "password" not in yaml.safe_dump(content)
    assert any("TAG=" in line for job, line in makes() if job == "release/build")


def test_actions_are_pinned_and_jobs_end() -> None:
    for file, name, job in jobs():
        assert job["timeout-minutes"] <= 120, f"{file}/{name}"
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@[\w/.]+", action) for action in steps(job, "uses")), f"{file}/{name}"


@pytest.mark.parametrize(("file", "name", "job"), jobs(), ids=[f"{file}/{name}" for file, name, _ in jobs()])
def test_shell_is_given_names_of_refs_as_variables(file: str, name: str, job: dict[str, Any]) -> None:
    """Text that a pull request can choose must not be read as a command."""
    assert not [text for text in steps(job, "run") if "${{" in text]


# -- docs of each version --------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "html"
    (folder / "_static").mkdir(parents=True)
    (folder / "index.html").write_text("first")
    (folder / "_static" / "site.css").write_text("")
    return folder


def publish(site: Path, pages: Path, name: str) -> None:
    command = [sys.executable, str(ROOT / "docs" / "versions.py"), str(site), str(pages), name]
    subprocess.run(command, check=True)


def test_versions_are_kept_and_listed(site: Path, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    (pages / ".git").mkdir(parents=True)
    (pages / "CNAME").write_text("kept")
    names = ["v1.9.0", "dev", "v1.10.0", "v1.10.0rc2", "v2.0.0rc1", "v0.1.0"]
    for name in names:
        VERSIONS["add"](site, pages, name)
    (site / "index.html").write_text("second")
    (site / "_static" / "site.css").unlink()
    publish(site, pages, "v1.9.0")
    listed = re.findall(r'href="(.*)/"', (pages / "index.html").read_text())
    assert listed == ["dev", "v2.0.0rc1", "v1.10.0", "v1.10.0rc2", "v1.9.0", "v0.1.0"]
    assert re.findall(r">([^<]*)</a> \(the newest release\)", (pages / "index.html").read_text()) == ["v1.10.0"]
    assert (pages / "v1.9.0" / "index.html").read_text() == "second"
    assert not (pages / "v1.9.0" / "_static" / "site.css").exists()
    assert (pages / "dev" / "index.html").read_text() == "first"
    assert (pages / "CNAME").read_text() == "kept"
    assert (pages / ".nojekyll").exists()


def git(*arguments: str, folder: Path) -> str:
    names = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    return subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_workflows_own_lines_publish(site: Path, tmp_path: Path) -> None:
    """In a clone, first without the branch; others have pushed between two publications."""
    [script] = steps(FILES["docs"]["jobs"]["publish"], "run")
    origin, clone = tmp_path / "origin.git", tmp_path / "clone"
    git("init", "--quiet", "--bare", "--initial-branch=main", str(origin), folder=tmp_path)
    git("clone", "--quiet", str(origin), str(clone), folder=tmp_path)
    (clone / "docs").mkdir()
    (clone / "docs" / "versions.py").write_text((ROOT / "docs" / "versions.py").read_text())
    git("add", ".", folder=clone)
    git("commit", "--quiet", "--message", "first", folder=clone)
    git("push", "--quiet", "origin", "HEAD:main", folder=clone)
    site.rename(clone / "html")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig")}
    for name in ("dev", "v1.0.0", "v1.0.0", "v1.1.0"):  # the second time there is nothing new
        subprocess.run(["bash", "-ec", script], cwd=clone, env={**variables, "NAME": name}, check=True)
        shutil.rmtree(clone / "pages")
        git("worktree", "prune", folder=clone)
    files = git("ls-tree", "-r", "--name-only", "gh-pages", folder=origin).split()
    assert {file.split("/")[0] for file in files} == {".nojekyll", "index.html", "dev", "v1.0.0", "v1.1.0"}
    assert git("log", "--format=%s", "gh-pages", folder=origin).split("\n")[:-1] == [
        f"Docs of {name}" for name in ("v1.1.0", "v1.0.0", "dev")
    ]
    assert "v1.1.0/" in git("show", "gh-pages:index.html", folder=origin)


@pytest.mark.parametrize("name", ["main", "v1.2", "../v1.2.3", "1.2.3", ""])
def test_what_is_no_version_is_not_published(site: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit, match="neither 'dev' nor the tag"):
        VERSIONS["add"](site, tmp_path / "pages", name)
    assert not (tmp_path / "pages").exists()


def test_an_empty_site_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make docs` first"):
        VERSIONS["add"](tmp_path, tmp_path / "pages", "dev")


def test_the_oldest_pytorch_is_that_of_the_project() -> None:
    [line] = [line for _, line in makes() if line.startswith("test-oldest")]
    asked = re.search(r"OLDEST_TORCH=([\d.]+)", line)
    least = re.search(r'"torch>=([\d.]+)"', PROJECT)
    assert asked is not None
    assert least is not None
    assert asked.group(1) == f"{least.group(1)}.0"


def test_what_the_oldest_versions_are_tested_with_exists() -> None:
    core = MAKEFILE.split("OLDEST_CORE :=")[1].split("\n\n")[0]
    [short] = re.findall(r"addprefix (tests/distributed/test_),([\w. ]+)\)", core)
    files = [short[0] + name for name in short[1].split()] + re.findall(r"tests/\w+/test_\w+\.py", core)
    assert len(files) >= 8
    assert [file for file in files if not (ROOT / file).exists()] == []
