"""Lets code that would communicate run on one rank alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def alone() -> Iterator[None]:
    """In this block, on this thread, PyTorch says that there is no process group.

    SyncBatchNorm, metrics, and whoever else asks, then go by this rank's own samples. What does not ask gets PyTorch's
    error that there is no group, instead of a wait for ranks that do something else. Other threads see no difference.
    """
    thread, initialized = threading.get_ident(), dist.is_initialized

    def is_initialized() -> bool:
        return threading.get_ident() != thread and initialized()

    modules = (vars(dist), vars(distributed_c10d))
    for module in modules:
        module["is_initialized"] = is_initialized
    try:
        yield
    finally:
        for module in modules:
            module["is_initialized"] = initialized
