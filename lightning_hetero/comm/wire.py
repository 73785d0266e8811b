"""How numbers look on the wire between replicas. Parameters themselves are never rounded; sums are taken in fp32."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.comm.deadline import deadline

Wire = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sum:
    """A sum over a group that is under way.

    In fp32 it is one all-reduce. In 16 bits each member's vector is gathered and summed here, in fp32: a reduction in
    16 bits would round every partial sum.

    Args:
        flats: floating vectors on the CPU; copied.
        group: of the exchange's own: gloo runs the work of a group in order.
        wire: number format on the wire; fp32 leaves float64 as it is.
    """

    def __init__(self, flats: Sequence[Tensor], group: dist.ProcessGroup | None, wire: Wire) -> None:
        self._dtypes = [torch.promote_types(flat.dtype, torch.float32) for flat in flats]
        narrow = DTYPES[wire]
        self._parts: list[list[Tensor]] = []
        self._works = []
        for flat, wide in zip(flats, self._dtypes, strict=True):
            own = flat.to(narrow or wide, copy=True)
            with deadline("send to the other replicas"):
                if narrow is None:
                    self._parts.append([own])
                    self._works.append(dist.all_reduce(own, group=group, async_op=True))
                else:
                    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
                    self._parts.append(parts)
                    self._works.append(dist.all_gather(parts, own, group=group, async_op=True))

    def wait(self) -> list[Tensor]:
        """The sums, in fp32 or wider, on the CPU."""
        with deadline("receive from the other replicas"):
            for work in self._works:
                if work is not None:
                    work.wait()
        self._works = []
        return [
            parts[0] if len(parts) == 1 else torch.stack([part.to(wide) for part in parts]).sum(0)
            for parts, wide in zip(self._parts, self._dtypes, strict=True)
        ]
