"""Fingerprints that tell apart the batches of several ranks, whatever they hold."""

import pytest
import torch

from lightning_hetero.batching.stream_peers import _fingerprint

KINDS = {
    "floats": torch.arange(6.0).reshape(2, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "bf16": torch.arange(6.0).to(torch.bfloat16),
    "bools": torch.tensor([True, False]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "learned": torch.arange(3.0, requires_grad=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_batches_are_known_and_others_differ(kind: str) -> None:
    own = _fingerprint({"x": KINDS[kind], "text": "a"})
    assert own is not None
    assert own == _fingerprint({"x": KINDS[kind].clone(), "text": "b"})
    assert own != _fingerprint({"x": KINDS[kind].flip(0), "text": "a"})


@pytest.mark.parametrize("batch", [None, [], ["text"], torch.zeros(4), torch.tensor(3), torch.eye(3).to_sparse()])
def test_a_batch_without_anything_to_tell_it_by(batch: object) -> None:
    assert _fingerprint(batch) is None
