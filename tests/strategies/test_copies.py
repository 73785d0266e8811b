"""Copies of a state that may be taken until the moment at which it changes."""

import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.strategies.copies import PIECE, Copies


def _state(elements: int = 3 * PIECE + 5) -> Tensor:
    return torch.arange(elements, dtype=torch.float32)


def _late(copies: Copies, *states: Tensor) -> list[Tensor]:
    return copies.late(list(states), {state.untyped_storage().data_ptr() for state in states})


def _on_thread(copies: Copies) -> threading.Thread:
    thread = threading.Thread(target=copies.work)
    thread.start()
    return thread


def test_what_lasts_is_copied_before_an_exchange() -> None:
    copies, step, exchange = Copies(), _state(), _state()
    copies.lasting = {exchange.untyped_storage().data_ptr()}
    found = _late(copies, step, exchange)
    copies.finish(lasting=False)
    step.zero_()
    assert len(copies._lasting) == 4
    copies.finish()
    exchange.zero_()
    assert all(torch.equal(copy, _state()) for copy in found)
    assert not copies.changed


def test_what_is_left_is_copied_before_it_changes() -> None:
    copies, state = Copies(), _state()
    truth = state.clone()
    (copy,) = _late(copies, state)
    copies.finish()
    state.zero_()
    _on_thread(copies).join()  # which comes late, and has nothing to do
    assert torch.equal(copy, truth)
    assert not copies.changed


def test_a_thread_and_the_training_share_the_work() -> None:
    copies, truths = Copies(), []
    states = [_state() + i for i in range(20)]
    for _ in range(20):
        copies.rewind()
        truths = [state.clone() for state in states]
        found = _late(copies, *states)
        thread = _on_thread(copies)
        copies.finish()
        for state in states:
            state.add_(1)
        thread.join()
        assert not copies.changed
        assert all(torch.equal(copy, truth) for copy, truth in zip(found, truths, strict=True))


def test_what_has_changed_before_it_was_copied_is_noticed() -> None:
    copies, state = Copies(), nn.Parameter(_state())
    _late(copies, state)
    with torch.no_grad():
        state.add_(1)
    copies.finish()
    assert copies.changed
    copies.rewind()
    _late(copies, state)
    copies.finish()
    assert not copies.changed


def test_only_what_lies_in_the_given_memory_is_copied_late() -> None:
    copies, late, now = Copies(), _state(8), _state(8)
    found = copies.late({"late": late, "now": now}, {late.untyped_storage().data_ptr()})
    now.zero_()
    late.fill_(7)
    assert torch.equal(found["now"], _state(8))
    copies.finish()
    assert torch.equal(found["late"], torch.full((8,), 7.0))


def test_what_is_one_tensor_stays_one_and_is_copied_once() -> None:
    copies, state = Copies(), _state(8)
    (first,), (second,) = _late(copies, state), _late(copies, state.detach())
    assert first is second
    assert len(copies._left) == 1


@pytest.mark.parametrize("late", [True, False])
def test_several_tensors_become_one_vector(late: bool) -> None:
    copies, parts = Copies(), [torch.randn(3, 4), torch.randn(2, 3).t(), torch.randn(0), torch.randn(1)]
    truth = torch.cat([part.reshape(-1) for part in parts])
    flat = copies.vector(parts, {part.untyped_storage().data_ptr() for part in parts} if late else ())
    copies.finish()
    assert torch.equal(flat, truth)


def test_memory_is_used_again() -> None:
    copies, state = Copies(), _state()
    before = _late(copies, state)[0].data_ptr()
    copies.rewind()
    assert _late(copies, state)[0].data_ptr() == before
    copies.rewind()
    assert copies.of([_state(4)])[0].shape == (4,)
