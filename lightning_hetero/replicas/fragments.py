"""Fragments: the parts of a model that replicas exchange one after another, cut along its modules."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from torch import nn

from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.vectors import Partition

Fragments = int | Literal["blocks"]


def partition(fragments: Fragments) -> Partition | None:
    """The partition of a model into fragments along its modules, in their order; ``None``: into one.

    Args:
        fragments: how many, of sizes as equal as modules allow; or ``"blocks"``: one for each of the model's repeated
            blocks, such as the layers of a transformer. What comes before the first block goes with it, and what comes
            after a block with that.

    Raises:
        ConfigurationError: neither a number of at least 1 nor ``"blocks"``.
    """
    if fragments != "blocks" and (type(fragments) is not int or fragments < 1):
        raise ConfigurationError(
            f"fragments={fragments!r} must be a whole number of at least 1 (1: the whole model), or 'blocks'."
        )
    return None if fragments == 1 else partial(_cut, fragments)


def _cut(fragments: Fragments, module: nn.Module, sizes: Mapping[str, int]) -> Callable[[str], int]:
    """Cut a model.

    Args:
        fragments: see :func:`partition`.
        module: the model.
        sizes: of the parameters that are exchanged, by name.

    Returns:
        A function that gives the number of the fragment of a parameter or buffer, by its name.

    Raises:
        ConfigurationError: the model has fewer modules, or no blocks.
    """
    order = {name: i for i, (name, _) in enumerate(module.named_modules())}
    starts = _blocks(module, sizes) if fragments == "blocks" else _equal(fragments, sizes)
    firsts = sorted(order[name] for name in starts)[1:]
    return lambda name: bisect_right(firsts, order[owning_module(name)])


def _equal(count: int, sizes: Mapping[str, int]) -> list[str]:
    modules = modules_of(sizes)
    if len(modules) < count:
        raise ConfigurationError(
            f"fragments={count}: the model has {len(modules)} modules with parameters that replicas exchange, and "
            f"a fragment is at least one of these. Use fragments={max(len(modules), 1)} or less."
        )
    return [list(modules)[i] for i in balanced_runs(list(modules.values()), count)]


def _blocks(module: nn.Module, sizes: Mapping[str, int]) -> list[str]:
    within: dict[str, int] = defaultdict(int)  # parameters in a module and its children
    for name, size in sizes.items():
        while name:
            name = owning_module(name)
            within[name] += size
    best: list[str] = []
    for path, parent in module.named_modules():
        alike: dict[type, list[str]] = defaultdict(list)
        for name, child in parent.named_children():
            if within[whole := f"{path}.{name}" if path else name]:
                alike[type(child)].append(whole)
        for blocks in alike.values():
            if len(blocks) > 1 and sum(map(within.get, blocks)) > sum(map(within.get, best)):  # type: ignore[arg-type]
                best = blocks
    if not best:
        raise ConfigurationError(
            "fragments='blocks': no module of the model has two children of the same class with parameters that "
            "replicas exchange. Give a number of fragments."
        )
    return best


def modules_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """The modules with parameters, each of which is at most one fragment, with their sizes.

    Args:
        sizes: of the parameters that are exchanged, by name.
    """
    modules: dict[str, int] = defaultdict(int)
    for name, size in sizes.items():
        modules[owning_module(name)] += size
    return modules


def owning_module(name: str) -> str:
    """The name of the module that has a parameter, buffer or module."""
    return name.rpartition(".")[0]


def balanced_runs(sizes: Sequence[int], count: int) -> list[int]:
    """Starts of contiguous runs whose largest sum is as small as it can be.

    Args:
        sizes: of the items, at least as many as runs.
        count: number of runs; none is empty.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, count, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, count, low)


def _filled(sizes: Sequence[int], count: int, limit: int) -> list[int]:
    """Fill one run after another up to a limit, but leave an item for each of the runs."""
    starts, held = [0], 0
    for i, size in enumerate(sizes):
        scarce = len(sizes) - i == count - len(starts)
        if i and (held + size > limit or scarce):
            starts.append(i)
            held = 0
        held += size
    return starts
