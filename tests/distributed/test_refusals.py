"""Unsupported settings end in one clear error on every rank before anything is saved: a table for all strategies."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import refused as bad
import torch
import torch.distributed as dist
from center_tasks import STRATEGIES
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from ranks import attempt, free_port
from tasks import FAST, EvaluatedNet, Net, dataset
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.utils.data import DataLoader

from lightning_hetero import (
    AutoStrategy,
    DASOStrategy,
    DiLoCoAsyncStrategy,
    GossipAsyncStrategy,
    GossipPushSumStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
    NoLoCoStrategy,
)
from lightning_hetero.errors import (
    ConfigurationError,
    DataError,
    DisagreementError,
    HeteroError,
    LaunchError,
    ShareError,
    UnsupportedError,
)
from lightning_hetero.strategies import job as job_module
from lightning_hetero.strategies import trainer_checks
from lightning_hetero.strategies.trainer_checks import precision_problem


@dataclass
class Row:
    """A case that is refused.

    Attributes:
        strategy: class of the strategy, or its name in ``center_tasks``.
        options: of the strategy.
        error: on every rank.
        words: of its message.
        by_rank: options that differ between ranks.
        module: makes the model.
        data: makes a dataset.
        load: options of its DataLoader.
        loader: makes the DataLoader, or several, instead.
        trainer: settings of the Trainer, or what makes them.
        env: environment variables of a rank.
        stage: of the Trainer, which gets the data.
        validated: makes the data that a fit validates on.
        late: it cannot be known before the end of an epoch, for which there is a checkpoint then.
    """

    strategy: Any
    options: dict[str, Any]
    error: type[HeteroError]
    words: list[str]
    by_rank: dict[str, list[Any]] = field(default_factory=dict)
    module: Callable[[], Any] = Net
    data: Callable[[], Any] = lambda: dataset(96)
    load: dict[str, Any] = field(default_factory=dict)
    loader: Callable[[], Any] | None = None
    trainer: Any = field(default_factory=dict)
    env: Callable[[int], dict[str, str]] = lambda rank: {}
    stage: str = "fit"
    validated: Callable[[], Any] = lambda: None
    late: bool = False


def ddp(error: type[HeteroError], *words: str, options: Any = None, **more: Any) -> Row:
    return Row(HeteroDDPStrategy, options or {}, error, list(words), **more)


def evaluated(stage: str, kind: str, sizes: list[int], *words: str, **log: Any) -> Row:
    """Evaluation data of which each rank has its own."""
    data = partial(bad.parts, kind, sizes)
    fits = {"loader": partial(bad.parts, "stream", [8, 8]), "validated": data}
    given = {"trainer": OWN_PARTS, **(fits if stage == "fit" else {"loader": data})}
    return ddp(DataError, *words, module=partial(bad.Logs, **log), stage=stage, **given)


def replicas(kind: Any, options: dict[str, Any], error: type[HeteroError], *words: str, **more: Any) -> Row:
    """A case with two replicas, which take 8 and 4 of 12 samples."""
    given = {"balance": [2.0, 1.0], "global_batch_size": 12, **options}
    return Row(STRATEGIES.get(kind, kind) if isinstance(kind, str) else kind, given, error, list(words), **more)


def daso(options: dict[str, Any], error: type[HeteroError], *words: str, **more: Any) -> Row:
    return replicas(
        DASOStrategy, {"balance": "off", **options}, error, *words, **{"trainer": {"max_epochs": 2}, **more}
    )


def center(kind: str, options: dict[str, Any], error: type[HeteroError], *words: str, **more: Any) -> Row:
    return replicas(kind, options, error, *words, **{"module": bad.Optimized, **more})


def gossip(kind: Any, words: str, by_rank: dict[str, list[Any]]) -> Row:
    return replicas(kind, {}, DisagreementError, words, by_rank=by_rank)


def optimizer(kind: str, make: Any, *words: str) -> Row:
    return center(kind, AUTO, UnsupportedError, *words, module=partial(bad.Optimized, make))


def unfrozen(kind: Any, options: Any, error: type[HeteroError], callback: pl.Callback, *words: str) -> Row:
    """A case in which the trainable parameters change, after the first epoch if not before training starts."""
    trainer = {"max_epochs": 2, "callbacks": [callback]}
    return replicas(kind, options, error, *words, module=bad.Backboned, trainer=trainer, late=True)


AUTO = {"moving_rate": "auto"}
EVEN = {"balance": "off", "global_batch_size": None}
THREE = {"max_batch_size": 3}
WHOLE = {"whole_batches": 3}
SEARCHED = {"max_batch_size": "auto", "max_batch_memory": "1GB"}
HOSTS = {"host": ["host0", "host1"]}  # the host of a rank
TIMED = {"val_check_interval": "00:00:00:05", "check_val_every_n_epoch": None}
DIFFER = (
    "the ranks differ in the parameters that have become trainable or frozen",
    "net.0.weight: rank 0: (missing), rank 1: frozen",
)
OWN_PARTS = {"use_distributed_sampler": False}
ENDLESS = bad.Unending()
UNUSED = {"find_unused_parameters": True}
WINDOWS = {"accumulate_grad_batches": 2}
GOES_ON = {"on_peer_loss": "continue"}
UNSIZED: dict[str, Any] = {"DataLoader": {"data": bad.SizedStream}, "Unending": {"loader": bad.Unending}}
NODE, TWO_EPOCHS = STRATEGIES["node"], {"max_epochs": 2}
TWO_RANKS = [
    ddp(ConfigurationError, "3 shares for 2 ranks", options={"balance": [1.0, 1.0, 1.0]}),
    ddp(ShareError, "at most [3, 3]", "batch of 8,", "manual optimization", options=THREE, module=bad.TrainsItself),
    ddp(ShareError, "with static_graph=True DDP averages", options={**THREE, "static_graph": True}),
    ddp(ShareError, "'metric' is a metric with dist_sync_on_step=True", options=THREE, module=bad.SyncedMetric),
    ddp(ShareError, "each rank reads training data of its own", options=THREE, data=bad.Stream),
    ddp(ShareError, "several training loaders", options=THREE, loader=lambda: bad.two(dataset(96), dataset(96), 4)),
    ddp(UnsupportedError, "training_step calls a collective, while", options=THREE, module=bad.Gathers, late=True),
    ddp(
        UnsupportedError,
        "training_step calls torch.distributed.all_reduce",
        options=THREE,
        module=bad.Reduces,
        late=True,
    ),
    ddp(UnsupportedError, "returned None", "in one of several passes", options=THREE, module=bad.Nothing, late=True),
    ddp(
        DataError,
        "is to be run in 2 passes, and its dataset makes it in 1",
        options=THREE,
        data=bad.Whole,
        load={"batch_size": 4, "collate_fn": dict},
        late=True,
    ),
    ddp(UnsupportedError, "and this training dataloader has none", options=WHOLE),
    ddp(UnsupportedError, "and this training dataloader has none", options=WHOLE, data=bad.shared),
    ddp(UnsupportedError, "with manual optimization", options=WHOLE, loader=bad.own_batches, module=bad.TrainsItself),
    ddp(UnsupportedError, "dist_sync_on_step=True", options=WHOLE, loader=bad.own_batches, module=bad.SyncedMetric),
    ddp(DisagreementError, "whole_batches: rank 0: 2, rank 1: 3", by_rank={"whole_batches": [2, 3]}),
    ddp(ShareError, "8 samples is too small", options={"min_batch_size": 5}),
    ddp(ShareError, "1 samples is too small for 2 ranks", options={"global_batch_size": 1}),
    ddp(ConfigurationError, "does not fit 2 ranks", options={"ranks_per_node": 3}),
    ddp(DataError, "1 samples for 2 ranks", data=partial(dataset, 1)),
    ddp(DataError, "sample 1 costs -1; costs are finite", data=partial(bad.Costly, sample_cost=lambda i: -i % -8)),
    ddp(DataError, "Costly.lengths: sample 0 costs nan", data=partial(bad.Costly, lengths=[float("nan")] * 96)),
    ddp(DataError, "Costly.sample_costs has 95 costs for 96", data=partial(bad.Costly, sample_costs=[*range(95)])),
    ddp(DataError, "all 96 samples cost 0", data=partial(bad.Costly, lengths=[0] * 96)),
    ddp(DataError, "whole numbers", options={"cost": "padded", "sample_cost": [1.5] * 96}),
    ddp(ConfigurationError, "TensorDataset does not tell", options={"cost": "padded"}),
    ddp(DisagreementError, "costs of samples: rank 0: Costly.sample_cost, digest", data=bad.by_rank),
    ddp(UnsupportedError, "batches that all ranks share", options={"sample_cost": abs}, data=bad.Stream),
    ddp(ConfigurationError, "`sample_cost(sample)`", options={"cost": "padded"}, data=bad.shared),
    ddp(DataError, "gives no number for sample 0: TypeError", options={"sample_cost": abs}, data=bad.shared),
    ddp(DataError, "is unknown", "batch_weight", data=bad.Rows, options={"balance_iterable": True}),
    ddp(UnsupportedError, "batch_size=None", "use_distributed_sampler=False", load={"batch_size": None}),
    ddp(UnsupportedError, "in_order=True", load={"num_workers": 2, "in_order": False}),
    ddp(UnsupportedError, "dataloader_iter", module=bad.FetchesItself),
    ddp(UnsupportedError, "sync_batchnorm", "CPU", module=bad.Normed, trainer={"sync_batchnorm": True}),
    ddp(UnsupportedError, "val_check_interval", "own clock", trainer=TIMED),
    ddp(DataError, "batch_weight", "negative or NaN", module=bad.BadWeight),
    ddp(UnsupportedError, "with batch_weight and accumulated", options=GOES_ON, module=bad.BadWeight, trainer=WINDOWS),
    ddp(
        UnsupportedError,
        "with on_nan='skip' and accumulated",
        options={**GOES_ON, "on_nan": "skip"},
        trainer={"callbacks": [GradientAccumulationScheduler({1: 2})]},
    ),
    ddp(DisagreementError, "net.0.weight: rank 0: (16, 8) float64, rank 1: (20, 8) float64", module=bad.ByRank),
    ddp(
        DisagreementError,
        "rebalance_every_n_steps: rank 0: 3, rank 1: 4",
        by_rank={"rebalance_every_n_steps": [3, 4]},
    ),
    ddp(
        DisagreementError,
        "precision: rank 0: 32-true, rank 1: bf16-mixed",
        "accumulate_grad_batches: rank 0: 1, rank 1: 2",
        trainer=bad.settings_of_rank,
    ),
    ddp(DisagreementError, "samples: rank 0: 96, rank 1: 97", data=lambda: dataset(96 + bad.rank())),
    ddp(DisagreementError, "seed_everything", env=lambda rank: {"PL_GLOBAL_SEED": str(rank)}),
    ddp(ConfigurationError, "on cpu (rank ", "needs a limit", "max_batch_memory", options={"max_batch_size": "auto"}),
    ddp(ConfigurationError, "3 limits for 2 ranks", options={**SEARCHED, "max_batch_memory": [1000, "1kB", None]}),
    ddp(UnsupportedError, "manual optimization", "as numbers", options=SEARCHED, module=bad.TrainsItself),
    ddp(UnsupportedError, "needs a map-style dataset", options=SEARCHED, data=bad.Stream),
    ddp(
        UnsupportedError,
        "needs a map-style dataset",
        options=SEARCHED,
        load={"batch_size": 1, "batch_sampler": [[0, 1], [2, 3, 4], [5, 6]]},
    ),
    ddp(
        UnsupportedError,
        "rank 1 could not try a batch: ValueError: Default process",
        options=SEARCHED,
        module=bad.FailsAlone,
    ),
    ddp(ShareError, "not even a batch of 1 fits", "rank(s) [1]", options={**SEARCHED, "max_batch_memory": ["1GB", 99]}),
    ddp(
        ShareError,
        "less than a global batch of 8, and cannot take it in several passes",
        options={**SEARCHED, "max_batch_memory": 14_250},
        module=bad.SyncedMetric,
    ),
    ddp(ConfigurationError, "min_replicas=3, but this job has 2 ranks", options={**GOES_ON, "min_replicas": 3}),
    ddp(
        UnsupportedError,
        "join_file='no such file', but nobody could join this fit: each rank reads training data of its own",
        "lightning_hetero.SharedStream",
        options={**GOES_ON, "join_file": "no such file"},
        data=bad.Stream,
    ),
    ddp(UnsupportedError, "with a DistributedSampler that you have made", options=GOES_ON, loader=bad.own_sampler),
    ddp(UnsupportedError, "with LBFGS, which calls its closure", options=GOES_ON, module=partial(bad.Optimized, LBFGS)),
    ddp(UnsupportedError, "cannot be one of several", loader=lambda: bad.two(bad.shared(), bad.shared(), 4)),
    ddp(UnsupportedError, "needs a batch_size", data=bad.shared, load={"batch_size": None}),
    ddp(DataError, "the training stream is empty", data=partial(bad.shared, 0)),
    *(
        ddp(UnsupportedError, f"your own {name}: remove these options", options=options, **data)
        for options in ({"balance": [3.0, 1.0]}, {"global_batch_size": 16}, {"max_batch_size": 2})
        for name, data in UNSIZED.items()
    ),
    *(
        ddp(
            UnsupportedError,
            f"with your {name} the sizes of batches, or their number, are settled",
            "Remove the option",
            options={"balance_iterable": True},
            **data,
        )
        for name, data in UNSIZED.items()
    ),
    ddp(
        UnsupportedError,
        "balance=[3.0, 0.0] gives rank 1 nothing",
        "lightning_hetero.SharedStream",
        options={"balance": [3.0, 0.0]},
        data=bad.Stream,
    ),
    ddp(
        UnsupportedError,
        "(global batches of [16, 8] samples)",
        "the same batch_size",
        options={"balance": [1.0, 1.0]},
        loader=bad.two_streams,
        module=bad.TwoLoaders,
    ),
    *(
        ddp(UnsupportedError, "Unending has no length", "use_distributed_sampler=False", load=load)
        for load in ({"batch_size": 1, "batch_sampler": ENDLESS}, {"batch_size": None, "sampler": ENDLESS})
    ),
    ddp(UnsupportedError, "outside of `training_step`", options=UNUSED, module=bad.LateBackward, late=True),
    *(evaluated(stage, kind, [8, 0], "rank(s) 1 got no") for stage in ("fit", "test") for kind in ("stream", "sized")),
    *(
        evaluated("validate", kind, sizes, "different numbers of validation batches", "on_step=False", on_step=True)
        for kind in ("stream", "sized")
        for sizes in ([4, 12], [12, 4], [8, 12])
    ),
    *(
        evaluated("test", kind, [4, 12], "different numbers of test batches", gather=True)
        for kind in ("stream", "sized")
    ),
    ddp(LaunchError, "WORLD_SIZE", "torchrun", env=lambda rank: {"WORLD_SIZE": ""}),
    ddp(LaunchError, "LOCAL_RANK", "torchrun", env=lambda rank: {"LOCAL_RANK": ""}),
    ddp(LaunchError, "MASTER_ADDR", "torchrun", env=lambda rank: {"MASTER_ADDR": ""}),
    ddp(LaunchError, "MASTER_PORT", "torchrun", env=lambda rank: {"MASTER_PORT": ""}),
]
TWO_NODES = [
    daso({"warmup": 10, "cooldown": 10}, ConfigurationError, "of 16 optimizer steps"),
    daso({"warmup": "1 epoch", "cooldown": "2 epochs"}, ConfigurationError, "of 16 optimizer steps"),
    daso({"warmup": "1 epochs"}, ConfigurationError, "length of an epoch is unknown: give steps", data=bad.Stream),
    daso({"monitor": "val_loss", "warmup": 0}, ConfigurationError, "monitor='val_loss' is NaN, or has not", late=True),
    daso({}, DisagreementError, "wire: rank 0: fp32, rank 1: bf16", by_rank={"wire": ["fp32", "bf16"]}),
    center("easgd", {"moving_rate": 1.0, "beta": 1.0}, ConfigurationError, "unstable"),
    center("easgd", {"moving_rate": 0.7}, ConfigurationError, "alpha=0.7 ", " and beta=1.4"),
    center("round_robin", {"rho": 70.0}, ConfigurationError, "alpha=0.7 ", " and beta=1.4"),
    center("overlap", {**AUTO, "exclude": ["*.bais"]}, ConfigurationError, "exclude: '*.bais' is the name of no"),
    optimizer("eamsgd", partial(Adam, lr=0.01), "EAMSGD needs ", " gave Adam"),
    optimizer("eamsgd", bad.HEAVY, "gave SGD with {'momentum': 0.9, 'nesterov': False}"),
    optimizer("eamsgd", partial(SGD, lr=0.01), "gave SGD with {'momentum': 0"),
    optimizer("measgd", partial(bad.HEAVY, nesterov=True), "'nesterov': True"),
    optimizer("measgd", partial(AdamW, lr=0.01), "MEASGD needs ", " gave AdamW"),
    center("easgd", AUTO, DisagreementError, "tau: rank 0: 3, rank 1: 4", by_rank={"tau": [3, 4]}),
    center(
        "easgd", {}, DisagreementError, "moving_rate: rank 0: 0.1, rank 1: 0.2", by_rank={"moving_rate": [0.1, 0.2]}
    ),
    center("async", AUTO, DisagreementError, "center: rank 0: thread", by_rank={"center": ["thread", "auto"]}),
    center("async", AUTO, DisagreementError, "debias: rank 0: True", by_rank={"debias": [True, False]}),
    center("diloco", {}, DisagreementError, "outer: rank 0: ", "0.7", "0.8", by_rank={"outer_lr": [0.7, 0.8]}),
    center(
        "diloco", {"fragments": 3}, ConfigurationError, "fragments=3: the model has 2 modules", "fragments=2 or less"
    ),
    center("diloco", {}, DisagreementError, "fragments: rank 0: 1, rank 1: 2", by_rank={"fragments": [1, 2]}),
    center("easgd", AUTO, DisagreementError, "exclude: rank 0: ", by_rank={"exclude": [["*bias"], []]}),
    center("hogwild", AUTO, UnsupportedError, "serves one host", "host0, host1", by_rank=HOSTS),
    center("async", {**AUTO, "center": "shared_memory"}, UnsupportedError, "Use center='thread'", by_rank=HOSTS),
    center("async", {**AUTO, "center": "mpi"}, UnsupportedError, "center='mpi'", "mpiexec"),
    gossip(GossipStrategy, "overlap: rank 0: True, rank 1: False", {"overlap": [True, False]}),
    gossip(GossipPushSumStrategy, "topology: rank 0: ring, rank 1: random", {"topology": ["ring", "random"]}),
    replicas(
        DiLoCoAsyncStrategy,
        {},
        DisagreementError,
        "follow_speed: rank 0: True, rank 1: False",
        by_rank={"follow_speed": [True, False]},
    ),
    replicas(DiLoCoAsyncStrategy, {"center": "shared_memory"}, UnsupportedError, "Use center='thread'", by_rank=HOSTS),
    replicas(DiLoCoAsyncStrategy, {"exclude": ["*.bais"]}, ConfigurationError, "exclude: '*.bais' is the name of no"),
    replicas(NODE, {}, UnsupportedError, "a SyncBatchNorm in the model needs GPUs", module=bad.Synced),
    replicas(
        bad.UnlockedStrategy,
        {**AUTO, "center": "thread"},
        UnsupportedError,
        "locked=False with center='thread'",
        "center='shared_memory'",
    ),
    replicas(NODE, {}, UnsupportedError, "acts at certain times", trainer={"max_time": "00:00:01:00"}),
    replicas(NODE, {}, DisagreementError, "every_n_steps: rank 0: 3, rank 1: 4", by_rank={"every_n_steps": [3, 4]}),
    replicas(AutoStrategy, {"replica": "rank"}, ConfigurationError, "chooses the replicas"),
    replicas(AutoStrategy, GOES_ON, UnsupportedError, "on_peer_loss='continue'"),
    replicas(
        STRATEGIES["diloco"],
        GOES_ON,
        UnsupportedError,
        "StochasticWeightAveraging under DiLoCoStrategy",
        trainer={**TWO_EPOCHS, "callbacks": [StochasticWeightAveraging(0.1)]},
    ),
    *(
        replicas(kind, EVEN, DataError, "1 rank(s) got no training batch at all", data=partial(bad.on_rank_1, data))
        for kind in (NODE, GossipAsyncStrategy)
        for data in (bad.Stream, bad.SizedStream)
    ),
    replicas(NODE, UNUSED, UnsupportedError, "outside of `training_step`", module=bad.LateBackward, late=True),
    daso(UNUSED, UnsupportedError, "phase is", module=bad.Complex),
    *(
        unfrozen(kind, options, DisagreementError, bad.OnOneRank(), *DIFFER)
        for kind, options in ((NODE, {}), (STRATEGIES["async"], {**AUTO, "tau": 1}), (GossipAsyncStrategy, {}))
    ),
    unfrozen(
        DASOStrategy,
        {},
        UnsupportedError,
        bad.InMidEpoch(),
        "net.0.weight and 1 more became trainable, or frozen, in mid-epoch",
    ),
    replicas(bad.OwnStrategy, {}, ConfigurationError, "OwnAverager.velocity holds tensors", "velocity = Shared(zeros)"),
    gossip(NoLoCoStrategy, "gamma: rank 0: 0.7, rank 1: 0.5", {"gamma": [0.7, 0.5]}),
    gossip(GossipAsyncStrategy, "deadline: rank 0: 1.0, rank 1: 2.0", {"deadline": [1.0, 2.0]}),
]
THREE_RANKS = [
    ddp(DataError, "2 samples for 3 ranks", module=EvaluatedNet, data=partial(dataset, 2), stage="validate"),
    ddp(
        DataError,
        "[96, 95]",
        "equal proportions",
        "drop_last",
        module=bad.TwoLoaders,
        loader=lambda: bad.two(dataset(192), dataset(191), 32),
    ),
]
#: Rows, and ranks of each node.
JOBS = {"two ranks": (TWO_RANKS, [2]), "two nodes": (TWO_NODES, [1, 1]), "three ranks": (THREE_RANKS, [3])}


def _train(row: Row, folder: str) -> None:
    mine = {name: values[bad.rank()] for name, values in row.by_rank.items()}
    if host := mine.pop("host", None):
        job_module.hostname = lambda: host
    # Warnings of Lightning: of a checkpoint after a step by hand, and of each iterable dataset with a length.
    warnings.filterwarnings("ignore", "(?s).*self.manual_backward", UserWarning)
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_on_exception=True)
    trainer = dict(row.trainer() if callable(row.trainer) else row.trainer)
    trainer["callbacks"] = [keep, *trainer.pop("callbacks", [])]
    settings = {**FAST, "max_epochs": 1, "enable_checkpointing": True, **trainer}
    fit = pl.Trainer(strategy=row.strategy(**row.options, **mine), **settings)
    data = row.loader() if row.loader else DataLoader(row.data(), **{"batch_size": 4, **row.load})
    given = (data, row.validated()) if row.stage == "fit" else (data,)
    getattr(fit, row.stage)(row.module(), *given)


def _try_all(folder: str, job: str, ports: list[int]) -> list[tuple[str, str, list[str]]]:
    """The class of each row's error, its base classes, and its message."""
    found, hostname, usual = [], job_module.hostname, dict(os.environ)
    for number, (row, port) in enumerate(zip(JOBS[job][0], ports, strict=True)):
        Path(folder, f"at-{os.environ['RANK']}").write_text(f"row {number}: {row}")  # to be named if it hangs
        os.environ.update({"MASTER_PORT": str(port), **row.env(bad.rank())})
        try:
            _train(row, f"{folder}/{number}")
            found.append(("nothing", []))
        except Exception as error:
            found.append((f"{type(error).__name__}: {error}", [kind.__name__ for kind in type(error).__mro__]))
        finally:
            job_module.hostname = hostname
            os.environ.clear()
            os.environ.update(usual)
            if dist.is_initialized():
                dist.destroy_process_group()
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize("job", JOBS)
def test_every_rank_refuses_with_the_same_words_and_saves_nothing(tmp_path: Path, job: str) -> None:
    rows, nodes = JOBS[job]
    outcomes = attempt(_try_all, sum(nodes), str(tmp_path), job, [free_port() for _ in rows], nodes=nodes)
    for rank, outcome in enumerate(outcomes):
        assert outcome.value is not None, (outcome.trace, (tmp_path / f"at-{rank}").read_text())
        for row, (message, kinds), (first, _) in zip(rows, outcome.value, outcomes[0].value, strict=True):
            assert row.error.__name__ in kinds, (row, message)
            for words in row.words:
                assert words in message, (row, message)
            assert message == first or row.error is not DisagreementError, row
    for number, row in enumerate(rows):
        assert row.late or not list((tmp_path / str(number)).glob("*")), row


# -- what no row can say -------------------------------------------------------------------------------------


def _one_sided() -> None:
    module = bad.FetchesItself() if bad.rank() == 1 else Net()
    pl.Trainer(strategy=HeteroDDPStrategy(), max_epochs=1, **FAST).fit(module, DataLoader(dataset(96), batch_size=4))


def test_an_unsupported_setting_on_one_rank_only() -> None:
    outcomes = attempt(_one_sided, 2)
    assert isinstance(outcomes[1].error, UnsupportedError), outcomes[1].trace
    assert isinstance(outcomes[0].error, DisagreementError), outcomes[0].trace
    assert "rank 1" in str(outcomes[0].error)


def _closure_twice(on_peer_loss: str) -> None:
    strategy = HeteroDDPStrategy(on_peer_loss=on_peer_loss)
    fit = pl.Trainer(strategy=strategy, max_epochs=1, **FAST)
    fit.fit(bad.Optimized(bad.Twice), DataLoader(dataset(96), batch_size=4))


@pytest.mark.parametrize("on_peer_loss", ["continue", "error"])
def test_a_closure_that_is_called_again_cannot_be_repeated(on_peer_loss: str) -> None:
    for outcome in attempt(_closure_twice, 2, on_peer_loss):
        if on_peer_loss == "error":
            assert outcome.error is None, outcome.trace
        else:
            assert isinstance(outcome.error, UnsupportedError), outcome.trace
            assert "with Twice, which calls its closure several times" in str(outcome.error)


def test_16_mixed_over_cpus_and_gpus() -> None:
    cpu, gpu = ("cpu", "bf16-mixed"), ("cuda", "16-mixed")  # as Lightning sets them for precision="16-mixed"
    problem = precision_problem([gpu, cpu], [[0, 1]])
    assert isinstance(problem, UnsupportedError)
    assert "rank 1: cpu in bf16-mixed" in str(problem)
    assert precision_problem([gpu, gpu, cpu], [[0, 1], [2]]) is None  # alike within each replica
    assert precision_problem([("cuda", "bf16-mixed"), cpu], [[0, 1]]) is None
    assert isinstance(precision_problem([("xpu", "16-mixed"), cpu], [[0, 1]]), UnsupportedError)


def test_batch_norm_over_unlike_devices() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(EvaluatedNet())
    gpu, plugin = torch.device("cuda", 0), TorchSyncBatchNorm()
    problem = trainer_checks._unsupported(trainer, plugin, gpu, connected=False)
    assert "in a replica of unlike devices" in str(problem)
    assert trainer_checks._unsupported(trainer, plugin, gpu, connected=True) is None
    assert trainer_checks._unsupported(trainer, None, gpu, connected=False) is None
