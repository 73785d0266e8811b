"""The stopwatch against a clock that stands still unless the test moves it."""

import time

import pytest
import torch

from lightning_hetero.batching.timer import StepTimer

CPU = torch.device("cpu")


def lap(timer, samples):
    """The laps known by now: samples, work, wait."""
    return [known[:3] for known in timer.end_step(samples)]


class Slow(torch.autograd.Function):
    """Identity, of which the backward pass takes some time of this rank's own."""

    @staticmethod
    def forward(ctx, x, spend):
        ctx.spend = spend
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.spend()
        return grad, None


def backward(timer, own, waiting, layers=1, fail=False):
    """A backward pass like DDP's: once the last gradient is there, a callback waits for the other ranks."""
    weight = torch.ones(1, requires_grad=True)
    queued = []

    def others():
        if fail:
            raise RuntimeError("another rank has gone")
        waiting()

    def gradient_ready(grad):
        queued.append(True)
        torch.autograd.Variable._execution_engine.queue_callback(others)

    weight.register_hook(gradient_ready)
    loss = weight
    for _ in range(layers):
        loss = Slow.apply(loss, own)
    loss = loss.sum()
    timer.watch(loss)
    loss.backward()
    timer.backward_done()
    assert queued
    assert weight.grad.item() == 1


# -- blocks ------------------------------------------------------------------------------------------


def test_a_step_without_waiting_is_all_work(timer, clock):
    clock.spend(3)
    assert lap(timer, 8) == [(8, 3, 0)]


def test_waiting_is_not_work(timer, clock):
    clock.spend(1)
    with timer.waiting():
        clock.spend(10)
    clock.spend(2)
    with timer.waiting():
        clock.spend(20)
    clock.spend(4)
    assert lap(timer, 8) == [(8, 7, 30)]


def test_nested_waiting_counts_once(timer, clock):
    clock.spend(1)
    with timer.waiting():
        clock.spend(10)
        with timer.waiting():
            clock.spend(20)
            with timer.waiting():
                clock.spend(40)
        clock.spend(80)
    clock.spend(2)
    assert lap(timer, 8) == [(8, 3, 150)]


def test_after_an_error_while_waiting_work_goes_on(timer, clock):
    def fail():
        clock.spend(10)
        raise KeyError

    with pytest.raises(KeyError), timer.waiting():
        fail()
    clock.spend(2)
    assert lap(timer, 8) == [(8, 2, 10)]


def test_laps_follow_each_other(timer, clock):
    laps = []
    for n, (work, wait) in enumerate([(1, 10), (2, 20), (4, 0)]):
        clock.spend(work)
        with timer.waiting():
            clock.spend(wait)
        laps += timer.end_step(n)
    assert [lap[:3] for lap in laps] == [(0, 1, 10), (1, 2, 20), (2, 4, 0)]
    assert [lap.began for lap in laps] == [100, 111, 133]
    assert clock.now == 100 + sum(lap.work + lap.wait for lap in laps)  # no time is lost, none counted twice


def test_restarting_forgets_the_running_step(timer, clock):
    clock.spend(50)
    with timer.waiting():
        clock.spend(60)
    timer.restart()
    clock.spend(1)
    assert lap(timer, 8) == [(8, 1, 0)]


# -- the backward pass -----------------------------------------------------------------------------------


def test_the_backward_pass_is_work_and_what_comes_after_it_is_waiting(timer, clock):
    clock.spend(1)  # forward
    backward(timer, own=lambda: clock.spend(2), waiting=lambda: clock.spend(500))
    clock.spend(4)  # optimizer
    assert lap(timer, 8) == [(8, 7, 500)]


def test_the_slowest_rank_does_not_wait(timer, clock):
    backward(timer, own=lambda: clock.spend(500), waiting=lambda: None, layers=3)
    assert lap(timer, 8) == [(8, 1500, 0)]


def test_ranks_that_all_read_the_same_time_are_told_apart(clock):
    # As in a job: whoever is fast waits for the slow one, so that both have spent 25 at the end of backward.
    laps = []
    for own in (5, 25):
        clock.now = 100.0
        timer = StepTimer(CPU, clock)
        backward(timer, own=lambda own=own, clock=clock: clock.spend(own), waiting=lambda c=clock: c.spend(125 - c.now))
        assert clock.now == 125
        laps += lap(timer, 8)
    assert laps == [(8, 5, 20), (8, 25, 0)]


def test_several_backward_passes_in_a_step_add_up(timer, clock):
    for _ in range(3):  # accumulation, or several losses
        clock.spend(1)
        backward(timer, own=lambda: clock.spend(2), waiting=lambda: clock.spend(500))
    assert lap(timer, 8) == [(8, 9, 1500)]


def test_a_loss_that_is_watched_twice_counts_once(timer, clock):
    weight = torch.ones(1, requires_grad=True)
    loss = Slow.apply(weight, lambda: clock.spend(2)).sum()
    for _ in range(2):  # `retain_graph=True`, and again
        timer.watch(loss)
        loss.backward(retain_graph=True)
        clock.spend(30)  # not known to be waiting until it has returned
        timer.backward_done()
    assert lap(timer, 8) == [(8, 4, 60)]


def test_waiting_blocks_around_a_backward_pass_add_up(timer, clock):
    with timer.waiting():
        clock.spend(10)
    backward(timer, own=lambda: clock.spend(2), waiting=lambda: clock.spend(500))
    with timer.waiting():
        clock.spend(20)
    assert lap(timer, 8) == [(8, 2, 530)]


def test_a_loss_without_gradients_and_a_pass_that_was_not_watched_are_work(timer, clock):
    timer.watch(torch.ones(1))
    clock.spend(3)
    timer.backward_done()
    assert lap(timer, 8) == [(8, 3, 0)]


def test_restarting_forgets_a_backward_pass_that_never_returned(timer, clock):
    with pytest.raises(RuntimeError, match="has gone"):
        backward(timer, own=lambda: clock.spend(2), waiting=None, fail=True)
    clock.spend(1000)
    timer.restart()
    backward(timer, own=lambda: clock.spend(3), waiting=lambda: clock.spend(5))
    assert lap(timer, 8) == [(8, 3, 5)]


def test_with_a_real_clock():
    timer = StepTimer(CPU)
    backward(timer, own=lambda: time.sleep(0.01), waiting=lambda: time.sleep(1.0))
    ((samples, work, wait),) = lap(timer, 8)
    assert samples == 8
    assert 0.01 <= work < 1.0  # or it would hold the waiting
    assert wait >= 1.0
