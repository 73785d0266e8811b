"""What a replica's flat vectors are asked about."""

import pytest
import torch

from lightning_hetero.comm.replica import finite

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
