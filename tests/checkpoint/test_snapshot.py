"""Copies in memory of the state that is saved at a step."""

from typing import Any

import torch
from torch import Tensor

from lightning_hetero.checkpoint.snapshot import Snapshot


def _state(elements: int = 8) -> Tensor:
    return torch.arange(elements, dtype=torch.float32)


def test_copies_stay_as_they_are() -> None:
    state = {"a": _state(), "b": [_state(3), {"c": torch.randn(3, 2).t(), "d": torch.eye(2).to_sparse()}], "e": "text"}
    found: Any = Snapshot().of(state)
    transposed = state["b"][1]["c"].clone()  # type: ignore[index]
    for tensor in (state["a"], *state["b"][:1], state["b"][1]["c"], state["b"][1]["d"]):  # type: ignore[index]
        tensor.zero_()
    assert torch.equal(found["a"], _state())
    assert torch.equal(found["b"][0], _state(3))
    assert torch.equal(found["b"][1]["c"], transposed)
    assert torch.equal(found["b"][1]["d"].to_dense(), torch.eye(2))
    assert found["e"] == "text"


def test_what_is_one_tensor_stays_one_and_is_copied_once() -> None:
    snapshot, state = Snapshot(), _state()
    (first, same), (second,) = snapshot.of([state, state.view(8)]), snapshot.of([state.detach()])
    assert first is same is second


def test_what_has_changed_meanwhile_is_copied_again() -> None:
    snapshot, state = Snapshot(), _state()
    (before,) = snapshot.of([state])
    state.add_(1)
    (after,) = snapshot.of([state])
    assert torch.equal(before, _state())
    assert torch.equal(after, _state() + 1)


def test_what_nobody_else_writes_to_is_not_copied() -> None:
    snapshot, mine, other = Snapshot(), _state(), _state()
    vector = snapshot.vector([_state(3)])
    found = snapshot.of([mine[2:], other, vector[1:]], owned=[mine])
    assert [one.data_ptr() for one in found] == [mine[2:].data_ptr(), found[1].data_ptr(), vector[1:].data_ptr()]
    assert found[1].data_ptr() != other.data_ptr()


def test_several_tensors_become_one_vector() -> None:
    parts = [torch.randn(3, 4), torch.randn(2, 3).t(), torch.randn(0), torch.randn(1)]
    flat = Snapshot().vector(parts)
    assert torch.equal(flat, torch.cat([part.reshape(-1) for part in parts]))


def test_inference_tensors_can_be_copied() -> None:
    with torch.inference_mode():
        state = _state()
    assert torch.equal(Snapshot().of([state])[0], _state())


def test_memory_is_used_again_where_it_fits() -> None:
    snapshot = Snapshot()
    before = [copy.data_ptr() for copy in snapshot.of([_state(), _state() + 1])]
    snapshot.rewind()
    again = snapshot.of([_state(4), _state() + 2])  # in another order
    assert again[0].data_ptr() not in before
    assert again[1].data_ptr() in before
    assert torch.equal(again[0], _state(4))
    assert torch.equal(again[1], _state() + 2)
    snapshot.rewind()
    assert sum(len(spare) for spare in snapshot._spare.values()) == 2  # what was not needed any more has gone
