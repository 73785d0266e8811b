"""Fits on streams go on when a rank is lost, and when one joins: each sample once, what is lost is counted."""

import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from faults import DIED
from growing import LATE, WaitsForOthers, flat, grow
from ranks import Outcome, attempt, run
from tasks import FAST
from test_survival import LR, Module, Numbered
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy, NodeAverageStrategy, SharedStream
from lightning_hetero.errors import JoinRefusedError

SAMPLES, BATCH = 96, 4  # of 3 ranks: eight batches of 12
KILLED = 3  # the step in which rank 1 is
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (HeteroDDPStrategy, {"balance": [3.0, 2.0, 1.0]}),
    "diloco": (DiLoCoStrategy, {"tau": 2, "balance": "off"}),
    "node": (NodeAverageStrategy, {"every_n_steps": 2, "balance": "off"}),
}


class Plain(IterableDataset):
    """All samples, in another order in each epoch."""

    def __init__(self) -> None:
        self.data, self.epoch = Numbered(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return (self.data[i] for i in order.tolist())


class Jumping(Plain):
    def iter_from(self, index: int) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return (self.data[i] for i in order[index:].tolist())


class Sized(Plain):
    def __len__(self) -> int:
        return SAMPLES


class WritesSamples(pl.Callback):
    """Writes down at once, for each first rank, the samples and steps that it has trained on."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, f"trained-{os.environ['RANK']}{'-late' if os.environ.get(LATE) else ''}")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        drawn = trainer.strategy.accounting.current()  # type: ignore[attr-defined]
        self.mine = batch[2].tolist() if drawn.samples else []
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        with self.path.open("a") as file:
            file.write("".join(f"{trainer.current_epoch} {self.step} {index}\n" for index in self.mine))


class Dies(pl.Callback):
    """Kills a first rank, once the ranks of all replicas have reached the step."""

    def __init__(self, folder: str, rank: int, step: int = KILLED) -> None:
        self.folder, self.rank, self.step = folder, rank, step

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        first = os.environ["RANK"] if not os.environ.get(LATE) else "late"
        if trainer.global_step != self.step:
            return
        Path(self.folder, f"there-{first}").touch()
        if first == str(self.rank):
            until = time.monotonic() + 60
            while len(list(Path(self.folder).glob("there-*"))) < trainer.world_size and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class Trained(NamedTuple):
    """A sample that was trained on."""

    epoch: int
    step: int
    index: int


def trained(folder: Path) -> list[Trained]:
    """Samples that all ranks have trained on, the lost one too."""
    lines = [line for path in folder.glob("trained-*") for line in path.read_text().splitlines()]
    return [Trained(*map(int, line.split())) for line in lines]


class Record(NamedTuple):
    """Record of a fit that has ended well, on one rank."""

    weights: torch.Tensor
    losses: list[Any]
    messages: list[str]
    steps: int


def _fit(
    folder: str,
    kind: str,
    loader: Any,
    callbacks: Any = (),
    options: dict[str, Any] | None = None,
    path: str | None = None,
    **settings: Any,
) -> Record:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
    strategy_class, own = KINDS[kind]
    made = {**own, "on_peer_loss": "continue", "timeout": 60, **(options or {})}
    strategy, module = strategy_class(**made), Module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(strategy=strategy, callbacks=[WritesSamples(folder), *callbacks], **{**FAST, **settings})
        trainer.fit(module, loader, ckpt_path=path)
    messages = [str(one.message) for one in caught]
    return Record(flat(module), strategy.recovery.losses, messages, trainer.global_step)


def went_on(outcomes: list[Outcome], lost: int) -> list[Record]:
    """Records of the survivors. Fails if their weights differ, or if one of them has not named the lost rank."""
    assert outcomes[lost].exitcode == -signal.SIGKILL, outcomes[lost].trace
    rest = [outcome.value for rank, outcome in enumerate(outcomes) if rank != lost]
    assert all(rest), "\n".join(outcome.trace for outcome in outcomes)
    for record in rest:
        assert torch.equal(record.weights, rest[0].weights)
        assert [loss.lost for loss in record.losses] == [{lost: DIED}]
        assert record.losses[0].samples == rest[0].losses[0].samples
        assert len([text for text in record.messages if "Training goes on" in text]) == 1
    return rest


def one_process(steps: list[list[int]]) -> torch.Tensor:
    """Weights of one process that takes these steps."""
    data, module = Numbered(), Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    for samples in steps:
        chosen = torch.tensor(samples)
        optimizer.zero_grad()
        nn.functional.mse_loss(module.net(data.x[chosen].double()), data.y[chosen].double()).backward()
        optimizer.step()
    return flat(module)


def steps_of(samples: list[Trained]) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    return [[one.index for one in samples if one.step == step] for step in sorted({one.step for one in samples})]


# -- a stream that all read alike ----------------------------------------------------------------------------


def _shared(folder: str, kind: str, data: Any, workers: int, stateful: bool, rank: int) -> Record:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
    loader = (StatefulDataLoader if stateful else DataLoader)(
        SharedStream(data()), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0
    )
    return _fit(folder, kind, loader, [Dies(folder, rank)], max_epochs=2)


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("data", "workers", "stateful", "rank"),
    [(Plain, 2, False, 1), (Plain, 0, True, 0), (Sized, 2, False, 2), (Jumping, 2, True, 0)],
)
def test_each_sample_of_a_shared_stream_is_trained_on_or_counted(
    tmp_path: Path, data: Any, workers: int, stateful: bool, rank: int
) -> None:
    rest = went_on(attempt(_shared, 3, str(tmp_path), "ddp", data, workers, stateful, rank), rank)
    done = trained(tmp_path)
    counts = Counter((one.epoch, one.index) for one in done)
    assert set(counts.values()) == {1}
    assert rest[0].losses[0].samples == 2 * SAMPLES - len(done) > 0
    assert rest[0].losses[0].bound == ""
    if (
        not workers or data is Sized
    ):  # otherwise workers are asked for batches beyond the end, which count in the next epoch
        assert sum(one.epoch == 1 for one in done) == SAMPLES
    assert rest[0].steps == 16  # an epoch has as many steps as before
    assert (rest[0].weights - one_process(steps_of(done))).abs().max() < 1e-10


@pytest.mark.parametrize(("kind", "world"), [("diloco", 3), ("node", 2)])
def test_replicas_go_on_with_a_shared_stream(tmp_path: Path, kind: str, world: int) -> None:
    rest = went_on(attempt(_shared, world, str(tmp_path), kind, Plain, 0, False, 1, nodes=[1] * world), 1)
    done = trained(tmp_path)
    assert set(Counter((one.epoch, one.index) for one in done).values()) == {1}
    [loss] = rest[0].losses
    assert loss.bound == "up to "
    missing = 2 * SAMPLES - len(done)
    assert 0 < missing <= loss.samples <= missing + KILLED * BATCH  # it may not have reported its latest steps
    assert f"Up to {loss.samples} samples that they had still to take are not trained on." in " ".join(rest[0].messages)


# -- streams of each rank's own ------------------------------------------------------------------------------

LENGTHS = (5, 8, 6)  # batches of each rank's own part


class Part(IterableDataset):
    """The stream of one of the first ranks; its state has the part and the position."""

    def __init__(self, part: int) -> None:
        self.data, self.part, self.at = Numbered(), part, 0

    def __iter__(self) -> Iterator[Any]:
        first = BATCH * sum(LENGTHS[: self.part])
        for index in range(self.at, BATCH * LENGTHS[self.part]):
            self.at += 1
            yield self.data[first + index]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"part": self.part, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.part, self.at = state["part"], state["at"]


class SizedPart(Part):
    def __len__(self) -> int:
        return BATCH * LENGTHS[self.part]


def part_of(index: int) -> int:
    """The rank whose part has this sample."""
    return next(rank for rank in range(3) if index < BATCH * sum(LENGTHS[: rank + 1]))


def _own(folder: str, kind: str, data: Any, stateful: bool, rank: int, balance: Any) -> Record:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
    loader = (StatefulDataLoader if stateful else DataLoader)(data(int(os.environ["RANK"])), batch_size=BATCH)
    return _fit(folder, kind, loader, [Dies(folder, rank)], {"balance": balance}, max_epochs=2)


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("kind", "data", "stateful", "rank", "nodes", "balance"),
    [
        ("ddp", Part, True, 1, [3], "off"),  # the longest part is lost
        ("node", Part, False, 1, [1, 1, 1], "off"),
        ("ddp", SizedPart, False, 1, [3], "off"),
        ("ddp", Part, False, 0, [3], "off"),
        ("ddp", Part, False, 0, [3], [1.0, 2.0, 1.0]),  # the others take more then
        ("node", Part, True, 2, [2, 1], "off"),
        ("node", SizedPart, False, 1, [1, 1, 1], "off"),
        ("diloco", Part, True, 0, [1, 1, 1], "off"),
    ],
)
def test_others_go_on_with_their_own_parts(
    tmp_path: Path, kind: str, data: Any, stateful: bool, rank: int, nodes: list[int], balance: Any
) -> None:
    rest = went_on(attempt(_own, 3, str(tmp_path), kind, data, stateful, rank, balance, nodes=nodes), rank)
    done = trained(tmp_path)
    parts = Counter((one.epoch, part_of(one.index)) for one in done)
    others = {(epoch, part): BATCH * LENGTHS[part] for epoch in (0, 1) for part in range(3) if part != rank}
    own = BATCH if balance == "off" else 3  # of 12
    assert parts == {**others, (0, rank): KILLED * own}
    assert set(Counter((one.epoch, one.index) for one in done).values()) == {1}
    [loss] = rest[0].losses
    message = next(text for text in rest[0].messages if "Training goes on" in text)
    assert f"What was left of the training data of rank(s) {rank} is gone" in message
    assert "SharedStream" in message
    if kind == "ddp":  # others know its batches of the broken step, and without a length also of the next one
        drawn = own * (1 if data is SizedPart else 2)
        assert f"At least {drawn} samples that they had still to take are not trained on." in message
        assert (loss.samples, loss.bound) == (drawn, "at least ")
        assert (rest[0].weights - one_process(steps_of(done))).abs().max() < 1e-10
    else:
        assert "How many samples that they had still to take are not trained on is not known." in message


# -- checkpoints after the loss ------------------------------------------------------------------------------


class SaveAt(pl.Callback):
    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


AFTER = KILLED + 4


def _saved(folder: str, shared: bool, path: str, resumed: bool) -> Record:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    rank = int(os.environ["RANK"])
    loader = (
        DataLoader(SharedStream(Plain()), batch_size=BATCH)
        if shared
        else StatefulDataLoader(Part(rank), batch_size=BATCH)
    )
    options = {"balance": "off"}
    if resumed:
        return _fit(folder, "ddp", loader, (), options, path, max_epochs=2)
    return _fit(folder, "ddp", loader, [Dies(folder, 1), SaveAt(path, AFTER)], options, max_epochs=2)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_run_goes_on_from_a_checkpoint_after_the_loss(tmp_path: Path, shared: bool) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    whole.mkdir()
    again.mkdir()
    rest = went_on(attempt(_saved, 3, str(whole), shared, str(tmp_path / "saved.ckpt"), False), 1)
    resumed = run(_saved, 2, str(again), shared, str(tmp_path / "saved.ckpt"), True)
    expected = sorted(one for one in trained(whole) if one.step >= AFTER)
    assert sorted(trained(again)) == expected
    assert expected
    for record in resumed:
        assert torch.equal(record.weights, rest[0].weights)


# -- others join ---------------------------------------------------------------------------------------------


def _grown(folder: str, kind: str, file: str | None, own: bool, wait: int) -> Record:
    if os.environ.get(LATE):
        until = time.monotonic() + 120
        while file is not None and not Path(file).exists() and time.monotonic() < until:
            time.sleep(0.02)
    data = Part(0) if own else SharedStream(Plain())
    waits = [] if os.environ.get(LATE) else [WaitsForOthers(wait)]
    options = {"balance": "off", "join_file": file}
    return _fit(folder, kind, DataLoader(data, batch_size=BATCH), [Dies(folder, 1), *waits], options, max_epochs=4)


@pytest.mark.parametrize("kind", ["ddp", "diloco"])
def test_who_joins_after_a_loss_goes_on_with_the_next_sample(tmp_path: Path, kind: str) -> None:
    outcomes = grow(3, 1, _grown, str(tmp_path), kind, str(tmp_path / "job"), False, 1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    rest = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 1]
    assert all(rest), "\n".join(outcome.trace for outcome in outcomes)
    assert all(torch.equal(record.weights, rest[0].weights) for record in rest)
    assert list(tmp_path.glob("trained-*-late"))
    done = trained(tmp_path)
    assert set(Counter((one.epoch, one.index) for one in done).values()) == {1}
    [loss] = [change for change in rest[0].losses if change.lost]
    missing = 4 * SAMPLES - len(done)
    assert 0 < missing <= loss.samples
    assert missing == loss.samples or kind != "ddp"
    if kind == "ddp":
        assert (rest[0].weights - one_process(steps_of(done))).abs().max() < 1e-10


def _started_again(folder: str) -> Any:
    dead, asked = Path(folder, "dead"), Path(folder, "asked")
    late = bool(os.environ.get(LATE))
    until = time.monotonic() + 120
    if late:  # the same command, once more
        while not (dead.exists() and not Path(f"/proc/{dead.read_text()}").exists()) and time.monotonic() < until:
            time.sleep(0.02)
    elif os.environ["RANK"] == "1":
        dead.write_text(str(os.getpid()))
    try:
        loader = DataLoader(Part(int(os.environ["RANK"])), batch_size=BATCH)
        return _fit(folder, "ddp", loader, [Dies(folder, 1), Waits(asked)], {"balance": "off"}, max_epochs=2)
    except JoinRefusedError as error:
        return str(error)
    finally:
        if late:
            asked.touch()


class Waits(pl.Callback):
    """The first rank waits until a process has asked to join."""

    def __init__(self, asked: Path) -> None:
        self.asked = asked

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        until = time.monotonic() + 120
        while trainer.global_step == KILLED + 1 and not self.asked.exists() and time.monotonic() < until:
            time.sleep(0.02)


def test_nobody_joins_where_each_rank_has_its_own_part(tmp_path: Path) -> None:
    def env_of(rank: int) -> dict[str, str]:
        same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(min(rank, 1)), "LOCAL_RANK": str(min(rank, 1))}
        return {**same, LATE: "1"} if rank == 2 else same

    first, _, late = attempt(_started_again, 3, str(tmp_path), env_of=env_of)
    assert first.value, first.trace
    assert isinstance(late.value, str), late.trace
    assert "the job does not let this process in: each rank reads training data of its own" in late.value
    assert "SharedStream" in late.value
    assert [loss.lost for loss in first.value.losses] == [{1: DIED}]
    assert sum(one.epoch == 1 for one in trained(tmp_path)) == BATCH * LENGTHS[0]
