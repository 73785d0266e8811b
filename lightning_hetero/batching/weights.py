"""Weight of a batch in the gradient: by its samples; and batches of weight 0, which leave no trace in the model."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

from lightning_hetero.batching.state_backup import StateBackup


def gradient_weight(own: float, total: float, ranks: int) -> float:
    """Factor of a rank's loss, with which the plain mean over ranks is the mean over all samples.

    ``W n_i / N``, so that ``1/W sum_i (W n_i / N) g_i = sum_i (n_i / N) g_i``.

    Source: HetGrad, Moreno-Alvarez et al. 2022.

    Args:
        own: samples of this rank, n_i, or what counts instead.
        total: of all ranks of the replica, N; 0: none of them counts.
        ranks: of the replica, W.
    """
    return ranks * own / total if total else 0.0


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in its order; collections of any kind, and dataclasses, are opened."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # such as a UserDict
            yield from tensors_in(list(leaf.values()))
        elif isinstance(leaf, Sequence) and not isinstance(leaf, str | bytes):
            yield from tensors_in(list(leaf))
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


def samples_in(batch: Any) -> float:
    """The first dimension that all tensors of a batch share.

    Raises:
        ValueError: there is none, or the tensors differ.
    """
    sizes = {tensor.size(0) for tensor in tensors_in(batch) if tensor.ndim > 0}
    if len(sizes) != 1:
        differ = f"its tensors have first dimensions {sorted(sizes)}"
        raise ValueError(differ if sizes else f"no tensors are found in it (a {type(batch).__name__})")
    return float(sizes.pop())


_METRICS = (Metric, MetricCollection)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes: parameters, buffers, hooks, ...


@contextmanager
def zero_backward(module: nn.Module) -> Iterator[None]:
    """Backward passes in this block give zeros for all parameters.

    A loss times 0 is not enough: where the loss of a padding batch is not finite (a mean over no token, a standard
    deviation of one sample), its gradient would be NaN for all ranks.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def zero_loss(module: nn.Module) -> Tensor:
    """A loss of 0 in which all parameters have a part, with gradients of zero."""
    return sum((p.reshape(-1)[:0].abs().sum() for p in module.parameters() if p.requires_grad), torch.zeros(()))


def zero_gradients(optimizer: Optimizer) -> None:
    """Set the gradients that an optimizer would take in to zero."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.detach().zero_()


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Forward passes in this block leave the state of a module as it was.

    That covers buffers, such as BatchNorm's running statistics, the states of torchmetrics, tensors that are changed
    in place, and lists, dictionaries and sets that attributes hold, such as one of outputs. It does not cover numbers
    that are attributes, or in a dictionary: what counts steps counts this one, as on the other ranks.
    """
    kept = StateBackup(
        whole=lambda value: isinstance(value, nn.Module | Optimizer) and not isinstance(value, _METRICS), counters=False
    )
    for part in module.modules():
        kept.keep(vars(part)["_buffers"])
        if isinstance(part, _METRICS):
            kept.keep(part)
        for name, value in vars(part).items():
            if isinstance(value, Tensor | list | dict | set | deque) and name not in _OF_MODULES:
                kept.keep(value)
    yield
    kept.restore()  # past autograd: the backward pass that follows must not take it for a change


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this block an object has another attribute of a name; after it what it had, which may be that of its class."""
    own = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(own)


class _SkippedStepError(Exception):
    """Ends an optimizer's own step after its closure, before it has changed anything."""


@contextmanager
def skip_step_if(left_out: Callable[[], bool], optimizer: Optimizer) -> Iterator[None]:
    """In this block the optimizer's own step may be left out, but none of the hooks around it.

    Parameters, momenta and step counts stay as they are. An optimizer calls its closure first, and Lightning's hooks
    are part of the closure, or run before the step.

    Args:
        left_out: whether to leave it out; asked after the closure.
        optimizer: that is to step.
    """
    original: Callable[..., Any] = optimizer.step

    @wraps(original)
    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        def closed() -> Any:
            output = None if closure is None else closure()
            if left_out():
                raise _SkippedStepError
            return output

        if closure is None and not left_out():
            return original(*args, **kwargs)
        try:
            return original(*args, closure=closed, **kwargs)
        except _SkippedStepError:
            for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
                hook(optimizer, args, kwargs)

    with replaced(optimizer, "step", step):  # where the schedule of a learning rate has put one, too, to count steps
        yield
