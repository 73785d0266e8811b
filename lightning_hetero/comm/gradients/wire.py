"""A communication hook of DDP: gradients travel on a low-bit wire, or as matrices of low rank."""

import logging
import threading
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lightning_hetero.comm.background import Background
from lightning_hetero.comm.buffer_pool import BufferPool
from lightning_hetero.comm.gradients.bundle import bundles_of
from lightning_hetero.comm.gradients.means import EncodedMean, LowRankMean, Mean
from lightning_hetero.comm.gradients.spelling import rank_of
from lightning_hetero.errors import UnsupportedError

log = logging.getLogger("lightning_hetero")


class _Waiting:
    """A bucket of DDP that waits for means.

    Args:
        bucket: with the gradients of this rank.
    """

    def __init__(self, bucket: dist.GradBucket) -> None:
        self.buffer, self.parameters, self.gradients = bucket.buffer(), bucket.parameters(), bucket.gradients()
        devices: list[int | str | torch.device] = [] if self.buffer.device.type == "cpu" else [self.buffer.device]
        self._future: Future[Any] = Future(devices=devices)
        self.future: Future[Tensor] = self._future.then(self._outcome)
        self.missing: set[int] = set()  # bundles

    def end(self, error: BaseException | None) -> None:
        """Let DDP go on: the means are there, or there will be none."""
        if self.buffer.device.type == "cuda":
            torch.cuda.current_stream(self.buffer.device).synchronize()
        self._error = error
        self._future.set_result(self.buffer)

    def _outcome(self, future: Future[Any]) -> Tensor:
        if self._error is not None:  # a future with an error of Python's own is a mere value to DDP
            raise self._error
        return future.value()


class GradientWire:
    """Takes the means of gradients in the background, while the backward pass goes on.

    All collectives of a step run one after the other, in an order that is the same on every rank. The bundles in which
    gradients travel depend on the model only; so do the means, whatever the size of DDP's buckets.

    Args:
        wire: a low-bit one, or ``"powersgd:4"``.
        model: of which the gradients travel.
        group: the ranks, over gloo. Nobody else may use it.

    Raises:
        UnsupportedError: a parameter is complex.
    """

    def __init__(self, wire: str, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.wire, self._group = wire, group
        self.bundles = bundles_of(model.named_parameters())
        rank, pool = rank_of(wire), BufferPool()
        self._means: list[Mean] = []
        self._values: list[Tensor] = []
        for number, bundle in enumerate(self.bundles):
            if bundle.dtype.is_complex:
                raise UnsupportedError(
                    f"wire={wire!r}: one of {', '.join(bundle.names)} is complex. Hold it as two real ones "
                    "(torch.view_as_real), or use wire='fp32'."
                )
            dtype = torch.float32 if rank is None else bundle.dtype
            self._values.append(torch.zeros(bundle.length, dtype=dtype))
            self._means.append(
                EncodedMean(wire, bundle.length, group, pool)
                if rank is None
                else LowRankMean(rank, bundle.shapes, dtype, group, seed=number)
            )
        self._places = {
            id(p): (number, part)
            for number, (bundle, values) in enumerate(zip(self.bundles, self._values, strict=True))
            for p, part in zip(bundle.parameters, bundle.parts(values), strict=True)
        }
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []  # buckets
        self._absent: list[int] = []  # of each bundle, gradients that have yet to come
        self._latest: Background[None] | None = None
        self._not_finite: set[int] = set()  # bundles
        self.used = False  # whether anything may have been left out

    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Take the means of a bucket's gradients; DDP calls this as soon as they are ready.

        Raises:
            UnsupportedError: they are sparse.
        """
        if bucket.buffer().is_sparse:
            raise UnsupportedError(
                f"wire={self.wire!r}: a gradient is sparse. Use sparse=False in the model's embeddings, or wire='fp32'."
            )
        if bucket.index() == 0:
            self._begin()
        waiting, ready = _Waiting(bucket), []
        for p, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
            number, part = self._places[id(p)]
            part.copy_(gradient.reshape(-1))
            waiting.missing.add(number)
            self._absent[number] -= 1
            if not self._absent[number]:
                ready.append(number)
        with self._lock:
            self._waiting.append(waiting)
        for number in ready:
            self._start(number)
        return waiting.future

    def _begin(self) -> None:
        """A backward pass begins."""
        self._absent = [len(bundle.parameters) for bundle in self.bundles]
        self._latest, self._waiting, self.used = None, [], True
        if self._not_finite:
            for number in self._not_finite:
                self._means[number].reset()
            self._not_finite.clear()
            self.say_dropped("a gradient was not finite")

    def _start(self, number: int) -> None:
        """Take the means of a bundle, after those that were started before."""
        before = self._latest

        def take() -> None:
            error: BaseException | None = None
            try:
                if before is not None:
                    before.result()
                self._take(number)
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._arrived(number, error)

        self._latest = Background(take)

    @torch.no_grad()
    def _take(self, number: int) -> None:
        values = self._values[number]
        self._means[number].take(values)
        if not bool(values.sum().isfinite()):  # the same on every rank
            self._not_finite.add(number)

    @torch.no_grad()
    def _arrived(self, number: int, error: BaseException | None) -> None:
        """Let go the buckets that have all their means, or of which one will not come."""
        with self._lock:
            done = []
            for waiting in self._waiting:
                if number in waiting.missing:
                    waiting.missing.discard(number)
                    if error is not None or not waiting.missing:
                        done.append(waiting)
            self._waiting = [waiting for waiting in self._waiting if waiting not in done]
        for waiting in done:
            if error is None:
                for p, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
                    gradient.copy_(self._places[id(p)][1].view(gradient.shape))
            waiting.end(error)

    # -- what goes from step to step -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What messages of this rank have left out, and all else that goes from step to step."""
        means = [mean.state() for mean in self._means]
        return {"wire": self.wire, "members": dist.get_world_size(self._group), "means": means}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`; if it does not fit, error feedback begins anew, with a warning."""
        own = self.state_dict()
        means = [] if state is None else state["means"]
        if state is None or _sizes(state) != _sizes(own):
            self.say_dropped("the checkpoint was saved with another wire, another model or another number of ranks")
            return
        for kept, saved in zip(chain(*own["means"]), chain(*means), strict=True):
            kept.copy_(saved)

    def say_dropped(self, why: str) -> None:
        """Say on one rank that what messages have left out is dropped."""
        if dist.get_rank() == 0:
            log.warning(
                f"wire={self.wire!r}: {why}, so what earlier messages have left out is dropped. Error feedback begins "
                "anew, from 0."
            )


def _sizes(state: Mapping[str, Any]) -> tuple[Any, ...]:
    means = [[tuple(tensor.shape) for tensor in mean] for mean in state["means"]]
    return state["wire"], state["members"], means
