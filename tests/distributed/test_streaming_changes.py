"""`hetero_diloco` in fragments: replicas that join, and checkpoints of other fragments or another delay."""

from pathlib import Path
from typing import Any

import torch
from events import Seen, fit
from growing import fit as joined
from growing import grow, values
from ranks import run
from saved import replicas_of
from tasks import Save

from lightning_hetero.errors import CheckpointError

BASE: dict[str, Any] = {"tau": 4, "fragments": 2, "delay": 2, "blend": 0.5}


def test_a_newcomer_streams_with_the_others(tmp_path: Path) -> None:
    options = {**BASE, "replica": "rank", "wire": "int8"}
    seen = values(grow(2, 1, joined, "DiLoCoStrategy", options, str(tmp_path / "job"), 1))
    assert [one.starts[-1][1:] for one in seen] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(one.begun[-1], seen[0].begun[-1]) for one in seen)
    assert all(torch.equal(one.weights, seen[0].weights) for one in seen)
    assert not torch.equal(seen[0].begun[-1], seen[0].weights)


APART = [1, 1, 1]


def _save(path: str) -> None:
    fit("hetero_diloco/fragments", Save(path, 11, True))


def _resume(path: str, options: dict[str, Any]) -> Seen:
    return fit("hetero_diloco/fragments", resume=path, options=options)


def test_with_other_fragments_all_ranks_say_so_and_another_delay_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run(_save, 3, path, nodes=APART)
    [pending] = replicas_of(path)[0]["algorithm"]["pending"]
    assert pending["step"] == 10
    for seen in run(_resume, 3, path, {"fragments": 1}, nodes=APART):
        assert isinstance(seen.error, CheckpointError)
        assert "Resume with the fragments and exclude" in str(seen.error)
    for delay in (0, 3):
        first, *others = run(_resume, 3, path, {"delay": delay}, nodes=APART)
        assert first.error is None
        assert first.weights.isfinite().all()
        assert all(torch.equal(other.weights, first.weights) for other in others)
