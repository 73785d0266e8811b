"""``hetero_ddp`` for Lightning Fabric: batches are split by speed, and gradients are weighted by samples."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_hetero import lightning_compat
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.sampler import Position, has_own_batches, loader_is_sharded
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.batching.weights import gradient_weight, preserve_buffers, zero_backward
from lightning_hetero.checkpoint.format import add_plan, restore_plan
from lightning_hetero.comm.agreement import AsyncAllGather, raise_on_all, value_of_rank
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.job import Job, RendezvousAddress, join_world
from lightning_hetero.comm.topology import interface_towards, place_of, use_interface
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError, not_none
from lightning_hetero.launch.environment import hostname
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.replica_ddp import ReplicaDDP, use_shared_memory_allreduce
from lightning_hetero.strategies.training_step import mark_sizes_dynamic

_OPTIONS = (
    *("balance", "global_batch_size", "min_batch_size", "max_batch_size", "rebalance_every_n_steps"),
    *("ranks_per_node", "within", "timeout", "interface", "start_method"),
)


class HeteroFabricStrategy(DDPStrategy):
    """``hetero_ddp`` for Fabric, also as ``Fabric(strategy="hetero_ddp")``.

    A batch is one of training if its loader is iterated while gradients are enabled. It ends when the next one is
    fetched. A loader that is iterated under ``torch.no_grad()`` evaluates: each sample once, ranks take equal parts.

    Args:
        *args: of Fabric's ``DDPStrategy``.
        **kwargs: those options of :class:`~lightning_hetero.HeteroDDPStrategy` that ``docs/launching.md`` names; others
            are those of Fabric's ``DDPStrategy`` and of ``DistributedDataParallel``.

    Raises:
        UnsupportedError: an option needs the Trainer.

    Example::

        from lightning.fabric import Fabric

        from lightning_hetero import HeteroFabricStrategy

        fabric = Fabric(strategy=HeteroFabricStrategy(balance="off"), accelerator="cpu", devices=2)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = {field.name for field in fields(Options)}
        if refused := sorted(name for name in kwargs if name in names and name not in _OPTIONS):
            raise UnsupportedError(
                f"{', '.join(refused)} for Fabric: it takes {', '.join(_OPTIONS)}. Use lightning.pytorch.Trainer with "
                "HeteroDDPStrategy for the others."
            )
        self.options = Options(**{name: kwargs.pop(name) for name in _OPTIONS if name in kwargs})
        if self.options.max_batch_size == "auto":
            raise UnsupportedError("max_batch_size='auto' for Fabric: give the largest batch of a rank, or of each.")
        kwargs |= {"timeout": self.options.limit, "start_method": self.options.start_method}
        super().__init__(*args, **kwargs)
        self.timer = StepTimer(torch.device("cpu"))
        self._modules: list[nn.Module] = []
        self._running: _SharedLoader | None = None  # the loader of the running batch
        self._went_back = self._evaluated = False  # in the running batch; since the latest one

    # -- the job -----------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        if self.accelerator is None or self.cluster_environment is None:
            raise ConfigurationError(f"{type(self).__name__} is not set up: give it to Fabric(strategy=...).")
        self.accelerator.setup_device(self.root_device)
        environment, options = self.cluster_environment, self.options
        use_interface(options.interface)
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        address = RendezvousAddress.of(environment, interface_towards(environment.main_address, options.interface))
        rank, world = address.rank, address.world
        connect = partial(lightning_compat.init_dist_connection, environment, "gloo", timeout=options.limit)
        join_world(connect, address, options.limit)
        place = place_of(self.root_device, hostname(), self.node_rank, self.local_rank)
        agreed = {"strategy": type(self).__name__, **options.agreed()}
        self.job = Job.join(place, options.ranks_per_node, lambda _: (tuple(range(world)),), agreed, options.limit)
        self.timer.move_to(self.root_device)
        planner, ranks = options.planner(world), self.job.view.replica.ranks

        def loaders(plans: Planner) -> Loaders:
            return Loaders(rank, ranks, plans, options, self._begin_epoch, partial(value_of_rank, rank=0), _no_peers)

        self.loaders, self.evaluating = loaders(planner), loaders(Planner(world, "off"))
        gathering = AsyncAllGather(self.job.report_group(), 1)
        self.accounting = BatchAccounting(planner, self.timer, self.loaders, ranks, self.job.small_group, gathering)
        self.loaders.combined = lambda: SimpleNamespace(  # type: ignore[assignment, return-value]
            flattened=[] if self._running is None else [self._running.training]
        )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Wrap a module in a DDP (collective)."""
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            self.accounting.planner.least = 2  # it cannot normalise one sample
        group, view, device = self.job.data_group(), self.job.view, self.root_device
        options = {**lightning_compat.ddp_options(self), "process_group": group or dist.group.WORLD}
        ids = None if device.type == "cpu" else [device.index]
        ddp = _FabricDDP(self.timer, self._is_padding, module=module, device_ids=ids, **options)
        if group is not None:
            use_shared_memory_allreduce(self.options, ddp, view.topology, view.replica.ranks, group, hooked=False)
        self._modules.append(module)
        return ddp

    # -- data --------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}  # the global order, which this strategy's samplers cut up

    @override
    def process_dataloader(self, dataloader: DataLoader) -> Any:
        raise_on_all(_unsuitable(dataloader, self.world_size), "a dataloader")
        trained = self.loaders.training(copy.copy(dataloader), sharded_by_user=False, module=None)
        evaluated = self.evaluating.evaluation(copy.copy(dataloader), "evaluation")
        return _SharedLoader(dataloader, trained, evaluated, self._fetching, self._fetched)

    def _begin_epoch(self) -> Position:
        running = not_none(self._running, "the loader that trains")
        self.accounting.begin_epoch()
        self.accounting.planner.expect(running.training.batch_sampler.batches.batch_size)
        return Position(running.passes - 1, 0, self.accounting.step)

    def _fetching(self, loader: "_SharedLoader", training: bool) -> None:
        """A batch is about to be fetched, or training on a loader begins or ends."""
        if training or self._went_back:
            self._end_batch(loader)
        if not training or self._evaluated:
            self.timer.restart()  # evaluation is no part of a training batch
        self._evaluated = not training
        if training:
            self._running = loader
            self.timer.fetching()

    def _fetched(self) -> None:
        """A batch of training is here."""
        self.timer.fetched()
        self.accounting.begin()

    def _end_batch(self, following: "_SharedLoader") -> None:
        """The program has done its work on the running batch."""
        accounting = self.accounting
        if accounting.drawn is None:
            return
        if self._went_back:
            accounting.end(report=(accounting.step + 1) % self.options.rebalance_every_n_steps == 0)
        elif following is self._running:
            accounting.drawn, accounting.step = None, accounting.step + 1  # passed over
            self.timer.restart()
        else:
            raise UnsupportedError(
                "two dataloaders were iterated without a backward pass between: Fabric's hetero_ddp trains on one "
                "loader at a time. Combine the datasets; or, if one of the loaders evaluates, iterate it under "
                "torch.no_grad()."
            )
        self._went_back = False

    def _is_padding(self) -> bool:
        """Whether the running batch of training counts for nothing."""
        return torch.is_grad_enabled() and self.accounting.drawn is not None and not self.accounting.counts

    # -- a step ------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass of a loss, the mean over this rank's samples, weighed by their number."""
        if self.accounting.drawn is None:
            raise UnsupportedError(
                "fabric.backward without a batch: no dataloader of fabric.setup_dataloaders has given one since, with "
                "gradients enabled, so that nobody knows by how many samples the gradient counts. Iterate such a "
                "loader, outside of torch.no_grad()."
            )
        weight = gradient_weight(*self.accounting.weights(), self.world_size)
        self._went_back = True
        loss = tensor * weight
        self.timer.watch(loss)
        nothing = nullcontext() if weight else zero_backward(nn.ModuleList(self._modules))
        with deadline("average gradients", self.timer.works), nothing:
            super().backward(loss, module, *args, **kwargs)
        self.timer.backward_done()

    # -- what the program does together ------------------------------------------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            with self.timer.waiting(), deadline("meet in a barrier"):
                dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self.timer.waiting():
            return value_of_rank(obj, src) if dist.is_initialized() else obj

    @override
    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        with self.timer.waiting(), deadline("reduce a tensor"):
            return super().all_reduce(tensor, *args, **kwargs)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a state, and next to it the plan (collective)."""
        ours: dict[str, Any] = {}
        add_plan(ours, self.accounting)
        with self.timer.waiting():  # the others wait for rank 0
            super().save_checkpoint(path, {**state, **ours}, *args, **kwargs)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a state, and go on with its plan (collective)."""
        found = super().load_checkpoint(path, *args, **kwargs)
        restore_plan(found, self.accounting, self.global_rank)
        return found


def _unsuitable(loader: Any, world: int) -> HeteroError | None:
    """The reason why a loader's batches cannot be split, if so."""
    why = ""
    if not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
        why = "it has no map-style dataset"
    elif has_own_batches(loader) or loader.batch_size is None:
        why = "it has no batch_size"
    elif loader_is_sharded(loader):
        why = "its sampler splits the data already"
    elif world > 1 and not isinstance(loader.sampler, DistributedSampler):  # which Fabric has put around any other
        why = "use_distributed_sampler=False says that you have split the data already"
    if not why:
        return None
    return UnsupportedError(
        f"Fabric's hetero_ddp splits the batches of a DataLoader by speed; not of this one: {why}. Give a map-style "
        "dataset, the same on all ranks, and a batch_size, and leave the distributed sampler and "
        "use_distributed_sampler out: any other sampler keeps its order. Or use strategy='ddp', or "
        "lightning.pytorch.Trainer with hetero_ddp, which takes more."
    )


class _FabricDDP(ReplicaDDP):
    """DDP under which a padding batch leaves no trace in buffers."""

    def __init__(self, timer: StepTimer, is_padding: Callable[[], bool], **kwargs: Any) -> None:
        super().__init__(timer, **kwargs)
        self._is_padding = is_padding

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with preserve_buffers(self.module) if self._is_padding() else nullcontext():
            return super().forward(*args, **kwargs)


def _no_peers(length: int | None) -> Any:
    raise AssertionError("streams are refused")


class _SharedLoader:
    """A loader of which this rank gets its shares in training, and equal parts in evaluation."""

    def __init__(
        self,
        given: DataLoader,
        training: Any,
        evaluating: Any,
        fetching: Callable[["_SharedLoader", bool], None],
        fetched: Callable[[], None],
    ) -> None:
        self.__dict__.update(given.__dict__)  # for those who look at a loader's attributes, as Fabric does
        self.training, self._evaluating, self._fetching, self._fetched = training, evaluating, fetching, fetched
        self.passes = 0  # of training, those that have begun

    def __len__(self) -> int:
        return len(self.training)

    def __iter__(self) -> Iterator[Any]:
        trains = torch.is_grad_enabled()
        self._fetching(self, trains)
        self.passes += trains
        batches = iter(self.training if trains else self._evaluating)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            if trains:
                self._fetched()
                mark_sizes_dynamic(batch)
            yield batch
            self._fetching(self, trains)
