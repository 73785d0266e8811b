"""Vectors of a replica: a check that all values are finite, and a broadcast."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run

from lightning_hetero.comm.object_collectives import finite
from lightning_hetero.replicas.vectors import broadcast_tensors

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_is_what_a_look_at_each_element_says(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for values in ([], [0.0], [1.0, -2.0], [most, most], [most, most, -most], [-most] * 1000):
        assert finite([torch.tensor(values, dtype=dtype)])  # also where their sum is not
    for values in ([INF], [NAN], [-INF, 1.0], [INF, -INF], [NAN, INF], [most, most, NAN, -most]):
        assert not finite([torch.ones(5, dtype=dtype), torch.tensor(values, dtype=dtype)])
    long = torch.ones(100_003, dtype=dtype)
    for place in (0, 65_536, 100_002):
        for value in (INF, -INF, NAN):
            broken = long.clone()
            broken[place] = value
            assert not finite([broken])


def _shared(dtypes: list[torch.dtype]) -> list[list[float]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    own = [torch.tensor([dist.get_rank(), 1], dtype=dtype) for dtype in dtypes]
    broadcast_tensors([*own, torch.tensor(dist.get_rank()), torch.zeros(0)])
    return [tensor.abs().tolist() if tensor.is_complex() else tensor.tolist() for tensor in own]


def test_values_of_any_dtype_are_shared() -> None:
    dtypes = [torch.int16, torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
    assert run(_shared, 2, dtypes) == [[[0, 1]] * len(dtypes)] * 2
