"""Weights after each step, bit for bit those that ``trajectories.json`` holds."""

import json

import pytest
import trajectories
from trajectories import CASES, RECORD, run_all

from lightning_hetero.strategies.table import ENTRIES

#: Their numbers depend on the order of ranks; other tests compare conserved sums.
UNORDERED = {
    "hetero_easgd_async",
    "hetero_easgd_hogwild",
    "hetero_measgd_async",
    "hetero_gossip_async",
    "hetero_diloco_async",
}


def test_every_string_has_a_case() -> None:
    assert {string for string, *_ in CASES.values()} == {entry.name for entry in ENTRIES} - UNORDERED


def test_a_step_that_is_not_the_same_is_seen() -> None:
    """Digests show a change of one unit in the last place."""
    model = trajectories.Model("momentum")
    before = model.digest()
    model.first.weights.data[0] = model.first.weights.data[0].nextafter(model.first.weights.data[1])
    assert model.digest() != before


@pytest.mark.long
def test_weights_are_those_recorded() -> None:
    recorded = json.loads(RECORD.read_text())
    found = run_all(list(CASES))
    assert set(recorded) == set(CASES)
    first_different = {}
    for name in CASES:
        steps = zip(zip(*recorded[name], strict=True), zip(*found[name], strict=True), strict=True)
        first_different[name] = next((step for step, (old, new) in enumerate(steps) if old != new), None)
    assert {name: step for name, step in first_different.items() if step is not None} == {}
