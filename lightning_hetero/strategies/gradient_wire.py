"""Gradients of a strategy on a wire: the hook of DDP, and what of it is in checkpoints."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.futures import Future

from lightning_hetero.comm import objects
from lightning_hetero.comm.collective import collective
from lightning_hetero.comm.gradients import GradientWire, check_gradient_wire
from lightning_hetero.engine.checkpoint import FORMAT, KEY, part_of
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError
from lightning_hetero.strategies.replica_ddp import ReplicaDDP

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy

_NAME = "gradients"  # in a checkpoint


class WiredGradients:
    """Lets the gradients of a strategy travel on its wire.

    Args:
        wire: the option.
    """

    def __init__(self, wire: str) -> None:
        check_gradient_wire(wire)
        self.wire = wire
        self._running: GradientWire | None = None  # of the running fit, where messages leave something out

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have yet to join a job."""
        return {"wire": self.wire, "_running": None}

    def check(self, options: Mapping[str, Any]) -> None:
        """See that no other option says how gradients travel.

        Args:
            options: that were given to the strategy.

        Raises:
            ConfigurationError: names the option.
        """
        for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
            if self.wire != "fp32" and options.get(name) is not None:
                raise ConfigurationError(
                    f"wire={self.wire!r} together with {name}: both say how gradients travel. Give one of them."
                )
        if self.wire != "fp32" and options.get("within") == "shm":
            raise ConfigurationError(
                f"wire={self.wire!r} together with within='shm': nothing travels in shared memory. Give one of them."
            )

    def problem(self, strategy: "HeteroStrategy") -> HeteroError | None:
        """Why the Trainer's settings do not go with the wire, if so."""
        scaled = getattr(strategy.precision_plugin, "scaler", None) is not None
        if not scaled or self.wire in ("fp32", "bf16", "fp16"):
            return None
        return UnsupportedError(
            f"wire={self.wire!r} with precision='16-mixed': what messages leave out would be added to gradients of "
            "another loss scale. Use precision='bf16-mixed' or 32, or wire='fp16'."
        )

    def register(self, strategy: "HeteroStrategy") -> None:
        """Let a model's gradients travel on the wire, if it is wrapped in DDP (collective over the replica).

        Raises:
            UnsupportedError: an embedding has sparse gradients, or a parameter is complex.
        """
        former, self._running = self._running, None
        model = strategy.model
        if not isinstance(model, ReplicaDDP) or self.wire == "fp32":
            return
        if self.wire != "bf16" and (name := _sparse(model.module)) is not None:
            raise UnsupportedError(
                f"wire={self.wire!r}: the gradient of {name} is sparse, and such gradients travel in fp32 or bf16. "
                "Use sparse=False in the model's embeddings, or wire='fp32'."
            )
        if self.wire in ("bf16", "fp16"):
            model.register_comm_hook(model.process_group, _bf16 if self.wire == "bf16" else fp16_compress_hook)
            return
        assert strategy.job is not None
        group = strategy.job.groups.get("gradients on a wire", strategy.job.view.replica.ranks)
        assert group is not None
        self._running = GradientWire(self.wire, model.module, group)
        model.register_comm_hook(None, self._running.hook)
        if former is not None and former.used:
            self._running.say_dropped("the ranks or the trainable parameters have changed")

    def forget(self) -> None:
        """A fit has ended."""
        self._running = None

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Add what messages have left out, of all ranks, to rank 0's checkpoint (collective)."""
        if self._running is None:
            return
        own = self._running.state_dict()
        everyone = collective("gather what gradients have left out", lambda: objects.gather(own))
        if everyone is not None:
            checkpoint.setdefault(KEY, {"format": FORMAT})[_NAME] = everyone

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds of this rank; if that does not fit, say that it is dropped."""
        if self._running is None:
            return
        everyone: list[Any] = part_of(checkpoint).get(_NAME) or []
        fits = len(everyone) == dist.get_world_size()
        self._running.load_state_dict(everyone[dist.get_rank()] if fits else None)


def _sparse(model: torch.nn.Module) -> str | None:
    """The name of an embedding that is trained with sparse gradients, if there is one."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return next(
        (name for name, m in model.named_modules() if isinstance(m, kinds) and m.sparse and m.weight.requires_grad),
        None,
    )


def _bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """PyTorch's hook, under another name: by its own DDP refuses it without CUDA."""
    return bf16_compress_hook(group, bucket)
