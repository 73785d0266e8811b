"""Options that cannot work: the constructor refuses them, with the option's name and value: one table for all."""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from center_tasks import STRATEGIES
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.optim import SGD

from lightning_hetero import (
    AutoStrategy,
    DASOStrategy,
    DiLoCoAsyncStrategy,
    GossipAsyncStrategy,
    GossipPushSumStrategy,
    GossipStrategy,
    HeteroDDPStrategy,
    NoLoCoStrategy,
    lightning_compat,
)
from lightning_hetero.callbacks import ResumableCheckpoint
from lightning_hetero.errors import ConfigurationError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_averager import SlowMoStrategy

AUTO = {"moving_rate": "auto"}
ELASTIC = [kind for name, kind in STRATEGIES.items() if name not in ("diloco", "node")]
OF_ALL_ELASTIC: list[tuple[dict[str, Any], str]] = [
    ({"moving_rate": 0.1, "rho": 1.0}, "both are given"),
    ({"moving_rate": -1}, "moving_rate=-1"),
    ({"rho": float("nan")}, "rho=nan"),
    ({**AUTO, "beta": float("inf")}, "beta=inf"),
    ({**AUTO, "tau": 0}, "tau=0"),
    ({**AUTO, "tau": 2.0}, "tau=2.0"),
    ({**AUTO, "tau": True}, "tau=True"),
    ({**AUTO, "replica": "gpu"}, "replica='gpu' must be one of 'rank', 'node'"),
    ({**AUTO, "exclude": "bias"}, "exclude='bias': give a list"),
    ({**AUTO, "on_nan": "ignore"}, "on_nan='ignore'"),
    ({**AUTO, "moving_rat": 1}, "unknown option"),
]
WRONG_WIRES: list[tuple[Any, str]] = [
    ("int9", "wire='int9' must be one of 'fp32', 'bf16', 'fp16', 'int8', 'int4', '2bit', 'topk:0.02'"),
    (None, "wire=None must be one of"),
    (8, "wire=8 must be one of"),
    (["int8"], "wire=['int8'] must be one of"),
    ("int8:0.5", "wire='int8:0.5' must be one of"),
    *((f"topk:{density}", "the density is") for density in ("0", "-0.1", "1.01", "0.001", "nan", "", "2%")),
    *((f"int4:decay={decay}", "above 0 and at most 1") for decay in ("0", "-0.5", "1.01", "nan", "")),
    ("topk:0.02:bits=3", "bits=3 must be 4 or 2"),
    ("int4:bits=2", "Settings may follow"),
    ("bf16:decay=0.95", "must be one of"),
    ("2bit:decay=0.9:decay=0.5", "must be one of"),
    ("int8:decays=0.9", "must be one of"),
]
LOW_BIT: list[tuple[Any, dict[str, Any]]] = [
    (DASOStrategy, {}),
    *((STRATEGIES[name], {}) for name in ("node", "diloco")),
    *((STRATEGIES[name], AUTO) for name in ("easgd", "overlap", "eamsgd")),
]
GOES_ON = {"on_peer_loss": "continue"}
WRONG_KINDS: list[dict[str, Any]] = [
    *({"balance": balance} for balance in ([2.0, "x"], [None, 1.0], 3.0)),
    *({"timeout": timeout} for timeout in ("abc", float("nan"), float("inf"), None)),
    *({"ranks_per_node": ranks} for ranks in ("2", 0, [1.5, 1.5])),
    {"global_batch_size": True},
    {"max_batch_size": 0},
    {"max_batch_size": 2.5},
    {"min_batch_size": -1},
    {"min_batchsize": 4},
]
OF_AUTO: list[dict[str, Any]] = [
    {"gain": -0.1}, {"gain": True}, {"every": 0}, {"measure": 0}, {"wire": "topk:0.02"}, {"exact": "yes"},
]  # fmt: skip
OF_REPLICAS: list[tuple[Any, dict[str, Any]]] = [
    (STRATEGIES["node"], {}), (DASOStrategy, {}), (STRATEGIES["easgd"], AUTO), (GossipAsyncStrategy, {}),
]  # fmt: skip
SECOND_AVERAGES: list[dict[str, Any]] = [
    {"model_averaging_period": 2},
    {"ddp_comm_state": PostLocalSGDState(None, None, 5), "ddp_comm_hook": post_localSGD_hook},
]
WRONG_PORTS = ("29500", "30000-29500", "0-10", "65000-65536", "a-b", 29500, "")
ROWS: list[tuple[Any, dict[str, Any], str]] = [
    (HeteroDDPStrategy, {"balance": [1.0, -1.0]}, "at least 0"),
    (HeteroDDPStrategy, {"balance": [1.0, float("nan")]}, "finite"),
    (HeteroDDPStrategy, {"balance": [0.0, 0.0]}, "not all 0"),
    (HeteroDDPStrategy, {"balance": "fair"}, "'fair'"),
    (HeteroDDPStrategy, {"global_batch_size": 0}, "global_batch_size=0"),
    (HeteroDDPStrategy, {"rebalance_every_n_steps": 0}, "rebalance_every_n_steps=0"),
    (HeteroDDPStrategy, {"timeout": 0}, "timeout=0"),
    (HeteroDDPStrategy, {"timeout": timedelta(seconds=-1)}, "timeout=-1 s: the longest wait must be above 0"),
    (HeteroDDPStrategy, {"balance": "off", "balance_iterable": True}, "balance='off' fixes them"),
    (HeteroDDPStrategy, {"balance_iterable": 2}, "balance_iterable=2 must be one of True, False"),
    (HeteroDDPStrategy, {"cost": "tokens"}, "cost='tokens' must be one of 'additive', 'padded', 'samples'"),
    (HeteroDDPStrategy, {"sample_cost": 3.0}, "sample_cost=3.0: give a function of a sample's index, or a number for"),
    (HeteroDDPStrategy, {"sample_cost": [1, 2], "cost": "samples"}, "but sample_cost says what they cost"),
    (
        HeteroDDPStrategy,
        {"whole_batches": 0},
        "whole_batches=0 must be a whole number of at least 1, or True, or False",
    ),
    (HeteroDDPStrategy, {"share_multiple": 0}, "share_multiple=0 must be a whole number of at least 1, or 'auto'"),
    (HeteroDDPStrategy, {"share_multiple": 8, "balance": "off"}, "share_multiple=8 rounds shares, but balance='off'"),
    (HeteroDDPStrategy, {"share_multiple": 8, "whole_batches": 4}, "but whole_batches keeps batches as they are"),
    (HeteroDDPStrategy, {"whole_batches": "all"}, "whole_batches='all' must be"),
    (HeteroDDPStrategy, {"whole_batches": 4, "max_batch_size": 3}, "whole_batches=4 with max_batch_size: batches that"),
    (HeteroDDPStrategy, {"whole_batches": True, "global_batch_size": 3}, "whole_batches=True with global_batch_size"),
    (HeteroDDPStrategy, {"start_method": "x"}, "start_method='x' must be one of 'popen'"),
    *((HeteroDDPStrategy, {"wire": wire}, words) for wire, words in WRONG_WIRES),
    (HeteroDDPStrategy, {"wire": "int9"}, "'topk:0.02', 'powersgd:4'"),
    *((HeteroDDPStrategy, {"wire": f"powersgd{rank}"}, "the rank of the matrices") for rank in ("", ":", ":0", ":1.5")),
    (HeteroDDPStrategy, {"wire": "powersgd:-1"}, "wire='powersgd:-1'"),
    (HeteroDDPStrategy, {"wire": "int8", "ddp_comm_hook": print}, "wire='int8' together with ddp_comm_hook"),
    (HeteroDDPStrategy, {"wire": "int8", "within": "shm"}, "wire='int8' together with within='shm'"),
    (HeteroDDPStrategy, {"within": "memory"}, "within='memory'"),
    (HeteroDDPStrategy, {"interface": ""}, "interface=''"),
    *(
        (HeteroDDPStrategy, {"ports": ports}, f"ports={ports!r}: give the first and the last port")
        for ports in WRONG_PORTS
    ),
    (HeteroDDPStrategy, {"data_parallel_size": 0}, "data_parallel_size=0"),
    (HeteroDDPStrategy, {"tensor_parallel_size": 1.5}, "tensor_parallel_size=1.5"),
    (
        HeteroDDPStrategy,
        {"tensor_parallel_size": 2, "max_batch_size": "auto"},
        "tensor_parallel_size=2 with max_batch_size",
    ),
    (HeteroDDPStrategy, {"save_distributed_checkpoint": "yes"}, "save_distributed_checkpoint='yes' must be one of"),
    (HeteroDDPStrategy, {"process_group_backend": "nccl"}, "All ranks meet over gloo"),
    (HeteroDDPStrategy, {"balance": [1.0, 1.0], "min_batch_size": 9, "max_batch_size": 3}, "min_batch_size=[9, 9]"),
    (HeteroDDPStrategy, {"balance": [1.0, 1.0], "min_batch_size": [1, 2, 3]}, "3 limits for 2 ranks"),
    (HeteroDDPStrategy, {"balance": [1.0, 1.0], "max_batch_size": -1}, "at least 0"),
    (HeteroDDPStrategy, {"max_batch_size": "most"}, "max_batch_size='most': give a number of samples"),
    (
        HeteroDDPStrategy,
        {"max_batch_size": "auto", "max_batch_memory": "8 XB"},
        "max_batch_memory='8 XB': give",
    ),
    (HeteroDDPStrategy, {"max_batch_size": 8, "max_batch_memory": "8GiB"}, "is for max_batch_size='auto'"),
    (HeteroDDPStrategy, {"on_nan": "stop"}, "on_nan='stop' must be one of 'error', 'skip', 'ignore'"),
    (HeteroDDPStrategy, {"min_replicas": 2}, "say when to go on without lost ranks"),
    (HeteroDDPStrategy, {"grace": 5.0}, "say when to go on without lost ranks"),
    *((HeteroDDPStrategy, {**GOES_ON, "grace": grace}, "give at least 0.5 seconds") for grace in (0, 1e-9, 0.49)),
    (HeteroDDPStrategy, {**GOES_ON, "join_file": 3}, "join_file=3: give the name of a file"),
    (HeteroDDPStrategy, {**GOES_ON, "join_file": ""}, "join_file='': give the name of a file"),
    (HeteroDDPStrategy, {**GOES_ON, "start_method": "spawn"}, "that launcher ends all ranks when one fails"),
    (HeteroDDPStrategy, {"on_peer_loss": "ignore"}, "on_peer_loss"),
    *((HeteroDDPStrategy, wrong, next(iter(wrong))) for wrong in WRONG_KINDS),
    *((STRATEGIES["node"], {"every_n_steps": every}, "every_n_steps") for every in (0, -1, 2.5, True)),
    *((AutoStrategy, wrong, next(iter(wrong))) for wrong in OF_AUTO),
    *((kind, {**given, **more}, "a second time") for kind, given in OF_REPLICAS for more in SECOND_AVERAGES),
    (ResumableCheckpoint, {"dirpath": ""}, "give a folder"),
    (ResumableCheckpoint, {"dirpath": "a", "every_n_steps": 0}, "every_n_steps=0"),
    (ResumableCheckpoint, {"dirpath": "a", "keep": 0}, "keep=0"),
    (DASOStrategy, {"global_every": 0}, "global_every=0"),
    (DASOStrategy, {"wait": 5}, "wait=5"),
    (DASOStrategy, {"wait": "soon"}, "wait='soon'"),
    (DASOStrategy, {"max_global_every": 0}, "max_global_every=0"),
    (DASOStrategy, {"mixing": "mean"}, "mixing='mean' must be one of 'daso', 'delta'"),
    *((kind, {**given, "wire": wire}, words) for kind, given in LOW_BIT for wire, words in WRONG_WIRES),
    (DASOStrategy, {"warmup": "soon"}, "warmup='soon'"),
    (DASOStrategy, {"warmup": -1}, "warmup=-1"),
    (DASOStrategy, {"cooldown": 1.5}, "cooldown=1.5"),
    (DASOStrategy, {"schedule_every_n_steps": 0}, "schedule_every_n_steps=0"),
    (DASOStrategy, {"threshold": 1}, "threshold=1"),
    (DASOStrategy, {"on_nan": "ignore"}, "on_nan='ignore'"),
    (DASOStrategy, {"warm_up": 1}, "unknown option"),
    *((kind, options, words) for kind in ELASTIC for options, words in OF_ALL_ELASTIC),
    (STRATEGIES["async"], {**AUTO, "wire": "int8"}, "no low-bit wire can be used. Use one of 'fp32', 'bf16', 'fp16'"),
    (STRATEGIES["round_robin"], {**AUTO, "wire": "topk:0.1"}, "or hetero_node, hetero_daso, hetero_easgd"),
    (STRATEGIES["async"], {**AUTO, "center": "disk"}, "center='disk' must be one of"),
    (STRATEGIES["async"], {**AUTO, "center": "shared_memory", "wire": "bf16"}, "memory has no wire"),
    (STRATEGIES["diloco"], {"tau": -1}, "tau=-1"),
    (STRATEGIES["diloco"], {"outer_lr": 0}, "outer_lr=0"),
    (STRATEGIES["diloco"], {"tau": "often"}, "tau='often'"),
    (STRATEGIES["diloco"], {"tau": "auto", "tau_max": 0}, "tau_max=0"),
    (STRATEGIES["diloco"], {"tau": "auto", "tau_max": 5, "delay": 5}, "less than tau_max=5"),
    (STRATEGIES["diloco"], {"fragments": 0}, "fragments=0"),
    (STRATEGIES["diloco"], {"fragments": "layers"}, "fragments='layers'"),
    (STRATEGIES["diloco"], {"fragments": True}, "fragments=True"),
    (STRATEGIES["diloco"], {"tau": 5, "delay": 5}, "less than tau=5"),
    (STRATEGIES["diloco"], {"delay": -1}, "delay=-1"),
    (STRATEGIES["diloco"], {"blend": 0}, "blend=0"),
    (STRATEGIES["diloco"], {"blend": 1.5}, "blend=1.5"),
    (STRATEGIES["diloco"], {"blend": float("nan")}, "blend=nan"),
    (STRATEGIES["diloco"], {"outer_lr": float("nan")}, "outer_lr=nan"),
    (STRATEGIES["diloco"], {"outer_lr": -0.7}, "outer_lr=-0.7"),
    (STRATEGIES["diloco"], {"outer_lr": "fast"}, "outer_lr="),
    (STRATEGIES["diloco"], {"outer_momentum": 1.0}, "outer_momentum=1.0"),
    (STRATEGIES["diloco"], {"outer_momentum": -0.1}, "outer_momentum=-0.1"),
    (STRATEGIES["diloco"], {"outer_momentum": "much"}, "outer_lr="),
    (STRATEGIES["diloco"], {"outer": lambda parameters: list(parameters)}, "made a list, not a torch.optim.Optimizer"),
    (STRATEGIES["diloco"], {"outer": partial(SGD, lr=-1.0)}, "does not make an optimizer"),
    (STRATEGIES["diloco"], {"outer": partial(SGD, lr=1.0), "outer_lr": 0.5}, "would have no effect"),
    (STRATEGIES["diloco"], {"outer": "sgd"}, "outer='sgd' does not make an optimizer"),
    (GossipStrategy, {"topology": "star"}, "topology='star' is unknown"),
    (GossipStrategy, {"topology": "exponential"}, "cannot be used by exchange='pairwise'"),
    (GossipPushSumStrategy, {"topology": "star"}, "topology='star' is unknown"),
    (DiLoCoAsyncStrategy, {"tau": 0}, "tau=0"),
    (DiLoCoAsyncStrategy, {"outer_lr": -0.7}, "outer_lr=-0.7"),
    (DiLoCoAsyncStrategy, {"outer_momentum": 1.0}, "outer_momentum=1.0"),
    (DiLoCoAsyncStrategy, {"follow_speed": 2}, "follow_speed=2 must be one of True, False"),
    (DiLoCoAsyncStrategy, {"center": "mpi"}, "center='mpi' must be one of 'auto', 'shared_memory', 'thread'"),
    (DiLoCoAsyncStrategy, {"exclude": "bias"}, "exclude='bias': give a list"),
    (DiLoCoAsyncStrategy, {"outer": SGD}, "unknown option(s) outer: neither this strategy nor Distributed"),
    (DiLoCoAsyncStrategy, {"center": "shared_memory", "wire": "int4"}, "a center in shared_memory has no wire"),
    (DiLoCoAsyncStrategy, {"fragments": 0}, "fragments=0 must be a whole number of at least 1"),
    (DiLoCoAsyncStrategy, {"wire": "powersgd:4"}, "wire='powersgd:4' must be one of"),
    (DiLoCoAsyncStrategy, {"wire": "topk:0.02:decay=0"}, "decay is '0', and must be a number above 0"),
    (STRATEGIES["node"], {"fragments": 2}, "outer_lr=1.0 and outer_momentum=0.0 that is the periodic average"),
    (GossipStrategy, {"fragments": 2, "delay": 1}, "hetero_easgd_overlap exchange in the background, too. Parts of"),
    (DiLoCoAsyncStrategy, {"on_nan": "ignore"}, "on_nan='ignore'"),
    (NoLoCoStrategy, {"tau": 0}, "tau=0"),
    (NoLoCoStrategy, {"outer_lr": 0}, "outer_lr=0"),
    (NoLoCoStrategy, {"outer_momentum": 1.0}, "outer_momentum=1.0"),
    (NoLoCoStrategy, {"gamma": 0}, "gamma=0 must be above 0"),
    (NoLoCoStrategy, {"gamma": 1.5}, "below 2 (1 - outer_momentum^2) = 1.5"),
    (NoLoCoStrategy, {"gamma": 0.7, "outer_momentum": 0.9}, "= 0.38"),
    (NoLoCoStrategy, {"wire": "int8"}, "wire='int8': gossip"),
    (NoLoCoStrategy, {"deadline": 0}, "deadline=0"),
    (NoLoCoStrategy, {"seed": 0.5}, "seed=0.5"),
    (NoLoCoStrategy, {"every_n_steps": 2}, "unknown option"),
    (NoLoCoStrategy, {"on_nan": "ignore"}, "on_nan='ignore'"),
    (GossipStrategy, {"exchange": "both"}, "exchange='both' must be one of"),
    (GossipStrategy, {"every_n_steps": 0}, "every_n_steps=0"),
    (GossipStrategy, {"every_n_steps": True}, "every_n_steps=True"),
    (GossipAsyncStrategy, {"every_n_steps": 1.5}, "every_n_steps=1.5"),
    (GossipStrategy, {"deadline": 0}, "deadline=0"),
    (GossipStrategy, {"deadline": float("inf")}, "deadline=inf"),
    (GossipStrategy, {"deadline": "soon"}, "deadline='soon'"),
    (GossipStrategy, {"deadline": True}, "deadline=True"),
    (GossipStrategy, {"seed": 1.0}, "seed=1.0"),
    (GossipStrategy, {"wire": "int8"}, "wire='int8': gossip rounds values"),
    (GossipStrategy, {"wire": "int9"}, "wire='int9' must be one of"),
    (GossipPushSumStrategy, {"wire": "int4"}, "nothing may be left out"),
    (GossipPushSumStrategy, {"wire": "fp8"}, "wire='fp8' must be one of 'fp32', 'bf16', 'fp16'."),
    (GossipStrategy, {"replica": "socket"}, "replica='socket' must be one of"),
    (GossipStrategy, {"on_nan": "ignore"}, "on_nan='ignore'"),
    (GossipStrategy, {"topologie": "ring"}, "unknown option"),
    (GossipStrategy, {"overlap": "no"}, "overlap='no'"),
    *((SlowMoStrategy, wrong, "SlowMo(tau=") for wrong in ({"tau": 0}, {"alpha": 0.0}, {"beta": 1.0})),
    *((SlowMoStrategy, wrong, "tau must be at least 1") for wrong in ({"tau": 0}, {"alpha": 0.0}, {"beta": 1.0})),
]


@pytest.mark.parametrize(("kind", "options", "words"), ROWS, ids=[f"{row[0].__name__}-{row[2]}" for row in ROWS])
def test_options_that_cannot_work(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        kind(**options)
    assert words in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_a_module_without_values_is_not_moved() -> None:
    module = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(NotImplementedError):
        module.cpu()
    with lightning_compat.module_without_values_stays(module):
        assert module.cpu() is module
    with pytest.raises(NotImplementedError):
        module.cpu()
