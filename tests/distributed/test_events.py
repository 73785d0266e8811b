"""Every strategy, and all that may happen to a fit: it ends as the fit to which nothing happens, or loses nothing."""

import os
import re
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from events import (
    ALL,
    BATCH,
    CHANGES,
    EPOCH,
    LENGTHS,
    LIMIT,
    OTHERS,
    ROWS,
    SAMPLES,
    SHARES,
    Freezes,
    Model,
    Seen,
    StruckError,
    Thaws,
    broken,
    elsewhere,
    explodes,
    failed,
    goes_on,
    grown,
    killed,
    left_out,
    loss_at,
    lost,
    of_stream,
    one_process,
    order,
    saved,
    sharded,
    stopped,
    stops,
    unfrozen,
)
from growing import LATE, grow
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import Outcome, attempt, run
from saved import consensus
from tasks import parameters

from lightning_hetero.errors import CommunicationError, NotFiniteError
from lightning_hetero.strategies.registry import ENTRIES

FIRST = ("hetero_ddp", "hetero_daso", "hetero_easgd_async", "hetero_gossip")  # one of each family
KEPT = [name for name in ROWS if name != "hetero_auto"]  # it refuses to go on without a rank
#: Where replicas meet all at once: what is not finite is an error on all ranks before it spreads.
AT_ONCE = ["hetero_ddp", "hetero_auto", "hetero_node", "hetero_daso", "hetero_easgd", "hetero_easgd_overlap"]
AT_ONCE += ["hetero_eamsgd", "hetero_diloco"]


def strings(names: Any) -> Any:
    """For each of these rows; `make test` has one of each family."""
    cases = [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.long]) for name in names]
    return pytest.mark.parametrize("name", cases)


def test_every_string_has_its_row() -> None:
    assert set(ROWS) == {entry.name for entry in ENTRIES}
    assert not set(ROWS) & set(OTHERS)


def job(function: Callable[..., Any], name: str, *args: Any, nodes: tuple[int, ...] | None = None) -> list[Any]:
    """What all ranks have seen."""
    nodes = nodes or ALL[name].nodes
    return run(function, sum(nodes), name, *args, nodes=list(nodes))


def close(a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    return torch.equal(a, b) if limit == 0 else a.shape == b.shape and bool((a - b).abs().max() <= limit)


def alike(weights: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, weights[0]) for one in weights) and bool(weights[0].isfinite().all())


def mean(parts: list[torch.Tensor], shares: list[float] = SHARES) -> torch.Tensor:
    return sum(share * part for share, part in zip(shares, parts, strict=True)) / sum(shares)


def continues(name: str, first: Seen, second: Seen, whole: Seen, step: int) -> None:
    """A fit that was stopped after a step, and the one that goes on from there, are the fit that was not stopped."""
    limit = ALL[name].limit
    assert first.seen == whole.seen[:step]
    assert second.seen == whole.seen[step:]
    assert second.steps == whole.steps
    assert len(second.path) == whole.steps - step
    if ALL[name].order == "threads":
        assert torch.equal(second.begun[0], first.last[0])
    else:
        assert close(first.path, whole.path[:step], limit)
        assert close(second.path, whole.path[step:], limit)
        assert close(second.weights, whole.weights, limit)
    assert (first.weights - whole.weights).abs().max() > 1e-3
    assert torch.equal(second.momenta[0][0], first.last[1])


# -- looked at, stopped, resumed -----------------------------------------------------------------------------


@strings(ALL)
def test_looked_at_stopped_and_resumed_it_is_the_fit_that_was_not(tmp_path: Path, name: str) -> None:
    ranks = job(stopped, name, tmp_path)
    wholes = [found["whole"] for found in ranks]
    assert alike([whole.weights for whole in wholes])
    assert [whole.steps for whole in wholes] == [LIMIT] * 3
    for epoch in range(2):
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        assert sorted(i for whole in wholes for step in steps for i in whole.seen[step]) == list(range(SAMPLES))
    for stop in stops(name):
        for found in ranks:
            continues(name, found[stop, 1], found[stop, 2], found["whole"], stop)
    looks(tmp_path, name, ranks)
    if name in ROWS:
        told_to_stop(tmp_path, name, ranks)


def looks(folder: Path, name: str, ranks: list[dict[Any, Seen]]) -> None:
    """Validations and checkpoints change nothing, and are of the same weights on all ranks."""
    row = ALL[name]
    for found in ranks:
        whole, looked = found["plain"], found["looked"]
        assert looked.seen == whole.seen
        if row.order != "threads":
            assert close(looked.path, whole.path, row.limit)
            assert close(looked.weights, whole.weights, row.limit)
        start, *validated = looked.validated
        assert torch.equal(start, parameters(Model(name)))  # the sanity check
        assert len(validated) == len(looked.metrics) == EPOCH
        for number, weights in enumerate(validated):
            step = 2 * number + 2
            assert torch.equal(weights, ranks[0]["looked"].validated[number + 1])
            assert looked.metrics[number] == pytest.approx(loss_at(weights), rel=1e-12)
            assert torch.equal(consensus(folder / "looked" / f"step={step}.ckpt"), weights)
            if row.mean and name != "hetero_gossip_push_sum" and row.order == "at once":
                of_all = mean([other["looked"].path[step - 1] for other in ranks])
                assert (weights - of_all).abs().max() < 1e-12, step


def told_to_stop(folder: Path, name: str, ranks: list[dict[Any, Seen]]) -> None:
    """All stop after the same step when one of them is told to, have saved, and go on from there."""
    steps = {found["signal", 1].steps for found in ranks}
    assert len(steps) == 1
    [step] = steps
    assert 5 <= step < 2 * EPOCH
    files = [path.name for path in (folder / "last").iterdir() if path.is_file()]
    assert "last.ckpt" in files or files == ["last-sigterm.ckpt"]
    for found in ranks:
        first, second, whole = found["signal", 1], found["signal", 2], found["plain"]
        assert isinstance(first.error, SIGTERMException)
        assert first.error.code == 128 + signal.SIGTERM
        continues(name, first, second, whole, step)
        assert first.evaluated + second.evaluated == whole.evaluated
        assert torch.equal(whole.ended, whole.weights)
        assert whole.test == pytest.approx(loss_at(whole.weights), rel=1e-12)


@strings(ROWS)
def test_on_other_ranks_it_goes_on_with_the_next_sample(tmp_path: Path, name: str) -> None:
    path = tmp_path / "11.ckpt"
    before = job(saved, name, path)
    for world in (2, 4):
        after = job(elsewhere, name, path, nodes=(1,) * world)
        done = [i for found in before for step in range(EPOCH, 11) for i in found.seen[step]]
        rest = [i for seen in after for batch in seen.seen for i in batch]
        assert sorted(done + rest) == list(range(SAMPLES))
        assert all(sum(len(seen.seen[step]) for seen in after) == 12 for step in range(5))  # the global batch stays
        assert alike([seen.weights for seen in after])
        for rank, seen in enumerate(after):
            assert seen.starts == [(11, rank, world)]
            assert torch.equal(seen.begun[0], consensus(path))
            own = before[min(rank, 2)].last[1]  # its own optimizer's state, or the nearest
            assert torch.equal(seen.momenta[0][0], own)
        said = [text for text in after[0].said if "3 ranks" in text or "measures anew" in text]
        assert len(said) == 1, after[0].said


@strings(ALL)
def test_layers_that_are_unfrozen_or_frozen_train_or_stand_still_on_all(tmp_path: Path, name: str) -> None:
    ranks = job(unfrozen, name, tmp_path)
    begin = parameters(Model(name))
    still = parameters(Model(name).backbone).numel()  # its parameters come first
    for callback, stop in CHANGES if name in ROWS else CHANGES[1:]:
        assert alike([found[callback, 0].weights for found in ranks])
        assert (ranks[0][callback, 0].weights != begin).all()
        for found in ranks:
            continues(name, found[callback, 1], found[callback, 2], found[callback, 0], stop)
    for found in ranks:
        path = found[Freezes, 0].path[:, :still]
        assert all(torch.equal(one, two) for one, two in pairwise(path[EPOCH : 2 * EPOCH]))
        assert torch.equal(path[EPOCH], ranks[0][Freezes, 0].path[EPOCH, :still])
        assert not torch.equal(path[2 * EPOCH - 1], path[2 * EPOCH])
        if name in ROWS:
            path = found[Thaws, 0].path[:, :still]
            assert all(torch.equal(one, begin[:still]) for one in path[:EPOCH])
            assert not torch.equal(path[EPOCH], begin[:still])
    if ALL[name].mean and ALL[name].order == "at once" and name != "hetero_gossip_push_sum":
        of_all = mean([found[Freezes, 0].path[EPOCH - 1, :still] for found in ranks])
        assert (ranks[0][Freezes, 0].path[EPOCH, :still] - of_all).abs().max() < 1e-12


# -- not finite ----------------------------------------------------------------------------------------------


@strings(ALL)
def test_a_loss_that_is_not_finite_ends_the_fit_before_it_spreads(tmp_path: Path, name: str) -> None:
    victim = explodes(name)
    outcomes = attempt(broken, 3, name, tmp_path, nodes=list(ALL[name].nodes))
    for rank, outcome in enumerate(outcomes):
        seen = outcome.value
        assert seen is not None, outcome.trace
        if name.partition("/")[0] in AT_ONCE or rank == victim:
            assert isinstance(seen.error, NotFiniteError)
            assert re.search(rf"rank {victim}\b.* at step 5|[Aa]t step 5.* rank {victim}\b", str(seen.error), re.DOTALL)
            assert "on_nan='skip'" in str(seen.error)
        else:
            assert isinstance(seen.error, NotFiniteError | CommunicationError)
            assert f"rank {victim}" in str(seen.error)
        assert rank == victim or seen.weights.isfinite().all()
    for path in tmp_path.glob("*.ckpt"):
        assert consensus(path).isfinite().all()


@strings(ALL)
def test_a_loss_that_is_not_finite_is_left_out_if_asked_for(name: str) -> None:
    ranks = job(left_out, name)
    for seen in ranks:
        assert seen.error is None
        assert seen.steps == 2 * EPOCH
        assert torch.equal(seen.weights, ranks[0].weights)
        assert seen.weights.isfinite().all()
        assert seen.path[-4:].isfinite().all()
    said = [text for seen in ranks for text in seen.said if "left out" in text]
    assert said
    assert all(str(explodes(name)) in text for text in said)


# -- data that users have split ------------------------------------------------------------------------------


@strings(ROWS)
def test_data_that_users_have_split_stay_as_they_are(tmp_path: Path, name: str) -> None:
    ranks = job(sharded, name, tmp_path)
    for rank, found in enumerate(ranks):
        sampler = torch.utils.data.DistributedSampler(range(SAMPLES), 3, rank, seed=3)
        own = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            rows = list(sampler)
            own += [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        assert found["sampler"].seen == own
        for part in ("streams", "streams with a length", "stateful"):
            streamed = found[part]
            assert streamed.steps == len(streamed.seen) == 2 * max(LENGTHS)
            for epoch in range(2):
                batches = streamed.seen[epoch * max(LENGTHS) :][: max(LENGTHS)]
                assert [i for batch in batches[: LENGTHS[rank]] for i in batch] == of_stream(rank)
                assert all(batch == batches[LENGTHS[rank] - 1] for batch in batches[LENGTHS[rank] :])  # of no weight
        for part in ("shared", "stateful"):
            whole, second = found[part], found[f"{part}, resumed"]
            assert second.seen == whole.seen[5:]
            if ALL[name].order != "threads":
                assert close(second.weights, whole.weights, ALL[name].limit)
    for step in range(2 * EPOCH):
        first = 12 * (step % EPOCH)
        assert sorted(i for found in ranks for i in found["shared"].seen[step]) == list(range(first, first + 12))
    for part in ranks[0]:
        assert alike([found[part].weights for found in ranks])
    if ALL[name].period == 1 and ALL[name].mean and ALL[name].limit:
        rows = [[i for found in ranks for i in found["sampler"].seen[step]] for step in range(2 * EPOCH)]
        assert (ranks[0]["sampler"].weights - one_process(rows)).abs().max() < 1e-12
        rows = []
        for step in range(2 * max(LENGTHS)):
            at = step % max(LENGTHS)
            rows.append(
                [i for rank, found in enumerate(ranks) if at < LENGTHS[rank] for i in found["streams"].seen[step]]
            )
        assert (ranks[0]["streams"].weights - one_process(rows)).abs().max() < 1e-12


# -- ranks that are lost -------------------------------------------------------------------------------------

MOMENTS = {"before": 0, "within": 1, "after": 2, "fails": 2}  # an exchange, or in a step; and who is lost
DIED, FAILED = "has ended without a word", "failed with StruckError: struck"


STREAMING = ["hetero_diloco/fragments", "hetero_diloco/int4"]


@pytest.mark.parametrize("moment", MOMENTS)
@strings([*KEPT, *STREAMING])
def test_the_others_go_on_when_a_rank_is_lost(name: str, moment: str) -> None:
    rank = MOMENTS[moment]
    outcomes = attempt(lost, 3, name, rank, moment, nodes=[1, 1, 1])
    how = FAILED if moment == "fails" else DIED
    assert outcomes[rank].exitcode == -signal.SIGKILL or isinstance(outcomes[rank].error, StruckError)
    rest = survivors(outcomes, rank)
    for number, seen in enumerate(rest):
        assert seen.error is None
        assert seen.number == (number, 2)
        assert seen.steps == 2 * EPOCH
        [loss] = seen.losses
        assert loss.lost.keys() == {rank}
        assert loss.lost[rank].startswith(how)
        [told] = [text for text in seen.said if "Training goes on" in text]
        assert f"rank {rank} {how}" in told
        assert f"after step {loss.step};" in told
    assert alike([seen.weights for seen in rest])
    assert loss_at(rest[0].weights) < loss_at(parameters(Model(name)))
    if name == "hetero_ddp":
        exact(rest)
    if moment == "after" and name in STREAMING:  # one of them is ahead, and has begun what the other has not
        assert sum("These are dropped" in text for seen in rest for text in seen.said) == 1
        assert ("int4" in name) == any("Error feedback begins anew" in text for seen in rest for text in seen.said)


def survivors(outcomes: list[Outcome], *lost: int) -> list[Seen]:
    rest = [outcome for rank, outcome in enumerate(outcomes) if rank not in lost]
    assert all(outcome.value for outcome in rest), "\n".join(outcome.trace for outcome in rest)
    return [outcome.value for outcome in rest]


def exact(rest: list[Seen]) -> None:
    """One process that takes the same samples, those of the lost rank until it was lost included, gets there."""
    batches, step = [], rest[0].losses[0].step
    for number in range(2 * EPOCH):
        whole = order(number // EPOCH)[12 * (number % EPOCH) :][:12]
        taken = [i for seen in rest for i in seen.rows[number]]
        assert set(taken) <= set(whole)
        batches.append(whole if number < step else taken)
    assert rest[0].losses[0].samples == sum(12 - len(batch) for batch in batches) > 0
    assert all(len(batch) == 12 for batch in batches[EPOCH:])
    assert any(f"{rest[0].losses[0].samples} samples that they had still to take" in text for text in rest[0].said)
    assert (rest[0].weights - one_process(batches)).abs().max() < 1e-10


@strings(ROWS)
def test_an_error_of_one_rank_ends_the_fit_on_all(name: str) -> None:
    outcomes = attempt(failed, 3, name, nodes=list(ALL[name].nodes))
    assert isinstance(outcomes[2].error, StruckError)
    for seen in survivors(outcomes, 2):
        assert isinstance(seen.error, CommunicationError)
        assert f"rank 2 {FAILED}" in str(seen.error)
    assert not any(outcome.late or outcome.exitcode for outcome in outcomes)


@strings(ROWS)
def test_what_a_killed_job_has_saved_goes_on_as_if_it_had_not_been_killed(tmp_path: Path, name: str) -> None:
    nodes = list(ALL[name].nodes)
    outcomes = attempt(killed, 3, name, tmp_path, nodes=nodes)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for seen in survivors(outcomes, 1):
        assert isinstance(seen.error, CommunicationError)
        assert f"rank 1 {DIED}" in str(seen.error)
    assert {path.stem for path in tmp_path.glob("*.ckpt")} == {"step=4", "step=8", "step=12"}
    for whole, second in job(goes_on, name, tmp_path):
        assert second.seen == whole.seen[12:]
        if ALL[name].order != "threads":
            assert close(second.path, whole.path[12:], ALL[name].limit)
            assert close(second.weights, whole.weights, ALL[name].limit)


# -- ranks that join -----------------------------------------------------------------------------------------


#: Where all begin with the mean of the replicas; a center would be behind it.
LIKE_THE_MEAN = [name for name in KEPT if ROWS[name].mean or "easgd" in name]


@strings([*KEPT, *STREAMING])
def test_who_joins_begins_where_the_others_are(tmp_path: Path, name: str) -> None:
    outcomes = grow(2, 1, grown, name, tmp_path, LATE)
    ranks = survivors(outcomes)
    [step] = {seen.starts[-1][0] for seen in ranks}
    assert [seen.starts[-1][1:] for seen in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert [len(seen.starts) for seen in ranks] == [2, 2, 1]
    assert {seen.steps for seen in ranks} == {step + 5}
    begun = [seen.begun[-1] for seen in ranks]
    assert alike(begun)
    assert alike([seen.weights for seen in ranks])
    assert not torch.equal(begun[0], ranks[0].weights)
    for seen in ranks[:2]:
        assert torch.equal(*seen.momenta[-1])  # each keeps its own
    assert torch.equal(ranks[2].momenta[-1][0], ranks[0].momenta[-1][0])  # the new one has that of the first
    if name in LIKE_THE_MEAN and name not in ("hetero_gossip_push_sum", "hetero_gossip_async"):
        assert (begun[0] - mean([seen.path[step - 1] for seen in ranks[:2]], [1.0, 1.0])).abs().max() < 1e-12
    if name == "hetero_ddp":
        batches = [order(number // 12)[8 * (number % 12) :][:8] for number in range(step + 5)]
        assert (ranks[0].weights - one_process(batches)).abs().max() < 1e-10
    assert not (tmp_path / "job").exists()  # the job is over
    assert os.listdir(tmp_path) == []
