"""The options that all strategies share, checked."""

from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.checks import at_least_one, one_of
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.workload.planner import Planner


@dataclass(frozen=True)
class Options:
    """What the user asked for; the same on every rank. See ``HeteroStrategy`` for the meaning of each.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    strategy: str
    balance: Literal["auto", "off"] | list[float]
    global_batch_size: int | None
    min_batch_size: int | list[int] | None
    max_batch_size: int | list[int] | None
    balance_iterable: bool
    rebalance_every_n_steps: int
    ranks_per_node: int | list[int] | None
    timeout: timedelta

    def __post_init__(self) -> None:
        if self.balance not in ("auto", "off") and not isinstance(self.balance, list | tuple):
            raise ConfigurationError(
                f"balance={self.balance!r}: give 'auto', 'off', or a list with one share per rank."
            )
        for name in ("global_batch_size", "rebalance_every_n_steps"):
            value = getattr(self, name)
            if value is not None:
                at_least_one(name, value)
        one_of("balance_iterable", self.balance_iterable, (True, False))
        if self.balance_iterable and self.balance != "auto":
            raise ConfigurationError(
                f"balance_iterable=True moves shares by measured speed, but balance={self.balance!r} fixes them. "
                "Remove one of the two."
            )
        if self.timeout <= timedelta(0):
            raise ConfigurationError(
                f"timeout={self.timeout.total_seconds():g} s: the longest wait must be above 0 seconds."
            )
        nodes = [self.ranks_per_node] if isinstance(self.ranks_per_node, int) else self.ranks_per_node
        if nodes is not None and not (isinstance(nodes, list | tuple) and all(type(n) is int and n > 0 for n in nodes)):
            raise ConfigurationError(
                f"ranks_per_node={self.ranks_per_node!r}: give a size, or a list of sizes, above 0."
            )
        given = [x for x in (self.balance, self.min_batch_size, self.max_batch_size) if isinstance(x, list | tuple)]
        self.planner(len(given[0]) if given else 1)  # raises now rather than after the launch

    @property
    def sizes(self) -> bool:
        """Whether the user has a say in the sizes of batches."""
        limits = (self.global_batch_size, self.min_batch_size, self.max_batch_size)
        return not isinstance(self.balance, str) or any(limit is not None for limit in limits)

    def planner(self, world: int) -> Planner:
        """A planner for ``world`` ranks."""
        return Planner(world, self.balance, self.min_batch_size, self.max_batch_size)


def seconds(timeout: Any) -> timedelta:
    """A timeout as a timedelta.

    Raises:
        ConfigurationError: not a number of seconds.
    """
    if isinstance(timeout, timedelta):
        return timeout
    try:
        return timedelta(seconds=float(timeout))
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"timeout={timeout!r}: give a finite number of seconds, or a timedelta.") from None


def check_accelerator(accelerator: Any) -> None:
    """See that no option of ours is given by position, where Lightning's strategies take an accelerator.

    Raises:
        ConfigurationError: the first argument is one of ``balance``.
    """
    if accelerator == "off" or isinstance(accelerator, list | tuple):
        raise ConfigurationError(
            f"accelerator={accelerator!r}: the first argument by position is the accelerator, as with Lightning's "
            f"DDPStrategy. Give options of this package by name: balance={accelerator!r}."
        )


def check_ddp_options(backend: str | None, options: dict[str, Any]) -> None:
    """See that options that are not ours are DDP's.

    Args:
        backend: Lightning's ``process_group_backend``.
        options: by name.

    Raises:
        ConfigurationError: names the unknown ones, and gives the reason where one of Lightning's is refused.
    """
    if backend is not None:
        raise ConfigurationError(
            f"process_group_backend={backend!r}: not a choice here. All ranks meet over gloo, "
            "which serves every device; groups of GPUs exchange gradients over NCCL by themselves. Leave it out."
        )
    known = {*signature(DDPStrategy.__init__).parameters, *signature(DistributedDataParallel.__init__).parameters}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigurationError(
            f"unknown option(s) {', '.join(unknown)}: neither this strategy nor DistributedDataParallel has them."
        )
