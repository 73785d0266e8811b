"""A model that shards itself over the ranks of its replica trains as a whole one does, to rounding."""

import itertools
import os
import time
import warnings
from datetime import timedelta
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run
from tasks import FAST, Killed, Net, TokenNet, dataset
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import HeteroMonitor, SharedStream
from lightning_hetero.comm.centers import client
from lightning_hetero.comm.threads import Background
from lightning_hetero.errors import CheckpointError, HeteroError, NotFiniteError, UnsupportedError
from lightning_hetero.strategies.table import ENTRIES

STRATEGIES = {entry.name: entry.strategy for entry in ENTRIES}
STRATEGIES |= dict.fromkeys(("push", "pull"), STRATEGIES["hetero_gossip"])  # forms of it
STRATEGIES["quorum"] = STRATEGIES["hetero_diloco_async"]


class Sharded:
    """Shards the layers of a module over its replica, if it is given a mesh."""

    shards = True

    def configure_model(self) -> None:
        mesh = self.device_mesh  # type: ignore[attr-defined]
        if not self.shards or mesh is None or hasattr(self, "sharded"):
            return
        self.sharded = True
        for layer in self.net:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])  # type: ignore[call-overload]


class ShardedNet(Sharded, Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "nesterov":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        if self.optimizer == "momentum":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return super().configure_optimizers()


class ShardedTokens(Sharded, TokenNet):
    pass


def whole(module: pl.LightningModule) -> list[torch.Tensor]:
    """The parameters, each gathered from its shards (collective over the replica)."""
    values = [p.detach() for p in module.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for p in values]


def fit(
    name: str, shards: bool = True, kind: type[Any] = ShardedNet, samples: int = 101, epochs: int = 2, **given: Any
) -> list[torch.Tensor]:
    options = {key: value for key, value in given.items() if key in ("gradient_clip_val", "accumulate_grad_batches")}
    left = (*options, "optimizer", "turns")
    take_turns(given.get("turns"))
    strategy = STRATEGIES[name](**{key: value for key, value in given.items() if key not in left})
    module = kind(optimizer=given.get("optimizer", "sgd"))
    module.shards = shards
    warnings.filterwarnings("ignore", "Replicas of the job|FSDP2-wrapped module .* returned a view")
    trainer = pl.Trainer(strategy=strategy, max_epochs=epochs, **options, **FAST)
    trainer.fit(module, DataLoader(dataset(samples), batch_size=4))
    found = whole(module)
    dist.barrier()
    return found


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sharded_gradients_are_exact(optimizer: str) -> None:
    options = {"balance": [3.0, 1.0, 2.0], "optimizer": optimizer}
    ours = run(fit, 3, "hetero_ddp", **options)
    theirs = run(fit, 3, "hetero_ddp", shards=False, **options)
    assert distance(ours[0], theirs[0]) < 1e-10
    assert all(distance(ours[0], each) == 0 for each in ours)


#: Options of each string with which a fit is deterministic and has several exchanges.
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "hetero_node": {"every_n_steps": 3, "average_optimizer_state": True, "optimizer": "adamw"},
    "hetero_daso": {},
    "hetero_easgd": {"replica": "node", "tau": 2},
    "hetero_easgd_overlap": {"replica": "node", "tau": 2},
    "hetero_easgd_round_robin": {"replica": "node", "tau": 2},
    "hetero_eamsgd": {"replica": "node", "tau": 2, "optimizer": "nesterov"},
    "hetero_diloco": {"replica": "node", "tau": 4},
    "quorum": {"replica": "node", "tau": 4, "quorum": 1, "patience": 1e9},
    "hetero_noloco": {"replica": "node", "tau": 4},
    "hetero_gossip": {"replica": "node"},
    "hetero_gossip_push_sum": {"replica": "node"},
    "push": {"replica": "node", "exchange": "push", "topology": "exponential"},
    "pull": {"replica": "node", "exchange": "pull", "topology": "one_peer_exponential"},
}
SHAPES = {"2x2": [2, 2], "2+1": [2, 1], "1x3": [1, 1, 1]}


@pytest.mark.long(after=6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_shards_train_as_whole_replicas_do(name: str, shape: str) -> None:
    sizes = SHAPES[shape]
    options = {"ranks_per_node": sizes, "balance": [float(1 + rank % 2) for rank in range(sum(sizes))]}
    options |= SYNCHRONOUS[name]
    ours = run(fit, sum(sizes), name, **options)
    theirs = run(fit, sum(sizes), name, shards=False, **options)
    assert distance(ours[0], theirs[0]) < 1e-10
    assert all(distance(ours[0], each) < 1e-12 for each in ours)


class Saves(pl.Callback):
    """Saves in mid-epoch, at a step."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def saved(name: str, path: str, resume: str | None = None, shards: bool = True, **given: Any) -> list[torch.Tensor]:
    """Final weights of a fit that saves at step 7, or that resumes from a checkpoint."""
    warnings.filterwarnings("ignore", "The checkpoint|Replicas of the job|.*fork")
    take_turns(given.pop("turns", None))
    module = ShardedNet(given.pop("optimizer", "adamw"))
    module.shards = shards
    callbacks = [] if resume else [Saves(path, 7)]
    trainer = pl.Trainer(strategy=STRATEGIES[name](**given), max_epochs=2, callbacks=callbacks, **FAST)
    trainer.fit(module, DataLoader(dataset(101), batch_size=4), ckpt_path=resume)
    found = whole(module)
    dist.barrier()
    return found


RESUMED: dict[str, dict[str, Any]] = {
    "hetero_ddp": {},
    **{name: SYNCHRONOUS[name] for name in ("hetero_node", "hetero_daso", "hetero_easgd", "hetero_diloco")},
    "hetero_gossip": SYNCHRONOUS["hetero_gossip"],
    "hetero_easgd_async": {"replica": "node", "tau": 2, "turns": True},
    "hetero_diloco_async": {"replica": "node", "tau": 3, "follow_speed": False, "turns": True},
}


@pytest.mark.long(after=3)
@pytest.mark.parametrize("shape", ["2x2", "2+1"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_fit_ends_as_one_that_was_not_stopped(name: str, shape: str, tmp_path: Any) -> None:
    sizes, path = SHAPES[shape], str(tmp_path / "a.ckpt")
    options = {**RESUMED[name], "ranks_per_node": sizes, "balance": "off"}
    options.pop("optimizer", None)
    if "turns" in options:
        options["turns"] = sizes
    undisturbed = run(saved, sum(sizes), name, path, **options)
    resumed = run(saved, sum(sizes), name, path, resume=path, **options)
    for one, other in zip(undisturbed, resumed, strict=True):
        assert distance(one, other) == 0


def resumed(path: str, name: str, sizes: list[int], shards: bool, **given: Any) -> list[torch.Tensor]:
    """The weights with which a fit goes on from a checkpoint, and one step later."""
    warnings.filterwarnings("ignore", "The checkpoint|Replicas of the job|.*fork")
    module = ShardedNet("adamw")
    module.shards = shards
    options = {"balance": "off", "global_batch_size": 12, **given}
    if name != "hetero_ddp":
        options["ranks_per_node"] = sizes
    trainer = pl.Trainer(strategy=STRATEGIES[name](**options), max_epochs=2, **FAST)
    loader, found = DataLoader(dataset(101), batch_size=4), list[torch.Tensor]()

    class First(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            found.extend(whole(module))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.extend(whole(module))
            trainer.should_stop = True

    trainer.callbacks.append(First())
    trainer.fit(module, loader, ckpt_path=path)
    dist.barrier()
    return found[:8]


@pytest.mark.long(after=2)
@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
@pytest.mark.parametrize("name", ["hetero_ddp", "hetero_node"])
def test_a_checkpoint_is_read_on_other_ranks(name: str, full: bool, tmp_path: Any) -> None:
    path = str(tmp_path / "a.ckpt")
    options: dict[str, Any] = {"balance": "off", "global_batch_size": 12}
    if name == "hetero_node":
        options |= {"ranks_per_node": [2, 1], "every_n_steps": 3}
    run(saved, 3, name, path, save_distributed_checkpoint=not full, **options)
    shapes = [(2, 2), (1, 1)] if name == "hetero_node" else [(3,), (4,), (2,)]
    jobs = {sizes: run(resumed, sum(sizes), path, name, list(sizes), True) for sizes in shapes}
    jobs[1, 1, 1] = run(resumed, 3, path, name, [1, 1, 1], shards=False)
    first = jobs[1, 1, 1][0]
    for job in jobs.values():
        for rank in job:
            assert distance(rank[:4], first[:4]) < 1e-12, "the weights"
            if name == "hetero_ddp":
                assert distance(rank, first) < 1e-10, "the optimizer's state"


def test_a_whole_checkpoint_goes_on_in_shards(tmp_path: Any) -> None:
    path = str(tmp_path / "a.ckpt")
    run(saved, 2, "hetero_ddp", path, shards=False, balance="off", global_batch_size=12)
    theirs = run(resumed, 2, path, "hetero_ddp", [2], shards=False)
    ours = run(resumed, 3, path, "hetero_ddp", [3], shards=True)
    assert distance(ours[0], theirs[0]) < 1e-10


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_the_consensus_is_saved_between_exchanges(full: bool, tmp_path: Any) -> None:
    """At step 7 replicas differ: the consensus is that of a job with whole replicas."""
    begun = []
    for shards in (True, False):
        path, options = str(tmp_path / f"{shards}.ckpt"), {**SYNCHRONOUS["hetero_diloco"], "ranks_per_node": [2, 1]}
        run(
            saved,
            3,
            "hetero_diloco",
            path,
            shards=shards,
            balance="off",
            save_distributed_checkpoint=not full,
            **options,
        )
        begun += run(resumed, 1, path, "hetero_ddp", [1], shards=False)
    assert distance(begun[0][:4], begun[1][:4]) < 1e-10


def consensus_elsewhere(path: str) -> list[torch.Tensor]:
    """The weights that Lightning's own strategy reads from a directory."""
    module = ShardedNet("adamw")
    strategy = pl.strategies.ModelParallelStrategy(tensor_parallel_size=1, data_parallel_size=2)
    trainer = pl.Trainer(strategy=strategy, devices=2, max_epochs=2, **FAST)
    found: list[torch.Tensor] = []

    class Look(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            found.extend(whole(module))
            trainer.should_stop = True

    trainer.callbacks.append(Look())
    trainer.fit(module, DataLoader(dataset(101), batch_size=6), ckpt_path=path)
    dist.barrier()
    return found


def test_lightnings_own_strategy_reads_the_consensus(tmp_path: Any) -> None:
    path = str(tmp_path / "a.ckpt")
    options = {"ranks_per_node": [2, 1], "every_n_steps": 3, "balance": "off", "global_batch_size": 12}
    run(saved, 3, "hetero_node", path, **options)
    theirs = run(consensus_elsewhere, 2, path)
    [alone] = run(resumed, 1, path, "hetero_ddp", [1], shards=False)
    assert distance(theirs[0], alone[:4]) < 1e-12


# -- what else a fit may have ----------------------------------------------------------------------

FEATURES: dict[str, dict[str, Any]] = {
    "clipping": {"gradient_clip_val": 0.1},
    "accumulation": {"accumulate_grad_batches": 2},
    "tokens": {"kind": ShardedTokens},
    "a rank without samples": {"balance": [3.0, 0.0, 2.0]},
    "tails": {"samples": 50},
    "skip": {"on_nan": "skip"},
}


@pytest.mark.long(after=3)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_exact(feature: str) -> None:
    options = {"balance": [3.0, 1.0, 2.0], "optimizer": "adamw", **FEATURES[feature]}
    ours = run(fit, 3, "hetero_ddp", **options)
    theirs = run(fit, 3, "hetero_ddp", shards=False, **options)
    assert distance(ours[0], theirs[0]) < 1e-10
    assert all(distance(ours[0], each) == 0 for each in ours)


class NothingToLearn(ShardedNet):
    """The loss is NaN on the rank whose samples count for nothing."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss * torch.nan if int(dist.get_rank()) == 1 else loss


def test_a_loss_that_counts_for_nothing_spoils_nobody() -> None:
    ours = run(fit, 3, "hetero_ddp", kind=NothingToLearn, balance=[3.0, 0.0, 2.0])
    theirs = run(fit, 3, "hetero_ddp", balance=[3.0, 0.0, 2.0])
    assert distance(ours[0], theirs[0]) < 1e-10


class Broken(ShardedNet):
    """At its fifth batch rank 1 has a loss, or a gradient, that is not finite."""

    what = "loss"

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        if len(self.seen) == 5 and dist.get_rank() == 1:
            if self.what == "loss":
                return loss * torch.inf
            weight = self.net[0].weight
            weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), torch.inf))
        return loss


class BrokenGradient(Broken):
    what = "gradient"


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", [Broken, BrokenGradient])
def test_the_rank_that_is_not_finite_is_named(kind: type[Any]) -> None:
    for outcome in attempt(fit, 3, "hetero_ddp", kind=kind, balance="off"):
        assert isinstance(outcome.error, NotFiniteError), outcome.trace
        assert f"the {kind.what} of rank 1 was not finite" in str(outcome.error)


def test_one_rank_without_a_loss_is_refused() -> None:
    for outcome in attempt(fit, 2, "hetero_ddp", kind=ReturnsNone, balance="off", timeout=20):
        assert outcome.error is not None
    assert "The model is sharded" in str(attempt(fit, 2, "hetero_ddp", kind=ReturnsNone, timeout=20)[1].error)


class ReturnsNone(ShardedNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 and dist.get_rank() == 1 else loss


@pytest.mark.long(after=2)
@pytest.mark.parametrize("sizes", [[2, 1], [2, 2], [2, 1, 1]])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "topk:0.2"])
@pytest.mark.parametrize("name", ["hetero_node", "hetero_diloco"])
def test_wires_carry_shards(name: str, wire: str, sizes: list[int]) -> None:
    """Residuals of a message are sent later: ranks agree, and the values are near those of fp32."""
    options = {**SYNCHRONOUS[name], "ranks_per_node": sizes, "balance": "off"}
    ours = run(fit, sum(sizes), name, wire=wire, **options)
    exact = run(fit, sum(sizes), name, **options)
    assert all(distance(ours[0], each) < 1e-12 for each in ours)
    assert 0 < distance(ours[0], exact[0]) < (0.3 if wire.startswith("topk") else 0.05)


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "hetero_easgd_async": {"tau": 2},
    "hetero_easgd_hogwild": {"tau": 2},
    "hetero_gossip_async": {},
    "hetero_diloco_async": {"tau": 4, "outer_momentum": 0.0},  # with momentum runs differ much, also of whole models
}


class InTurn:
    """Lets replicas meet their center one after the other, so that the result is always the same.

    Args:
        sizes: of the replicas.
    """

    def __init__(self, sizes: list[int]) -> None:
        firsts = [0, *itertools.accumulate(sizes)]
        self.replicas = [range(*pair) for pair in itertools.pairwise(firsts)]
        self.rank, self.visits = int(os.environ["RANK"]), 0
        self.index = next(i for i, ranks in enumerate(self.replicas) if self.rank in ranks)

    def __call__(self, visit: Any) -> Background[Any]:
        number, self.visits = self.visits, self.visits + 1

        def in_turn() -> Any:
            store = dist.distributed_c10d._get_default_store()
            if self.index or number:
                before = [f"visit {number - (not self.index)} of {rank}" for rank in self.replicas[self.index - 1]]
                store.wait(before, timedelta(seconds=60))
            found = visit()
            store.set(f"visit {number} of {self.rank}", "")
            return found

        return Background(in_turn)


def take_turns(sizes: list[int] | None) -> None:
    """Let replicas of these sizes meet their center one after the other in this process, if there are any."""
    if sizes is not None:
        client.Background = InTurn(sizes)  # type: ignore[assignment,misc]


#: Options of each string with a center that replicas visit one by one.
WITH_CENTER: dict[str, tuple[str, dict[str, Any]]] = {
    "shared memory": ("hetero_easgd_async", {"tau": 2, "center": "shared_memory"}),
    "thread": ("hetero_easgd_async", {"tau": 2, "center": "thread"}),
    "hogwild": ("hetero_easgd_hogwild", {"tau": 2}),
    "momentum": ("hetero_measgd_async", {"tau": 2, "optimizer": "momentum"}),
    "diloco": ("hetero_diloco_async", {"tau": 4, "follow_speed": False, "center": "shared_memory"}),
    "diloco, thread": ("hetero_diloco_async", {"tau": 4, "follow_speed": False, "center": "thread"}),
    "look ahead": ("hetero_diloco_async", {"tau": 3, "follow_speed": False, "momentum_rule": "look_ahead"}),
    "fragments": ("hetero_diloco_async", {"tau": 4, "follow_speed": False, "fragments": 2}),
    "fragments, thread": ("hetero_diloco_async", {"tau": 4, "follow_speed": False, "fragments": 2, "center": "thread"}),
}


@pytest.mark.long(after=2)
@pytest.mark.parametrize("sizes", [[2, 1], [2, 2], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("case", WITH_CENTER)
def test_shards_meet_a_center_as_whole_replicas_do(case: str, sizes: list[int]) -> None:
    name, given = WITH_CENTER[case]
    options = {"replica": "node", "ranks_per_node": sizes, "balance": "off", "turns": sizes, **given}
    ours, theirs = (run(fit, sum(sizes), name, shards=shards, **options) for shards in (True, False))
    assert distance(ours[0], theirs[0]) < 1e-10
    assert all(distance(ours[0], each) == 0 for each in ours)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("name", "wire", "sizes"),
    [
        ("hetero_diloco_async", "int4", [2, 2]),
        ("hetero_diloco_async", "bf16", [2, 2]),
        ("hetero_diloco_async", "topk:0.2", [3, 3]),
        ("hetero_easgd_async", "bf16", [2, 2]),
        ("hetero_easgd_async", "bf16", [2, 1]),
    ],
)
def test_wires_to_a_center_carry_shards(name: str, wire: str, sizes: list[int]) -> None:
    """Also for fragments: the residual of a fragment is sent at its next turn."""
    options = {"replica": "node", "ranks_per_node": sizes, "balance": "off", "turns": sizes, "tau": 4}
    options |= {"follow_speed": False, "fragments": 2} if name == "hetero_diloco_async" else {}
    ours, exact = (run(fit, sum(sizes), name, center="thread", wire=each, **options) for each in (wire, "fp32"))
    assert all(distance(ours[0], each) == 0 for each in ours)
    assert 0 < distance(ours[0], exact[0]) < (0.3 if wire.startswith("topk") else 0.05)


@pytest.mark.long(after=2)
@pytest.mark.parametrize("sizes", [[2, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_strings_end_alike(name: str, sizes: list[int]) -> None:
    options = {"replica": "node", "ranks_per_node": sizes, **ASYNCHRONOUS[name]}
    ours, theirs = (run(fit, sum(sizes), name, shards=shards, **options) for shards in (True, False))
    assert all(distance(ours[0], each) < 1e-12 for each in ours)
    assert distance(ours[0], theirs[0]) < 0.2  # the order of replicas differs between runs


class Straight(ShardedNet):
    """Gradients do not depend on weights, so that the mean of all replicas does not depend on the partners."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(8, 5), nn.Linear(8, 4)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(layer(batch[0]).mean() for layer in self.net)  # type: ignore[return-value]

    def on_train_end(self) -> None:
        assert self.trainer.strategy.traffic.exchanges > 0  # a busy machine leaves time for few


@pytest.mark.long(after=1)
@pytest.mark.parametrize("sizes", [[2, 1], [1, 2, 2]], ids=str)
@pytest.mark.parametrize("name", ["hetero_gossip_async"])
def test_gossip_at_its_own_pace_keeps_the_weighted_sum(name: str, sizes: list[int]) -> None:
    options = {"replica": "node", "ranks_per_node": sizes, "balance": "off", "kind": Straight}
    ours, theirs = (run(fit, sum(sizes), name, shards=shards, **options) for shards in (True, False))
    assert distance(ours[0], theirs[0]) < 1e-10
    assert all(distance(ours[0], each) < 1e-12 for each in ours)


# -- how models are made, and what they take ---------------------------------------------------------


class OnMeta(ShardedNet):
    """No rank ever holds the whole model: it is made without memory, sharded, and then given values."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        del self.net

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(torch.float64)
        super().configure_model()


class Checkpointed(ShardedNet):
    """Computes activations again in the backward pass."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, *_ = batch
        return nn.functional.mse_loss(checkpoint(self.net, x, use_reentrant=False), y)


class Compiled(ShardedNet):
    """Compiles each layer, before it is sharded."""

    def configure_model(self) -> None:
        if not hasattr(self, "sharded"):
            for layer in self.net:
                layer.compile(backend="aot_eager", dynamic=True)
        super().configure_model()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", [Checkpointed, Compiled])
def test_models_are_made_in_many_ways(kind: type[Any]) -> None:
    options = {**SYNCHRONOUS["hetero_diloco"], "ranks_per_node": [2, 1], "balance": "off"}
    ours = run(fit, 3, "hetero_diloco", kind=kind, **options)
    theirs = run(fit, 3, "hetero_diloco", shards=False, **options)
    assert distance(ours[0], theirs[0]) < 1e-10


def values_of_meta(path: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights of a model without memory at the start of a fit, and at that of a resumed one."""
    found: list[list[torch.Tensor]] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.append(whole(module))
            trainer.should_stop = True

    warnings.filterwarnings("ignore", "The checkpoint|Replicas of the job")
    for resume in (None, path):
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks draw other values
        strategy = STRATEGIES["hetero_node"](ranks_per_node=[2, 1])
        trainer = pl.Trainer(strategy=strategy, max_epochs=2, callbacks=[Look()], **FAST)
        trainer.fit(OnMeta(optimizer="adamw"), DataLoader(dataset(101), batch_size=4), ckpt_path=resume)
    dist.barrier()
    return found[0], found[1]


def test_a_model_without_memory_begins_alike_and_is_loaded(tmp_path: Any) -> None:
    path = str(tmp_path / "a.ckpt")
    run(saved, 2, "hetero_ddp", path, balance="off")
    [there] = run(resumed, 1, path, "hetero_ddp", [1], shards=False)
    found = run(values_of_meta, 3, path)
    for begun, loaded in found:
        assert distance(begun, found[0][0]) == 0
        assert 0 < max(value.abs().max().item() for value in begun) < 1
        assert distance(loaded, there[:4]) == 0


def narrow(precision: Any) -> list[torch.Tensor]:
    module = ShardedNet(optimizer="adamw", dtype=torch.float32)
    strategy = STRATEGIES["hetero_diloco"](ranks_per_node=[2, 1], tau=4)
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, precision=precision, **FAST)
    trainer.fit(module, DataLoader(dataset(101, torch.float32), batch_size=4))
    found = whole(module)
    dist.barrier()
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_precisions(precision: str, dtype: torch.dtype) -> None:
    ours = run(narrow, 3, precision)
    assert all(value.dtype == dtype for value in ours[0])
    assert all(distance(ours[0], each) == 0 for each in ours)


def bytes_sent(sizes: list[int]) -> tuple[int, int, int]:
    """Bytes that this rank has sent between replicas, the number of exchanges, and the values of its shards."""
    module = ShardedNet()
    strategy = STRATEGIES["hetero_node"](ranks_per_node=sizes, every_n_steps=2)
    trainer = pl.Trainer(strategy=strategy, max_steps=8, **FAST)
    trainer.fit(module, DataLoader(dataset(101), batch_size=4))
    shards = sum(p.to_local().numel() for p in module.parameters())
    held = [value.numel() for value in strategy.averager.reference] if strategy.averager else []
    assert sum(held) in (0, shards)
    dist.barrier()
    return strategy.traffic.bytes, strategy.traffic.exchanges, shards


@pytest.mark.parametrize("sizes", [[2, 2], [2, 1]])
def test_each_byte_crosses_once(sizes: list[int]) -> None:
    found = run(bytes_sent, sum(sizes), sizes)
    whole_model = 8 * 16 + 16 + 16 + 1
    for replica in (found[:2], found[2:]):
        assert sum(shards for *_, shards in replica) == whole_model
        for sent, exchanges, shards in replica:
            assert sent == exchanges * 8 * shards  # an all-reduce of two: each sends its vector of float64 once


class Scaled(ShardedNet):
    """The outermost module has parameters of its own, which `fully_shard` keeps as a whole after a forward pass."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 8, dtype=torch.float64))

    def forward(self, batch: Any) -> torch.Tensor:
        x, y, *_ = batch
        return nn.functional.mse_loss(self.net(x * self.scale), y)

    def loss(self, batch: Any) -> torch.Tensor:
        return self(batch)  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step


def evaluated(name: str, shards: bool, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses before, within and after a fit with unequal numbers of validation batches on ranks; the weights."""
    warnings.filterwarnings("ignore", "Replicas ")
    module = Scaled()
    module.shards = shards
    strategy = STRATEGIES[name](balance="off", **options)
    trainer = pl.Trainer(strategy=strategy, max_epochs=3, val_check_interval=3, **FAST)
    held_out = DataLoader(dataset(13), batch_size=4)
    losses = [trainer.validate(module, held_out, verbose=False)[0]["loss"]]
    trainer.fit(module, DataLoader(dataset(101), batch_size=4), held_out)
    losses.append(float(trainer.callback_metrics["loss"]))
    losses.append(trainer.test(module, held_out, verbose=False)[0]["loss"])
    found = whole(module)
    dist.barrier()
    return losses, found


@pytest.mark.parametrize("name", ["hetero_ddp", "hetero_diloco"])
def test_evaluation_is_that_of_a_whole_model_and_changes_nothing(name: str) -> None:
    options = {**SYNCHRONOUS.get(name, {}), "ranks_per_node": [2, 1]}
    ours, theirs = (run(evaluated, 3, name, shards, **options) for shards in (True, False))
    assert ours[0][0] == pytest.approx(theirs[0][0], abs=1e-10)
    assert distance(ours[0][1], theirs[0][1]) < 1e-10


# -- what is refused ---------------------------------------------------------------------------------


class OverTheWorld(Sharded, Net):
    def configure_model(self) -> None:
        fully_shard(self.net)


class Partly(Sharded, Net):
    def configure_model(self) -> None:
        fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])


class Later(Sharded, Net):
    """Has no `configure_model` of its own."""

    configure_model = pl.LightningModule.configure_model

    def setup(self, stage: str) -> None:
        fully_shard(self.net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class OverThreeDimensions(Sharded, Net):
    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (1, 1, dist.get_world_size()))
        for layer in self.net:
            for name, value in list(layer.named_parameters()):
                shards = distribute_tensor(value.detach(), mesh, [Replicate(), Replicate(), Shard(0)])
                layer.register_parameter(name, nn.Parameter(shards))


class ReadsSizes(ShardedNet):
    """Requires replicas of two ranks, as Lightning's strategy would make them."""

    def configure_model(self) -> None:
        assert self.device_mesh["data_parallel"].size() == 2, "this module is for two ranks"
        super().configure_model()


REFUSED: dict[str, tuple[str, type[Any], dict[str, Any], str]] = {
    "over the world": ("hetero_node", OverTheWorld, {"ranks_per_node": [2, 1]}, "is sharded over ranks"),
    "three dimensions": ("hetero_ddp", OverThreeDimensions, {}, "over a mesh of 3 dimensions, (1, 1, 3). Use self."),
    "partly": ("hetero_ddp", Partly, {}, "is not sharded, and other parameters are"),
    "elsewhere": ("hetero_ddp", Later, {}, "but not in `configure_model`"),
    "sizes": ("hetero_ddp", ShardedNet, {"data_parallel_size": 2}, "data_parallel_size=2 times"),
    "mpi": (
        "hetero_easgd_async",
        ShardedNet,
        {"replica": "node", "ranks_per_node": [2, 1], "center": "mpi"},
        "center='mpi' with a sharded model needs replicas of one size",
    ),
    "wire": (
        "hetero_diloco_async",
        ShardedNet,
        {"replica": "node", "ranks_per_node": [2, 1], "fragments": 2, "wire": "int4"},
        "wire='int4' with a sharded model needs replicas of one size (ranks_per_node). Use wire='fp32'.",
    ),
    "auto": ("hetero_auto", ShardedNet, {}, "hetero_auto"),
    "join": (
        "hetero_node",
        ShardedNet,
        {"on_peer_loss": "continue", "join_file": "no such file", "ranks_per_node": [1, 1, 1]},
        "nobody could join this fit: the model is sharded, and a replica that joins must be of the size of all others",
    ),
}


@pytest.mark.long(after=4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(case: str) -> None:
    name, kind, options, message = REFUSED[case]
    for outcome in attempt(fit, 3, name, kind=kind, timeout=60, **options):
        assert isinstance(outcome.error, HeteroError), outcome.trace
        assert message in str(outcome.error)


@pytest.mark.parametrize("nodes", [[3], [2, 1]], ids=["all", "one rank"])
def test_a_module_for_other_sizes_ends_with_its_own_error_on_every_rank(nodes: list[int]) -> None:
    name, options = ("hetero_node", {"ranks_per_node": nodes}) if len(nodes) > 1 else ("hetero_ddp", {})
    for rank, outcome in enumerate(attempt(fit, 3, name, kind=ReadsSizes, timeout=60, **options)):
        assert isinstance(outcome.error, AssertionError if nodes == [3] or rank == 2 else HeteroError), outcome.trace
        assert "this module is for two ranks" in str(outcome.error)
        assert "training_step" not in outcome.trace


@pytest.mark.long(after=1)
@pytest.mark.parametrize("lost", ["*.distcp", ".metadata", "meta.pt"])
def test_a_directory_that_lacks_a_file_is_refused_on_every_rank(lost: str, tmp_path: Any) -> None:
    path = tmp_path / "a.ckpt"
    run(saved, 2, "hetero_ddp", str(path), balance="off")
    next(path.glob(lost)).unlink()
    for outcome in attempt(saved, 2, "hetero_ddp", str(path), resume=str(path), balance="off"):
        assert isinstance(outcome.error, CheckpointError), outcome.trace
        assert "lacks a file" in str(outcome.error)


# -- a replica is lost -------------------------------------------------------------------------------


def survived(name: str, shards: bool, lost: int = -1, kind: type[Any] = ShardedNet, **options: Any) -> Any:
    """Final weights of a fit in which a rank, by default the last, is killed at its sixth step."""
    warnings.filterwarnings(
        "ignore", "rank .*Training goes on|.*exchanges under way|Replicas of the job|.*starts over|FSDP2-wr"
    )
    module = kind(optimizer=options.pop("optimizer", "sgd"))
    module.shards = shards
    strategy = STRATEGIES[name](on_peer_loss="continue", timeout=60, **{"balance": "off", **options})
    callbacks = [Killed(lost % int(os.environ["WORLD_SIZE"]), 6)]
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, callbacks=callbacks, **FAST)
    trainer.fit(module, DataLoader(dataset(120), batch_size=4))
    return whole(module), trainer.world_size, strategy.traffic.exchanges


@pytest.mark.long(after=3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["hetero_node", "hetero_daso", "hetero_diloco", "hetero_easgd", "hetero_gossip"])
def test_sharded_replicas_go_on_when_one_is_lost(name: str, ranks: int) -> None:
    options = {**SYNCHRONOUS[name], "ranks_per_node": ranks}
    ours, theirs = (attempt(survived, 3 * ranks, name, shards, **options) for shards in (True, False))
    left = 2 * ranks
    assert all(outcome.value for outcome in (*ours[:left], *theirs[:left])), ours[0].trace
    assert all(outcome.value is None for outcome in ours[left:])
    weights = [outcome.value[0] for outcome in ours[:left]]
    assert all(distance(weights[0], each) < 1e-12 for each in weights)
    assert [outcome.value[1] for outcome in ours[:left]] == [left] * left
    if name not in ("hetero_daso", "hetero_gossip"):  # an exchange under way may be dropped or not
        assert distance(weights[0], theirs[0].value[0]) < 1e-10


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("sizes", "lost"), [([2, 1, 1], 2), ([2, 1, 1], 0), ([2, 1, 1], 1), ([2, 1, 1], 3), ([2, 3, 1], 0)]
)
@pytest.mark.parametrize(
    "name",
    ["hetero_node", "hetero_daso", "hetero_diloco", "hetero_easgd", "hetero_eamsgd", "hetero_noloco", "hetero_gossip"],
)
def test_replicas_of_unequal_size_go_on_when_one_is_lost(name: str, sizes: list[int], lost: int) -> None:
    """They exchange other pieces after that, and keep the state of each value, such as its momentum."""
    options = {**SYNCHRONOUS[name], "ranks_per_node": sizes}
    if name == "hetero_gossip":
        options |= {"every_n_steps": 4, "overlap": False}  # so that no offer is under way at the loss
    ours, theirs = (attempt(survived, sum(sizes), name, shards, lost, **options) for shards in (True, False))
    firsts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    gone = next(range(a, b) for a, b in itertools.pairwise(firsts) if lost in range(a, b))
    left = [rank for rank in range(sum(sizes)) if rank not in gone]
    assert all(ours[rank].value for rank in left), ours[left[0]].trace
    assert all(ours[rank].value is None for rank in gone)
    weights = [ours[rank].value[0] for rank in left]
    assert all(distance(weights[0], each) < 1e-12 for each in weights)
    assert {ours[rank].value[1] for rank in left} == {len(left)}
    if name != "hetero_daso":  # an exchange under way may be dropped or not
        [other, *_] = [theirs[rank].value for rank in left]
        assert distance(weights[0], other[0]) < 1e-10
        assert ours[left[0]].value[2] == other[2], "exchanges, of before and after"


@pytest.mark.long(after=1)
@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("name", [*ASYNCHRONOUS, "hetero_gossip", "hetero_gossip_push_sum"])
def test_replicas_at_their_own_pace_go_on_when_one_is_lost(name: str, lost: int) -> None:
    """The lost rank may be the center's host, and an offer may be under way."""
    options = {"replica": "node", "ranks_per_node": [2, 1, 1], **(SYNCHRONOUS | ASYNCHRONOUS)[name]}
    found = attempt(survived, 4, name, True, lost, **options)
    weights = [outcome.value[0] for outcome in found if outcome.value]
    assert len(weights) == (3 if lost else 2), "\n".join(outcome.trace[-2000:] for outcome in found)
    assert all(distance(weights[0], each) < 1e-12 for each in weights)
    assert all(value.isfinite().all() for value in weights[0])


def test_hetero_ddp_cannot_lose_shards() -> None:
    for outcome in attempt(survived, 2, "hetero_ddp", True):
        assert isinstance(outcome.error, UnsupportedError), outcome.trace
        assert "the shards of a lost rank are lost" in str(outcome.error)


# -- layers that several ranks split -----------------------------------------------------------------


class TensorParallel(ShardedNet):
    """Two ranks split each layer; pairs of ranks shard the parts."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if not self.shards or mesh is None or hasattr(self, "sharded"):
            return
        self.sharded = True
        parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=mesh["data_parallel"])


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("name", "nodes", "options"),
    [
        ("hetero_ddp", None, {"balance": [3.0, 1.0]}),
        ("hetero_node", [2, 2], {"every_n_steps": 3, "balance": [2.0, 1.0]}),
        ("hetero_diloco", [2, 2], {"tau": 4, "replica": "node", "balance": [2.0, 1.0]}),
    ],
)
def test_ranks_that_split_layers_have_the_same_samples(name: str, nodes: Any, options: dict[str, Any]) -> None:
    """Four ranks in pairs train as two ranks with whole models do."""
    split = {"tensor_parallel_size": 2, **({} if nodes is None else {"ranks_per_node": nodes})}
    ours = run(fit, 4, name, kind=TensorParallel, **options, **split)
    whole_ones = {} if nodes is None else {"ranks_per_node": 1}
    theirs = run(fit, 2, name, shards=False, **options, **whole_ones)
    assert all(distance(theirs[0], each) < 1e-10 for each in ours)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("name", "size", "lost"),
    [("hetero_diloco", 2, 3), ("hetero_node", 2, 2), ("hetero_easgd", 2, 3), ("hetero_diloco", 4, 5)],
)
def test_ranks_that_split_layers_go_on_when_others_are_lost(name: str, size: int, lost: int) -> None:
    """One or two replicas of a pair of ranks train on as one or two replicas of one rank with whole models do."""
    options = {**SYNCHRONOUS[name], "balance": [2.0, 1.0] * (size // 2), "ranks_per_node": size}
    options["tensor_parallel_size"] = 2
    ours = attempt(survived, 2 * size, name, True, lost, kind=TensorParallel, **options)
    options |= {"ranks_per_node": size // 2, "tensor_parallel_size": 1}
    theirs = attempt(survived, size, name, False, lost // 2, **options)
    assert all(outcome.value for outcome in ours[:size]), ours[0].trace
    assert all(outcome.value is None for outcome in ours[size:])
    [weights, world, exchanges] = theirs[0].value
    assert world == size // 2
    for outcome in ours[:size]:
        assert distance(outcome.value[0], weights) < 1e-10
        assert outcome.value[1:] == (size, exchanges)


def watched(folder: str) -> Any:
    """Ranks and shares as the monitor has seen them, of two replicas of two ranks each that split layers."""
    monitor = HeteroMonitor(report=folder)
    options: dict[str, Any] = {"ranks_per_node": [2, 2], "tensor_parallel_size": 2, "balance": [3.0, 1.0]}
    strategy = STRATEGIES["hetero_node"](every_n_steps=3, **options)
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, callbacks=[monitor], **FAST)
    trainer.fit(TensorParallel(), DataLoader(dataset(101), batch_size=4))
    dist.barrier()
    return [(record.ranks, record.shares) for record in monitor.history]


def test_the_monitor_counts_pairs_that_split_layers_by_their_first_ranks(tmp_path: Any) -> None:
    for seen in run(watched, 4, str(tmp_path)):
        assert seen
        assert set(seen) == {((0, 2), (6, 2))}
    assert (tmp_path / "report.html").exists()


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hetero_ddp", {"tensor_parallel_size": 3}, "tensor_parallel_size=3 is not 4"),
        ("hetero_gossip", {"tensor_parallel_size": 2, "ranks_per_node": 2, "replica": "node"}, "at its own pace"),
        ("hetero_node", {"tensor_parallel_size": 2, "max_batch_size": "auto"}, "cannot do that yet"),
    ],
)
def test_what_ranks_that_split_layers_cannot_do(name: str, options: dict[str, Any], message: str) -> None:
    for outcome in attempt(fit, 4, name, kind=TensorParallel, timeout=60, **options):
        assert isinstance(outcome.error, HeteroError), outcome.trace
        assert message in str(outcome.error)


# -- layers that are unfrozen, time, processes that come later ------------------------------------------


class Thawing(ShardedNet):
    """Trains the first layer from the second epoch on."""

    def configure_model(self) -> None:
        if not hasattr(self, "sharded"):
            self.net[0].requires_grad_(False)
        super().configure_model()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["hetero_ddp", "hetero_node", "hetero_diloco", "hetero_noloco"])
def test_layers_may_be_unfrozen(name: str) -> None:
    options = {} if name == "hetero_ddp" else {**SYNCHRONOUS[name], "ranks_per_node": [2, 1]}
    ours, theirs = (run(fit, 3, name, shards, kind=Thawing, balance="off", **options) for shards in (True, False))
    assert distance(ours[0], theirs[0]) < 1e-10
    assert all(distance(ours[0], each) < 1e-12 for each in ours)


class Sleeps(ShardedNet):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)


def work() -> float:
    """Seconds of this rank's own work in a step, the median."""
    seconds = list[float]()

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.accounting.watchers.append(lambda timing: seconds.append(timing.work))

    strategy = STRATEGIES["hetero_ddp"](balance="off")
    trainer = pl.Trainer(strategy=strategy, max_steps=10, callbacks=[Watch()], **FAST)
    trainer.fit(Sleeps(), DataLoader(dataset(101), batch_size=4))
    dist.barrier()
    return median(seconds[2:])


@pytest.mark.clock
def test_waiting_for_shards_is_not_work() -> None:
    quick, slow = run(work, 2)
    assert 0.05 < slow - quick < 0.15


class Numbers(IterableDataset):
    """The samples of the data set, one after the other."""

    def __iter__(self) -> Any:
        return iter(dataset(96))

    def __len__(self) -> int:
        return 96


def streamed(shards: bool, **options: Any) -> list[torch.Tensor]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view|Your `IterableDataset` has `__len__`")
    module = TensorParallel()
    module.shards = shards
    strategy = STRATEGIES["hetero_ddp"](balance=[3.0, 1.0], **options)
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, **FAST)
    trainer.fit(module, DataLoader(SharedStream(Numbers()), batch_size=4))
    found = whole(module)
    dist.barrier()
    return found


def test_ranks_that_split_layers_share_a_stream() -> None:
    ours = run(streamed, 4, True, tensor_parallel_size=2)
    theirs = run(streamed, 2, False)
    assert all(distance(theirs[0], each) < 1e-10 for each in ours)


# -- what readers found ------------------------------------------------------------------------------


class Grouped(Thawing):
    """Layers of one shape, in groups in another order than the module's; one layer is unfrozen later."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)).double()
        self.register_buffer("noise", torch.full((3,), 1.0 + int(os.environ["RANK"]), dtype=torch.float64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [layer.weight for layer in self.net]
        biases = [layer.bias for layer in self.net]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights[::-1], "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)


def regrouped(path: str, resume: str | None, shards: bool, full: bool = False, step: int = 12) -> Any:
    warnings.filterwarnings("ignore", "The checkpoint|.*fork")
    module = Grouped()
    module.shards = shards
    strategy = STRATEGIES["hetero_ddp"](balance="off", global_batch_size=12, save_distributed_checkpoint=not full)

    class Begins(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            if step == 0 and resume is None:
                trainer.save_checkpoint(path)

    callbacks = [Begins()] if resume else [Begins(), Saves(path, step)]
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, callbacks=callbacks, **FAST)
    trainer.fit(module, DataLoader(dataset(101), batch_size=4), ckpt_path=resume)
    found = whole(module), module.noise.tolist()
    dist.barrier()
    return found


@pytest.mark.parametrize("step", [0, 12])
@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_each_parameter_keeps_its_own_moments(full: bool, step: int, tmp_path: Any) -> None:
    """Step 12 is after the layer was unfrozen; at step 0 there are no moments, and saving makes none."""
    path = str(tmp_path / "a.ckpt")
    [undisturbed, *_] = run(regrouped, 2, str(tmp_path / "b.ckpt"), None, False, step=12)
    ours = run(regrouped, 2, path, None, True, full, step=step)
    assert distance(ours[0][0], undisturbed[0]) < 1e-10
    assert [noise for _, noise in ours] == [[1.0] * 3] * 2  # the first rank's, as DDP would have it
    for shards in (True, False):
        resumed = run(regrouped, 2, path, path, shards)
        assert distance(resumed[0][0], undisturbed[0]) < 1e-10


def test_a_whole_file_is_read_in_shards_by_the_names_of_parameters(tmp_path: Any) -> None:
    path = str(tmp_path / "a.ckpt")
    [undisturbed, *_] = run(regrouped, 2, path, None, False)
    resumed = run(regrouped, 2, path, path, True)
    assert distance(resumed[0][0], undisturbed[0]) < 1e-10


@pytest.mark.parametrize("name", ["hetero_node", "hetero_diloco"])
def test_one_sharded_replica_trains_and_is_resumed(name: str, tmp_path: Any) -> None:
    path, options = str(tmp_path / "a.ckpt"), {**SYNCHRONOUS[name], "ranks_per_node": 2, "balance": "off"}
    undisturbed = run(saved, 2, name, path, **options)
    resumed = run(saved, 2, name, path, resume=path, **options)
    for one, other in zip(undisturbed, resumed, strict=True):
        assert distance(one, other) == 0


def averaged() -> None:
    callbacks = [pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01)]
    trainer = pl.Trainer(strategy=STRATEGIES["hetero_ddp"](timeout=20), max_epochs=2, callbacks=callbacks, **FAST)
    trainer.fit(ShardedNet(), DataLoader(dataset(), batch_size=4))


def test_averages_of_whole_models_are_refused() -> None:
    for outcome in attempt(averaged, 2):
        assert isinstance(outcome.error, UnsupportedError), outcome.trace
        assert "it averages a copy of the whole model" in str(outcome.error)
