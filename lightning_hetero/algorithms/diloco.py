"""Outer optimizer on the mean of the replicas' local steps: local SGD, DiLoCo, BMUF."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_hetero.algorithms.base import Outcome
from lightning_hetero.algorithms.center import CenteredAverager
from lightning_hetero.algorithms.state import Shared
from lightning_hetero.algorithms.streaming import StreamingAverager
from lightning_hetero.argument_checks import outer_rates
from lightning_hetero.comm.compression import check_wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.replicas.fragments import Fragments
from lightning_hetero.replicas.outer_step import OuterStep, OuterSteps


@dataclass
class OuterAverager(StreamingAverager):
    """``c <- Outer(c, grad = -sum_i w_i (x_i - c));  x_i <- c``: the kernel with ``a = 1``, the pull coming last.

    With ``fragments`` parts of the model take turns, each with an outer optimizer of its own; with ``delay`` their
    exchanges pass in the background, and ``x_i <- (1 - blend) x_i + blend c`` comes as many steps later.

    With ``SGD(lr=1)`` as outer optimizer it is periodic averaging; with Nesterov's momentum DiLoCo; with heavy-ball
    momentum BMUF. Buffers, which have no gradients, take the mean.

    Between two outer steps the mean of the replicas is validated, saved and left at the end: it reads better than the
    center, and than the center after an outer step ahead of its time.

    Source: DiLoCo, Douillard et al. 2023, algorithm 1; Streaming DiLoCo, Douillard et al. 2025, algorithm 2.

    Args:
        tau: optimizer steps from one outer step to the next (H in the paper, where it is 500). ``"auto"``: as few as
            possible with exchanges that are hidden, or for which replicas wait at most 5% of the steps' time, as
            measured; it begins with 8.
        outer_lr: learning rate of the outer optimizer, which is SGD with Nesterov's momentum. Default: 0.7.
        outer_momentum: its momentum. Default: 0.9.
        outer: instead of these two: makes any other outer optimizer, given parameters.
        wire: number format of differences: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"2bit"``
            or ``"topk:0.02"``; sums are taken in fp32.
        tau_max: the largest tau that ``"auto"`` chooses. Default: 500.
        fragments: parts of the model that take turns: a number, of sizes as equal as its modules allow, or
            ``"blocks"``: one for each of its repeated blocks, such as a transformer's layers. Fragment p of P exchanges
            after the steps t with ``t mod tau = p tau / P``. Default: 1, the whole model at once.
        delay: optimizer steps for which an exchange may last, in the background; less than tau. Default: 0, all wait.
        blend: the part of the way that replicas go to the center when an exchange has arrived, above 0 and at most 1.
            (The paper's alpha is ``1 - blend``.) Default: 1, all of it.

    Raises:
        ConfigurationError: a value that cannot work; when training starts: more fragments than modules.
    """

    traits = replace(
        CenteredAverager.traits, between="the mean of all replicas, and each such look costs as much as an exchange"
    )
    outer_steps = Shared[OuterSteps]()
    tau: int | Literal["auto"] = 50
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer: Callable[[Iterable], Optimizer] | None = None
    wire: str = "fp32"
    tau_max: int = field(default=500, kw_only=True)
    fragments: Fragments = field(default=1, kw_only=True)
    delay: int = field(default=0, kw_only=True)
    blend: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire(self.wire)
        self._make = self._outer_optimizer()
        self._described = outer_optimizer_options(self._make, self.outer)

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
        outer_rates(lr, momentum)
        return partial(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @override
    def options(self) -> dict[str, Any]:
        return {**super().options(), "outer": self._described}

    @override
    def prepare(self) -> Outcome | None:
        super().prepare()
        self.outer_steps = OuterSteps([OuterStep(self._make, part.replica, part.center) for part in self._parts])
        return None

    @override
    def move(self, p: int, difference: list[Tensor]) -> None:
        self.outer_steps.of_fragments[p].take(difference)


def outer_optimizer_options(make: Callable[[Iterable], Optimizer], given: object) -> tuple[str, dict[str, Any]]:
    """An outer optimizer in builtins: its class and its defaults.

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
            f"outer={given!r}: {type(made).__name__} must evaluate the loss again, which an outer step cannot. Use "
            "another optimizer."
        )
    return type(made).__name__, made.defaults
