"""Training steps of a rank that gets no samples: which can be left out, and what takes their place."""

from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.reports import Idling
from lightning_hetero.batching.weights import zero_loss
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.replicas.sharding import is_sharded
from lightning_hetero.strategies.replica_ddp import ReplicaDDP, sparse_embedding

_changes = attrgetter("_version")  # how often a tensor has changed in place, as autograd counts
#: Objects that attributes hold are looked at so deep, unless they hold more.
DEEP, MANY = 3, 100
_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))  # attributes that are not the user's


class IdleSteps:
    """Training steps of a rank that gets no samples, because even its least share would make every step longer.

    It does not run the module's ``training_step``: a loss of 0 in which all parameters have a part takes its place.
    DDP then averages gradients of zero in the usual order, and hooks, callbacks and optimizers run as on all ranks.

    Whether that can be is found out while the rank has samples: the step must leave no trace in the module, and no rank
    may wait for another one in it.

    Args:
        accounting: of this rank's batches.
        several: whether there are several replicas.

    Attributes:
        left_out: ranks that have left out steps in the running epoch; the same on every rank.
    """

    #: The first steps are looked at in any case: what happens in one of ``n`` steps happens in the first.
    FIRST = 4

    def __init__(self, accounting: BatchAccounting, several: bool) -> None:
        self._accounting, self._several, self._seen = accounting, several, 0
        self._met = False  # whether ranks have met in the running step
        self.left_out = set[int]()

    def met(self, name: str) -> None:
        """Note that ranks meet in the running training step.

        Raises:
            UnsupportedError: a rank without samples does not run it.
        """
        self._met = True
        self._refuse(f"calls {name}")

    def _refuse(self, what: str) -> None:
        if idle := self._accounting.idle_ranks:
            raise UnsupportedError(
                f"training_step {what}, and rank {', '.join(map(str, idle))}, which gets no samples because it is too "
                "slow, does not run it. That was not to be seen in the steps before. Give `min_batch_size=1`: then "
                "every rank gets samples of every batch."
            )

    def run(self, module: pl.LightningModule, step: Callable[[], Any], log: Callable[[], None]) -> Any:
        """Run a training step, or what takes its place.

        Args:
            module: that is trained.
            step: its training step.
            log: logs what it would have logged; that counts for nothing.
        """
        accounting = self._accounting
        self.left_out.update(accounting.idle_ranks)
        if accounting.idle:
            log()
            return zero_loss(module)
        if self._seen == 0:  # of this view
            obstacle = self._obstacle(module)
            accounting.idling = max(accounting.idling, obstacle) if accounting.idling > Idling.ALONE else obstacle
        self._seen, drawn = self._seen + 1, accounting.current().samples
        least = max(accounting.planner.at(accounting.step).low[accounting.loaders.rank], 1)
        watched = self._seen <= self.FIRST or drawn <= least or accounting.idle_ranks
        if not watched or accounting.idling > Idling.FIRST or not drawn:
            return step()
        self._met, before = False, list(_state(module))
        output = step()
        returned = set(output) <= {"loss"} if isinstance(output, dict) else isinstance(output, Tensor | None)
        if self._met:
            accounting.idling = Idling.COLLECTIVES
        elif before != list(_state(module)):
            self._refuse("changes attributes or frozen parameters of the module")
            accounting.idling = Idling.STATE
        elif not returned:
            accounting.idling = Idling.OUTPUT
        return output

    def _obstacle(self, module: pl.LightningModule) -> Idling:
        """The reason why the step cannot be left out, as far as it can be known before one has run."""
        model, replica = module.trainer.strategy.model, self._accounting.replica
        if self._several or len(replica) < 2 or self._accounting.loaders.own_streams:
            return Idling.ALONE
        if not module.automatic_optimization:
            return Idling.MANUAL
        if not isinstance(model, ReplicaDDP) or is_sharded(module) or sparse_embedding(module) is not None:
            return Idling.GRADIENTS
        if model.find_unused_parameters or model.static_graph:
            return Idling.GRADIENTS
        if not model.broadcast_buffers and any(True for _ in module.buffers()):
            return Idling.BUFFERS
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            return Idling.COLLECTIVES
        return Idling.FIRST if self._accounting.loaders.rank == 0 else Idling.POSSIBLE


def _state(module: nn.Module) -> Iterator[Any]:
    """Traces that a training step could leave in a module, other than gradients, buffers and metrics."""
    seen = set[int]()
    for part in module.modules():
        if isinstance(part, Metric | MetricCollection):
            continue
        deep = 0 if type(part).__module__.startswith("torch.") else DEEP
        for name, value in vars(part).items():
            if name not in _OF_LIGHTNING:
                yield name, _look(value, deep, seen)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            yield _look(parameter, 0, seen)


def _look(value: Any, deep: int, seen: set[int]) -> Any:
    """Mark of a value, and of what it holds some levels deep: another one once it was replaced, or changed in place."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else _changes(value)
    held: Any = value if isinstance(value, list | tuple | dict | set | deque) else getattr(value, "__dict__", ())
    if not deep or len(held) > MANY or id(value) in seen or isinstance(value, nn.Module | pl.Trainer):
        return id(value), len(held)
    seen.add(id(value))
    inside = list(held.values() if isinstance(held, dict | MappingProxyType) else held)
    return id(value), [_look(each, deep - 1, seen) for each in inside]
