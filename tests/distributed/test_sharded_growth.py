"""Replicas that are started later join a job whose model is sharded: it goes on as one with whole replicas does."""

import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from growing import LATE
from ranks import Outcome, attempt, free_port
from tasks import FAST, dataset
from test_sharded_models import STRATEGIES, SYNCHRONOUS, ShardedNet, distance, whole
from torch.utils.data import DataLoader

from lightning_hetero.strategies import signals

JOINS_AT = 5


class Meets(pl.Callback):
    """The ranks that run wait at a step until others have asked to join, and all begin again one step later."""

    def __init__(self, late: int) -> None:
        self.late, self.met = late, False

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if not self.met:
            trainer.strategy.recovery.newcomers._most = lambda waiting: 0

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
    """The weights at the end of a fit that others join, where it began, and what was said."""
    signals._NOTICE = 0.0  # so that nobody goes on beyond the step at which they wait
    until = time.monotonic() + 120
    while os.environ.get(LATE) and not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.02)
    module, begins = kind(optimizer=given.pop("optimizer", "adamw")), Begins()
    module.shards = shards
    strategy = STRATEGIES[name](**{"balance": "off", "timeout": 60, **given}, on_peer_loss="continue", join_file=file)
    waits = [] if os.environ.get(LATE) else [Meets(late)]
    trainer = pl.Trainer(strategy=strategy, max_epochs=3, callbacks=[begins, *waits, *callbacks], **FAST)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(dataset(120), batch_size=4))
    return whole(module), begins.starts, [str(one.message) for one in told]


def grow(first: list[int], late: list[int], function: Any, *args: Any, **kwargs: Any) -> list[Outcome]:
    """How a function ends on nodes that are started together, and on nodes that are started later, one by one."""
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
    """Three replicas of one rank, or two of two, and one that joins: its moments are those of the first one."""
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
