"""An outer optimizer on the average of what replicas have done: local SGD, DiLoCo, BMUF."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.averaging.averager import StepContext
from lightning_hetero.averaging.center import CenterAverager
from lightning_hetero.comm.all_reduce import Average
from lightning_hetero.comm.links import ReplicaLinks
from lightning_hetero.comm.replica import Replica
from lightning_hetero.comm.wire import Wire
from lightning_hetero.errors import ConfigurationError

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


class OuterAverager(CenterAverager):
    """``c <- Outer(c, grad = -sum_i w_i (x_i - c));  x_i <- c``: the kernel with ``a = 1``, the pull coming last.

    With ``SGD(lr=1)`` as outer optimizer it is periodic averaging; with Nesterov's momentum DiLoCo; with heavy-ball
    momentum BMUF. Buffers, which have no gradients, take the mean.

    Between two outer steps the mean of the replicas is validated, saved and left at the end: it reads better than the
    center, and than the center after an outer step ahead of its time (``benchmarks/consensus.py``).

    Source: DiLoCo, Douillard et al. 2023, algorithm 1.

    Args:
        outer: makes the outer optimizer, of parameters in the model's shapes.
        tau: optimizer steps from one outer step to the next.
        wire: number format of the differences.
    """

    between = "the mean of all replicas, and each such look costs as much as an exchange"

    def __init__(self, outer: MakeOptimizer, tau: int, wire: Wire = "fp32") -> None:
        super().__init__(tau, "gauss_seidel", wire, overlap=False)
        self._make = outer
        self._since = 0  # steps since the latest outer step

    @override
    def setup(self, replica: Replica, links: ReplicaLinks, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        super().setup(replica, links, optimizers)
        views, self._buffers = replica.views(self.center)
        self._parameters = [nn.Parameter(view) for view in views]  # in the center's own memory
        if not self._parameters:
            raise ConfigurationError("exclude leaves no parameter for the outer optimizer.")
        self.outer = self._make(self._parameters)
        taken = {id(p) for group in self.outer.param_groups for p in group["params"]}
        if left := [tuple(p.shape) for p in self._parameters if id(p) not in taken]:
            raise ConfigurationError(
                f"outer: {type(self.outer).__name__} takes {len(taken)} of {len(self._parameters)} parameters, and "
                f"leaves others as they were at first, such as one of shape {left[0]}. Let it take them all."
            )

    @override
    def after_step(self, context: StepContext) -> None:
        self._since += 1
        super().after_step(context)

    @override
    def move(self, own: list[Tensor], average: Average) -> None:
        for mean in average.difference:
            mean.neg_()
        gradients, steps = self.replica.views(average.difference)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self.outer.step()
        for buffer, step in zip(self._buffers, steps, strict=True):
            buffer.sub_(step)
        self.replica.unpack(self.center)
        self._since = 0

    @property
    @override
    def leads(self) -> bool:
        return self._since == 0  # all replicas are where the center is

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "outer": self.outer.state_dict(), "since": self._since}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.outer.load_state_dict(state["outer"])
        self._since = state["since"]
