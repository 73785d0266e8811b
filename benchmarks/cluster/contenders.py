"""Strategies by their strings: Lightning's, this package's, and what people build from PyTorch's parts on CPUs.

And what every rank that trains with them does first and last.

``NAME`` or ``NAME:option=value,option=value``.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import lightning_hetero  # noqa: F401  registers the package's strings


class HookedDDP(DDPStrategy):
    """Lightning's DDP, with communication hooks that also work on CPUs, where Lightning drops them without a word."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


class PostLocalSGD(HookedDDP):
    """PyTorch's post-local SGD as Lightning offers it: gradients within a node, averages of all ranks now and then."""

    def __init__(self, every: int = 4, after: int = 0) -> None:
        super().__init__(ddp_comm_hook=post_localSGD_hook, model_averaging_period=every)
        self._after = after

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if self._ddp_comm_state is None:
            hosts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(hosts, self.cluster_environment.node_rank())
            nodes = [[rank for rank, host in enumerate(hosts) if host == node] for node in dict.fromkeys(hosts)]
            subgroup, _ = dist.new_subgroups_by_enumeration(nodes, backend="gloo")
            self._ddp_comm_state = PostLocalSGDState(None, subgroup, start_localSGD_iter=self._after)


def powersgd(rank: int = 4, after: int = 2) -> HookedDDP:
    """PyTorch's PowerSGD, in one bucket: with several it aborts on gloo. It compresses after some steps, 2 at least."""
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=after)
    return HookedDDP(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook, bucket_cap_mb=1000)


#: What there is to compare with, beside all strategies that are registered.
BUILT_FROM_PARTS = {
    "alone": lambda: SingleDeviceStrategy(torch.device("cpu")),  # every rank for itself: no communication at all
    "ddp_fp16": lambda: HookedDDP(ddp_comm_hook=fp16_compress_hook),
    "ddp_powersgd": powersgd,
    "post_local_sgd": PostLocalSGD,
}


def parse(text: str) -> Strategy:
    """A strategy from its string."""
    name, _, options = text.partition(":")
    values = {key: _value(value) for key, _, value in (o.partition("=") for o in options.split(",") if o)}
    if name in BUILT_FROM_PARTS:
        return BUILT_FROM_PARTS[name](**values)
    if name not in StrategyRegistry:
        variants = ("_spawn", "_fork", "_notebook", "_true", "_false")
        strings = [known for known in StrategyRegistry.available_strategies() if not known.endswith(variants)]
        known = ", ".join([*BUILT_FROM_PARTS, *strings])
        raise SystemExit(f"Unknown strategy {name!r}. There are: {known}")
    entry = StrategyRegistry[name]
    return entry["strategy"](**{**entry["init_params"], **values})


def is_alone(text: str) -> bool:
    """Whether every rank trains for itself under a strategy."""
    return text.partition(":")[0] == "alone"


def trainer(text: str, **options: Any) -> pl.Trainer:
    """A Trainer that only trains, as a rank of the cluster, with a strategy from its string."""
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        accelerator="cpu",
        devices=1 if is_alone(text) else int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if is_alone(text) else int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=parse(text),
        **off,
        **options,
    )


@contextmanager
def on_cluster() -> Iterator[None]:
    """Be a rank of the cluster, on one thread and without Lightning's advice, until all are done."""
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def _value(text: str) -> Any:
    """A number, true or false; else the text as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
