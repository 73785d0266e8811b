"""PyTorch's operations over all ranks by default: they go over a rank's own replica, or are refused."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import run
from tasks import Net, dataset, parameters, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy, NodeAverageStrategy
from lightning_hetero.errors import UnsupportedError

NODES, STEPS = [2, 2], 4


class Weights(pl.Callback):
    """Keeps the weights after each step, before the replicas meet at the end."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.kept.append(parameters(module))


def _trained(make: Callable[[], pl.LightningModule] = Net, kind: Any = NodeAverageStrategy, **options: Any) -> Any:
    """The weights after each step, and the module, of a fit with no exchange before its end."""
    if kind is NodeAverageStrategy:
        options = {"every_n_steps": 1000, **options}
    weights, module = Weights(), make()
    strategy = kind(**{"balance": "off", "global_batch_size": 16, "timeout": 60, **options})
    data = DataLoader(dataset(), batch_size=4, shuffle=True)
    train(module, strategy, data, max_steps=STEPS, callbacks=[weights])
    return torch.stack(weights.kept), module


def by_the_convention(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's hook, written as PyTorch's are."""
    group = dist.group.WORLD if group is None else group
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def over_all(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's hook that averages over all ranks."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _hooked() -> dict[str, torch.Tensor]:
    found = {"plain": _trained()[0], "own group": _trained(ddp_comm_hook=by_the_convention)[0]}
    found["all-reduce"] = _trained(ddp_comm_hook=allreduce_hook)[0]
    found["fp16"] = _trained(ddp_comm_hook=fp16_compress_hook)[0]
    found["wrapped"] = _trained(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper)[0]
    state = PowerSGDState(None, start_powerSGD_iter=1000, min_compression_rate=0.1)
    for name in ("power", "power again"):  # the state is used by fit after fit, whose groups end
        found[name] = _trained(ddp_comm_hook=powerSGD_hook, ddp_comm_state=state)[0]
        assert state.process_group is None
    found["power, over all"] = _trained(
        ddp_comm_hook=powerSGD_hook, ddp_comm_state=PowerSGDState(dist.group.WORLD, start_powerSGD_iter=1000)
    )[0]
    with pytest.raises(UnsupportedError, match=r"ddp_comm_hook over_all calls torch.distributed.all_reduce over all"):
        _trained(ddp_comm_hook=over_all)
    return found


def test_hooks_average_within_a_replica() -> None:
    results = run(_hooked, 4, nodes=NODES)
    plain = [result["plain"] for result in results]
    assert torch.equal(plain[0], plain[1])
    assert torch.equal(plain[2], plain[3])
    assert (plain[0] - plain[2]).abs().max() > 1e-3  # replicas train apart
    for name in results[0].keys() - {"plain"}:
        for result, alone in zip(results, plain, strict=True):
            assert (result[name] - alone).abs().max() < (2e-3 if name in ("fp16", "wrapped") else 1e-12), name


def _one_replica() -> list[torch.Tensor]:
    return [
        _trained(kind=HeteroDDPStrategy, **options)[0]
        for options in ({}, {"ddp_comm_hook": over_all}, {"within": "gloo"})
    ]


def test_one_replica_is_all_ranks() -> None:
    for plain, hooked, sockets in run(_one_replica, 2):
        assert (plain - sockets).abs().max() < 1e-12
        assert (hooked - sockets).abs().max() < 1e-12


class Synced(nn.BatchNorm1d):
    """Uses the ranks that PyTorch's SyncBatchNorm uses, on CPUs too, and keeps the mean of their numbers."""

    def __init__(self, features: int) -> None:
        super().__init__(features, affine=False, track_running_stats=False)
        self.process_group: Any = None
        self.mean: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.process_group or dist.group.WORLD
        if self.training and dist.get_world_size(group) > 1:
            total = torch.tensor([float(dist.get_rank()), 1.0])
            dist.all_reduce(total, group=group)
            self.mean = (total[0] / total[1]).item()
        return x


class SyncedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, Synced(16))


def _normalised() -> list[tuple[float | None, Any]]:
    found = []
    kinds = [(NodeAverageStrategy, {}), (HeteroDDPStrategy, {}), (DiLoCoStrategy, {"replica": "rank", "tau": 2})]
    for kind, options in kinds:
        layer = _trained(SyncedNet, kind, **options)[1].net[1]
        found.append((layer.mean, layer.process_group))
    return found


def test_batch_norm_of_the_users_own() -> None:
    nodes, everyone, alone = zip(*run(_normalised, 4, nodes=NODES), strict=True)
    assert nodes == ((0.5, None), (0.5, None), (2.5, None), (2.5, None))
    assert everyone == ((1.5, None),) * 4
    assert alone == ((None, None),) * 4  # a replica of one rank


def optim() -> Any:
    """PyTorch's distributed optimizers, whose import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.optim

        return torch.distributed.optim


class Zero(Net):
    """Spreads the optimizer's state over ranks."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def configure_optimizers(self) -> torch.optim.Optimizer:
        group = self.trainer.strategy.replica_group if self.own else None
        return optim().ZeroRedundancyOptimizer(
            self.parameters(), torch.optim.SGD, process_group=group, lr=self.lr, momentum=0.9
        )


class Inner(Net):
    """Wraps a part of itself."""

    def configure_model(self) -> None:
        if not isinstance(self.net, DistributedDataParallel):
            self.net = DistributedDataParallel(self.net)


def _optimizers() -> tuple[torch.Tensor, torch.Tensor]:
    plain = _trained()[0]
    with pytest.raises(UnsupportedError, match=r"ZeroRedundancyOptimizer goes over ranks \[0, 1, 2, 3\]"):
        _trained(lambda: Zero(False))
    with pytest.raises(UnsupportedError, match=r"DistributedDataParallel \(net\) goes over ranks \[0, 1, 2, 3\]"):
        _trained(Inner)
    return plain, _trained(lambda: Zero(True))[0]


@pytest.mark.long
def test_optimizers_that_go_over_ranks() -> None:
    for plain, spread in run(_optimizers, 4, nodes=NODES):
        assert (plain - spread).abs().max() < 1e-12


class Calling(Net):
    """Calls collectives in its training step."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.sums = own, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        group = self.trainer.strategy.replica_group if self.own else dist.group.WORLD
        loss = super().training_step(batch, batch_idx)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        self.sums.append(total.item())
        return loss + 0 * differentiable_all_reduce(loss, group=group)


class CallingInAHook(Calling):
    """Averages gradients over all ranks by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return Net.training_step(self, batch, batch_idx)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def _called(own: bool, kind: Any = NodeAverageStrategy, make: Any = Calling) -> tuple[list[str], list[float]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = _trained(lambda: make(own), kind)[1]
    return [str(one.message) for one in caught if "over all ranks" in str(one.message)], module.sums


def _calls() -> list[Any]:
    hooks = [_called(False, kind, CallingInAHook) for kind in (NodeAverageStrategy, HeteroDDPStrategy)]
    return [_called(True), _called(False), _called(False, HeteroDDPStrategy), *hooks]


def test_a_collective_over_all_ranks_in_a_training_step_is_told_once() -> None:
    results = run(_calls, 4, nodes=NODES)
    for rank, (own, over, one, hook, one_hook) in enumerate(results):
        assert own[0] == one[0] == one_hook[0] == []
        assert len(over[0]) == len(hook[0]) == (rank == 0)
    assert "a hook of the training step calls torch.distributed.all_reduce" in results[0][3][0][0]
    assert "training_step calls torch.distributed.all_reduce over all ranks" in results[0][1][0][0]
    assert "strategy.replica_group" in results[0][1][0][0]
    assert results[0][0][1] == results[1][0][1] != results[2][0][1] == results[3][0][1]
