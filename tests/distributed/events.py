"""Fits to which something happens, for the table of `test_events`: one model, one fit, and what a rank has seen of it.

Only what users can reach is touched: a Trainer, options, callbacks, checkpoints, warnings, `strategy.survival.losses`.
"""

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tasks import FAST, EvaluatedNet, Save, dataset, parameters
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import SharedStream
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies import ReplicaStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import own_averager  # noqa: F401  # registers hetero_slowmo

SHARES = [3.0, 1.0, 2.0]  # of 12 samples three ranks take 6, 2 and 4
SAMPLES, BATCH, EPOCH = 96, 4, 8  # samples, those of a rank in a batch, steps of three ranks in an epoch
LIMIT = 22  # steps of a fit whose length is given in steps


# -- the strategies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A strategy, and what can be said of it whatever happens.

    Attributes:
        options: of the strategy.
        nodes: ranks of each node, where nothing is lost.
        optimizer: ``heavy`` ball, or ``nesterov``.
        order: ``at once``: replicas meet at the same steps. ``alone``: each goes at its own pace, so that two fits are
            alike only if ranks step in turn. ``threads``: besides, exchanges pass on threads, and no two are alike.
        period: optimizer steps from one exchange to the next, the first of which may be the first step.
        mean: whether the mean of the replicas is validated and saved, and kept by exchanges.
        limit: the largest difference between a weight of two fits that are to be alike.
    """

    options: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = (1, 1, 1)
    optimizer: str = "heavy"
    order: str = "at once"
    period: int = 3
    mean: bool = False
    limit: float = 0.0


ROUNDING = 1e-12  # DDP lays its buckets out anew after its first step, and so sums three ranks in another order.
PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 3}
SELDOM = {**PULL, "tau": 5}
DASO = {"warmup": 3, "cooldown": 2, "global_every": 4, "wait": 3, "patience": 99}  # nearly always under way
SCHEDULE = {"warmup": 2, "cooldown": 4, "global_every": 4, "wait": 2, "patience": 2, "threshold": 0.9}
SCHEDULE["schedule_every_n_steps"] = 2  # its rates change while exchanges are under way
GOSSIP = {"deadline": 15}
#: Of each string its row; and rows of other options.
ROWS = {
    "hetero_ddp": Row({}, limit=ROUNDING, period=1, mean=True),
    "hetero_auto": Row({"measure": 6, "gain": 1e9}, limit=ROUNDING, period=1, mean=True),
    "hetero_node": Row({"every_n_steps": 3}, (2, 1), mean=True),
    "hetero_daso": Row(DASO, (2, 1), mean=True, period=4),
    "hetero_easgd": Row(PULL),
    "hetero_easgd_overlap": Row(PULL),
    "hetero_easgd_round_robin": Row(PULL),
    "hetero_easgd_async": Row(SELDOM, period=5, order="alone"),
    "hetero_easgd_hogwild": Row(SELDOM, period=5, order="alone"),
    "hetero_measgd_async": Row(SELDOM, period=5, order="alone"),
    "hetero_eamsgd": Row(PULL, optimizer="nesterov"),
    "hetero_gossip": Row({"overlap": False, "every_n_steps": 2, **GOSSIP}, period=2, mean=True),
    "hetero_gossip_push_sum": Row(GOSSIP, period=1, mean=True),
    "hetero_gossip_async": Row({}, order="threads", period=1, mean=True),
    "hetero_diloco": Row({"tau": 3}, mean=True),
    "hetero_diloco_async": Row({"tau": 5, "follow_speed": False}, period=5, order="alone", limit=1e-15),
    "hetero_noloco": Row({"tau": 3, **GOSSIP}),
}  # fmt: skip
OTHERS = {
    "hetero_node/int4": Row({"every_n_steps": 3, "wire": "int4"}, (2, 1), mean=True),
    "hetero_node/optimizer": Row({"every_n_steps": 3, "average_optimizer_state": True}, mean=True),
    "hetero_daso/mixing": Row({**DASO, "mixing": "daso"}, (2, 1), mean=True),
    "hetero_daso/schedule": Row(SCHEDULE, (2, 1), mean=True),
    "hetero_daso/topk": Row({**DASO, "wire": "topk:0.1"}, (2, 1), mean=True),
    "hetero_easgd/exclude": Row({**PULL, "exclude": ["*bias"]}),
    "hetero_easgd_overlap/bf16": Row({**PULL, "wire": "bf16"}),
    "hetero_easgd_overlap/int4": Row({**PULL, "wire": "int4"}),
    # Where the wire takes the client to be (the center at its last exchange) is not saved.
    "hetero_easgd_round_robin/bf16": Row({**PULL, "wire": "bf16"}, limit=2.0**-8),
    "hetero_easgd_async/thread": Row({**SELDOM, "center": "thread"}, period=5, order="alone"),
    "hetero_gossip/overlap": Row({"topology": "random", "wire": "bf16", **GOSSIP}, period=1),
    "hetero_gossip/pull": Row({"exchange": "pull", "topology": "exponential", **GOSSIP}, period=1),
    "hetero_gossip/push": Row({"exchange": "push", **GOSSIP}, period=1),
    "hetero_gossip_push_sum/bf16": Row({"topology": "hypercube", "every_n_steps": 3, "wire": "bf16", **GOSSIP}),
    "hetero_gossip_push_sum/ring": Row({"topology": "ring", **GOSSIP}, period=1),
    "hetero_diloco/topk": Row({"tau": 3, "wire": "topk:0.1"}),
    "hetero_diloco/fragments": Row({"tau": 4, "fragments": 2, "delay": 2, "blend": 0.5}, period=4),
    "hetero_diloco/int4": Row({"tau": 4, "fragments": 2, "delay": 3, "wire": "int4"}, period=4),
    "hetero_slowmo": Row({"tau": 5}),  # an algorithm of a user
    "hetero_noloco/bf16": Row({"tau": 3, "wire": "bf16", **GOSSIP}),
}
ALL = {**ROWS, **OTHERS}


def kind(name: str) -> Any:
    """The class that a Trainer makes of a string."""
    return StrategyRegistry[name.partition("/")[0]]["strategy"]


# -- the model, the data -------------------------------------------------------------------------------------


class Model(EvaluatedNet):
    """A regression that may draw other random numbers on each rank; its first layer is a backbone.

    Args:
        name: of the row, which may need a certain optimizer.
        dropout: of the inputs.
        lr: learning rate.
        scheduled: whether it changes from step to step.
    """

    def __init__(self, name: str, dropout: float = 0.0, lr: float = 0.05, scheduled: bool = True) -> None:
        super().__init__(lr=lr)
        self.backbone, self.dropout, self.scheduled = self.net[0], dropout, scheduled
        self.nesterov = ALL[name].optimizer == "nesterov"
        self.rows: dict[int, list[int]] = {}  # samples of each step, as it was taken

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, *_ = batch
        return nn.functional.mse_loss(self.net(nn.functional.dropout(x, self.dropout, self.training)), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows[self.trainer.global_step] = batch[3].tolist()
        self.seen = [*self.seen, batch[3].tolist()]  # a new list: a padding batch stays in it
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True)  # nobody waits for others in a step
        return loss

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=self.lr, momentum=0.9, nesterov=self.nesterov)
        if not self.scheduled:
            return optimizer
        assert self.trainer.estimated_stepping_batches > 0  # sets up the dataloaders before a checkpoint is read
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.2 + abs(5 - step % 10) / 5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loss_at(weights: torch.Tensor) -> float:
    """On all samples of the validation."""
    model = EvaluatedNet()
    nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.no_grad():
        return model.loss(dataset(50)[:]).item()


def order(epoch: int) -> list[int]:
    """The samples of an epoch, as PyTorch's own sampler shuffles them."""
    sampler = DistributedSampler(dataset(SAMPLES), num_replicas=1, rank=0, shuffle=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def one_process(batches: list[list[int]]) -> torch.Tensor:
    """The weights after one process has taken these steps."""
    data, model = dataset(SAMPLES), Model("hetero_ddp", scheduled=False)
    optimizer = model.configure_optimizers()
    for rows in batches:
        optimizer.zero_grad()
        model.loss(data[sorted(rows)]).backward()
        optimizer.step()
    return parameters(model)


def listed(workers: int = 0) -> DataLoader:
    return DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True, num_workers=workers)


LENGTHS = (3, 7, 5)  # batches of each rank's stream


def of_stream(rank: int) -> list[int]:
    """The samples of a rank's stream."""
    first = BATCH * sum(LENGTHS[:rank])
    return list(range(first, first + BATCH * LENGTHS[rank]))


class Shard(IterableDataset):
    """Every rank's own samples; tells where it stands."""

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


class SizedShard(Shard):
    def __len__(self) -> int:
        return len(of_stream(int(os.environ["RANK"])))


class Whole(IterableDataset):
    """What all ranks read alike."""

    def __iter__(self) -> Iterator[Any]:
        data = dataset(SAMPLES)
        return (data[i] for i in range(SAMPLES))


# -- what happens --------------------------------------------------------------------------------------------


class InTurn(pl.Callback):
    """Ranks take their steps in turn, so that what depends on who comes first is the same in every fit.

    But for the first two, and the last one of an epoch, in which all wait for each other; rows that are taken in turn
    exchange at none of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        folder.mkdir(parents=True, exist_ok=True)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        mine = self.count * trainer.world_size + trainer.global_rank
        until = time.monotonic() + 20
        while mine > 0 and not (self.folder / f"{mine - 1}").exists():
            assert time.monotonic() < until, f"step {mine - 1} has not been taken"
            time.sleep(0.001)
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self.count < 2 or last or trainer.global_step + 1 == trainer.max_steps:
            self._done(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._done(trainer)
        self.count += 1

    def _done(self, trainer: pl.Trainer) -> None:
        (self.folder / f"{self.count * trainer.world_size + trainer.global_rank}").touch()


class StartAt(pl.Callback):
    """Every rank begins elsewhere: so far from the others."""

    def __init__(self, starts: list[float]) -> None:
        self.starts = starts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            for p in pl_module.parameters():
                p.add_(self.starts[trainer.global_rank])


class Terminated(pl.Callback):
    """Rank 1 is told to stop after a step, and gives the others time to hear of it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)


def explodes(name: str) -> int:
    """The rank whose loss is not finite: with other options it is the first, which hosts centers."""
    return int(name in ROWS)


class Exploding(Model):
    """The loss of a rank is NaN once."""

    step = 4

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.rank = explodes(name)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == self.rank and self.trainer.global_step == self.step else loss


class StruckError(Exception):
    """What goes wrong on a rank."""


class Failing(Model):
    """Rank 2 fails in a step; an exchange may be under way."""

    step = 9

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if int(os.environ["RANK"]) == 2 and self.trainer.global_step == self.step:
            raise StruckError("struck")
        return super().training_step(batch, batch_idx)


class Thaws(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05)


class Freezes(pl.Callback):
    """Freezes the first layer in the second epoch, and trains it again in the third."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.current_epoch != 1)


class Killed(pl.Callback):
    """The process of a rank is killed in its step number ``step`` (from 1), at the end of which all exchange.

    Args:
        rank: of the process.
        step: its number.
        moment: ``before`` it begins; ``within``: while this rank waits for the others' part; ``after``: when one of
            the others is ahead, and the third one behind.
    """

    def __init__(self, rank: int, step: int, moment: str) -> None:
        self.rank, self.step, self.moment = rank, step + (moment == "after"), moment

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self.mine, self.world = trainer.global_rank, trainer.world_size  # ranks get other numbers later

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step - 1 or trainer.world_size != self.world:
            return
        if self.moment == "before":
            time.sleep(0.0 if self.mine == self.rank else 0.3)
        elif self.moment == "after":
            time.sleep({self.rank: 0.6, (self.rank + 1) % self.world: 1.0}.get(self.mine, 0.0))
        elif self.mine != self.rank:
            time.sleep(0.8)
        elif os.fork() == 0:
            time.sleep(0.4)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        if self.mine == self.rank and self.moment != "within":
            os.kill(os.getpid(), signal.SIGKILL)


class Grows(pl.Callback):
    """Ranks go slowly until others have joined; some steps later the fit ends."""

    def __init__(self, world: int, steps: int = 5) -> None:
        self.world, self.steps, self.end = world, steps, -1
        self.until = time.monotonic() + 120

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.world_size == self.world:
            self.end = trainer.global_step + self.steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.world_size == self.world:
            trainer.should_stop = trainer.global_step >= self.end
        else:
            assert time.monotonic() < self.until, "nobody has joined"
            time.sleep(0.1)


# -- what is seen --------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a rank has seen of a fit.

    Attributes:
        error: with which the fit has ended; ``None``: well.
        weights: at the end.
        path: weights after each step.
        starts: step, rank and world where training began, or began again.
        begun: the weights there.
        momenta: at those starts, and before each of them.
        last: the weights, and the momentum, after the last step.
        seen: samples of each batch.
        rows: of each step.
        validated: weights in each validation.
        metrics: of each validation.
        evaluated: samples of all validations.
        ended: weights when the callbacks are told that training has ended.
        test: loss at the end, if it has validated.
        steps: optimizer steps at the end.
        losses: of ranks.
        skipped: replicas that were left out of exchanges, once for each time.
        said: warnings, and what is logged.
        number: rank and world at the end.
    """

    error: BaseException | None
    weights: torch.Tensor
    path: torch.Tensor
    starts: list[tuple[int, int, int]]
    begun: list[torch.Tensor]
    momenta: list[tuple[torch.Tensor, torch.Tensor]]
    last: tuple[torch.Tensor, torch.Tensor]
    seen: list[list[int]]
    rows: dict[int, list[int]]
    validated: list[torch.Tensor]
    metrics: list[float]
    evaluated: list[int]
    ended: torch.Tensor
    test: float | None
    steps: int
    losses: list[Any]
    skipped: list[int]
    said: list[str]
    number: tuple[int, int]


class Watch(pl.Callback):
    """Notes what there is to see."""

    def __init__(self) -> None:
        self.path: list[torch.Tensor] = []
        self.starts: list[tuple[int, int, int]] = []
        self.begun: list[torch.Tensor] = []
        self.momenta: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.last = torch.zeros(0), torch.zeros(0)
        self.validated: list[torch.Tensor] = []
        self.metrics: list[float] = []
        self.ended = torch.zeros(0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append((trainer.global_step, trainer.global_rank, trainer.world_size))
        self.begun.append(parameters(pl_module))
        self.momenta.append((momentum(trainer), self.last[1]))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.path.append(parameters(pl_module))
        self.last = self.path[-1], momentum(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended = parameters(pl_module)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated.append(parameters(pl_module))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.metrics.append(trainer.callback_metrics["val"].item())


def momentum(trainer: pl.Trainer) -> torch.Tensor:
    """The momentum of all parameters that have one, flat."""
    states = [state["momentum_buffer"].flatten().clone() for state in trainer.optimizers[0].state.values()]
    return torch.cat(states) if states else torch.zeros(0)


def fit(
    name: str,
    *callbacks: pl.Callback,
    model: Any = None,
    data: Any = None,
    validates: bool = False,
    turns: Path | None = None,
    resume: Any = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Seen:
    """A fit on a rank; what goes wrong, and is an error of this package or a signal, is part of what is seen."""
    model = model or Model(name)
    strategy = kind(name)(**{"balance": SHARES, "timeout": 60, **ALL[name].options, **(options or {})})
    watch = Watch()
    in_turn = [InTurn(turns)] if turns and ALL[name].order != "at once" else []
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    settings = {**FAST, "max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": saves, **settings}
    data = data or listed()
    error, test, logged = None, None, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_hetero").addHandler(handler)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = pl.Trainer(strategy=strategy, callbacks=[watch, *in_turn, *callbacks], **settings)
        torch.manual_seed(trainer.global_rank)
        try:
            trainer.fit(model, data, DataLoader(dataset(50), batch_size=4) if validates else None, ckpt_path=resume)
        except (HeteroError, SIGTERMException) as caught:
            error = caught
        evaluated = list(model.evaluated)
        if validates and error is None:
            test = trainer.test(model, DataLoader(dataset(50), batch_size=4), verbose=False)[0]["test"]
    skipped = strategy.traffic.skipped if isinstance(strategy, ReplicaStrategy) and watch.path else []
    return Seen(
        error, parameters(model), torch.stack(watch.path) if watch.path else torch.zeros(0), watch.starts, watch.begun,
        watch.momenta, watch.last, model.seen, model.rows, watch.validated, watch.metrics, evaluated, watch.ended, test,
        trainer.global_step, strategy.survival.losses, skipped, [str(one.message) for one in said] + logged,
        (trainer.global_rank, trainer.world_size),
    )  # fmt: skip


# -- what ranks do -------------------------------------------------------------------------------------------


def stops(name: str) -> tuple[int, ...]:
    """The steps after which a fit is stopped: within an epoch, and at the end of one."""
    return (11, 8) if name in ROWS and ALL[name].order == "at once" else (11,)


def stopped(name: str, folder: Path) -> dict[Any, Seen]:
    """A fit; the same one with validations and checkpoints; and stopped, or told to stop, and resumed."""
    make = partial(Model, name, dropout=0.3)
    length: dict[str, Any] = {"max_epochs": -1, "max_steps": LIMIT}
    found: dict[Any, Seen] = {"whole": fit(name, model=make(), turns=folder / "whole", **length)}
    for stop in stops(name):
        path, data, first = folder / f"{stop}.ckpt", listed(int(stop == 8)), dict(length)
        ends: Any = Save(str(path), stop, True)
        if stop == 8 and name != "hetero_daso":  # whose cool-down begins before the end
            ends, first["max_steps"] = ModelCheckpoint(folder, str(stop), every_n_train_steps=stop), stop
        found[stop, 1] = fit(name, ends, model=make(), data=data, turns=folder / f"{stop}-1", **first)
        again = {"turns": folder / f"{stop}-2", "resume": path, **length}
        found[stop, 2] = fit(name, model=make(), data=listed(int(stop == 8)), **again)
    looks = {"validates": True, "val_check_interval": 2, "num_sanity_val_steps": 2, "max_epochs": 2}
    keep = ModelCheckpoint(folder / "looked", "{step}", save_top_k=-1, save_on_train_epoch_end=False)
    found["looked"] = fit(name, keep, turns=folder / "looks", **looks)
    looks = {"validates": name in ROWS, "val_check_interval": 4, "max_epochs": 2}
    found["plain"] = fit(name, turns=folder / "plain", **looks)
    if name in ROWS:
        last = partial(ModelCheckpoint, folder / "last", save_top_k=0, save_last=True)
        found["signal", 1] = fit(name, last(), Terminated(5), turns=folder / "signal-1", **looks)
        found["signal", 2] = fit(name, last(), turns=folder / "signal-2", resume="last", **looks)
    return found


def saved(name: str, path: Path) -> Seen:
    """A fit that is saved, and ends there."""
    return fit(name, Save(str(path), 11, True), model=Model(name, dropout=0.3), options={"balance": "off"})


def elsewhere(name: str, path: Path) -> Seen:
    """A fit of other ranks that goes on from a checkpoint."""
    options = {"balance": "off"}
    return fit(name, model=Model(name, dropout=0.3), options=options, resume=path, max_epochs=2)


CHANGES: list[tuple[Any, int]] = [(Thaws, 12), (Freezes, 20)]


def unfrozen(name: str, folder: Path) -> dict[Any, Seen]:
    """Fits in which a layer begins to train, or stands still for a while; and the same ones, stopped and resumed."""
    found = {}
    make = partial(Model, name, dropout=0.3, scheduled=False)
    for callback, stop in CHANGES if name in ROWS else CHANGES[1:]:
        at, path = folder / callback.__name__, folder / f"{callback.__name__}.ckpt"
        found[callback, 0] = fit(name, callback(), model=make(), turns=at / "0")
        found[callback, 1] = fit(name, callback(), Save(str(path), stop, True), model=make(), turns=at / "1")
        found[callback, 2] = fit(name, callback(), model=make(), turns=at / "2", resume=path)
    return found


def broken(name: str, folder: Path) -> Seen:
    """A fit in which a loss is not finite."""
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    return fit(name, keep, model=Exploding(name), max_epochs=2)


def left_out(name: str) -> Seen:
    """The same, with what is not finite left out."""
    return fit(name, model=Exploding(name), options={"on_nan": "skip"}, max_epochs=2)


def sharded(name: str, folder: Path) -> dict[str, Seen]:
    """Fits on data that users have split, by a sampler of their own or in streams, and on a stream that all share."""
    rank, even = int(os.environ["RANK"]), {"balance": "off"}
    sampler = DistributedSampler(dataset(SAMPLES), len(SHARES), rank, seed=3)
    own = DataLoader(dataset(SAMPLES), batch_size=BATCH, sampler=sampler)
    common: dict[str, Any] = {"options": even, "max_epochs": 2}

    def one(data: Any, *callbacks: pl.Callback, **more: Any) -> Seen:
        return fit(name, *callbacks, model=Model(name, scheduled=False), data=data, **more, **common)

    found = {
        "sampler": one(own),
        "streams": one(DataLoader(Shard(), batch_size=BATCH)),
        "streams with a length": one(DataLoader(SizedShard(), batch_size=BATCH)),
    }
    kinds: dict[str, Any] = {"shared": lambda: DataLoader(SharedStream(Whole()), batch_size=BATCH)}
    kinds["stateful"] = lambda: StatefulDataLoader(Shard(), batch_size=BATCH)
    for kind, make in kinds.items():
        path, turns = folder / f"{kind}.ckpt", folder / kind
        found[kind] = one(make(), Save(str(path), 5, False), turns=turns / "0")
        found[f"{kind}, resumed"] = one(make(), turns=turns / "1", resume=path)
    return found


def lost(name: str, rank: int, moment: str, grace: float = 20.0) -> Seen:
    """A fit in which a rank is lost."""
    options = {"on_peer_loss": "continue", "balance": "off", "grace": grace}
    if moment == "fails":
        return fit(name, model=Failing(name, scheduled=False), options=options, max_epochs=2)
    killed = Killed(rank, ALL[name].period * (1 if moment == "before" else 2), moment)
    data = listed(1) if moment == "after" else None
    return fit(name, killed, model=Model(name, scheduled=False), data=data, options=options, max_epochs=2)


def failed(name: str) -> Seen:
    """A fit that ends when a rank fails."""
    return fit(name, model=Failing(name), max_epochs=2)


def killed(name: str, folder: Path) -> Seen:
    """A fit that ends when a rank is killed, after it has saved."""
    return fit(name, _every_4(folder), Killed(1, 13, "before"), turns=folder / "turns", max_epochs=2)


def goes_on(name: str, folder: Path) -> tuple[Seen, Seen]:
    """The fit that is not killed, and the one that goes on from what the killed one has saved."""
    whole = fit(name, turns=folder / "whole", max_epochs=2)
    path = folder / "step=12.ckpt"
    return whole, fit(name, turns=folder / "again", resume=path, max_epochs=2)


def _every_4(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)


def grown(name: str, folder: Path, late: str) -> Seen:
    """A fit that another process joins."""
    file = folder / "job"
    options = {"on_peer_loss": "continue", "balance": "off", "join_file": str(file)}
    until = time.monotonic() + 60
    while os.environ.get(late) and not file.exists() and time.monotonic() < until:
        time.sleep(0.02)
    if name != "hetero_ddp":
        options["replica"] = "rank"
    return fit(name, Grows(3), model=Model(name, scheduled=False), options=options, max_epochs=1000)
