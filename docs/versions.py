"""Adds a built site to a folder that has one for each version, and writes the first page, which lists them.

python docs/versions.py docs/_build/html pages v1.2.3   # or dev
"""

import argparse
import html
import re
import shutil
from pathlib import Path

RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)((?:a|b|rc)\d+)?")
DEV = "dev"
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lightning-hetero: documentation</title>
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}
</style>
<h1>lightning-hetero</h1>
<p>Documentation of
<ul>
{items}
</ul>
"""


def order(name: str) -> tuple[int, ...]:
    """Where a version stands: what is being developed last, a release after its candidates."""
    found = RELEASE.fullmatch(name)
    if found is None:
        return (10**9,)
    major, minor, patch = map(int, found.group(1, 2, 3))
    candidate = found.group(4)
    kind = ("a", "b", "rc").index(candidate.rstrip("0123456789")) if candidate else 3
    return (major, minor, patch, kind, int(re.sub(r"\D", "", candidate)) if candidate else 0)


def versions(pages: Path) -> list[str]:
    """The versions that are there, the newest first, and `dev` before all."""
    found = (path.name for path in pages.iterdir() if (path / "index.html").is_file())
    return sorted((name for name in found if name == DEV or RELEASE.fullmatch(name)), key=order, reverse=True)


def newest(names: list[str]) -> str | None:
    """The latest release that is no candidate; else the latest of all."""
    whole = [name for name in names if name != DEV and not RELEASE.fullmatch(name)[4]]  # type: ignore[index]
    return whole[0] if whole else next(iter(names), None)


def page(names: list[str]) -> str:
    """The first page."""
    remarks = {DEV: " (the main branch, not released)"}
    if (latest := newest(names)) not in (None, DEV):
        remarks[str(latest)] = " (the newest release)"
    items = [f'  <li><a href="{name}/">{html.escape(name)}</a>{remarks.get(name, "")}' for name in names]
    return PAGE.format(items="\n".join(items))


def add(site: Path, pages: Path, name: str) -> None:
    """Put a site in the place of the one under the same name, and write the first page.

    Args:
        site: as Sphinx has made it.
        pages: with a folder for each version.
        name: `dev`, or the tag of a release.

    Raises:
        SystemExit: the name is no version, or there is no site.
    """
    if name != DEV and not RELEASE.fullmatch(name):
        raise SystemExit(f"{name!r} is neither {DEV!r} nor the tag of a release, such as v1.2.3 or v1.2.3rc1.")
    if not (site / "index.html").is_file():
        raise SystemExit(f"{site} holds no index.html: run `make docs` first.")
    shutil.rmtree(pages / name, ignore_errors=True)
    shutil.copytree(site, pages / name, ignore=shutil.ignore_patterns(".buildinfo", ".doctrees"))
    (pages / ".nojekyll").touch()  # or GitHub leaves out folders that begin with "_"
    (pages / "index.html").write_text(page(versions(pages)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("site", type=Path, help="the folder that `make docs` has made")
    parser.add_argument("pages", type=Path, help="the folder with one for each version")
    parser.add_argument("name", help="dev, or the tag of a release")
    options = parser.parse_args()
    add(options.site, options.pages, options.name)
