"""Replicas that start later join a job with a sharded model, with the same result as with whole models."""

import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from growing import LATE
from ranks import Outcome, attempt, free_port
from tasks import FAST, Killed, dataset
from test_sharded_models import STRATEGIES, SYNCHRONOUS, ShardedNet, TensorParallel, distance, whole
from torch.utils.data import DataLoader

from lightning_hetero.comm import join_requests
from lightning_hetero.errors import CommunicationError, JoinRefusedError
from lightning_hetero.strategies import signals

JOINS_AT = 5


class Meets(pl.Callback):
    """Running ranks wait at a step until others have asked to join; all begin again one step later."""

    def __init__(self, late: int) -> None:
        self.late, self.met = late, False

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.recovery.newcomers._most = lambda waiting: 0  # nobody joins before that, or after it

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.met or trainer.global_step != JOINS_AT:
            return
        newcomers, self.met, until = trainer.strategy.recovery.newcomers, True, time.monotonic() + 120
        while trainer.is_global_zero and newcomers._requests.waiting < self.late and time.monotonic() < until:
            time.sleep(0.02)
        vars(newcomers).pop("_most", None)
        while self.late and not trainer.strategy.stop_request.agreed._known.wait(0.1) and time.monotonic() < until:
            pass


class Begins(pl.Callback):
    """Notes where training begins, and begins again."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, int, int]] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.starts.append((trainer.global_step, trainer.global_rank, trainer.world_size))


def fit(
    name: str,
    file: str,
    late: int,
    shards: bool = True,
    callbacks: Sequence[Any] = (),
    kind: Any = ShardedNet,
    **given: Any,
) -> tuple[Any, list[tuple[int, int, int]], list[str]]:
    """Final weights of a fit that others join, the steps at which it began, and its messages."""
    signals._NOTICE = 0.0  # so that no rank goes beyond the step at which they wait
    messages: list[str] = []
    join_requests.rank_zero_info = messages.append  # type: ignore[attr-defined]
    until = time.monotonic() + 120
    while os.environ.get(LATE) and not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.02)
    module, begins = kind(optimizer=given.pop("optimizer", "adamw")), Begins()
    module.shards = shards
    strategy = STRATEGIES[name](
        **{"balance": "off", "timeout": given.pop("limit", 60), **given}, on_peer_loss="continue", join_file=file
    )
    waits = [] if os.environ.get(LATE) else [Meets(late)]
    trainer = pl.Trainer(strategy=strategy, max_epochs=3, callbacks=[begins, *waits, *callbacks], **FAST)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(dataset(120), batch_size=4))
    return whole(module), begins.starts, [*messages, *(str(one.message) for one in warned)]


def grow(
    first: list[int],
    late: list[int],
    function: Any,
    *args: Any,
    env_of_late: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Outcome of a function on nodes that start together, and on nodes that start later, one by one."""
    ports, world = [str(free_port()) for _ in late], sum(first)
    places = [(node, place) for node, ranks in enumerate(late) for place in range(ranks)]

    def env_of(rank: int) -> dict[str, str]:
        if rank < world:
            return {"WORLD_SIZE": str(world)}
        node, place = places[rank - world]
        size = str(late[node])
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(place)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), size),
            "GROUP_RANK": "0",
            "MASTER_PORT": ports[node],
            LATE: str(1 + node),
            **(env_of_late or {}),
        }

    return attempt(function, world + len(places), *args, nodes=[*first, *late], env_of=env_of, **kwargs)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    bad = [f"rank {rank} ({one.exitcode}):\n{one.trace[-3000:]}" for rank, one in enumerate(outcomes) if not one.value]
    assert not bad, "\n".join(bad)
    return [outcome.value for outcome in outcomes]


@pytest.mark.long(after=3)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_replica_joins_as_a_whole_one_does(name: str, size: int, tmp_path: Path) -> None:
    """Three replicas of one rank, or two of two, and one that joins and gets the moments of the first one."""
    options = {**({"optimizer": "adamw"} | SYNCHRONOUS[name]), **({"ranks_per_node": 1} if size == 1 else {})}
    first = [3] if size == 1 else [2, 2]
    ours, theirs = (
        values(grow(first, [size], fit, name, str(tmp_path / f"job {shards}"), size, shards=shards, **options))
        for shards in (True, False)
    )
    world = sum(first) + size
    for weights, starts, _ in ours:
        assert starts[-1][::2] == (JOINS_AT + 1, world)
        assert distance(weights, ours[0][0]) < 1e-12
    assert sorted(starts[-1][1] for _, starts, _ in ours) == list(range(world))
    assert distance(ours[0][0], theirs[0][0]) < 1e-10


def test_ranks_that_split_layers_join_as_a_replica(tmp_path: Path) -> None:
    """Two pairs, and one that joins, train as two ranks with whole models and one that joins."""
    options = {"tau": 4, "replica": "node"}
    pairs = {"kind": TensorParallel, "tensor_parallel_size": 2}
    ours = values(grow([2, 2], [2], fit, "hetero_diloco", str(tmp_path / "pairs"), 2, **options, **pairs))
    theirs = values(
        grow([2], [1], fit, "hetero_diloco", str(tmp_path / "whole"), 1, shards=False, ranks_per_node=1, **options)
    )
    for weights, starts, _ in ours:
        assert starts[-1][::2] == (JOINS_AT + 1, 6)
        assert distance(weights, theirs[0][0]) < 1e-10


#: Ranks per replica, the rank that is killed before others join, and whether a joining process is killed.
LOSSES = {
    "the last one": ([2, 2], 3, False),
    "the first one": ([2, 2, 2], 0, False),
    "the last one, and the newcomer": ([2, 2], 3, True),
    "the newcomer": ([2, 2], None, True),
}


class Dies(pl.Callback):
    """Kills a process that joins when it sets up its fit with the others."""

    def on_train_start(self, *_: Any) -> None:
        if os.environ.get(LATE) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["hetero_diloco", "hetero_node", "hetero_easgd"])
@pytest.mark.parametrize("case", LOSSES)
def test_a_replica_joins_after_a_loss_or_dies_on_its_way(case: str, name: str, tmp_path: Path) -> None:
    first, lost, dies = LOSSES[case]
    callbacks = [*([] if lost is None else [Killed(lost, 3)]), *([Dies()] if dies else [])]
    options = {"optimizer": "adamw"} | SYNCHRONOUS[name]
    jobs = [
        grow(first, [2], fit, name, str(tmp_path / f"job {shards}"), 2, shards=shards, callbacks=callbacks, **options)
        for shards in (True, False)
    ]
    at = [rank for rank in range(sum(first)) if lost is None or rank // 2 != lost // 2]
    world = len(at) + 2 * (not dies)
    ours, theirs = (
        values([job[rank] for rank in (at if dies else [*at, *range(sum(first), len(job))])]) for job in jobs
    )
    for weights, starts, _ in ours:
        assert starts[-1][::2] == (JOINS_AT + 1, world)
        assert distance(weights, ours[0][0]) < 1e-12
    assert distance(ours[0][0], theirs[0][0]) < 1e-10
    if dies:
        assert any("2 rank(s) could not join, and the fit goes on without" in text for text in ours[0][2])
        # The other one asks again, alone: it is refused, or the job has ended meanwhile.
        assert isinstance(jobs[0][-2].error, JoinRefusedError | CommunicationError), jobs[0][-2].trace


class WaitsForFile(pl.Callback):
    """The ranks wait at a step until a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        until = time.monotonic() + 120
        while trainer.global_step == JOINS_AT and not self.file.exists() and time.monotonic() < until:
            time.sleep(0.02)


def refused(folder: str, **options: Any) -> Any:
    done = Path(folder) / "done"
    try:
        return fit("hetero_diloco", f"{folder}/job", 0, callbacks=[WaitsForFile(done)], **options)
    finally:
        if os.environ.get(LATE):
            done.write_text("")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("2", "joins with all of its 2 ranks, and the others have not come within 20 s"),
        ("1", "each replica of the job has 2 rank(s); 1 rank(s) of one node do not make such replicas. Start 2"),
        ("4", "each replica of the job has 2 rank(s); 4 rank(s) of one node"),
    ],
)
def test_a_replica_that_is_not_whole_is_refused_and_the_job_goes_on(ranks: str, message: str, tmp_path: Path) -> None:
    """One rank asks to join, of a node with more ranks."""
    env = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    options = {"tau": 4, "replica": "node", "limit": 20}
    *ours, late = grow([2, 2], [1], refused, str(tmp_path), env_of_late=env, **options)
    undisturbed = values(grow([2, 2], [], fit, "hetero_diloco", str(tmp_path / "other"), 0, **options))
    assert isinstance(late.error, JoinRefusedError), late.trace
    assert message in str(late.error)
    for (weights, starts, _), (theirs, *_) in zip(values(ours), undisturbed, strict=True):
        assert len(starts) == 1
        assert distance(weights, theirs) == 0
    messages = [text for text in ours[0].value[2] if "Training goes on without it" in text]
    assert len(messages) == (ranks == "2")


class Lacks(ShardedNet):
    """Saves checkpoints that lack a layer."""

    def configure_model(self) -> None:
        self.strict_loading = False
        super().configure_model()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.weight"]


@pytest.mark.long
def test_what_a_checkpoint_lacks_is_that_of_the_first_replica(tmp_path: Path) -> None:
    options = {**SYNCHRONOUS["hetero_node"], "kind": Lacks}
    ours, theirs = (
        values(grow([2, 2], [2], fit, "hetero_node", str(tmp_path / f"{shards}"), 2, shards=shards, **options))
        for shards in (True, False)
    )
    assert all(distance(weights, ours[0][0]) < 1e-12 for weights, *_ in ours)
    assert distance(ours[0][0], theirs[0][0]) < 1e-10
