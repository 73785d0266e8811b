"""Only CPU tensors and builtins leave a process: messages and files of a rank with a device."""

import io
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fake_device
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import run
from tasks import FAST, Net, dataset
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.checkpoint import random_states
from lightning_hetero.comm.agreement import gather, value_of_rank
from lightning_hetero.comm.object_collectives import pack_value, portable, unpack_value
from lightning_hetero.replicas import optimizer_states
from lightning_hetero.strategies.capacity import Trials
from lightning_hetero.strategies.replica import ReplicaStrategy

CPU = torch.device("cpu")


@pytest.fixture
def mixed(fake: str) -> Callable[..., list[Any]]:
    """Runs a function on two ranks, of which one has the device."""

    def call(function: Callable[..., Any], *args: Any, has_device: int = 0, **options: Any) -> list[Any]:
        env = {"FAKE_LIBRARY": fake}
        return run(_loaded, 2, function, *args, env_of=lambda rank: env if rank == has_device else {}, **options)

    return call


def _loaded(function: Callable[..., Any], *args: Any) -> Any:
    return function(fake_device.load_if_given(), *args)


@pytest.fixture
def alone(fake: str) -> Callable[..., Any]:
    """Runs a function in a process with the device."""
    return lambda function, *args: run(_loaded, 1, function, *args, env={"FAKE_LIBRARY": fake})[0]


# -- between ranks ------------------------------------------------------------------------------------------------


class Custom:
    """An object of a user's class, which is no collection."""

    def __init__(self, device: str) -> None:
        self.tensor, self.device = torch.ones(3, device=device), torch.device(device)


def messages(kind: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = {"tensor": torch.full((2,), float(rank), device=kind), "custom": Custom(kind)}
    for other, value in enumerate(gather(own, "values")):
        assert (value["tensor"].device, value["tensor"].tolist()) == (CPU, [float(other)] * 2)
        assert (value["custom"].tensor.device, value["custom"].device) == (CPU, CPU)
    value = value_of_rank(own, 0)
    assert value is own if rank == 0 else (value["tensor"].device, value["custom"].device) == (CPU, CPU)
    value = value_of_rank(own, 1)
    assert value is own if rank == 1 else value["custom"].tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize("has_device", [0, 1])
def test_values_arrive_on_the_cpu(mixed, has_device):
    mixed(messages, has_device=has_device)


def control(kind: str) -> None:
    dist.init_process_group("gloo")
    dist.all_gather_object([None, None], torch.ones(2, device=kind))


def test_the_control_torchs_own_way_fails(mixed):
    with pytest.raises(AssertionError, match=r"fake|PrivateUse1|privateuse"):
        mixed(control, timeout=60)


class Broadcasting(Net):
    def on_train_start(self) -> None:
        kind, rank = self.device.type, self.trainer.global_rank
        sent = {
            "own": torch.full((2,), float(rank), device=self.device),
            "module": nn.Linear(2, 2).to(self.device),
            "text": f"of rank {rank}",
        }
        for source in (0, 1):
            got = self.trainer.strategy.broadcast(sent, source)
            assert (got["own"].device.type, got["module"].weight.device.type) == (kind, kind)
            assert (got["own"].tolist(), got["text"]) == ([float(source)] * 2, f"of rank {source}")
            assert got["module"](torch.ones(1, 2, device=self.device)).device.type == kind
        self.done = True


def fit(kind: str) -> bool:
    module = Broadcasting()
    options = {**FAST, "accelerator": kind, "devices": 1 if kind == "cpu" else "auto"}
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(), num_nodes=2, max_steps=1, **options)
    trainer.fit(module, DataLoader(dataset(8), batch_size=4))
    return module.done


def test_what_is_broadcast_arrives_where_the_receiver_computes(mixed, fake):
    assert mixed(fit, env={"FAKE_GLOO": "stage"}, nodes=[1, 1]) == [True, True]


def stays_on_cpu(kind: str) -> None:
    """Tensors that a rank with a device keeps on its CPU arrive on the CPU of others, also of those with a device."""
    assert kind == "fake"
    home = torch.device("fake", 0)
    sent = {"there": torch.ones(1, device=home), "here": torch.ones(1), "device": home}
    message = pack_value(sent, home)
    got = unpack_value(message, home)
    assert (got["there"].device, got["here"].device, got["device"]) == (home, CPU, home)
    got = unpack_value(message)
    assert (got["there"].device, got["here"].device, got["device"]) == (CPU, CPU, CPU)
    sparse = unpack_value(pack_value([torch.eye(2).to_sparse(), nn.Parameter(torch.ones(2, device=home))], home), home)
    assert isinstance(sparse[1], nn.Parameter)
    assert sparse[1].is_leaf
    assert sparse[1].device == home


def test_what_a_device_rank_keeps_on_the_cpu_stays_there(alone):
    alone(stays_on_cpu)


# -- files --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


def for_a_file(kind: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(kind)
    module.tied = module[0]
    state = module.state_dict()
    value = {"state": state, "pair": Pair([torch.ones(2, device=kind)], "text"), "cpu": torch.ones(1)}
    saved = portable(value)
    assert type(saved["state"]) is OrderedDict
    assert saved["state"]._metadata == state._metadata  # it has the versions of layers
    assert saved["state"]["0.weight"] is saved["state"]["tied.weight"]  # otherwise files of tied weights would grow
    assert saved["state"]["0.weight"].device == CPU
    assert torch.equal(saved["state"]["0.weight"], state["0.weight"].cpu())
    assert (type(saved["pair"]), saved["pair"].first[0].device, saved["pair"].second) == (Pair, CPU, "text")
    assert saved["cpu"] is value["cpu"]
    assert state["0.weight"].device.type == kind  # saving does not move the tensors
    locations = []
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    torch.load(file, lambda storage, place: locations.append(place) or storage, weights_only=False)
    assert set(locations) == {"cpu"}


def test_a_file_holds_no_device(alone):
    alone(for_a_file)


class Odd(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["all"]["sum"] = self.param_groups[0]["params"][0].detach().sum() + self.state["all"].get("sum", 0)
        return loss


def optimizers(kind: str) -> None:
    def stepped(make: Any, device: str) -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.ones(3, device=device))
        optimizer = make([parameter], lr=0.1)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return optimizer

    for make, momenta in ((torch.optim.AdamW, "exp_avg"), (Odd, None)):
        for there, here in ((kind, "cpu"), ("cpu", kind)):
            saved = portable(stepped(make, there).state_dict())
            optimizer = stepped(make, here)
            optimizer_states.restore(optimizer, saved)
            [parameter] = optimizer.param_groups[0]["params"]
            state = optimizer.state[parameter] if momenta else optimizer.state["all"]
            assert state[momenta or "sum"].device.type == here
            if momenta:
                assert state["step"].device == CPU
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()  # all of it fits together


def test_optimizers_get_their_state_on_their_own_device(alone):
    alone(optimizers)


# -- random numbers -----------------------------------------------------------------------------------------------


def numbers(kind: str) -> None:
    def drawn(device: torch.device) -> list[float]:
        return [*torch.rand(2).tolist(), *nn.functional.dropout(torch.ones(64, device=device), 0.5).tolist()]

    home = torch.device(kind, 0)
    on_device, on_cpu = random_states.current(home), random_states.current(CPU)
    assert (kind in on_device, kind in on_cpu) == (True, False)
    first = drawn(home)
    random_states.restore(on_device, home)
    assert drawn(home) == first
    random_states.restore(on_cpu, home)  # of a rank on its CPU: the device goes on where it is
    assert drawn(home)[:2] == first[:2]
    random_states.restore(on_device, CPU)  # the other way round
    assert drawn(CPU)[:2] == first[:2]


def test_random_states_of_each_kind_of_device(alone):
    alone(numbers)


def touching(kind: str) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"torch.cuda.{name}")

    torch.cuda = Untouchable()
    random_states.restore(random_states.current(CPU), CPU)
    module = nn.Linear(2, 2)
    trials = Trials(module, [torch.optim.SGD(module.parameters(), lr=0.1)], CPU, 10**9)
    with trials.begun():
        assert trials.fits(lambda: module(torch.ones(1, 2)).sum().backward())


def test_a_cpu_rank_does_not_touch_cuda(fake):
    assert run(_loaded, 1, touching) == [None]


# -- memory, loss scales ------------------------------------------------------------------------------------------


def tried(kind: str) -> None:
    module = nn.Linear(100, 100).to(kind)
    optimizer = torch.optim.AdamW(module.parameters())

    def step(samples: int) -> None:
        module(torch.ones(samples, 100, device=kind)).sum().backward()

    torch.fake.limit_memory(torch.fake.memory_allocated() + 10**6)
    trials = Trials(module, [optimizer], torch.device(kind, 0), None)
    before = torch.fake.memory_allocated()
    with trials.begun():
        assert [trials.fits(lambda n=n: step(n)) for n in (1, 100, 10**4, 1)] == [True, True, False, True]
    assert torch.fake.memory_allocated() == before
    limited = Trials(module, [optimizer], torch.device(kind, 0), before + 300_000)
    with limited.begun():
        assert [limited.fits(lambda n=n: step(n)) for n in (1, 400)] == [True, False]


def test_batches_are_tried_in_the_memory_of_any_device(alone):
    alone(tried)


class Plugin:
    """A plugin like Lightning's for 16-mixed on a GPU."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


def test_a_loss_scale_that_was_not_saved_begins_anew() -> None:
    class Strategy:
        precision_plugin = Plugin()

    with pytest.raises(RuntimeError, match="empty"):
        Plugin().load_state_dict({})
    ReplicaStrategy._restore_precision(Strategy(), {})  # type: ignore[arg-type]
    saved = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    ReplicaStrategy._restore_precision(Strategy(), saved)  # type: ignore[arg-type]
    assert Strategy.precision_plugin.scaler.get_scale() == 8.0


def test_the_cpu_rank_has_no_device(mixed, tmp_path: Path) -> None:
    """The control of all tests here: a rank without the device knows nothing of it."""
    assert mixed(_knows) == [True, False]


def _knows(kind: str) -> bool:
    try:
        return torch.ones(1, device="fake").device.type == "fake"
    except RuntimeError:
        assert "FAKE_LIBRARY" not in os.environ
        return False
