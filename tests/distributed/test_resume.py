"""A run that was stopped and resumed goes on as if it had never stopped: one table for all strategies."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import STRATEGIES, Recorder
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import run
from saved import replicas_of
from tasks import FAST, Dropping, Net, Save, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import (
    DASOStrategy,
    DiLoCoAsyncStrategy,
    GossipPushSumStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
    NodeAverageStrategy,
    NoLoCoStrategy,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # ranks inherit it
from own_averager import SlowMoStrategy

EPOCHS, STEPS = {"max_epochs": 3}, {"max_steps": 22, "max_epochs": -1}  # of 8 steps an epoch


class Scheduled(Net):
    """Asks for the number of steps while it is set up, which sets up the dataloaders before a checkpoint is read."""

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Rated(Dropping):
    """Its learning rate rises and falls."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.2 + abs(5 - step % 10) / 5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Nesterov(Dropping):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class Found(pl.Callback):
    """What there is when training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.weights = parameters(pl_module)
        averager = getattr(trainer.strategy, "averager", None)
        if getattr(averager, "reference", None):
            self.reference = torch.cat([part.double() for part in averager.reference])
        if hasattr(averager, "_client"):
            out = [torch.empty_like(part) for part in averager.center_vectors]
            self.counts = averager._client.read(out)
            self.center = torch.cat([part.double() for part in out[: len(averager.reference)]])


@dataclass
class Row:
    """A strategy, after which steps it is stopped, and how near the resumed run must come to one that was not.

    Attributes:
        strategy: its class.
        options: of the strategy.
        stops: steps. 8 make an epoch.
        limit: the largest difference of a weight after any step. 0: equal bit for bit.
        module: makes the model.
        workers: of the dataloader.
        length: of the run.
        interrupted: saved and stopped by a callback; otherwise ``ModelCheckpoint`` saves and ``max_steps`` stops.
        saved: looks at a checkpoint of a stop.
    """

    strategy: Any
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[int, ...] = (11,)
    limit: float = 0.0
    module: Callable[[], Net] = Dropping
    workers: int = 0
    length: dict[str, Any] = field(default_factory=lambda: EPOCHS)
    interrupted: bool = False
    saved: Callable[[Path, int], None] | None = None


def fit(row: Row, balance: Any, path: str | None = None, resume: str | None = None, stop: int = -1) -> dict[str, Any]:
    """Trains; saves at ``path`` after step ``stop`` and ends there."""
    module, recorder, found = row.module(), Recorder(), Found()
    callbacks, length = [recorder, found], dict(row.length)
    if path and row.interrupted:
        callbacks.append(Save(path, stop, True))
    elif path:
        folder, name = Path(path).parent, Path(path).stem
        callbacks.append(ModelCheckpoint(folder, name, every_n_train_steps=stop, save_top_k=-1))
        length["max_steps"] = stop
    strategy = row.strategy(balance=balance, global_batch_size=12, **row.options)
    settings = {**FAST, "enable_checkpointing": bool(path) and not row.interrupted, "callbacks": callbacks}
    trainer = pl.Trainer(strategy=strategy, **settings, **length)
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
    torch.manual_seed(trainer.global_rank)  # each rank drops out other units
    workers = {"num_workers": row.workers, "persistent_workers": row.workers > 0}
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True, **workers), ckpt_path=resume)
    return {
        "seen": module.seen,
        "path": torch.stack(recorder.weights),
        "centers": torch.stack(recorder.centers) if recorder.centers else torch.zeros(0),
        "final": parameters(module),
        "found": {name: value for name, value in vars(found).items() if name != "_found"},
    }


def place(folder: Any, number: int, stop: int) -> Path:
    return Path(folder, f"{number}-{stop}", "saved.ckpt")


def resumed(folder: str, rows: list[Row], balance: Any) -> list[Any]:
    """Of each row the whole fit; and of each stop the fit until then, and the one that goes on."""
    results = []
    for number, row in enumerate(rows):
        parts = {}
        try:
            for stop in row.stops:
                path = str(place(folder, number, stop))
                parts[stop] = fit(row, balance, path, stop=stop), fit(row, balance, resume=path)
            results.append((fit(row, balance), parts))
        except Exception as error:
            raise AssertionError(f"{row} failed") from error
    return results


def near(a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    if limit == 0:
        return torch.equal(a, b)
    return a.shape == b.shape and bool((a - b).abs().max() <= limit)


# -- what a checkpoint holds ---------------------------------------------------------------------------------


def consensus(path: Path) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in torch.load(path, weights_only=True)["state_dict"].values()])


def values(path: Path) -> list[torch.Tensor]:
    return [replica["values"][0] for replica in replicas_of(path)]


def two_nodes(path: Path, stop: int) -> None:
    one, other = values(path)
    assert not torch.equal(one, other)
    assert torch.allclose((2 * one + other) / 3, consensus(path), rtol=0, atol=1e-14)


def three_apart(path: Path, stop: int) -> None:
    one, other, _ = values(path)
    assert not torch.equal(one, other)


def outer_optimizer(path: Path, stop: int) -> None:
    one, other, _ = values(path)
    assert torch.equal(one, other) == (stop == 16)  # right after an outer step
    outer = replicas_of(path)[0]["algorithm"]["outer"]["state"]
    assert all(state["momentum_buffer"].any() for state in outer.values())


def slow_weights(path: Path, stop: int) -> None:
    for replica in replicas_of(path):
        state, values = replica["algorithm"], replica["values"][0]
        assert torch.equal(state["slow"][0], values) == (stop == 16)  # right after an outer step
        assert state["velocity"][0].any()


def under_way(path: Path, stop: int) -> None:
    [pending] = replicas_of(path)[0]["algorithm"]["pending"]
    assert pending["fragment"] == (stop // 2) % 2
    assert pending["step"] == stop // 2 * 2


# -- the table -----------------------------------------------------------------------------------------------

ENDS = (8, 11)  # at the end of an epoch, and within one
ROUNDING = 1e-12  # DDP lays its buckets out anew after its first step, and so sums three ranks in another order.
DDP = [
    Row(HeteroDDPStrategy, {}, ENDS, ROUNDING, Net, 2, EPOCHS, True),
    Row(HeteroDDPStrategy, {}, ENDS, ROUNDING, Dropping, 0, STEPS, True),
    Row(HeteroDDPStrategy, {}, ENDS, ROUNDING, Scheduled, 0, EPOCHS, True),
    Row(HeteroDDPStrategy, {}, ENDS, ROUNDING, Scheduled, 2, STEPS, True),
]
# B = 4 and W = 3: an exchange is under way at every step but one. hetero_node: between two exchanges.
DASO = {"warmup": 3, "cooldown": 2, "global_every": 4, "wait": 3, "patience": 99}
NODE = [
    Row(NodeAverageStrategy, {"every_n_steps": 5}, interrupted=True, saved=two_nodes),
    Row(DASOStrategy, {**DASO, "mixing": "delta"}, workers=2, interrupted=True, saved=two_nodes),
    Row(DASOStrategy, {**DASO, "mixing": "daso"}, interrupted=True, saved=two_nodes),
    Row(DASOStrategy, {**DASO, "wire": "topk:0.1"}, interrupted=True, saved=two_nodes),
    Row(NodeAverageStrategy, {"every_n_steps": 3, "wire": "int4"}, interrupted=True, saved=two_nodes),
]
PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 4}
BOTH = (11, 16)  # within an epoch, between two exchanges; at the end of an epoch
CENTER = [
    Row(STRATEGIES["easgd"], PULL, BOTH, saved=three_apart),
    Row(STRATEGIES["easgd"], {**PULL, "exclude": ["*bias"]}, saved=three_apart),
    Row(STRATEGIES["overlap"], {**PULL, "wire": "bf16"}, BOTH, saved=three_apart),
    Row(STRATEGIES["overlap"], {**PULL, "wire": "int4"}),
    Row(STRATEGIES["diloco"], {"tau": 3, "wire": "topk:0.1"}),
    Row(STRATEGIES["eamsgd"], PULL, module=Nesterov, saved=three_apart),
    Row(STRATEGIES["diloco"], {"tau": 4}, BOTH, saved=outer_optimizer),
    # An exchange is under way at every step.
    Row(STRATEGIES["diloco"], {"tau": 4, "fragments": 2, "delay": 2, "blend": 0.5}, BOTH, saved=under_way),
    Row(STRATEGIES["diloco"], {"tau": 4, "fragments": 2, "delay": 3, "wire": "int4"}, interrupted=True),
    Row(STRATEGIES["round_robin"], PULL, saved=three_apart),
    # Where the wire takes the client to be (the center at its last exchange) is not saved.
    Row(STRATEGIES["round_robin"], {**PULL, "wire": "bf16"}, limit=2.0**-8),
]
SLOW = {"deadline": 15}
GOSSIP = [
    Row(GossipStrategy, {"overlap": False, "every_n_steps": 2, "wire": "bf16", **SLOW}, saved=three_apart),
    Row(GossipStrategy, {"exchange": "pull", "topology": "exponential", **SLOW}, (16,)),  # several sources
    Row(GossipPushSumStrategy, {"topology": "hypercube", "every_n_steps": 3, "wire": "bf16", **SLOW}),
    Row(GossipPushSumStrategy, {"topology": "ring", **SLOW}),  # several sources
    Row(NoLoCoStrategy, {"tau": 4, **SLOW}, BOTH, saved=slow_weights),
    Row(NoLoCoStrategy, {"tau": 3, "wire": "bf16", **SLOW}),
    Row(GossipStrategy, {"topology": "random", "wire": "bf16", **SLOW}, (10,)),  # exchanges beside the step
]
OWN = [Row(SlowMoStrategy, {"tau": 7}, (11, 17), module=Rated)]
ALONE = [
    Row(STRATEGIES["async"], PULL),
    Row(STRATEGIES["hogwild"], PULL),
    Row(DiLoCoAsyncStrategy, {"tau": 4}, BOTH, 1e-15),  # the mean at the end is taken from where all last looked
]  # one client
SHARES = [3.0, 1.0, 2.0]  # of 12 samples three ranks take 6, 2 and 4
JOBS: dict[str, tuple[list[Row], list[int], Any]] = {  # rows, ranks of each node, shares
    "ddp": (DDP, [3], [5.0, 1.0, 2.0]),
    "node": (NODE, [2, 1], SHARES),
    "center": (CENTER, [1, 1, 1], SHARES),
    "gossip": (GOSSIP, [1, 1, 1], SHARES),
    "own": (OWN, [1, 1], [2.0, 1.0]),
    "alone": (ALONE, [1], [1.0]),
}


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_resuming_is_as_if_never_stopped(tmp_path: Path, job: str) -> None:
    rows, nodes, balance = JOBS[job]
    for results in run(resumed, sum(nodes), str(tmp_path), rows, balance, nodes=nodes):
        for row, (whole, parts) in zip(rows, results, strict=True):
            assert len(whole["path"]) == row.length.get("max_steps", 24)
            for stop, (first, second) in parts.items():
                assert first["seen"] == whole["seen"][:stop], row
                assert second["seen"] == whole["seen"][stop:], row
                assert near(first["path"], whole["path"][:stop], row.limit), row
                assert near(second["path"], whole["path"][stop:], row.limit), row
                if len(whole["centers"]):
                    assert near(second["centers"], whole["centers"][stop:], row.limit), row
                assert near(second["final"], whole["final"], row.limit), row
                assert (first["final"] - whole["final"]).abs().max() > 1e-3, row
    for number, row in enumerate(rows):
        for stop in row.stops if row.saved else ():
            row.saved(place(tmp_path, number, stop), stop)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("home", ["shared_memory", "thread"])
def test_a_center_and_its_counts_come_back(tmp_path: Path, home: str) -> None:
    row = Row(STRATEGIES["async"], {**PULL, "center": home})
    for [(_, parts)] in run(resumed, 3, str(tmp_path), [row], SHARES, nodes=[1, 1, 1]):
        found, saved = parts[11][1]["found"], consensus(place(tmp_path, 0, 11))
        assert found["counts"] == [2, 2, 2]
        assert torch.equal(found["center"], saved)
        assert not torch.equal(found["weights"], saved)
