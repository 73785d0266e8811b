"""The mean training loss, and the first step at which it was not finite, against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.batching import loss as loss_module
from lightning_hetero.batching.loss import LossTracker

batches = st.lists(
    st.tuples(
        st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([float("nan"), float("inf")])), st.integers(0, 64)
    ),
    max_size=40,
)


@given(batches, st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_sums_are_those_of_all_batches_with_samples(taken: list[tuple[float, int]], stacked: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "_TOGETHER", stacked)
        tracker = LossTracker()
        for step, (value, samples) in enumerate(taken):
            tracker.take(torch.tensor(value), samples, step)
    values, samples = np.array([[v, n] for v, n in taken if n]).reshape(-1, 2).T
    finite = np.isfinite(values)
    assert tracker.state_dict() == pytest.approx([(values * samples)[finite].sum(), samples[finite].sum()], rel=1e-9)
    broken = [step + 1 for step, (value, n) in enumerate(taken) if n and not np.isfinite(value)]
    assert tracker.nonfinite_step == (broken[0] if broken else None)


def test_few_tensors_wait_however_long_nobody_asks() -> None:
    tracker = LossTracker()
    for step in range(1000):
        tracker.take(torch.tensor(0.5), 2, step)
    assert len(tracker._losses) == len(tracker._counts) < 256
    assert tracker._copied is not None
    assert len(tracker._copied[0]) == 256
    other = LossTracker()
    other.load_state_dict(tracker.state_dict())
    assert other.state_dict() == [1000.0, 2000.0]
