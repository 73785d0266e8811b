"""Work behind the host, in simulated time: the stopwatch, and copies between device and host that overlap."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoAsyncStrategy
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.comm import staging
from lightning_hetero.comm.gradients import GradientWire
from lightning_hetero.comm.staging import HostStage
from lightning_hetero.replicas import vectors
from lightning_hetero.replicas.vectors import Replica

MS = 1e-3


@pytest.fixture
def on_device(fake: str) -> Callable[..., Any]:
    """Runs a function in a process that has the device."""
    return lambda function, *args: run(_loaded, 1, function, *args, env={"FAKE_LIBRARY": fake}, timeout=120)[0]


def _loaded(function: Callable[..., Any], *args: Any) -> Any:
    fake_device.load_if_given()
    return function(*args)


# -- the stopwatch -------------------------------------------------------------------------------------------


def timed(kind: str, reads: bool) -> list[tuple[float, float]]:
    """Work and waiting of steps of 3 ms forward and 7 ms backward, after which the stream waits for another rank."""
    torch.fake.cost("aten::mul", 3 * MS)
    torch.fake.cost("aten::sum", 0.0)
    timer = StepTimer(torch.device(kind), torch.fake.now)
    weight, x = torch.ones(4, device="fake", requires_grad=True), torch.ones(4, device="fake")
    laps = []
    for _ in range(8):
        loss = (weight * x).sum()
        timer.watch(loss)
        torch.fake.cost("aten::mul", 7 * MS)
        loss.backward()
        torch.fake.cost("aten::mul", 3 * MS)
        torch.fake.sleep(30 * MS)  # an all-reduce that waits for a rank that takes 40
        timer.backward_done()
        if reads:
            loss.item()  # as a progress bar does: the host waits, for the other rank too
        laps += timer.end_step(4)
    torch.fake.synchronize()
    laps += timer.end_step(4)
    return [(lap.work, lap.wait) for lap in laps[1:8]]


@pytest.mark.parametrize("reads", [True, False])
def test_a_ranks_work_is_its_own_also_where_the_host_reads_numbers(on_device, reads):
    laps = on_device(timed, "fake", reads)
    assert len(laps) == 7
    for work, wait in laps:
        assert work == pytest.approx(10 * MS)
        assert wait == pytest.approx(30 * MS)


def test_the_control_the_hosts_clock_takes_waiting_for_work(on_device):
    """With ``.item()`` the whole step seems to be work; without it, none of it."""
    assert [work for work, _ in on_device(timed, "cpu", True)] == pytest.approx([40 * MS] * 7)
    assert [work for work, _ in on_device(timed, "cpu", False)] == pytest.approx([0.0] * 7)


# -- staging -------------------------------------------------------------------------------------------------

ELEMENTS, PIECES = 1024, 4


def staged(mutant: str) -> dict[str, float]:
    """A tensor goes through the host in pieces: each is copied in 1 ms, and travels for 3."""
    staging.PIECE = 4 * ELEMENTS
    tensor = torch.arange(float(PIECES * ELEMENTS), device="fake")
    torch.fake.cost("copy", 1 * MS / (4 * ELEMENTS))
    torch.fake.synchronize()
    stage, before, wrong = HostStage(torch.device("fake", 0)), torch.fake.now(), 0
    if mutant == "no events":
        stage.ready = lambda: None
    if mutant == "pageable":
        staging.pinned = lambda length, dtype: torch.empty(length, dtype=dtype)
    stage._buffer(tensor).zero_()
    expected = iter(torch.arange(float(PIECES * ELEMENTS)).split(ELEMENTS))

    def travel(piece: torch.Tensor) -> None:
        nonlocal wrong
        wrong += int((piece != next(expected)).sum())
        torch.fake.work(3 * MS)
        piece.mul_(2)

    stage.through(tensor, travel)
    host = torch.fake.now() - before
    torch.fake.synchronize()
    device = torch.fake.now() - before
    result = int((tensor.cpu() != 2 * torch.arange(float(PIECES * ELEMENTS))).sum())
    return {"host": host, "device": device, "wrong": wrong, "result": result}


def test_pieces_are_copied_while_others_travel(on_device):
    found = on_device(staged, "")
    assert (found["wrong"], found["result"]) == (0, 0)
    # The first piece is copied, then all travel one after the other, then the last one is copied back.
    assert found["host"] == pytest.approx((1 + PIECES * 3) * MS)
    assert found["device"] == pytest.approx((1 + PIECES * 3 + 1) * MS)


def test_the_control_without_waiting_for_copies_wrong_numbers_travel(on_device):
    assert on_device(staged, "no events")["wrong"] > 0


def test_the_control_copies_to_memory_that_is_not_pinned_hold_the_host_up(on_device):
    found = on_device(staged, "pageable")
    assert (found["wrong"], found["result"]) == (0, 0)
    assert found["host"] == pytest.approx((PIECES + PIECES * 3 + PIECES) * MS)


def refused() -> tuple[list[str], bool, float]:
    """Warnings, whether memory is pinned, and the mean that is exchanged, where the system pins no memory."""
    allocate = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("fake error: no more locked memory\nCompile with ...")
        return allocate(*args, **kwargs)

    torch.empty = empty
    replica = Replica(torch.nn.BatchNorm1d(ELEMENTS).to("fake"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memory = replica.pack()
        vectors, copied = replica.snapshot(memory)
        copied()
        staging.memory_like(memory[0])
        stage_of = HostStage(torch.device("fake", 0))
        stage_of.through(torch.ones(ELEMENTS, device="fake"), lambda piece: None)
    torch.empty = allocate
    messages = [str(one.message) for one in caught]
    return messages, memory[0].is_pinned(), sum(float(vector.sum()) for vector in vectors) / ELEMENTS


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(on_device):
    messages, pinned, ones = on_device(refused)
    assert len(messages) == 1
    assert "0 MiB of memory could not be pinned (fake error: no more locked memory)" in messages[0]
    assert "several times slower" in messages[0]
    assert (pinned, ones) == (False, 2)  # weights and variances


def copied_beside(mutant: str) -> dict[str, Any]:
    """Values are copied in 4 ms beside a forward pass of 3 ms; then an optimizer changes them, in 1 ms."""
    model = torch.nn.BatchNorm1d(4 * ELEMENTS).to("fake")
    replica = Replica(model)
    memory, _ = replica.snapshot()
    replica.before_overwrite(after_backward=True)  # it has learned that nothing changes meanwhile
    for vector in memory:
        vector.zero_()
    size = 4 * sum(len(vector) for vector in memory)
    torch.fake.cost("copy", 4 * MS / size)
    torch.fake.cost("aten::mul", 3 * MS)
    torch.fake.cost("aten::neg", 1 * MS)
    torch.fake.synchronize()
    if mutant == "no event":
        Replica.before_overwrite = lambda self, after_backward=False: None
    if mutant == "pack":
        Replica.snapshot = lambda self, out: (self.pack(out), lambda: None)
    began = torch.fake.now()
    vectors, copied = replica.snapshot(memory)
    host, early = torch.fake.now() - began, [vector.clone() for vector in vectors]
    model.weight.detach().mul(1.0)
    replica.before_overwrite()
    model.weight.data = model.weight.detach().neg()
    copied()
    there = torch.fake.now() - began
    torch.fake.synchronize()
    values = torch.cat([vector.float() for vector in vectors])
    return {
        "host": host,
        "there": there,
        "device": torch.fake.now() - began,
        "ones": float(values.sum()) / (4 * ELEMENTS),
        "early": float(sum(vector.sum() for vector in early)) / (4 * ELEMENTS),
    }


def test_a_snapshot_is_copied_beside_a_forward_pass(on_device):
    found = on_device(copied_beside, "")
    assert found["host"] == 0
    # Buffers (half of the values: means of 0 and variances of 1) are copied first, on the stream that computes.
    assert found["there"] == pytest.approx(4 * MS)
    assert found["device"] == pytest.approx((2 + 3 + 1) * MS)
    assert found["ones"] == 2  # weights and variances, as they were
    assert found["early"] == 0  # the host must not read them before they are there


def test_the_control_without_the_event_the_optimizer_is_too_early(on_device):
    """It would change values that are still being copied."""
    slow = on_device(copied_late, "")
    assert slow == pytest.approx((4 + 1) * MS)
    assert on_device(copied_late, "no event") == pytest.approx(4 * MS)


def test_the_control_a_copy_that_is_awaited_holds_host_and_device_up(on_device):
    found = on_device(copied_beside, "pack")
    assert found["host"] == pytest.approx(4 * MS)
    assert found["device"] == pytest.approx((4 + 3 + 1) * MS)


def written_back(dtype: torch.dtype, is_pinned: bool) -> tuple[float, float, int, int]:
    """Seconds of the host and the device for 16 pieces of 1 ms, pinned vectors that were made, and wrong values."""
    vectors.SMALLEST, usual, made = 4, staging.pinned, list[int]()
    staging.pinned = lambda length, dtype: made.append(length) or usual(length, dtype)
    replica = Replica(model := torch.nn.Linear(16 * ELEMENTS, 1, bias=False).to("fake"))
    wrong = 0
    for number in range(3):
        flat = torch.arange(16.0 * ELEMENTS, dtype=dtype) + number
        flat = flat.pin_memory() if is_pinned else flat
        torch.fake.synchronize()
        torch.fake.cost("copy", 1 * MS / (4 * ELEMENTS))
        began = torch.fake.now()
        replica.unpack([flat])
        host = torch.fake.now() - began
        torch.fake.synchronize()
        device = torch.fake.now() - began
        wrong += int((model.weight.detach().cpu().view(-1) != flat).sum())
    return host, device, len(made), wrong


@pytest.mark.parametrize(("dtype", "is_pinned"), [(torch.float32, False), (torch.float64, True)])
def test_what_is_pageable_or_of_another_dtype_goes_back_through_pinned_memory(on_device, dtype, is_pinned):
    """The host fills a piece of pinned memory while the device reads the other one, and makes both once."""
    host, device, made, wrong = on_device(written_back, dtype, is_pinned)
    assert (made, wrong) == (2, 0)
    assert host == pytest.approx(14 * MS)
    assert device == pytest.approx(16 * MS)


def test_what_is_pinned_goes_back_while_the_host_goes_on(on_device):
    assert on_device(written_back, torch.float32, True) == (0, pytest.approx(16 * MS), 0, 0)


def copied_late(mutant: str) -> float:
    """Time at which the device is done, if the forward pass is shorter than the copy: 1 ms."""
    replica = Replica(model := torch.nn.Linear(ELEMENTS, 1, bias=False).to("fake"))
    memory, _ = replica.snapshot()
    replica.before_overwrite(after_backward=True)
    torch.fake.cost("copy", 4 * MS / (4 * ELEMENTS))
    torch.fake.cost("aten::mul", 1 * MS)
    torch.fake.cost("aten::neg", 1 * MS)
    if mutant == "no event":
        Replica.before_overwrite = lambda self, after_backward=False: None
    torch.fake.synchronize()
    began = torch.fake.now()
    replica.snapshot(memory)
    model.weight.detach().mul(1.0)
    replica.before_overwrite()
    model.weight.detach().neg()
    torch.fake.synchronize()
    return torch.fake.now() - began


def awaited(changes: str) -> list[float]:
    """Waits of the host for each of four snapshots of 4 ms, with a forward pass after each."""
    warnings.simplefilter("ignore")
    replica = Replica(model := torch.nn.Linear(ELEMENTS, 1, bias=False).to("fake"))
    memory, waits = replica.pack(), []
    torch.fake.cost("copy", 4 * MS / (4 * ELEMENTS))
    for number in range(4):
        torch.fake.synchronize()
        began = torch.fake.now()
        replica.snapshot(memory)
        waits.append(torch.fake.now() - began)
        if changes == "always" or (changes == "later" and number == 2):
            model.weight.detach().mul_(1.0)  # as Embedding(max_norm=...) does in a forward pass
        if changes == "evaluation":
            replica.before_overwrite()
            model.weight.detach().mul_(1.0)
        replica.before_overwrite(after_backward=True)
        model.weight.detach().neg_()
    return waits


@pytest.mark.parametrize(
    ("changes", "waits"),
    [("never", [4, 0, 0, 0]), ("always", [4, 4, 4, 4]), ("later", [4, 0, 0, 4]), ("evaluation", [4, 4, 4, 4])],
)
def test_snapshots_are_awaited_where_parameters_change_in_place(on_device, changes, waits):
    """Otherwise a message would mix old and new values, and each rank of a replica would send other ones."""
    assert on_device(awaited, changes) == pytest.approx([wait * MS for wait in waits])


# -- gradients on a wire -------------------------------------------------------------------------------------


def on_a_wire() -> dict[str, float]:
    """A bucket travels: 4 ms to the host, and 4 ms back; the backward pass goes on for 6 ms."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.BatchNorm1d(ELEMENTS).to("fake")
    buffer, parameters = torch.ones(2 * ELEMENTS, device="fake"), list(model.parameters())
    wire = GradientWire("powersgd:1", model, dist.group.WORLD)
    values = {"buffer": buffer, "parameters": parameters, "gradients": list(buffer.split(ELEMENTS)), "index": 0}
    bucket = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
    torch.fake.cost("copy", 4 * MS / (8 * ELEMENTS))
    torch.fake.cost("aten::mul", 6 * MS)
    torch.fake.synchronize()
    began = torch.fake.now()
    future = wire.hook(None, bucket)
    model.weight.detach().mul(1.0)
    host = torch.fake.now() - began
    future.wait()
    torch.fake.synchronize()
    device = torch.fake.now() - began
    dist.destroy_process_group()
    return {"host": host, "device": device, "ones": float(buffer.cpu().mean())}


def test_gradients_travel_beside_the_backward_pass(on_device):
    found = on_device(on_a_wire)
    assert found["host"] == 0
    assert found["device"] == pytest.approx((4 + 4) * MS)
    assert found["ones"] == 1


# -- choices by speed ----------------------------------------------------------------------------------------


class Slow(Net):
    """A step takes the device of rank 0 10 ms, and that of rank 1 40 ms. Their hosts are equally fast."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.fake.sleep((10 + 30 * self.global_rank) * MS)
        self.local_steps = self.trainer.strategy.averager.local_steps
        return self.loss(batch)


def paced() -> int:
    warnings.filterwarnings("ignore", "Ranks .* share ")
    settings = {**FAST, "accelerator": fake_device.load_if_given(), "devices": 1, "num_nodes": 2, "max_steps": 60}
    trainer = pl.Trainer(strategy=DiLoCoAsyncStrategy(tau=8, balance="off", timeout=60), **settings)
    trainer.fit(module := Slow(), DataLoader(dataset(2 * 60 * 4), batch_size=4))
    return module.local_steps


def test_local_steps_follow_the_devices_speeds_and_not_the_hosts(fake: str) -> None:
    assert run(paced, 2, nodes=[1, 1], env={"FAKE_LIBRARY": fake}) == [8, 2]
