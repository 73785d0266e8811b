"""Outcomes of Lightning's tests, and the differences between two sides. Uses files and strings only."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """Result of a test.

    Attributes:
        outcome: `passed`, `failed`, `skipped`, or `did not end` if its process was killed.
        why: the error, or the reason for which it was skipped.
        ddp: whether it made a strategy of the kind that is replaced.
    """

    outcome: str
    why: str = ""
    ddp: bool = False


Results = Mapping[str, Result]


def read(path: Path) -> dict[str, Result]:
    """The results in a file of the plugin; tests that were collected and have none did not end."""
    results: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        for test in entry.get("collected", ()):
            results.setdefault(_short(test), Result("did not end"))
        if "test" in entry:
            results[_short(entry["test"])] = Result(entry["outcome"], entry["why"], entry["ddp"])
    return results


def alone(results: Results) -> list[str]:
    """The tests that are skipped only because they ask for a process of their own."""
    return [test for test, result in results.items() if "Requires: [Standalone execution]" in result.why]


def differing(stock: Results, ours: Results) -> list[str]:
    """The tests that do not end alike."""
    tests = dict.fromkeys((*stock, *ours))
    return [test for test in tests if _outcome(stock, test) != _outcome(ours, test)]


def unexplained(stock: Results, ours: Results, expected: Mapping[str, str]) -> list[str]:
    """Differences that need work, in a line per test.

    Args:
        stock: results with Lightning's strategy.
        ours: results with the other one.
        expected: the reason for each difference that is known, by test.
    """
    found = differing(stock, ours)
    lines = [
        f"{test}: {_outcome(stock, test)} with stock, {_outcome(ours, test)} with ours"
        for test in found
        if test not in expected
    ]
    for test in expected:
        if test not in stock and test not in ours:
            lines.append(f"{test}: on the list of expected differences, but there is no such test")
        elif test not in found:
            lines.append(f"{test}: on the list of expected differences, but {_outcome(ours, test)} with both")
    return lines


def table(folders: Iterable[str], stock: Results, ours: Results) -> str:
    """Numbers by folder, as a table in Markdown."""
    rows = ["| folder | tests | of these with DDP | stock: passed, failed, skipped | ours: passed, failed, skipped |"]
    rows.append("|---|---:|---:|---:|---:|")
    for folder in (*folders, ""):
        tests = [test for test in dict.fromkeys((*stock, *ours)) if test.startswith(folder)]
        with_ddp = sum(any(test in side and side[test].ddp for side in (stock, ours)) for test in tests)
        numbers = []
        for side in (stock, ours):
            count = Counter(_outcome(side, test) for test in tests)
            failed = len(tests) - count["passed"] - count["skipped"]
            numbers.append(f"{count['passed']}, {failed}, {count['skipped']}")
        rows.append(
            f"| {f'`{folder}`' if folder else 'all'} | {len(tests)} | {with_ddp} | {numbers[0]} | {numbers[1]} |"
        )
    return "\n".join(rows)


def _short(test: str) -> str:
    """A test's id from Lightning's folder of tests on."""
    return test.removeprefix("tests/").removeprefix("tests_pytorch/")


def _outcome(results: Results, test: str) -> str:
    return results[test].outcome if test in results else "not there"
