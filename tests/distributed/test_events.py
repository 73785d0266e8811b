"""Events during a fit, for every strategy: the fit ends as one without the event, or loses nothing."""

import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from events import ALL, BATCH, EPOCH, ROWS, SAMPLES, STEPS, Model, Record, Row, among, fit, loss_at, one_process, order
from growing import LATE, grow
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import Outcome, attempt, run
from saved import consensus, same_state, states_of
from tasks import Save, dataset, parameters
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import SharedStream
from lightning_hetero.errors import CommunicationError, NotFiniteError
from lightning_hetero.strategies.table import ENTRIES


def test_every_string_has_its_row() -> None:
    assert set(ROWS) == {entry.name for entry in ENTRIES}


def rows(names: Iterable[str]) -> Any:
    """Parametrize a test by these rows; `make test` has the first four cases."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.long(after=4)(pytest.mark.parametrize("name", list(names))(test))

    return mark


def job(function: Callable[..., Any], name: str, *args: Any, nodes: tuple[int, ...] | None = None) -> list[Any]:
    """Results of all ranks."""
    nodes = nodes or ALL[name].nodes
    return run(function, sum(nodes), name, *args, nodes=list(nodes))


def close(one: list[torch.Tensor], two: list[torch.Tensor], limit: float) -> bool:
    """Whether weights are equal, bit for bit if the limit is 0."""
    if len(one) != len(two):
        return False
    pairs = zip(one, two, strict=True)
    return all(torch.equal(a, b) if limit == 0 else bool((a - b).abs().max() <= limit) for a, b in pairs)


def alike(ranks: list[Record]) -> None:
    """Check that all ranks end with the same finite weights."""
    assert all(torch.equal(record.weights, ranks[0].weights) for record in ranks)
    assert ranks[0].weights.isfinite().all()


def trained(ranks: list[Record], name: str) -> None:
    """Check that the weights are alike, and better than those at the start."""
    alike(ranks)
    assert loss_at(ranks[0].weights) < loss_at(parameters(Model(ALL[name])))


def mean(shares: list[float], parts: list[torch.Tensor]) -> torch.Tensor:
    return sum(share * part for share, part in zip(shares, parts, strict=True)) / sum(shares)


def check_goes_on(name: str, whole: Record, second: Record, step: int) -> None:
    """Check that a fit resumed after a step equals one without a stop; this rank begins with its own state."""
    row = ALL[name]
    assert second.starts == [(step, *whole.starts[0][1:])]
    assert second.seen == whole.seen[step:]
    assert second.steps == whole.steps
    assert len(second.path) == whole.steps - step
    if row.repeats:
        assert close(second.path, whole.path[step:], row.limit)
        assert close([second.weights], [whole.weights], row.limit)


# -- resumed -------------------------------------------------------------------------------------------------

MIDDLE = 11  # a step within the second epoch


class SaveAtStart(pl.Callback):
    """Saves a checkpoint before the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def resumed(name: str, folder: Path) -> tuple[Record, dict[str, Record]]:
    """A fit that is saved at the end of an epoch and within one, and two fits that resume from there."""
    paths = {"end": folder / f"step={EPOCH}.ckpt", "middle": folder / "middle.ckpt"}
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1), Save(str(paths["middle"]), MIDDLE, False)
    whole, parts = fit(name, *saves, model=Model(ALL[name], dropout=0.3)), {}
    for at, path in paths.items():
        again = SaveAtStart(folder / f"{at}-again.ckpt")
        parts[at] = fit(name, again, model=Model(ALL[name], dropout=0.3), resume=path)
    return whole, parts


def check_resumed(name: str, ranks: list[tuple[Record, dict[str, Record]]], folder: Path) -> None:
    trained([whole for whole, _ in ranks], name)
    for epoch in range(2):
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        assert sorted(i for whole, _ in ranks for step in steps for i in whole.seen[step]) == list(range(SAMPLES))
    for at, step, path in (("end", EPOCH, f"step={EPOCH}.ckpt"), ("middle", MIDDLE, "middle.ckpt")):
        trained([parts[at] for _, parts in ranks], name)
        # The resumed fit has all saved state, also of other ranks and of an exchange under way. Only the pairs of
        # `hetero_gossip_async` may exchange between the resume and the save.
        assert name == "hetero_gossip_async" or same_state(
            states_of(folder / f"{at}-again.ckpt"), states_of(folder / path)
        )
        for whole, parts in ranks:
            assert whole.steps == STEPS
            check_goes_on(name, whole, parts[at], step)
            assert torch.equal(parts[at].momenta[0], whole.last[step - 1])
            assert torch.equal(parts[at].begun[0], whole.path[step - 1])


@rows(ALL)
def test_a_resumed_fit_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, name: str) -> None:
    check_resumed(name, job(resumed, name, tmp_path), tmp_path)


# -- validated -----------------------------------------------------------------------------------------------


def fit_with_validation(name: str, folder: Path) -> tuple[Record, Record]:
    """A fit that is validated and saved at every other step, and one that is not."""
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=False)
    return fit(name, keep, validates=True, val_check_interval=2, num_sanity_val_steps=2), fit(name)


def check_validation(name: str, ranks: list[tuple[Record, Record]], folder: Path) -> None:
    row = ALL[name]
    trained([record for record, _ in ranks], name)
    for record, plain in ranks:
        assert record.seen == plain.seen
        if row.repeats:
            assert close(record.path, plain.path, row.limit)
            assert close([record.weights], [plain.weights], row.limit)
        start, *validated = record.validated
        assert torch.equal(start, parameters(Model(row)))  # the sanity check
        assert len(validated) == len(record.metrics) == EPOCH
        for number, weights in enumerate(validated):
            step = 2 * number + 2
            assert torch.equal(weights, ranks[0][0].validated[number + 1])
            assert record.metrics[number] == pytest.approx(loss_at(weights), rel=1e-12)
            assert torch.equal(consensus(folder / f"step={step}.ckpt"), weights)
            if row.mean:
                of_all = mean(row.shares, [other.path[step - 1] for other, _ in ranks])
                assert (weights - of_all).abs().max() < 1e-12
        assert torch.equal(record.ended, ranks[0][0].weights)
        assert record.test == pytest.approx(loss_at(record.weights), rel=1e-12)


@rows(ALL)
def test_validations_and_checkpoints_are_of_the_consensus_and_change_nothing(tmp_path: Path, name: str) -> None:
    check_validation(name, job(fit_with_validation, name, tmp_path), tmp_path)


# -- resumed elsewhere ---------------------------------------------------------------------------------------

EVEN, MEASURED = {"balance": "off"}, {"balance": "auto"}
WORLDS = ("hetero_ddp", "hetero_ddp/workers", "hetero_auto")  # of one replica


def saved(name: str, path: Path) -> Record:
    """A fit that is saved, and ends there."""
    return fit(name, Save(str(path), MIDDLE, True), options=MEASURED if name in WORLDS else EVEN)


def moved(name: str, path: Path) -> Record:
    """A fit that resumes with other ranks, to the end of the epoch."""
    return fit(name, options=MEASURED if name in WORLDS else EVEN, resume=path)


def check_moved(name: str, before: list[Record], after: list[Record], path: Path) -> None:
    world = len(after)
    done = [i for record in before for step in range(EPOCH, MIDDLE) for i in record.seen[step]]
    rest = [i for record in after for batch in record.seen for i in batch]
    assert sorted(done + rest) == list(range(SAMPLES))
    assert all(sum(len(record.seen[step]) for record in after) == BATCH for step in range(STEPS - MIDDLE))
    trained(after, name)
    for rank, record in enumerate(after):
        assert record.starts == [(MIDDLE, rank, world)]
        assert record.steps == STEPS
        assert torch.equal(record.begun[0], consensus(path))
        assert torch.equal(record.momenta[0], before[min(rank, len(before) - 1)].last[-1])  # its own, or the nearest
        messages = [text for text in record.messages if "3 ranks" in text or "measures again" in text]
        assert len(messages) == (rank == 0), record.messages


@rows(
    among(
        "easgd/exclude",
        "easgd_overlap/int4",
        "diloco/topk",
        "diloco/fragments",
        "diloco/int4",
        "diloco_async/int4",
        "diloco_async/quorum",
    )
)
def test_on_other_ranks_a_fit_goes_on_with_the_next_sample(tmp_path: Path, name: str) -> None:
    path = tmp_path / "saved.ckpt"
    before = job(saved, name, path, nodes=(1, 1, 1))
    for world in (2, 4):
        check_moved(name, before, job(moved, name, path, nodes=(1,) * world), path)


# -- not finite ----------------------------------------------------------------------------------------------

BREAK = among(
    "node/optimizer",
    "daso/mixing",
    "easgd_overlap/bf16",
    "easgd_async/thread",
    "diloco/fragments",
    "diloco_async/quorum",
    "gossip/push",
)
#: Replicas meet all at once: what is not finite is an error on all ranks before it spreads.
AT_ONCE = {"ddp", "auto", "node", "daso", "easgd", "easgd_overlap", "eamsgd", "diloco", "slowmo"}


class Exploding(Model):
    """The loss of a rank is NaN once: of rank 0, which hosts centers, in the rows of OTHERS, and else of rank 1."""

    def __init__(self, name: str) -> None:
        super().__init__(ALL[name])
        self.rank = explodes(name)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == self.rank and self.trainer.global_step == 4 else loss


def explodes(name: str) -> int:
    return int(name in ROWS)


def broken(name: str, folder: Path) -> Record:
    """A fit in which a loss is not finite, saved at every step."""
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    return fit(name, keep, model=Exploding(name))


def check_broken(name: str, ranks: list[Record], folder: Path) -> None:
    victim = explodes(name)
    for rank, record in enumerate(ranks):
        message = str(record.error)
        if rank == victim or name.removeprefix("hetero_").partition("/")[0] in AT_ONCE:
            assert isinstance(record.error, NotFiniteError)
            assert re.search(rf"rank {victim}\b.* at step 5|[Aa]t step 5.* rank {victim}\b", message, re.DOTALL)
            assert "on_nan='skip'" in message
            assert f"the loss of rank {victim}" in message or re.search(
                rf"replica \d \(ranks \[.*\b{victim}\b.*\]\)", message
            )
            assert "'net." in message or "replica" not in message
            assert "too large for the wire" not in message
        else:
            assert isinstance(record.error, NotFiniteError | CommunicationError)
            assert f"rank {victim}" in message or f"ranks [{victim}]" in message
            assert "too large for the wire" not in message
            assert record.weights.isfinite().all()
    assert list(folder.glob("*.ckpt"))
    assert all(consensus(path).isfinite().all() for path in folder.glob("*.ckpt"))


@rows(BREAK)
def test_a_loss_that_is_not_finite_ends_the_fit_before_it_spreads(tmp_path: Path, name: str) -> None:
    check_broken(name, job(broken, name, tmp_path), tmp_path)


def left_out(name: str) -> Record:
    """The same fit, with a loss that is not finite left out."""
    return fit(name, model=Exploding(name), options={"on_nan": "skip"})


def check_left_out(name: str, ranks: list[Record]) -> None:
    trained(ranks, name)
    assert all(record.error is None and record.steps == STEPS for record in ranks)
    assert all(weights.isfinite().all() for record in ranks for weights in record.path[-4:])
    messages = [text for record in ranks for text in record.messages if "left out" in text or "do not count" in text]
    assert messages
    assert all(str(explodes(name)) in text for text in messages)


@rows(BREAK)
def test_a_loss_that_is_not_finite_is_left_out_if_asked_for(name: str) -> None:
    check_left_out(name, job(left_out, name))


# -- a rank is lost ------------------------------------------------------------------------------------------

MOMENTS = {"before": 0, "within": 1, "after": 2, "fails": 2}  # an exchange, or in a step; and who is lost
DIED, FAILED = "has ended without an error message", "failed with InjectedError: injected"
KEPT = [
    name
    for name in among("diloco/fragments", "diloco/int4", "diloco_async/int4", "diloco_async/quorum", "slowmo")
    if name != "hetero_auto"
]


class InjectedError(Exception):
    """Failure of a rank."""


class FailsInStep(Model):
    """A rank fails in a step."""

    def __init__(self, row: Row, rank: int) -> None:
        super().__init__(row, scheduled=False)
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if int(os.environ["RANK"]) == self.rank and self.trainer.global_step == 9:
            raise InjectedError("injected")
        return super().training_step(batch, batch_idx)


class Killed(pl.Callback):
    """The process of a rank is killed in a step at the end of which all exchange.

    Args:
        rank: of the process.
        step: its number, from 1.
        moment: ``before`` it begins; ``within``: while this rank waits for the others' part; ``after``: in the next
            step, when one of the others may be ahead, and the third one is behind.
    """

    def __init__(self, rank: int, step: int, moment: str) -> None:
        self.rank, self.step, self.moment = rank, step + (moment == "after"), moment
        self.mine = int(os.environ["RANK"])  # it gets another number later

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step - 1 or trainer.world_size != 3:
            return
        if self.moment == "within" and self.mine == self.rank:
            if os.fork() == 0:
                time.sleep(0.3)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            return
        behind = (self.rank + 1) % 3
        pauses = {"before": (0.0, 0.3, 0.3), "within": (0.0, 0.6, 0.6), "after": (0.4, 0.7, 0.0)}[self.moment]
        time.sleep(pauses[0 if self.mine == self.rank else 1 if self.mine == behind else 2])
        if self.mine == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def lost(name: str, moment: str) -> Record:
    """A fit in which a rank is lost; the others go on."""
    options, row = {"on_peer_loss": "continue", "balance": "off", "grace": 20.0}, ALL[name]
    if moment == "fails":
        return fit(name, model=FailsInStep(row, MOMENTS[moment]), options=options)
    killed = Killed(MOMENTS[moment], row.period * (1 if moment == "before" else 2), moment)
    return fit(name, killed, model=Model(row, scheduled=False), options=options)


def rest_of(outcomes: list[Outcome], *without: int) -> list[Any]:
    """Results of the other ranks."""
    rest = [outcome for rank, outcome in enumerate(outcomes) if rank not in without]
    assert all(outcome.value for outcome in rest), "\n".join(outcome.trace for outcome in rest)
    return [outcome.value for outcome in rest]


def check_lost(name: str, moment: str, outcomes: list[Outcome]) -> None:
    rank, how = MOMENTS[moment], FAILED if moment == "fails" else DIED
    assert outcomes[rank].exitcode == -signal.SIGKILL or isinstance(outcomes[rank].error, InjectedError)
    rest = rest_of(outcomes, rank)
    trained(rest, name)
    for number, record in enumerate(rest):
        assert record.error is None
        assert record.number == (number, 2)
        assert record.steps == STEPS
        [loss] = record.losses
        assert loss.lost.keys() == {rank}
        assert loss.lost[rank].startswith(how)
        [message] = [text for text in record.messages if "Training goes on" in text]
        assert f"rank {rank} {how}" in message
        assert f"after step {loss.step};" in message
    if name in ("hetero_ddp", "hetero_node", "hetero_diloco"):  # where all meet, they are alike
        paths = [dict(zip(record.ends, record.path, strict=True)) for record in rest]
        steps = [step for step in range(EPOCH, STEPS + 1) if step % ALL[name].period == 0]
        assert all(torch.equal(paths[0][step], paths[1][step]) for step in steps)
    if name == "hetero_ddp":
        check_exact(rest)


def check_exact(rest: list[Record]) -> None:
    """Check the weights against one process on the same samples; these include the lost rank's until its loss."""
    batches, step = [], rest[0].losses[0].step
    for number in range(STEPS):
        whole = order(number // EPOCH)[BATCH * (number % EPOCH) :][:BATCH]
        taken = [i for record in rest for i in record.rows[number]]
        assert set(taken) <= set(whole)
        batches.append(whole if number < step else taken)
    assert rest[0].losses[0].samples == sum(BATCH - len(batch) for batch in batches) > 0
    assert all(len(batch) == BATCH for batch in batches[step + 3 :])  # beyond those that had been drawn
    assert any(f"{rest[0].losses[0].samples} samples that they had still to take" in text for text in rest[0].messages)
    assert (rest[0].weights - one_process(batches)).abs().max() < 1e-10


@pytest.mark.parametrize("moment", MOMENTS)
@rows(KEPT)
def test_the_others_go_on_when_a_rank_is_lost(name: str, moment: str) -> None:
    check_lost(name, moment, attempt(lost, 3, name, moment, nodes=[1, 1, 1], timeout=60))


def failed(name: str) -> Record:
    """A fit that ends when the first rank fails, which hosts centers."""
    return fit(name, model=FailsInStep(ALL[name], 0))


@rows(ROWS)
def test_an_error_of_one_rank_ends_the_fit_on_all(name: str) -> None:
    outcomes = attempt(failed, 3, name, nodes=list(ALL[name].nodes), timeout=60)
    assert isinstance(outcomes[0].error, InjectedError)
    for record in rest_of(outcomes, 0):
        assert isinstance(record.error, CommunicationError)
        assert f"rank 0 {FAILED}" in str(record.error)
    assert not any(outcome.late or outcome.exitcode for outcome in outcomes)


# -- told to stop --------------------------------------------------------------------------------------------


class Terminated(pl.Callback):
    """Sends SIGTERM to rank 1 after a step, and gives the others time to notice."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)


def terminated(name: str, folder: Path) -> tuple[Record, Record, Record]:
    """A fit, the same fit with SIGTERM, and the fit that resumes from there."""
    settings: dict[str, Any] = {"validates": True, "val_check_interval": 4}
    whole = fit(name, **settings)
    last = [ModelCheckpoint(folder, save_top_k=0, save_last=True) for _ in range(2)]
    first = fit(name, last[0], Terminated(), **settings)
    return whole, first, fit(name, last[1], resume="last", **settings)


def check_terminated(name: str, ranks: list[tuple[Record, Record, Record]], folder: Path) -> None:
    [step] = {first.steps for _, first, _ in ranks}
    assert 5 <= step < STEPS
    files = [path.name for path in folder.iterdir() if path.is_file()]
    assert files == ["last-sigterm.ckpt"] or "last.ckpt" in files
    trained([second for _, _, second in ranks], name)
    for whole, first, second in ranks:
        assert isinstance(first.error, SIGTERMException)
        assert first.error.code == 128 + signal.SIGTERM
        assert second.error is None
        assert first.seen == whole.seen[:step]
        check_goes_on(name, whole, second, step)
        assert torch.equal(second.begun[0], first.path[-1])
        assert torch.equal(second.momenta[0], first.last[-1])
        assert first.evaluated + second.evaluated == whole.evaluated


@rows(ROWS)
def test_all_save_and_stop_after_the_same_step_when_one_is_told_to(tmp_path: Path, name: str) -> None:
    check_terminated(name, job(terminated, name, tmp_path), tmp_path)


# -- unfrozen, frozen ----------------------------------------------------------------------------------------


CHANGE = among(
    "node/optimizer",
    "easgd_async/thread",
    "diloco_async/thread",
    "diloco_async/quorum",
    "diloco/delay",
    "gossip/push",
    "gossip_push_sum/bf16",
    "slowmo",
)


class Thaws(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.02)


class Freezes(pl.Callback):
    """Freezes the first layer in the second epoch, and trains it again in the third."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.current_epoch != 1)


def changed(name: str, change: Any, folder: Path) -> tuple[Record, Record]:
    """A fit in which a layer begins to train, or is frozen for a while; and a fit that resumes from within."""
    path = str(folder / "saved.ckpt")
    whole = fit(name, change(), Save(path, MIDDLE, False), model=Model(ALL[name], scheduled=False), max_epochs=3)
    return whole, fit(name, change(), model=Model(ALL[name], scheduled=False), resume=path, max_epochs=3)


def check_changed(name: str, change: Any, ranks: list[tuple[Record, Record]]) -> None:
    row, begin = ALL[name], parameters(Model(ALL[name]))
    still = parameters(Model(row).backbone).numel()  # the backbone's parameters come first
    for number in range(2):
        alike([found[number] for found in ranks])
        assert (ranks[0][number].weights != begin).all()
    first = ranks[0][0].path
    for whole, second in ranks:
        check_goes_on(name, whole, second, MIDDLE)
        assert torch.equal(second.begun[0], whole.path[MIDDLE - 1])
        path = [weights[:still] for weights in whole.path]
        if change is Thaws:
            assert all(torch.equal(weights, begin[:still]) for weights in path[:EPOCH])
            assert not torch.equal(path[EPOCH], begin[:still])
        else:
            assert all(torch.equal(weights, first[EPOCH][:still]) for weights in path[EPOCH : 2 * EPOCH])
            assert not torch.equal(path[2 * EPOCH], path[2 * EPOCH - 1])
    if change is Freezes and row.mean and row.repeats and "daso" not in name:  # DASO's exchange ends there
        of_all = zip(row.shares, [whole.path[EPOCH - 1][:still] for whole, _ in ranks], strict=True)
        assert (
            first[EPOCH][:still] - sum(share * path for share, path in of_all) / sum(row.shares)
        ).abs().max() < 1e-12


@rows(CHANGE)
def test_a_layer_that_is_unfrozen_trains_on_all(tmp_path: Path, name: str) -> None:
    check_changed(name, Thaws, job(changed, name, Thaws, tmp_path))


@rows(name for name in CHANGE if name not in WORLDS)  # where DDP wants `find_unused_parameters`
def test_a_layer_that_is_frozen_stands_still_on_all(tmp_path: Path, name: str) -> None:
    check_changed(name, Freezes, job(changed, name, Freezes, tmp_path))


# -- data that users have split ------------------------------------------------------------------------------

LENGTHS = (3, 7, 4)  # batches of each rank's stream; it is saved after 4 steps


def of_stream(rank: int) -> list[int]:
    """The samples of a rank's stream."""
    first = 4 * sum(LENGTHS[:rank])
    return list(range(first, first + 4 * LENGTHS[rank]))


class Shard(IterableDataset):
    """The samples of each rank; the stream saves its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        data = dataset(SAMPLES)
        for i in of_stream(int(os.environ["RANK"]))[self.at :]:
            self.at += 1
            yield data[i]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class SizedShard(IterableDataset):
    """The same, with a length."""

    def __iter__(self) -> Iterator[Any]:
        data = dataset(SAMPLES)
        return (data[i] for i in of_stream(int(os.environ["RANK"])))

    def __len__(self) -> int:
        return len(of_stream(int(os.environ["RANK"])))


class Whole(IterableDataset):
    """A stream that all ranks read alike."""

    def __iter__(self) -> Iterator[Any]:
        data = dataset(SAMPLES)
        return (data[i] for i in range(SAMPLES))


def streamed(name: str, folder: Path) -> dict[str, Record]:
    """Fits on data that users have split, by a sampler of their own or in streams, and on a stream that all share."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
    options, model = {"balance": "off", "global_batch_size": None}, partial(Model, ALL[name], scheduled=False)
    own = DistributedSampler(dataset(SAMPLES), 3, int(os.environ["RANK"]), seed=3)
    sampler = DataLoader(dataset(SAMPLES), batch_size=4, sampler=own)
    found = {
        "sampler": fit(name, model=model(), data=sampler, options=options),
        "sized": fit(name, model=model(), data=DataLoader(SizedShard(), batch_size=4), options=options),
    }
    kinds: dict[str, Any] = {"shared": lambda: DataLoader(SharedStream(Whole()), batch_size=4)}
    kinds["own"] = lambda: StatefulDataLoader(Shard(), batch_size=4)
    for kind, make in kinds.items():
        path = str(folder / f"{kind}.ckpt")
        found[kind] = fit(name, Save(path, 4, False), model=model(), data=make(), options=options)
        found[f"{kind}, resumed"] = fit(name, model=model(), data=make(), options=options, resume=path)
    return found


def check_streamed(name: str, ranks: list[dict[str, Record]]) -> None:
    for part in ranks[0]:
        trained([found[part] for found in ranks], name)
    for rank, found in enumerate(ranks):
        sampler, own = DistributedSampler(range(SAMPLES), 3, rank, seed=3), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            samples = list(sampler)
            own += [samples[i : i + 4] for i in range(0, len(samples), 4)]
        assert found["sampler"].seen == own
        for part in ("sized", "own"):  # all take as many steps as the longest has
            seen = found[part].seen
            assert found[part].steps == len(seen) == 2 * max(LENGTHS)
            for epoch in range(2):
                batches = seen[epoch * max(LENGTHS) :][: max(LENGTHS)]
                assert [i for batch in batches[: LENGTHS[rank]] for i in batch] == of_stream(rank)
                assert all(batch == batches[LENGTHS[rank] - 1] for batch in batches[LENGTHS[rank] :])  # of no weight
        for part in ("shared", "own"):
            check_goes_on(name, found[part], found[f"{part}, resumed"], 4)
    for step in range(STEPS):
        first = BATCH * (step % EPOCH)
        assert sorted(i for found in ranks for i in found["shared"].seen[step]) == list(range(first, first + BATCH))
    if name == "hetero_ddp":
        batches = [[i for found in ranks for i in found["sampler"].seen[step]] for step in range(STEPS)]
        assert (ranks[0]["sampler"].weights - one_process(batches)).abs().max() < 1e-12
        batches = []
        for step in range(2 * max(LENGTHS)):
            going = [rank for rank in range(3) if step % max(LENGTHS) < LENGTHS[rank]]
            batches.append([i for rank in going for i in ranks[rank]["sized"].seen[step]])
        assert (ranks[0]["sized"].weights - one_process(batches)).abs().max() < 1e-12


@rows(ROWS)
def test_data_that_users_have_split_stay_as_they_are(tmp_path: Path, name: str) -> None:
    check_streamed(name, job(streamed, name, tmp_path))


# -- a rank joins --------------------------------------------------------------------------------------------

#: Strategies with which all begin from the mean of the replicas; a center would be older.
LIKE_THE_MEAN = [name for name in KEPT if ALL[name].mean or "easgd" in name]


class Grows(pl.Callback):
    """Ranks go slowly until another one has joined; some steps later the fit ends."""

    def __init__(self) -> None:
        self.end, self.until = -1, time.monotonic() + 120

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.world_size == 3:
            self.end = trainer.global_step + 5

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.world_size == 3:
            trainer.should_stop = trainer.global_step >= self.end
        else:
            assert time.monotonic() < self.until, "nobody has joined"
            time.sleep(0.05)


def grown(name: str, folder: Path) -> Record:
    """A fit that another process joins."""
    file, until = folder / "job", time.monotonic() + 60
    while os.environ.get(LATE) and not file.exists() and time.monotonic() < until:
        time.sleep(0.02)
    options = {"on_peer_loss": "continue", "balance": "off", "join_file": str(file)}
    if name != "hetero_ddp":
        options["replica"] = "rank"
    return fit(name, Grows(), model=Model(ALL[name], scheduled=False), options=options, max_epochs=1000)


def check_grown(name: str, ranks: list[Record]) -> None:
    trained(ranks, name)
    [step] = {record.starts[-1][0] for record in ranks}
    assert [record.starts[-1][1:] for record in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert [len(record.starts) for record in ranks] == [2, 2, 1]
    assert {record.steps for record in ranks} == {step + 5}
    begun = [record.begun[-1] for record in ranks]
    assert all(torch.equal(one, begun[0]) for one in begun)
    assert not torch.equal(begun[0], ranks[0].weights)
    last = [dict(zip(record.ends, record.last, strict=True)) for record in ranks[:2]]
    assert all(torch.equal(record.momenta[-1], last[rank][step]) for rank, record in enumerate(ranks[:2]))  # its own
    assert torch.equal(ranks[2].momenta[-1], last[0][step])  # that of the first
    if name in LIKE_THE_MEAN:
        of_all = mean([1.0, 1.0], [dict(zip(record.ends, record.path, strict=True))[step] for record in ranks[:2]])
        assert (begun[0] - of_all).abs().max() < 1e-12
    if name == "hetero_ddp":
        batches = [order(number // EPOCH)[BATCH * (number % EPOCH) :][:BATCH] for number in range(step + 5)]
        assert (ranks[0].weights - one_process(batches)).abs().max() < 1e-10


@rows(KEPT)
def test_a_rank_that_joins_begins_where_the_others_are(tmp_path: Path, name: str) -> None:
    check_grown(name, rest_of(grow(2, 1, grown, name, tmp_path)))
    assert os.listdir(tmp_path) == []  # the job is over
