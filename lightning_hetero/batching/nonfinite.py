"""Guard against losses and gradients that are not finite: found within the step, before an optimizer takes them in."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_hetero.batching.timer import after_own_backward
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.failures import deadline
from lightning_hetero.comm.staging import pinned, stage_of
from lightning_hetero.errors import NotFiniteError
from lightning_hetero.replicas.sharding import ShardTraffic, local

OnNaN = Literal["error", "skip", "ignore"]
#: Optimizers whose fused form can leave a step out on the device, if it is told to.
FUSED = (SGD, Adam, AdamW)


class DeviceFlags(NamedTuple):
    """Flags of a step, on their way from the device to the host: what was not finite.

    Attributes:
        values: in pinned memory: whether the loss, this rank's gradient, and the averaged gradient were not finite.
        ready: an event that passes once they are there.
        parameters: that the optimizer has a gradient of.
        finite: of each, whether it is finite, on the device.
        where: which step it was.
    """

    values: Tensor
    ready: Any
    parameters: list[Tensor]
    finite: Tensor
    where: str


class NonFiniteGuard:
    """Guard that finds, before the ranks that average gradients step, that the loss or gradient of one is not finite.

    It costs no message, but for a flag where gradients are averaged into shards, and with ``"skip"`` one before each
    backward pass. A loss that is not finite makes all
    gradients of its rank NaN. Averaging spreads these, so that every rank sees them in what DDP returns. Only then do
    ranks ask each other who it was. To know, each has looked at its own gradients while DDP was averaging them.

    On a CPU the host knows at once. On an accelerator it need not wait: with ``"error"`` and PyTorch's ``SGD``,
    ``Adam`` or ``AdamW`` the device leaves the step out by itself, and the host learns of it before the next one.

    Args:
        mode: what to do: ``"error"``, ``"skip"`` or ``"ignore"``.
        ranks: those that average gradients.
        group: gives their process group for small CPU tensors; ``None``: this rank is alone.
        waiting: counts the time in its block as waiting.
        where: says which step this is.
        on_devices: whether all of these ranks compute on an accelerator. Else none may learn of it later than others.

    Attributes:
        shard_traffic: moves shards, if the model is sharded; each rank then sees a part of the averaged gradients.
    """

    shard_traffic: ShardTraffic | None = None

    def __init__(
        self,
        mode: OnNaN,
        ranks: Sequence[int],
        group: Callable[[], dist.ProcessGroup | None],
        waiting: Callable[[], AbstractContextManager[None]],
        where: Callable[[], str],
        on_devices: bool = False,
    ) -> None:
        self.mode, self._ranks, self._group, self._waiting, self._where = mode, ranks, group, waiting, where
        self._on_devices = on_devices
        self._flags: Tensor | None = None  # memory for those of a step
        self._buffers: list[Tensor] = []  # as they were before the forward pass
        self.begin()

    def begin(self, searching: bool = False) -> None:
        """Begin a fit.

        Args:
            searching: whether it is a search for a learning rate, in which losses that grow without limit are usual.
        """
        self._active: OnNaN = "ignore" if searching else self.mode
        self._skipped = 0  # times that something was left out
        self._spoilt = False  # whether the buffers are to be set back
        self._left_out = False  # whether an optimizer has left out what the latest backward passes have given
        self._latest: DeviceFlags | None = None  # of the latest step, if nobody has looked at them
        self._left_out_on_device: bool | Tensor = False
        self._forget()

    def _forget(self) -> None:
        """Begin a step."""
        # Whether a loss, or a gradient, of this rank was not finite; and one after averaging, the same on every rank.
        self._loss: bool | Tensor = False
        self._own: bool | Tensor = False
        self._spread: bool | Tensor = False
        self._passes = self._counted = 0  # backward passes; those of which not all was left out

    def continue_from(self, former: "NonFiniteGuard") -> None:
        """Go on in the midst of a window where another one has stopped, which was made for an earlier view."""
        searching = former._active != former.mode
        self._active = former._active if searching else self.mode  # others may look no more: there is one replica left
        self._skipped, self._left_out, self._latest = former._skipped, former._left_out, former._latest
        self._left_out_on_device = former._left_out_on_device
        self._loss, self._own, self._spread = former._loss, former._own, former._spread
        self._passes, self._counted = former._passes, former._counted
        self._spoilt, self._buffers = former._spoilt, former._buffers

    # -- losses ------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module) -> None:
        """Remember the buffers, since samples that are left out must not have changed them."""
        self.restore(module)
        if self._active == "skip":
            self._buffers = [buffer.detach().clone() for buffer in module.buffers()]

    def restore(self, module: nn.Module) -> None:
        """Set the buffers back if samples that are left out have changed them, once no backward pass needs them."""
        if self._spoilt:
            self._spoilt = False
            with torch.no_grad():
                for buffer, before in zip(module.buffers(), self._buffers, strict=True):
                    buffer.copy_(before)

    @property
    def asks(self) -> bool:
        """Whether ranks tell each other before each backward pass whether their losses count."""
        return self._active == "skip"

    def count(
        self, loss: Tensor, own: float, total: float, given: bool = True, in_passes: bool = False
    ) -> tuple[float, float]:
        """Weights of this rank and of all ranks in a backward pass; under ``"skip"`` without those with a broken loss.

        Collective over the replica under ``"skip"``.

        Args:
            loss: of this rank.
            own: weight of its samples.
            total: of all ranks.
            given: whether it is a loss at all; if not, the samples do not count either, as the user wants it.
            in_passes: whether ranks run passes of the batch, of which each may have another number. Then they do not
                ask each other, and a broken loss counts: all leave the whole step out.
        """
        if self._active != "skip":
            return own, total
        self._left_out = False
        if in_passes:
            self._passes, self._counted = self._passes + 1, self._counted + 1
            return own, total
        well = own == 0 or (given and bool(loss.detach().isfinite().all()))
        self._spoilt |= not well  # to be restored when the backward pass needs them no more
        mine = torch.tensor([own, float(well), float(well or not given)], dtype=torch.float64)
        rows = [mine]
        with self._waiting():
            group = self._group()
        if group is not None:
            rows = [torch.empty_like(mine) for _ in self._ranks]
            with self._waiting(), deadline("learn which losses are finite"):
                dist.all_gather(rows, mine, group=group)
        table = torch.stack(rows)
        bad, total = table[:, 2] == 0, (table[:, 0] * table[:, 1]).sum().item()
        self._passes += 1
        self._counted += total > 0 or not bool((table[:, 1] == 0).any())  # nothing to leave out, if all weigh 0
        if bad.any():
            their = "its" if bad.sum() == 1 else "their"
            self._say(f"{self._subject('loss', bad.tolist())} not finite: {their} samples do not count")
        return own if well else 0.0, total

    def weigh(self, loss: Tensor, weight: float, in_passes: bool = False) -> Tensor:
        """The loss times its weight; NaN times it if it counts and is not finite, unless ranks have left it out."""
        self._left_out_on_device, skips = False, self._active == "skip"
        if (self._active == "error" or (skips and in_passes)) and weight:
            if loss.device.type != "cpu":  # where nothing may wait for it
                bad = ~loss.detach().isfinite().all()
                self._loss = bad | self._loss
                self._spoilt |= skips and bool(bad)
                exact = torch.promote_types(loss.dtype, torch.float32)
                return loss * torch.full((), weight, dtype=exact, device=loss.device).masked_fill(bad, math.nan)
            if not (math.isfinite(loss.item()) if loss.numel() == 1 else bool(loss.detach().isfinite().all())):
                self._loss, weight, self._spoilt = True, math.nan, self._spoilt or skips
        return loss if weight == 1 else loss * weight

    # -- gradients ---------------------------------------------------------------------------------

    def _averages(self, model: nn.Module | None) -> bool:
        return self._active != "ignore" and getattr(model, "require_backward_grad_sync", True)

    def watch(self, start: Tensor, optimizers: Sequence[Optimizer], model: nn.Module | None) -> None:
        """Look at this rank's own gradients once they are ready, before DDP overwrites them.

        Args:
            start: the tensor with which the backward pass begins.
            optimizers: take the gradients in.
            model: perhaps wrapped in DDP.
        """

        def look() -> None:
            # Not finite now, and finite after the averaging of an earlier backward pass of this step.
            self._own = (gradients_nonfinite(optimizers) > self._spread) | self._own

        if self.shard_traffic is None and len(self._ranks) > 1 and self._averages(model) and start.requires_grad:
            after_own_backward(start, look)

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Look at this rank's own gradients before they are averaged into shards."""
        if self._active != "ignore":
            self._own = any_nonfinite(gradients) | self._own

    def check(self, optimizers: Sequence[Optimizer], model: nn.Module | None) -> None:
        """Look at the gradients after a backward pass, before hooks of the user, which ranks may have of their own."""
        if self._averages(model):
            self._spread = gradients_nonfinite(optimizers) | self._spread
            if self.shard_traffic is not None:  # others may see it in theirs
                with self._waiting(), deadline("learn whether gradients are finite"):
                    self._spread = self.shard_traffic.on_any_rank(self._spread)

    def _device_can_leave_out(self, scaled: bool, optimizer: Optimizer) -> bool:
        by_itself = self._on_devices and self._active == "error" and not scaled and self.shard_traffic is None
        return by_itself and leaves_out_on_device(optimizer)

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Let an optimizer step in this block, perhaps in its fused form, for which :meth:`skips_step` decides."""
        forms = [group.get("fused") for group in optimizer.param_groups]
        try:
            yield
        finally:
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
                for group, form in zip(optimizer.param_groups, forms, strict=False):
                    group["fused"] = form

    def _leave_to_device(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Let the device leave the step out if a gradient is not finite, and read later whether it has."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        finite = torch.stack(torch._foreach_norm([p.grad for p in parameters], math.inf)).isfinite()
        device = finite.device
        # Made by a kernel: to copy a number of the host's would wait for the device.
        loss, own, spread = (
            flag if isinstance(flag, Tensor) else torch.full((), flag, dtype=torch.bool, device=device)
            for flag in (self._loss, self._own, self._spread)
        )
        found = (spread | self._left_out_on_device) & ~finite.all()  # hooks may have put all gradients in order
        self._left_out_on_device = found
        for group in optimizer.param_groups:
            group["fused"] = True
        _place_steps(optimizer, on_device=True)
        optimizer.found_inf = found.float()  # type: ignore[attr-defined]
        stage = stage_of(device)
        self._flags = pinned(3, torch.bool) if self._flags is None else self._flags
        self._flags.copy_(torch.stack([loss, own, spread]), non_blocking=stage.has_streams)
        self._latest = DeviceFlags(self._flags, stage.ready(), parameters, finite, self._where())
        self._forget()

    def settle(self, module: nn.Module) -> None:
        """Learn what the device has found in the latest step; before the next one, and where a fit is looked at.

        Args:
            module: that the gradients belong to.

        Raises:
            NotFiniteError: on every rank, if something was not finite on one.
        """
        latest, self._latest = self._latest, None
        if latest is None:
            return
        if latest.ready is not None:
            with self._waiting():
                latest.ready.synchronize()
        loss, own, spread = latest.values.tolist()
        if spread:
            bad = {id(p) for p, finite in zip(latest.parameters, latest.finite.tolist(), strict=True) if not finite}
            name = next((name for name, p in module.named_parameters() if id(p) in bad), None)
            self._act(loss, own, name, False, latest.where)

    def skips_step(self, module: nn.Module, scaled: bool, optimizer: Optimizer) -> bool:
        """Act on what has been found, between the backward passes and the optimizer's step.

        Args:
            module: that the gradients belong to.
            scaled: whether a scaler skips steps with infinite gradients by itself.
            optimizer: that is about to step.

        Returns:
            Whether the optimizer is not to step, the same on every rank: under ``"skip"`` a gradient was not finite, or
            no sample is left.

        Raises:
            NotFiniteError: on every rank, if something is not finite on one.
        """
        if self._active == "ignore":
            return False
        self.settle(module)
        if self._device_can_leave_out(scaled, optimizer):
            self._leave_to_device(module, optimizer)
            return False
        if type(optimizer) in FUSED and not any(g["fused"] or g.get("capturable") for g in optimizer.param_groups):
            _place_steps(optimizer, on_device=False)  # ranks on CPUs may have joined
        self.restore(module)
        loss, own, spread = self._loss, self._own, bool(self._spread)
        nothing = self._passes > 0 and self._counted == 0
        self._forget()
        if nothing or self._left_out:  # several optimizers may step after the same backward passes
            self._left_out = True
            return True
        if not spread:
            return False
        name = next((name for name, p in module.named_parameters() if any_nonfinite([p.grad])), None)
        return self._act(bool(loss), bool(own), name, scaled, self._where())

    def _act(self, loss: bool, own: bool, name: str | None, scaled: bool, where: str) -> bool:
        """Find out whose loss or gradient was not finite (collective); whether the optimizer is not to step."""
        mine = loss, own, name
        with self._waiting():
            group = self._group()
        rows = [(loss, True, name)] if group is None else gather(mine, "what is not finite", group)
        losses, gradients, names = zip(*rows, strict=True)
        if any(losses):
            found = f"{self._subject('loss', losses)} not finite"
        elif scaled or not any(names):
            return False  # the scaler's business; or hooks have put all gradients in order
        else:
            # Under gradient_as_bucket_view=True averaging may have spread it before they looked.
            found = f"{self._subject('gradient', gradients)} not finite although the loss was"
            found += f", first in {next(filter(None, names))!r}"
        if self._active == "skip":
            self._say(f"{found}: no optimizer steps")
            self._left_out = True
            return True
        raise NotFiniteError(
            [0],
            f"At {where} {found}. The optimizer has not stepped: the weights are those from before. Lower the "
            "learning rate, clip gradients, or look at the samples of that batch. With on_nan='skip' such samples are "
            "left out of the step; on_nan='ignore' goes on, as Lightning's ddp does.",
        ).of_all()

    def _subject(self, what: str, bad: Sequence[bool]) -> str:
        ranks = [str(rank) for rank, is_bad in zip(self._ranks, bad, strict=True) if is_bad]
        if len(ranks) == 1:
            return f"the {what} of rank {ranks[0]} was"
        return f"the {'losses' if what == 'loss' else what + 's'} of ranks {', '.join(ranks)} were"

    def _say(self, text: str) -> None:
        self._skipped += 1
        if self._skipped & (self._skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th time
            rank_zero_warn(f"At {self._where()} {text} (on_nan='skip'; {self._skipped} times so far).")


def leaves_out_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer can leave a step out on its device: in a fused form, which the user has not ruled out."""
    groups = optimizer.param_groups
    if type(optimizer) not in FUSED or any(group["fused"] is False or group["foreach"] for group in groups):
        return False
    if any(group["differentiable"] or group.get("capturable") or isinstance(group["lr"], Tensor) for group in groups):
        return False
    if not optimizer.state and any(group.get("momentum") for group in groups):
        return False  # the first step: where it is left out, SGD's buffers hold what was in their memory
    taken = [p for group in groups for p in group["params"] if p.grad is not None]
    return bool(taken) and all(
        type(p) in (nn.Parameter, Tensor)
        and p.device == taken[0].device
        and p.device.type != "cpu"
        and p.is_floating_point()
        and not p.grad.is_sparse
        and p.numel()
        for p in taken
    )


def _place_steps(optimizer: Optimizer, on_device: bool) -> None:
    """Put Adam's counts of steps where its form needs them: the fused one on the device, the others on the host."""
    for p, state in optimizer.state.items():
        step = state.get("step") if isinstance(state, dict) else None
        if not isinstance(step, Tensor) or (step.device.type != "cpu") == on_device:
            return
        state["step"] = step.to(p.device if on_device else "cpu", torch.float32, non_blocking=on_device)


def gradients_nonfinite(optimizers: Sequence[Optimizer]) -> bool | Tensor:
    """Whether a gradient that they would take in is not finite; see :func:`any_nonfinite`."""
    return any_nonfinite(
        [p.grad for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    )


def any_nonfinite(gradients: Sequence[Tensor | None]) -> bool | Tensor:
    """Whether an element of some of them is not finite; beyond the CPU a tensor, which nobody awaits."""
    own = [local(g) for g in gradients if g is not None]
    values = [g._values() if g.is_sparse else g for g in own if g.numel()]
    if not values:
        return False
    if values[0].device.type != "cpu":
        return ~torch.stack(torch._foreach_norm(values, math.inf)).isfinite().all()
    # Here this norm is a hundred times as fast; it may overflow by itself.
    if math.isfinite(torch.stack(torch._foreach_norm(values)).sum().item()):
        return False
    return not all(bool(value.isfinite().all()) for value in values)
