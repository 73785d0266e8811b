"""A checkpoint of other ranks or of another strategy gives its weights, and rank 0 warns: one table for all."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from center_tasks import STRATEGIES
from ranks import attempt, run
from test_resume import CENTER, PULL, SHARES, Row, consensus, fit, place

from lightning_hetero import DASOStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.errors import CheckpointError

DDP, NODE, DASO = Row(HeteroDDPStrategy), Row(NodeAverageStrategy), Row(DASOStrategy)
ASYNC = Row(STRATEGIES["async"], PULL)
FIVE, ALONE = {"every_n_steps": 5}, {"every_n_steps": 5, "ranks_per_node": 1}
#: Of each job: ranks of each node and shares, before and after; what is saved, what is resumed, and the warning.
JOBS: dict[str, tuple[list[int], Any, list[int], Any, list[tuple[Row, Row, str | None]]]] = {
    "another number of ranks": ([2], "auto", [3], "auto", [(DDP, DDP, "measures anew")]),
    "other replicas": ([2, 1], SHARES, [3], "auto", [
        (Row(NodeAverageStrategy, FIVE), Row(NodeAverageStrategy, ALONE),
         "saved by 2 replicas with 3 ranks; this job has 3 with 3"),
    ]),
    "fewer replicas": ([1, 1, 1], SHARES, [1, 1], [2.0, 1.0], [
        (row, row, "saved by 3 replicas with 3 ranks; this job has 2 with 2") for row in (*CENTER[:-1], ASYNC)
    ]),
    "another strategy": ([2, 1], "off", [2, 1], "off", [
        (NODE, DASO, "was saved by NodeAverageStrategy, this is DASOStrategy"),
        (DDP, DASO, "it was saved by a strategy without them"),
        (DASO, NODE, "was saved by DASOStrategy, this is NodeAverageStrategy"),
        (DASO, DDP, "was saved by DASOStrategy, this is HeteroDDPStrategy"),
        (DDP, DDP, None),
    ]),
    "another strategy with a center": ([1, 1], [2.0, 1.0], [1, 1], [2.0, 1.0], [
        (CENTER[0], CENTER[4], "was saved by EASGDStrategy, this is DiLoCoStrategy"),
    ]),
}  # fmt: skip


def _save(folder: str, job: str) -> None:
    _, balance, _, _, moves = JOBS[job]
    for number, (row, _, _) in enumerate(moves):
        fit(row, balance, str(place(folder, number, 11)), stop=11)


def _load(folder: str, job: str) -> list[Any]:
    _, _, _, balance, moves = JOBS[job]
    results = []
    for number, (_, row, _) in enumerate(moves):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = fit(row, balance, resume=str(place(folder, number, 11)))
        results.append((result, [str(w.message) for w in caught]))
    return results


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_all_start_from_the_weights_of_the_checkpoint(tmp_path: Path, job: str) -> None:
    before, _, after, _, moves = JOBS[job]
    run(_save, sum(before), str(tmp_path), job, nodes=before)
    of_ranks = run(_load, sum(after), str(tmp_path), job, nodes=after)
    for rank, results in enumerate(of_ranks):
        for number, ((_, row, words), (result, said)) in enumerate(zip(moves, results, strict=True)):
            saved, found = consensus(place(tmp_path, number, 11)), result["found"]
            assert torch.equal(found["weights"], saved), row
            if "reference" in found:  # what does not take part comes last in it
                assert torch.equal(found["reference"].sort()[0], saved.sort()[0]), row
            assert result["final"].isfinite().all(), row
            assert torch.equal(result["final"], of_ranks[0][number][0]["final"]), row
            if words is None:
                assert not any("checkpoint" in text for text in said), row
            else:
                told = [text for text in said if words in text]
                assert len(told) == (rank == 0), (row, said)
                assert words == "measures anew" or all("from the checkpoint's weights" in text for text in told), row


def _cut_off(path: str, resume: str | None) -> None:
    fit(DASO, "off", path, resume, stop=5)


def test_a_checkpoint_that_was_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.ckpt"
    run(_cut_off, 2, str(path), None, nodes=[1, 1])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for outcome in attempt(_cut_off, 2, None, str(path), nodes=[1, 1]):
        assert isinstance(outcome.error, CheckpointError), outcome.trace
        assert "cut.ckpt is not a whole checkpoint" in str(outcome.error)
    assert path.read_bytes() == whole[: len(whole) // 2]
