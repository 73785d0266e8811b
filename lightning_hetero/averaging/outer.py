"""An outer optimizer on the average of what replicas have done: local SGD, DiLoCo, BMUF."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import Outcome, StepContext
from lightning_hetero.averaging.center import CenterAverager
from lightning_hetero.checks import is_number
from lightning_hetero.comm.all_reduce import Average
from lightning_hetero.comm.encodings import check_wire
from lightning_hetero.comm.regrowth import Regrowth
from lightning_hetero.errors import ConfigurationError


@dataclass
class OuterAverager(CenterAverager):
    """``c <- Outer(c, grad = -sum_i w_i (x_i - c));  x_i <- c``: the kernel with ``a = 1``, the pull coming last.

    With ``SGD(lr=1)`` as outer optimizer it is periodic averaging; with Nesterov's momentum DiLoCo; with heavy-ball
    momentum BMUF. Buffers, which have no gradients, take the mean.

    Between two outer steps the mean of the replicas is validated, saved and left at the end: it reads better than the
    center, and than the center after an outer step ahead of its time (``benchmarks/consensus.py``).

    Source: DiLoCo, Douillard et al. 2023, algorithm 1.

    Args:
        tau: optimizer steps from one outer step to the next (H in the paper, where it is 500).
        outer_lr: learning rate of the outer optimizer, which is SGD with Nesterov's momentum. Default: 0.7.
        outer_momentum: its momentum. Default: 0.9.
        outer: instead of these two: makes any other outer optimizer, given parameters.
        wire: number format of differences: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"`` or
            ``"topk:0.02"``; sums are taken in fp32.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    facts = replace(
        CenterAverager.facts, between="the mean of all replicas, and each such look costs as much as an exchange"
    )
    order = "gauss_seidel"

    tau: int = 50
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer: Callable[[Iterable], Optimizer] | None = None
    wire: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire(self.wire)
        self._make = self._outer_optimizer()
        self._described = described(self._make, self.outer)

    def _outer_optimizer(self) -> Callable[[Iterable], Optimizer]:
        if self.outer is not None:
            if (self.outer_lr, self.outer_momentum) != (None, None):
                raise ConfigurationError(
                    f"outer={self.outer!r} brings options of its own: outer_lr={self.outer_lr!r}, outer_momentum="
                    f"{self.outer_momentum!r} would have no effect. Leave them out, or outer."
                )
            return self.outer
        lr = 0.7 if self.outer_lr is None else self.outer_lr
        momentum = 0.9 if self.outer_momentum is None else self.outer_momentum
        if not (is_number(lr) and is_number(momentum)) or lr <= 0 or not 0 <= momentum < 1:
            raise ConfigurationError(
                f"outer_lr={lr!r}, outer_momentum={momentum!r}: the first must be above 0, the second at least 0 and "
                "below 1."
            )
        return partial(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @override
    def options(self) -> dict[str, Any]:
        return {**super().options(), "outer": self._described}

    @override
    def prepare(self) -> Outcome | None:
        super().prepare()
        self._since = 0  # steps since the latest outer step
        views, self._buffers = self.replica.views(self.center)
        self._parameters = [nn.Parameter(view) for view in views]  # in the center's own memory
        if not self._parameters:
            raise ConfigurationError("exclude leaves no parameter for the outer optimizer.")
        self._optimizer = self._make(self._parameters)
        taken = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if left := [tuple(p.shape) for p in self._parameters if id(p) not in taken]:
            raise ConfigurationError(
                f"outer: {type(self._optimizer).__name__} takes {len(taken)} of {len(self._parameters)} parameters, "
                f"and leaves others as they were at first, such as one of shape {left[0]}. Let it take them all."
            )
        return None

    @override
    def after_step(self, context: StepContext) -> Outcome | None:
        self._since += 1
        return super().after_step(context)

    @override
    def move(self, own: list[Tensor], average: Average) -> str | None:
        for mean in average.difference:
            mean.neg_()
        gradients, steps = self.replica.views(average.difference)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for buffer, step in zip(self._buffers, steps, strict=True):
            buffer.sub_(step)
        self.replica.unpack(self.center)
        self._since = 0
        return None

    @property
    @override
    def leads(self) -> bool:
        return self._since == 0  # all replicas are where the center is

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "outer": self._optimizer.state_dict(), "since": self._since}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["outer"] is None:  # in the midst of a fit, of another layout
            for name, p in zip(self.replica.parameter_names, self._parameters, strict=True):
                if momenta := state["momenta"].get(name):
                    self._optimizer.state[p] = momenta
        else:
            self._optimizer.load_state_dict(state["outer"])
        self._since = state["since"]

    @override
    def load_common(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["outer"])  # the same on all replicas

    @override
    def regrown(self, state: dict[str, Any], growth: Regrowth) -> dict[str, Any]:
        names = self.replica.parameter_names
        momenta = {name: self._optimizer.state.get(p, {}) for name, p in zip(names, self._parameters, strict=True)}
        return {**super().regrown(state, growth), "outer": None, "momenta": momenta}


def described(make: Callable[[Iterable], Optimizer], given: object) -> tuple[str, dict[str, Any]]:
    """What an outer optimizer is, in builtins: its class and its defaults.

    Args:
        make: makes it, of parameters.
        given: the option, for messages.

    Raises:
        ConfigurationError: it cannot take an outer step.
    """
    try:
        made = make([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:
        raise ConfigurationError(f"outer={given!r} does not make an optimizer of parameters: {error}") from error
    if not isinstance(made, Optimizer):
        raise ConfigurationError(f"outer={given!r} made a {type(made).__name__}, not a torch.optim.Optimizer.")
    if signature(made.step).parameters["closure"].default is Parameter.empty:
        raise ConfigurationError(
            f"outer={given!r}: {type(made).__name__} must evaluate the loss anew, which an outer step cannot. Use "
            "another optimizer."
        )
    return type(made).__name__, made.defaults
