"""Notices collectives of ``torch.distributed`` that other code calls, such as a user's module, or SyncBatchNorm."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.leaving import THREADS

#: Given the name of a collective and its group, ``None`` for all ranks, returns a block in which it is called.
Notice = Callable[[str, dist.ProcessGroup | None], AbstractContextManager[Any]]

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
)

_noticing: list[tuple[int, Notice]] = []  # the blocks that are open, each with its thread


@contextmanager
def noticing(notice: Notice) -> Iterator[None]:
    """Notice the collectives that are called in this block, by its thread or by a backward pass.

    Seen are those that are called as ``torch.distributed.all_reduce(...)``, as SyncBatchNorm, torchmetrics and
    ``torch.distributed.nn`` do; not those of a name imported before, nor in compiled code.

    Args:
        notice: is asked for each. Of nested blocks, the innermost one's is.
    """
    _noticing.append((threading.get_ident(), notice))
    names, former = vars(dist), {}
    if len(_noticing) == 1:
        former = {name: names[name] for name in _PLACES}
        names.update({name: _noticed(name, function) for name, function in former.items()})
    try:
        yield
    finally:
        _noticing.pop()
        for name, function in former.items():
            if names[name] is _noticed(name, function):  # nobody has put another one there meanwhile
                names[name] = function


def is_world(group: dist.ProcessGroup | None) -> bool:
    """Whether a group is that of all ranks, as which ``None`` counts."""
    return group is None or group is dist.group.WORLD


#: Of each collective, the place of its group among its arguments.
_PLACES = {
    name: list(inspect.signature(vars(dist)[name]).parameters).index("group")
    for name in _COLLECTIVES
    if name in vars(dist)
}


@functools.lru_cache(maxsize=256)
def _noticed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = _PLACES[name]

    @functools.wraps(function)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _noticing:
            return function(*args, **kwargs)
        thread, notice = _noticing[-1]
        here = threading.current_thread()
        # Autograd's threads are not Python's own.
        if here.ident != thread and not (isinstance(here, threading._DummyThread) and THREADS not in here.name):
            return function(*args, **kwargs)
        group = kwargs.get("group", args[place] if len(args) > place else None)
        with notice(name, group):
            return function(*args, **kwargs)

    return noticed
