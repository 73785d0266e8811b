"""Strategies as rows of a table, and the fit that each event of `test_events` happens to."""

import logging
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tasks import FAST, EvaluatedNet, dataset, parameters
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero.errors import HeteroError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # ranks inherit it
import own_averager  # noqa: F401  # registers hetero_slowmo

SHARES = [3.0, 1.0, 2.0]  # of 12 samples three ranks take 6, 2 and 4
SAMPLES, BATCH, EPOCH = 96, 12, 8  # samples, those of all ranks in a step, steps in an epoch
STEPS = 2 * EPOCH  # of a fit
ROUNDING = 1e-12  # DDP sums in another order once it has laid out its buckets again, after its first step

# -- the strategies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A strategy with options.

    Attributes:
        options: of the strategy.
        nodes: ranks of each node, where nothing is lost.
        repeats: two fits of it are alike. Otherwise time decides which replicas meet.
        period: optimizer steps from one exchange to the next.
        mean: the mean of the replicas is what is validated and saved, and exchanges keep it.
        nesterov: the optimizer that it needs.
        workers: of the dataloader.
        limit: the largest difference of a weight between two fits that are to be alike.
    """

    options: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = (1, 1, 1)
    repeats: bool = True
    period: int = 3
    mean: bool = False
    nesterov: bool = False
    workers: int = 0
    limit: float = 0.0

    @property
    def shares(self) -> list[float]:
        return SHARES[: sum(self.nodes)]


PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 3}
DASO = {"warmup": 3, "cooldown": 2, "global_every": 4, "wait": 3, "patience": 99}  # nearly always under way
SCHEDULE = {"warmup": 2, "cooldown": 2, "global_every": 4, "wait": 2, "patience": 2, "threshold": 0.9}
SCHEDULE["schedule_every_n_steps"] = 2  # its rates change while exchanges are under way
GOSSIP = {"deadline": 15}  # on a busy machine, too, nobody shall go on without a partner
TWO_NODES, ALONE = (2, 1), (1,)
#: The row of each string; the first four rows are of four families.
ROWS = {
    "hetero_ddp": Row(period=1, limit=ROUNDING, mean=True),
    "hetero_daso": Row(DASO, TWO_NODES, period=4, mean=True),
    "hetero_easgd_async": Row(PULL, repeats=False),
    "hetero_gossip": Row({"overlap": False, "every_n_steps": 2, **GOSSIP}, period=2, mean=True),
    "hetero_node": Row({"every_n_steps": 3}, TWO_NODES, mean=True),
    "hetero_auto": Row({"measure": 6, "gain": 1e9}, period=1, limit=ROUNDING, mean=True),
    "hetero_easgd": Row(PULL),
    "hetero_easgd_overlap": Row(PULL),
    "hetero_easgd_round_robin": Row(PULL),
    "hetero_easgd_hogwild": Row(PULL, repeats=False),
    "hetero_measgd_async": Row(PULL, repeats=False),
    "hetero_eamsgd": Row(PULL, nesterov=True),
    "hetero_gossip_push_sum": Row({"topology": "ring", **GOSSIP}, period=1),
    "hetero_gossip_async": Row(repeats=False, period=1),
    "hetero_diloco": Row({"tau": 3}, mean=True),
    "hetero_diloco_async": Row({"tau": 3, "outer_momentum": 0.3}, repeats=False),
    "hetero_noloco": Row({"tau": 3, **GOSSIP}),
}
#: Rows of other options, and of an algorithm of a user.
OTHERS = {
    "hetero_ddp/workers": Row(nodes=(3,), limit=ROUNDING, mean=True, workers=2),
    "hetero_node/int4": Row({"every_n_steps": 3, "wire": "int4"}, TWO_NODES, mean=True),
    "hetero_node/optimizer": Row({"every_n_steps": 3, "average_optimizer_state": True}, mean=True),
    "hetero_daso/mixing": Row({**DASO, "mixing": "daso"}, TWO_NODES, mean=True, workers=2),
    "hetero_daso/schedule": Row(SCHEDULE, TWO_NODES, mean=True),
    "hetero_daso/topk": Row({**DASO, "wire": "topk:0.1"}, TWO_NODES, mean=True),
    "hetero_easgd/exclude": Row({**PULL, "exclude": ["*bias"]}),
    "hetero_easgd_overlap/bf16": Row({**PULL, "wire": "bf16"}),
    "hetero_easgd_overlap/int4": Row({**PULL, "wire": "int4"}),
    # The client's values as known to the wire (the center at its last exchange) are not saved.
    "hetero_easgd_round_robin/bf16": Row({**PULL, "wire": "bf16"}, limit=2.0**-8),
    "hetero_easgd_async/thread": Row({**PULL, "center": "thread"}, repeats=False),
    "hetero_easgd_async/alone": Row(PULL, ALONE),  # one client: nobody comes between
    "hetero_easgd_hogwild/alone": Row(PULL, ALONE),
    "hetero_diloco_async/alone": Row({"tau": 4}, ALONE, limit=1e-15),  # the last seen values, and the changes since
    "hetero_diloco_async/thread": Row({"tau": 3, "outer_momentum": 0.3, "wire": "2bit"}, repeats=False),
    "hetero_diloco_async/int4": Row(
        {"tau": 4, "fragments": 2, "wire": "int4", "outer_momentum": 0.3}, repeats=False, period=4
    ),
    "hetero_diloco_async/quorum": Row({"tau": 3, "quorum": 2, "patience": 1e9}, limit=1e-12),  # sums in any order
    "hetero_gossip/overlap": Row({"topology": "random", "wire": "bf16", **GOSSIP}),
    "hetero_gossip/pull": Row({"exchange": "pull", "topology": "exponential", **GOSSIP}),
    "hetero_gossip/push": Row({"exchange": "push", **GOSSIP}),
    "hetero_gossip_push_sum/bf16": Row({"topology": "hypercube", "every_n_steps": 3, "wire": "bf16", **GOSSIP}),
    "hetero_diloco/topk": Row({"tau": 3, "wire": "topk:0.1"}),
    "hetero_diloco/delay": Row({"tau": 4, "delay": 2, "blend": 0.5}, period=4),
    "hetero_diloco/fragments": Row({"tau": 4, "fragments": 2, "delay": 2, "blend": 0.5}, period=4),
    "hetero_diloco/int4": Row({"tau": 4, "fragments": 2, "delay": 3, "wire": "int4"}, period=4),
    "hetero_noloco/bf16": Row({"tau": 3, "wire": "bf16", **GOSSIP}),
    "hetero_slowmo": Row({"tau": 5}),
}
ALL = {**ROWS, **OTHERS}


def among(*names: str) -> list[str]:
    """Names of the rows of all strings, and of these others."""
    return [*ROWS, *(name for name in OTHERS if name.removeprefix("hetero_") in names)]


def kind(name: str) -> Any:
    """Class of the strategy for the name of a row."""
    return StrategyRegistry[name.partition("/")[0]]["strategy"]


# -- the model, the data -------------------------------------------------------------------------------------


class Model(EvaluatedNet):
    """Learns sums of numbers, at a rate that changes with the steps; its first layer is a backbone.

    Args:
        row: a strategy's, which may need a certain optimizer.
        dropout: of the inputs; other ones on each rank.
        scheduled: whether the learning rate changes.
    """

    def __init__(self, row: Row, dropout: float = 0.0, scheduled: bool = True) -> None:
        super().__init__(lr=0.02)
        self.dropout, self.scheduled, self.nesterov = dropout, scheduled, row.nesterov
        self.rows: dict[int, list[int]] = {}  # samples of each step, as it was taken

    @property
    def backbone(self) -> nn.Module:
        return self.net[0]

    def loss(self, batch: Any) -> torch.Tensor:
        x = nn.functional.dropout(batch[0], self.dropout, self.training)
        return nn.functional.mse_loss(self.net(x), batch[0].sum(1, keepdim=True) / 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows[self.trainer.global_step] = batch[3].tolist()
        self.seen = [*self.seen, batch[3].tolist()]  # a new list: a padding batch stays in it
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True)  # otherwise ranks would wait for each other in each step
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
    """The loss of these weights on all samples of the validation."""
    model = Model(Row()).eval()
    nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.no_grad():
        return model.loss(dataset(50)[:]).item()


def order(epoch: int) -> list[int]:
    """The samples of an epoch, as PyTorch's own sampler shuffles them."""
    sampler = DistributedSampler(dataset(SAMPLES), num_replicas=1, rank=0, shuffle=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def one_process(batches: list[list[int]]) -> torch.Tensor:
    """The weights after these steps in one process."""
    data, model = dataset(SAMPLES), Model(Row(), scheduled=False)
    optimizer = model.configure_optimizers()
    for rows in batches:
        optimizer.zero_grad()
        model.loss(data[sorted(rows)]).backward()
        optimizer.step()
    return parameters(model)


# -- a fit, and its record -----------------------------------------------------------------------------------


@dataclass
class Record:
    """Record of a fit, on one rank.

    Attributes:
        error: of this package or a signal's, with which the fit has ended.
        starts: step, rank and world where training began, or began again.
        begun: the weights there.
        momenta: the optimizer's, there.
        ends: the number of each step.
        path: weights after it.
        last: the momentum after each step.
        weights: at the end.
        ended: weights when callbacks are told that training has ended.
        seen: samples of each batch.
        rows: samples of each step.
        validated: weights in each validation.
        metrics: of each validation.
        evaluated: samples of all validations.
        test: the loss that `trainer.test` finds, if it has validated.
        steps: optimizer steps at the end.
        number: rank and world at the end.
        losses: of ranks.
        messages: warnings, and what is logged.
    """

    error: BaseException | None = None
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    begun: list[torch.Tensor] = field(default_factory=list)
    momenta: list[torch.Tensor] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    path: list[torch.Tensor] = field(default_factory=list)
    last: list[torch.Tensor] = field(default_factory=list)
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    ended: torch.Tensor | None = None
    seen: list[list[int]] = field(default_factory=list)
    rows: dict[int, list[int]] = field(default_factory=dict)
    validated: list[torch.Tensor] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    test: float | None = None
    steps: int = 0
    number: tuple[int, int] = (0, 0)
    losses: list[Any] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


class Watch(pl.Callback):
    """Keeps the record of a fit."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.record.starts.append((trainer.global_step, trainer.global_rank, trainer.world_size))
        self.record.begun.append(parameters(pl_module))
        self.record.momenta.append(momentum(trainer))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.record.ends.append(trainer.global_step)
        self.record.path.append(parameters(pl_module))
        self.record.last.append(momentum(trainer))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.record.ended = parameters(pl_module)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.record.validated.append(parameters(pl_module))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.record.metrics.append(trainer.callback_metrics["val"].item())


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
    resume: Any = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Record:
    """Train on this rank; the record has the error of this package, or the signal, with which the fit has ended."""
    row, watch = ALL[name], Watch()
    model = model or Model(row)
    if data is None:
        data = DataLoader(dataset(SAMPLES), batch_size=4, shuffle=True, num_workers=row.workers)
    strategy = kind(name)(
        **{"balance": row.shares, "global_batch_size": BATCH, "timeout": 60, **row.options, **(options or {})}
    )
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    settings = {**FAST, "max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": saves, **settings}
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_hetero").addHandler(handler)
    record = watch.record
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(strategy=strategy, callbacks=[watch, *callbacks], **settings)
        torch.manual_seed(trainer.global_rank)
        try:
            trainer.fit(model, data, DataLoader(dataset(50), batch_size=4) if validates else None, ckpt_path=resume)
        except (HeteroError, SIGTERMException) as error:
            record.error = error
        record.weights, record.seen, record.rows = parameters(model), model.seen, model.rows
        record.evaluated = list(model.evaluated)
        if validates and record.error is None:
            record.test = trainer.test(model, DataLoader(dataset(50), batch_size=4), verbose=False)[0]["test"]
    logging.getLogger("lightning_hetero").removeHandler(handler)
    record.steps, record.number = trainer.global_step, (trainer.global_rank, trainer.world_size)
    record.losses, record.messages = strategy.recovery.losses, [str(one.message) for one in caught] + logged
    return record
