"""Cluster environments: what the launcher says about this process, without assuming that nodes are alike."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from typing_extensions import override

from lightning_hetero.errors import LaunchError, UnsupportedError

_given: dist.ProcessGroup | None = None  # that the launcher has made


class RenumberedEnvironment(ClusterEnvironment):
    """The environment of a rank that has got another number, since others were lost.

    Args:
        inner: the environment in which it was launched.
        rank: its number now.
        world: ranks that remain.
    """

    def __init__(self, inner: ClusterEnvironment, rank: int, world: int) -> None:
        self.inner, self._rank, self._world = inner, rank, world

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return self.inner.creates_processes_externally

    @property
    @override
    def main_address(self) -> str:
        return self.inner.main_address

    @property
    @override
    def main_port(self) -> int:
        return self.inner.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._world

    @override
    def set_world_size(self, size: int) -> None:
        """The ranks that remain are as many as they are."""

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """The number stays."""

    @override
    def local_rank(self) -> int:
        return self.inner.local_rank()

    @override
    def node_rank(self) -> int:
        return self.inner.node_rank()

    @override
    def teardown(self) -> None:
        self.inner.teardown()


def check_variables(environment: ClusterEnvironment, num_nodes: int) -> None:
    """See that the launcher has set what rank, world and rendezvous are read from.

    Raises:
        LaunchError: a variable is missing or not a number; names it and says who sets it.
    """
    inner = getattr(environment, "inner", environment)
    if isinstance(inner, TorchElasticEnvironment):
        _require(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"), "torchrun sets them all")
        if not 0 <= int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]):
            raise LaunchError(
                f"RANK={os.environ['RANK']} is not below WORLD_SIZE={os.environ['WORLD_SIZE']}. Launch with torchrun, "
                "which sets both."
            )
    elif getattr(type(inner), "global_rank", None) is not LightningEnvironment.global_rank:
        return  # it knows its ranks, as that of Ray does
    elif "RANK" in os.environ:
        raise LaunchError(
            f"RANK={os.environ['RANK']} is set, but the launcher is not known, so that this process would train alone. "
            "Launch with torchrun (or set TORCHELASTIC_RUN_ID as it does), srun or mpiexec, or unset RANK."
        )
    elif num_nodes > 1:
        _require(
            ("MASTER_PORT",),
            f"num_nodes={num_nodes}: without them every node would wait on a port of its own 127.0.0.1. Launch with "
            "torchrun, srun or mpiexec on each node, or leave num_nodes out if there is one machine",
        )
        if "NODE_RANK" not in os.environ and "GROUP_RANK" not in os.environ:
            raise LaunchError(
                f"num_nodes={num_nodes}, but NODE_RANK is not set, so that every node would take itself for the "
                "first. Set NODE_RANK=0, 1, ... on each node, or launch with torchrun, srun or mpiexec."
            )


def _require(numbers: tuple[str, ...], reason: str) -> None:
    """See that MASTER_ADDR is set, and so are these numbers."""
    missing = [name for name in (*numbers, "MASTER_ADDR") if not os.environ.get(name)]
    if missing:
        raise LaunchError(f"missing launcher variables: {', '.join(missing)} ({reason}).")
    wrong = [f"{name}={os.environ[name]!r}" for name in numbers if not os.environ[name].isdigit()]
    if wrong:
        raise LaunchError(f"launcher variables that are no numbers: {', '.join(wrong)} ({reason}).")


def check_process_group(used: bool, continues: bool) -> None:
    """See that a process group can be used that the launcher has made, as Ray does.

    Args:
        used: whether a job of this package is in the group already.
        continues: whether the fit is to go on when a rank is lost.

    Raises:
        LaunchError: it is of another backend than gloo.
        UnsupportedError: the fit could not go on.
    """
    global _given
    if dist.is_initialized() and not used:
        _given = dist.group.WORLD
    if not dist.is_initialized() or dist.group.WORLD is not _given:
        return
    if (backend := dist.get_backend()) != "gloo":
        raise LaunchError(
            f"there is a process group already, with the backend {backend!r}; the launcher or this script has made it. "
            "All ranks meet over gloo here, which serves every device; groups of GPUs exchange gradients over NCCL by "
            "themselves. Make it with gloo: with Ray, TorchTrainer(torch_config=TorchConfig(backend='gloo'))."
        )
    if continues:
        raise UnsupportedError(
            "on_peer_loss='continue' in a process group that the launcher or this script has made: ranks that wait in "
            "it for a lost one cannot be woken up. Use on_peer_loss='error' with a ResumableCheckpoint, and let the "
            "launcher start the ranks again: with Ray, FailureConfig(max_failures=...)."
        )


def local_devices(environment: ClusterEnvironment, devices: list[torch.device]) -> list[torch.device]:
    """Devices of this node's ranks: as many as the launcher started here.

    Lightning counts CPU ranks from ``devices=`` alone. If the launcher started more ranks than there are devices,
    they share them in turn.
    """
    if not environment.creates_processes_externally:
        return devices
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", 0)), environment.local_rank() + 1, len(devices))
    return [devices[i % len(devices)] for i in range(ranks)]


def hostname() -> str:
    """This machine's name; ranks of the same name are taken to share its memory."""
    return socket.gethostname()
