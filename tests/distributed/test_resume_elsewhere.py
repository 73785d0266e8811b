"""Checkpoints of another strategy or of other replicas: weights are taken, rank 0 warns; half of one is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from events import Record, fit
from ranks import attempt, run
from saved import consensus
from tasks import Save

from lightning_hetero.errors import CheckpointError

#: The strategy that saves, the one that resumes, the options, and the warning.
MOVES: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("hetero_ddp", "hetero_daso", {}, "it was saved by a strategy without them"),
    ("hetero_node", "hetero_daso", {}, "was saved by NodeAverageStrategy, this is DASOStrategy"),
    ("hetero_daso", "hetero_node", {}, "was saved by DASOStrategy, this is NodeAverageStrategy"),
    ("hetero_daso", "hetero_ddp", {}, "was saved by DASOStrategy, this is HeteroDDPStrategy"),
    ("hetero_easgd", "hetero_diloco", {}, "was saved by EASGDStrategy, this is DiLoCoStrategy"),
    ("hetero_node", "hetero_node", {"ranks_per_node": 1}, "saved by 2 replicas with 3 ranks; this job has 3 with 3"),
    ("hetero_ddp", "hetero_ddp", {}, None),
]


def _moved(path: str, first: str, second: str, options: dict[str, Any]) -> Record:
    fit(first, Save(path, 11, True))
    return fit(second, resume=path, options=options)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("first", "second", "options", "words"), MOVES)
def test_all_start_from_the_weights_of_the_checkpoint(
    tmp_path: Path, first: str, second: str, options: dict[str, Any], words: str | None
) -> None:
    path = tmp_path / "saved.ckpt"
    ranks = run(_moved, 3, str(path), first, second, options, nodes=[2, 1])
    for rank, record in enumerate(ranks):
        assert torch.equal(record.begun[0], consensus(path))
        assert record.weights.isfinite().all()
        assert torch.equal(record.weights, ranks[0].weights)
        messages = [text for text in record.messages if "checkpoint" in text]
        assert len(messages) == (rank == 0 and words is not None), messages
        assert all(words and words in text and "from the checkpoint's weights" in text for text in messages)


def _cut_off(path: str, resume: str | None) -> None:
    record = fit("hetero_daso", *([] if resume else [Save(path, 5, True)]), resume=resume)
    if record.error:
        raise record.error


def test_a_checkpoint_that_was_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.ckpt"
    run(_cut_off, 3, str(path), None, nodes=[2, 1])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for outcome in attempt(_cut_off, 3, "", str(path), nodes=[2, 1]):
        assert isinstance(outcome.error, CheckpointError), outcome.trace
        assert "cut.ckpt is not a whole checkpoint" in str(outcome.error)
    assert path.read_bytes() == whole[: len(whole) // 2]
