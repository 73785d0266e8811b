"""DDP over the ranks of one replica."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.checkpoint_sections import add_section, section
from lightning_hetero.comm import all_reduce, object_collectives
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.gradients import GradientWire, check_gradient_wire
from lightning_hetero.comm.job import Job
from lightning_hetero.comm.retry import collective
from lightning_hetero.comm.shared_memory import ALIGNED, PART, SHARED, SharedMean, share_memory
from lightning_hetero.comm.topology import Topology
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError
from lightning_hetero.strategies.default_groups import GroupOverrides
from lightning_hetero.strategies.options import Options

_log = logging.getLogger(__name__)


class ReplicaDDP(DistributedDataParallel):
    """PyTorch's DDP; the wait for another rank's buffers is not this rank's work.

    Args:
        timer: the strategy's.
        **kwargs: as for ``DistributedDataParallel``.
    """

    def __init__(self, timer: StepTimer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._step_timer = timer
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]

    def outgrown(self) -> bool:
        """Whether a parameter has been unfrozen since: DDP does not know of its gradients."""
        return any(p.requires_grad for p in self._frozen)

    def _sync_buffers(self) -> None:
        with self._step_timer.waiting(), deadline("share buffers"):
            super()._sync_buffers()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, also where gradients accumulate (collective)."""
        if self.broadcast_buffers and self.modules_buffers:
            self._sync_buffers()


class BucketSize:
    """Lets the size of DDP's gradient buckets follow the link, which is measured when a model first needs it.

    Not so where the user gives ``bucket_cap_mb``; for models that travel in two buckets at most whatever the link; nor
    with deterministic algorithms, since the size decides in which order the gradients of three or more ranks are
    summed, and with that how sums are rounded.
    """

    #: Bytes of gradients up to which there is nothing to choose.
    SMALL = 2 * all_reduce.MEBIBYTE

    def __init__(self) -> None:
        self._travel: all_reduce.AllReduceTime | None = None

    def options(self, given: Mapping[str, Any], model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
        """DDP's options with a bucket size that suits the link (collective over the replica).

        Args:
            given: the options so far, with the replica's process group.
            model: to be wrapped.
            device: where its gradients are.

        Raises:
            CommunicationError: another rank did not take part in time.
        """
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        chosen = given.get("bucket_cap_mb") is not None or bool(given.get("bucket_cap_mb_list"))
        open_ = size > self.SMALL and not chosen and not torch.are_deterministic_algorithms_enabled()
        group = given["process_group"]
        if not all_reduce.all_agree(open_, group, device):
            return dict(given)
        if self._travel is None:
            self._travel = all_reduce.measure_all_reduce(group, device)
        cap = self._travel.bucket_mib()
        _log.info("%s: gradients travel in buckets of %s MiB", self._travel, cap or all_reduce.DEFAULT)
        return dict(given) if cap is None else {**given, "bucket_cap_mb": cap}


class ReplicaSyncBatchNorm(TorchSyncBatchNorm):
    """BatchNorm statistics over the samples of a replica.

    Args:
        group: the replica's process group; ``None``: it is one rank, and its BatchNorm layers stay as they are.
        lent: lends the group to layers.
    """

    def __init__(self, group: dist.ProcessGroup | None, lent: GroupOverrides) -> None:
        super().__init__()
        self._group, self._lent = group, lent

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the model's BatchNorm layers."""
        if self._group is None:
            return model
        converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self._lent.lend_layers(converted, self._group)
        return converted


def use_shared_memory_allreduce(
    options: Options,
    ddp: ReplicaDDP,
    topology: Topology,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    hooked: bool,
) -> str | None:
    """Let DDP average gradients through shared memory, where the ranks of a replica can (collective over them).

    Args:
        options: of the user.
        ddp: over the model.
        topology: of the job.
        ranks: of the replica.
        group: of these ranks.
        hooked: whether DDP has the user's own hook already, which wins.

    Returns:
        How they are averaged and why, in words; ``None``: as DDP does.

    Raises:
        UnsupportedError: the user asks for shared memory, and it cannot be.
        CommunicationError: another rank did not take part in time.
    """
    way, otherwise = options.within, "by ddp_comm_hook" if hooked else None
    if way == "gloo":
        return otherwise
    reason = "ddp_comm_hook averages the gradients" if hooked else _unsuitable(topology, ranks)
    if reason is None:
        trained = [p for p in ddp.module.parameters() if p.requires_grad]
        size = sum(p.numel() * p.element_size() + ALIGNED for p in trained)
        needed = -(-size // ALIGNED) * ALIGNED * (len(ranks) + 1)  # a row for each rank, and the result
        try:
            part = PART if way == "auto" else 1.0
            ddp.register_comm_hook(group, SharedMean(share_memory(group, size, options.limit, part)).hook)
            return "in shared memory: all are CPUs of one node"
        except OSError as error:
            reason = f"the memory cannot be shared ({error})"
            if way == "auto":
                rank_zero_warn(
                    f"Gradients are averaged over sockets: {reason}. Shared memory is faster, and needs "
                    f"{round(needed / PART)} free bytes in /dev/shm (docker run --shm-size), of which it leaves half. "
                    "within='gloo' silences this warning."
                )
    if way == "shm":
        raise UnsupportedError(f"within='shm', but {reason}. Set within='auto', which uses sockets then.")
    return otherwise


def _unsuitable(topology: Topology, ranks: Sequence[int]) -> str | None:
    """The reason why these ranks cannot average through shared memory, if so; the same on all of them."""
    places = [topology.places[rank] for rank in ranks]
    if devices := sorted({place.device for place in places} - {"cpu"}):
        return f"gradients are on {', '.join(devices)}, not on CPUs"
    if not os.path.isdir(SHARED):
        return f"this system has no {SHARED}"
    if len({(place.host, place.node) for place in places}) > 1:
        return f"ranks {list(ranks)}, which average gradients, are on several nodes"
    return None


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

    def problem(self, precision: Precision) -> HeteroError | None:
        """The reason why the Trainer's settings do not go with the wire, if so."""
        scaled = getattr(precision, "scaler", None) is not None
        if not scaled or self.wire in ("fp32", "bf16", "fp16"):
            return None
        return UnsupportedError(
            f"wire={self.wire!r} with precision='16-mixed': what messages leave out would be added to gradients of "
            "another loss scale. Use precision='bf16-mixed' or 32, or wire='fp16'."
        )

    def register(self, model: torch.nn.Module | None, job: Job) -> None:
        """Let a model's gradients travel on the wire, if it is wrapped in DDP (collective over the replica).

        Raises:
            UnsupportedError: an embedding has sparse gradients, or a parameter is complex.
        """
        former, self._running = self._running, None
        if not isinstance(model, ReplicaDDP) or self.wire == "fp32":
            return
        if self.wire != "bf16" and (name := sparse_embedding(model.module)) is not None:
            raise UnsupportedError(
                f"wire={self.wire!r}: the gradient of {name} is sparse, and such gradients travel in fp32 or bf16. "
                "Use sparse=False in the model's embeddings, or wire='fp32'."
            )
        if self.wire in ("bf16", "fp16"):
            model.register_comm_hook(model.process_group, _bf16 if self.wire == "bf16" else fp16_compress_hook)
            return
        if (group := job.groups.get("gradients on a wire", job.view.replica.ranks)) is None:
            return  # one rank
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
        everyone = collective("gather what gradients have left out", lambda: object_collectives.gather(own))
        if everyone is not None:
            add_section(checkpoint, "gradients", everyone)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds of this rank; if that does not fit, say that it is dropped."""
        if self._running is None:
            return
        everyone: list[Any] = section(checkpoint, "gradients") or []
        fits = len(everyone) == dist.get_world_size()
        self._running.load_state_dict(everyone[dist.get_rank()] if fits else None)


def sparse_embedding(model: torch.nn.Module) -> str | None:
    """The name of an embedding that is trained with sparse gradients, if there is one."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return next(
        (name for name, m in model.named_modules() if isinstance(m, kinds) and m.sparse and m.weight.requires_grad),
        None,
    )


def _bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """PyTorch's hook, under another name: by its own DDP refuses it without CUDA."""
    return bf16_compress_hook(group, bucket)
