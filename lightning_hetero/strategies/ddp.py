"""`hetero_ddp`: data-parallel training on ranks of unequal speed, exact against one process."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_hetero.comm.agreement import raise_on_all
from lightning_hetero.strategies import saving
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.docstrings import documented
from lightning_hetero.strategies.gradient_wire import WiredGradients
from lightning_hetero.strategies.options import Options


class HeteroDDPStrategy(HeteroStrategy):
    """Data-parallel training: batches are split by measured speed, and gradients are weighted by samples.

    There is one replica, the world. After every step all ranks hold the weights that one process would have reached
    on the whole batch, whatever the split, to rounding, for losses that are means over samples (or over
    ``batch_weight``) and layers that do not couple samples.

    Source: HetGrad, Moreno-Alvarez et al. 2022: ``g = sum_i (n_i / N) g_i``.

    Args:
        accelerator: set by the Trainer.
        wire: how gradients travel: ``"fp32"``, exact; ``"bf16"`` or ``"fp16"``; with error feedback in few bits,
            ``"int8"``, ``"int4"`` or ``"topk:0.02"`` (any density), or as matrices of low rank, ``"powersgd:4"`` (any
            rank). Not together with ``ddp_comm_hook``, nor with shared memory (``within``).

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import HeteroDDPStrategy

        trainer = Trainer(strategy=HeteroDDPStrategy(balance=[3.0, 1.0]), accelerator="cpu", devices=2)
    """

    def __init__(self, accelerator: Accelerator | None = None, *args: Any, wire: str = "fp32", **kwargs: Any) -> None:
        self._gradients = WiredGradients(wire)
        self._gradients.check(kwargs)
        if wire != "fp32":
            kwargs["within"] = "gloo"
        super().__init__(accelerator, *args, **kwargs)

    @property
    def wire(self) -> str:
        """How gradients travel."""
        return self._gradients.wire

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), "wire": self.wire}

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            raise_on_all(self._gradients.problem(self), "the Trainer's precision")
        super().setup(trainer)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._gradients.register(self)

    @override
    def teardown(self) -> None:
        self._gradients.forget()
        super().teardown()

    @override
    @saving.whole
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if not self.collectives.alone():
            self._gradients.add_to(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        super()._restore_replicas(checkpoint)
        self._gradients.load(checkpoint)


def _with_all_options() -> None:
    """Give the class, which takes the shared options by name, their signature and their explanations."""
    init: Any = HeteroDDPStrategy.__init__
    own = signature(init).parameters
    shared = [p for p in signature(HeteroStrategy.__init__).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    *first, last = own.values()
    init.__signature__ = signature(init).replace(parameters=[*first, *shared, last])
    HeteroDDPStrategy.__doc__ = documented(HeteroDDPStrategy.__doc__, [*own, *(p.name for p in shared)], [Options])


_with_all_options()
