"""The fake accelerator itself: its errors and its simulated time. Each test runs in a process of its own."""

from collections.abc import Callable
from typing import Any

import fake_device
import pytest
import torch
from ranks import run
from torch import nn

MS = 1e-3


@pytest.fixture
def on_device(fake: str) -> Callable[..., Any]:
    """Runs a function in a process that has the device."""

    def call(function: Callable[..., Any], **env: str) -> Any:
        return run(_loaded, 1, function, env={"FAKE_LIBRARY": fake, **env})[0]

    return call


def _loaded(function: Callable[..., Any]) -> Any:
    assert fake_device.load_if_given() == "fake"
    return function()


# -- tensors --------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    a, b = torch.ones(3, device="fake"), torch.ones(3)
    messages = []
    for action in (lambda: a + b, lambda: b + a, lambda: torch.cat([a, b]), lambda: b.add_(a), lambda: a.numpy()):
        with pytest.raises((RuntimeError, TypeError)) as error:
            action()
        messages.append(str(error.value))
    assert torch.equal((a + torch.tensor(2.0)).cpu(), b + 2)  # a number may lie on the CPU
    assert torch.equal(a[torch.tensor([0, 2])].cpu(), b[:2])  # and so may indices
    return messages


def test_tensors_of_two_devices_do_not_meet(on_device):
    messages = on_device(refusals)
    assert ["found at least two devices" in text for text in messages] == [True, True, True, True, False], messages
    assert "convert fake" in messages[-1]


def two_devices() -> None:
    a, b = torch.ones(3, device="fake:0"), torch.ones(3, device="fake:1")
    assert (a.device.index, b.device.index, (b + b).device.index) == (0, 1, 1)
    with pytest.raises(RuntimeError, match="fake:0 and fake:1"):
        a + b
    assert torch.equal((a + b.to("fake:0")).cpu(), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="fake:2 does not exist"):
        torch.ones(3, device="fake:2")


def test_a_host_can_have_several(on_device):
    on_device(two_devices, FAKE_DEVICES="2")


def same_as_cpu() -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1)).double()
        x = torch.randn(16, 4, dtype=torch.float64)
        net, x = net.to(device), x.to(device)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert {t.device.type for t in (*net.state_dict().values(), *moments)} == {device}
        return [t.cpu() for t in (*net.state_dict().values(), *moments)]

    for here, there in zip(trained("fake"), trained("cpu"), strict=True):
        torch.testing.assert_close(here, there)


def test_training_there_is_training_on_the_cpu(on_device):
    on_device(same_as_cpu)


def random_numbers() -> None:
    torch.manual_seed(3)
    cpu, device = torch.get_rng_state(), torch.fake.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64, device="fake"), 0.5)
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(torch.fake.get_rng_state(), device)
    torch.rand(5)
    torch.fake.set_rng_state(device)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="fake"), 0.5), first)


def test_it_draws_random_numbers_of_its_own(on_device):
    on_device(random_numbers)


def memory() -> None:
    before = torch.fake.memory_allocated()
    kept = torch.zeros(1000, device="fake")
    assert torch.fake.memory_allocated() - before == 4000
    torch.fake.reset_peak_memory_stats()
    (kept + 1).sum()
    assert torch.fake.max_memory_allocated() - before >= 8000
    torch.fake.limit_memory(torch.fake.memory_allocated() + 3999)
    with pytest.raises(torch.OutOfMemoryError):
        kept.clone()
    torch.fake.limit_memory(-1)
    del kept
    assert torch.fake.memory_allocated() == before


def test_its_memory_is_counted_and_can_be_limited(on_device):
    on_device(memory)


# -- simulated time -------------------------------------------------------------------------------------------


def events() -> None:
    torch.fake.cost("", 2 * MS)
    torch.fake.cost("aten::mm", 10 * MS)
    torch.fake.cost("launch", 0.1 * MS)
    x = torch.empty(4, 4, device="fake")
    start, end = (torch.fake.Event(enable_timing=True) for _ in range(2))
    start.record()
    before = torch.fake.now()
    torch.mm(x, x)
    x.add_(1)
    end.record()
    assert torch.fake.now() - before == pytest.approx(0.2 * MS)  # the host runs ahead
    assert not end.query()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert torch.fake.now() - before == pytest.approx(12.1 * MS)  # from the launch of the first kernel on
    assert start.elapsed_time(end) == pytest.approx(12.1)


def test_events_tell_what_kernels_take(on_device):
    on_device(events)


def waits() -> dict[str, float]:
    torch.fake.cost("aten::add", 5 * MS)
    x, found = torch.ones(1, device="fake"), {}
    actions = {"item": lambda y: y.item(), "copy": lambda y: y.cpu(), "all": lambda y: torch.fake.synchronize()}
    for name, action in actions.items():
        before = torch.fake.now()
        y = x + 1
        assert torch.fake.now() == before
        action(y)
        found[name] = torch.fake.now() - before
    return found


def test_the_host_waits_where_it_reads(on_device):
    assert on_device(waits) == pytest.approx({"item": 5 * MS, "copy": 5 * MS, "all": 5 * MS})


def streams() -> None:
    side, main = torch.fake.Stream(), torch.fake.current_stream()
    torch.fake.sleep(10 * MS)
    with torch.fake.stream(side):
        assert torch.fake.current_stream() == side
        torch.fake.sleep(7 * MS)
    assert torch.fake.current_stream() == main
    side.synchronize()
    assert torch.fake.now() == pytest.approx(7 * MS)  # both at once
    side.wait_stream(main)
    with torch.fake.stream(side):
        torch.fake.sleep(1 * MS)
    torch.fake.work(100 * MS)  # the host has something else to do
    side.synchronize()
    assert torch.fake.now() == pytest.approx(107 * MS)
    assert main.query()
    assert side.query()


def test_streams_overlap_unless_one_waits_for_the_other(on_device):
    on_device(streams)


def staging() -> None:
    """A copy to pinned memory passes beside a kernel, and has not arrived before its time."""
    torch.fake.cost("copy", 1 * MS / 4096)
    x = torch.ones(4096, device="fake")
    torch.fake.synchronize()
    pinned, pageable = torch.zeros(4096).pin_memory(), torch.zeros(4096)
    assert (pinned.is_pinned(), pinned[7:].is_pinned(), pageable.is_pinned()) == (True, True, False)
    before, copies = torch.fake.now(), torch.fake.Stream()
    with torch.fake.stream(copies):
        pinned.copy_(x, non_blocking=True)
        arrived = torch.fake.Event()
        arrived.record()
    torch.fake.sleep(6 * MS)
    assert torch.fake.now() == before
    x.zero_()  # the copy has the values from the moment at which it began
    assert pinned.sum() == 0  # without waiting one reads the old values
    arrived.synchronize()
    assert pinned.sum() == 4096
    assert torch.fake.now() - before == pytest.approx(4 * MS)
    torch.fake.synchronize()
    assert torch.fake.now() - before == pytest.approx(6 * MS)  # not 10
    pageable.copy_(x, non_blocking=True)
    assert torch.fake.now() - before == pytest.approx(10 * MS)  # the host waits for a copy to pageable memory


def test_pinned_memory_is_copied_beside_kernels(on_device):
    on_device(staging)


# -- gloo -----------------------------------------------------------------------------------------------------


def summed(shape: int) -> list[float]:
    device = fake_device.load_if_given()
    torch.distributed.init_process_group("gloo")
    tensor = torch.full((shape,), float(torch.distributed.get_rank() + 1), device=device)
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


def on_rank_zero(fake: str, **env: str) -> Callable[[int], dict[str, str]]:
    return lambda rank: {"FAKE_LIBRARY": fake, **env} if rank == 0 else {}


def test_gloo_refuses_its_tensors(fake):
    with pytest.raises(AssertionError, match="No backend type associated with device type fake"):
        run(summed, 2, 3, env_of=on_rank_zero(fake), timeout=60)


def test_gloo_stages_its_tensors_if_asked(fake):
    assert run(summed, 2, 3, env_of=on_rank_zero(fake, FAKE_GLOO="stage")) == [[3.0] * 3] * 2
