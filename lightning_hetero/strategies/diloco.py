"""`hetero_diloco`: an outer optimizer on what replicas have done."""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.outer import OuterAverager
from lightning_hetero.checks import is_number, one_of
from lightning_hetero.comm.wire import DTYPES, Wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.centers import CenterStrategy


class DiLoCoStrategy(CenterStrategy):
    """Replicas train apart for tau steps; the mean of what they have done is the gradient of an outer step.

    Source: DiLoCo, Douillard et al. 2023, algorithm 1; with other outer optimizers local SGD (``SGD(lr=1)``) and BMUF
    (heavy-ball momentum), Chen and Huo 2016.

    Args:
        tau: optimizer steps from one outer step to the next (H in the paper, where it is 500).
        outer_lr: learning rate of the outer optimizer, which is SGD with Nesterov's momentum. Default: 0.7.
        outer_momentum: its momentum. Default: 0.9.
        outer: instead of these two: makes any other outer optimizer, given parameters.
        wire: number format of differences: ``"fp32"``, ``"bf16"`` or ``"fp16"``; sums are taken in fp32.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.centers.CenterStrategy`, such as
            ``replica``.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    def __init__(
        self,
        tau: int = 50,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer: Callable[[Iterable], Optimizer] | None = None,
        wire: Wire = "fp32",
        **kwargs: Any,
    ) -> None:
        one_of("wire", wire, tuple(DTYPES))
        if outer is not None and (outer_lr, outer_momentum) != (None, None):
            raise ConfigurationError(
                f"outer={outer!r} brings options of its own: outer_lr={outer_lr!r}, outer_momentum={outer_momentum!r} "
                "would have no effect. Leave them out, or outer."
            )
        outer_lr = 0.7 if outer_lr is None else outer_lr
        outer_momentum = 0.9 if outer_momentum is None else outer_momentum
        numbers = is_number(outer_lr) and is_number(outer_momentum)
        if not numbers or outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise ConfigurationError(
                f"outer_lr={outer_lr!r}, outer_momentum={outer_momentum!r}: the first must be above 0, the second at "
                "least 0 and below 1."
            )
        nesterov = outer_momentum > 0
        self.outer = outer or partial(SGD, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        self.wire = wire
        try:
            made = self.outer([torch.nn.Parameter(torch.zeros(2, 2))])
        except Exception as error:
            raise ConfigurationError(f"outer={outer!r} does not make an optimizer of parameters: {error}") from error
        if not isinstance(made, Optimizer):
            raise ConfigurationError(f"outer={outer!r} made a {type(made).__name__}, not a torch.optim.Optimizer.")
        if signature(made.step).parameters["closure"].default is Parameter.empty:
            raise ConfigurationError(
                f"outer={outer!r}: {type(made).__name__} must evaluate the loss anew, which an outer step cannot. Use "
                "another optimizer."
            )
        self._described = type(made).__name__, made.defaults
        super().__init__(tau=tau, **kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), "outer": self._described, "wire": self.wire}

    @override
    def make_averager(self) -> Averager:
        return OuterAverager(self.outer, self.tau, self.wire)
