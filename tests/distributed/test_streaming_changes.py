"""`hetero_diloco` in fragments: replicas that join, and checkpoints of other fragments or another delay."""

from pathlib import Path
from typing import Any

import torch
from events import Seen, fit
from ranks import run
from saved import replicas_of
from tasks import Save

from lightning_hetero.errors import CheckpointError

BASE: dict[str, Any] = {"tau": 4, "fragments": 2, "delay": 2, "blend": 0.5}


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
