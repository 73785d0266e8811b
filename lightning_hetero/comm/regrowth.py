"""From the layout of a replica to its layout after parameters have become trainable, or frozen."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hetero.comm.replica import Replica, wide


class Regrowth:
    """Brings vectors from one layout into another: values keep what they had, by their names.

    Args:
        old: the layout until now.
        new: the layout from now on, of the same model.

    Attributes:
        new: the layout from now on.
        left: names of the values that only the old layout has.
    """

    def __init__(self, old: Replica, new: Replica) -> None:
        self._old, self.new = old, new
        after = set(new.names)
        self.left = [name for name in old.names if name not in after]

    @torch.no_grad()
    def settle(self, flats: Sequence[Tensor]) -> None:
        """Let the model take over what the new layout no longer has.

        Args:
            flats: vectors in the old layout.
        """
        parts = self._old.by_name(flats)
        for group in self._old.layout:
            for name, value in group.items():
                if name in self.left:
                    value.copy_(parts[name].view_as(value))

    def carry(self, flats: Sequence[Tensor], fresh: float = 1.0) -> list[Tensor]:
        """Vectors in the new layout, on the CPU, in fp32 or wider.

        Args:
            flats: vectors in the old layout, or those of them that come before excluded values.
            fresh: times the model's value, that is what added values get. 0 suits differences and momenta.
        """
        known = self._old.by_name(flats)
        whole = len(flats) > self._old.included or len(self._old.layout) == self._old.included
        groups = self.new.layout if whole else self.new.layout[: self.new.included]
        carried = []
        for group in groups:
            parts = []
            for name, value in group.items():
                part = known[name] if name in known else value.detach() * fresh
                parts.append(part.reshape(-1).to("cpu", wide(value)))
            carried.append(torch.cat(parts))
        return carried
