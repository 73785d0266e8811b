"""What kinds of devices can and cannot do."""

import torch

#: Kinds of devices that have no float64, all of them (MPS) or some (XPU).
_NARROW = ("mps", "xpu")


def widest(device: torch.device) -> torch.dtype:
    """The dtype in which sums over many values are taken on a device: float64, where the device has it.

    Example::

        >>> import torch
        >>> widest(torch.device("cpu")), widest(torch.device("mps"))
        (torch.float64, torch.float32)
    """
    return torch.float32 if device.type in _NARROW else torch.float64
