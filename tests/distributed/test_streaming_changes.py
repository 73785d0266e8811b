"""`hetero_diloco` in fragments: replicas that join, and checkpoints of other fragments or another delay."""

from pathlib import Path
from typing import Any

import torch
from center_tasks import APART, STRATEGIES
from growing import fit as joined
from growing import grow, values
from ranks import attempt, run
from test_resume import SHARES, Row, fit, place, replicas_of

from lightning_hetero.errors import CheckpointError

BASE: dict[str, Any] = {"tau": 4, "fragments": 2, "delay": 2, "blend": 0.5}


def _row(**options: Any) -> Row:
    return Row(STRATEGIES["diloco"], {**BASE, **options})


def test_a_newcomer_streams_with_the_others(tmp_path: Path) -> None:
    options = {**BASE, "replica": "rank", "wire": "int8"}
    seen = values(grow(2, 1, joined, "DiLoCoStrategy", options, str(tmp_path / "job"), 1))
    assert [one.starts[-1][1:] for one in seen] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(one.begun[-1], seen[0].begun[-1]) for one in seen)
    assert all(torch.equal(one.weights, seen[0].weights) for one in seen)
    assert not torch.equal(seen[0].begun[-1], seen[0].weights)


def _save(folder: str) -> None:
    fit(_row(), SHARES, str(place(folder, 0, 11)), stop=11)


def _resume(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return fit(_row(**options), SHARES, resume=str(place(folder, 0, 11)))


def test_with_other_fragments_all_ranks_say_so_and_another_delay_goes_on(tmp_path: Path) -> None:
    run(_save, 3, str(tmp_path), nodes=APART)
    [pending] = replicas_of(place(tmp_path, 0, 11))[0]["algorithm"]["pending"]
    assert pending["step"] == 10
    for outcome in attempt(_resume, 3, str(tmp_path), {"fragments": 1}, nodes=APART):
        assert isinstance(outcome.error, CheckpointError), outcome.trace
        assert "Resume with the fragments and exclude" in str(outcome.error)
    for delay in (0, 3):
        first, *others = run(_resume, 3, str(tmp_path), {"delay": delay}, nodes=APART)
        assert first["final"].isfinite().all()
        for other in others:
            assert torch.equal(other["final"], first["final"])
            assert torch.equal(other["centers"], first["centers"])
