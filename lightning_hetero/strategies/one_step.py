"""One training step, from top to bottom, as Lightning asks a strategy for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from lightning_hetero import _lightning
from lightning_hetero.engine.drift import SameParameters
from lightning_hetero.errors import DisagreementError
from lightning_hetero.strategies.position import describe
from lightning_hetero.strategies.replica_ddp import take_unfrozen_in
from lightning_hetero.strategies.training import apply

_PATIENCE = 5.0  # seconds

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


def begin(strategy: "HeteroStrategy") -> None:
    """A batch is on its way to the device."""
    strategy.survival.again(lambda: strategy.step.begin(strategy.trainer))


def forward(strategy: "HeteroStrategy", run: Callable[[], Any], batch: Any) -> Any:
    """Run the module's ``training_step``. With manual optimization that is all of a step.

    Args:
        strategy: in a fit.
        run: runs it.
        batch: its first argument.
    """
    strategy.survival.again(lambda: strategy.engine.before_window())
    take_unfrozen_in(strategy)

    def step() -> Any:
        with strategy.step.forward(strategy.trainer, batch):
            return run()

    output = strategy.survival.step(step, left_out=lambda: None)
    if not strategy.trainer.lightning_module.automatic_optimization:
        if strategy.step.passes == 0:
            strategy.survival.again(lambda: _none_ran_backward(strategy))
        window_ended(strategy)
    return output


def _none_ran_backward(strategy: "HeteroStrategy") -> None:
    """See that no rank of the replica has run a backward pass on this batch, as this one has not.

    Raises:
        DisagreementError: others have, it seems. They wait for this rank's gradients.
    """
    assert strategy.job is not None
    with strategy.timer.waiting():
        silent = strategy.job.others_skip(strategy.share.step, _PATIENCE, strategy.options.limit.total_seconds())
    if silent:
        others = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        raise DisagreementError(
            f"rank {strategy.global_rank} ran no backward pass in `training_step` at {describe(strategy.trainer)}, and "
            f"{others} of its replica did: with gradients to average they wait for this rank, and would get those of "
            "its next batch. With manual optimization all ranks must run the same number of backward passes on a "
            "batch. Where a rank has nothing to learn from its part, let it run "
            "`self.manual_backward(0.0 * loss)` instead of returning early."
        )


def backward(
    strategy: "HeteroStrategy",
    loss: Tensor,
    optimizer: Optimizer | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Run a backward pass of the loss, weighed by this rank's samples.

    Args:
        strategy: in a fit.
        loss: the mean over this rank's samples.
        optimizer: that is to step, where Lightning knows it.
        args: of the user's ``manual_backward``.
        kwargs: of the user's ``manual_backward``.
    """
    trainer, module, precision = strategy.trainer, strategy.trainer.lightning_module, strategy.precision_plugin
    loss = strategy.step.weigh(loss, trainer.accumulate_grad_batches)
    strategy.pre_backward(loss)
    loss = precision.pre_backward(loss, module)
    with strategy.step.backward(trainer, loss, strategy.optimizers):
        precision.backward(loss, module, optimizer, *args, **kwargs)
    loss = precision.post_backward(loss, module)
    strategy.post_backward(loss)
    if module.automatic_optimization and _lightning.accumulates(trainer):
        strategy.step.batch_ended(trainer)
    return loss


def optimize(
    strategy: "HeteroStrategy", optimizer: Optimizer, closure: Callable[[], Any], stepping: Callable[[Callable], Any]
) -> Any:
    """Let an optimizer step. With automatic optimization that makes the gradients first, and ends a window.

    Args:
        strategy: in a fit.
        optimizer: that is to step.
        closure: makes the gradients.
        stepping: lets it step, given the closure.
    """

    def step() -> Any:
        with strategy.step.hooks():
            return strategy.step.optimize(strategy.trainer, optimizer, closure, stepping)

    output = strategy.survival.step(step, left_out=lambda: _lightning.leave_out(closure))
    if strategy.trainer.lightning_module.automatic_optimization:
        window_ended(strategy)  # before schedulers and callbacks
    return output


def window_ended(strategy: "HeteroStrategy") -> None:
    """An optimizer has stepped, or with manual optimization any number of them: replicas may meet."""
    strategy.survival.again(lambda: strategy.step.batch_ended(strategy.trainer, window=True))
    strategy.step.window_ended()
    if (same := strategy.parts.same) is not None:
        _compare(strategy, same)
    apply(strategy.survival.exchange(lambda: strategy.engine.exchange()), type(strategy).__name__)
    strategy.survival.again(lambda: strategy.engine.met())


def _compare(strategy: "HeteroStrategy", same: SameParameters) -> None:
    """See now and then that unlike devices of a replica hold the same parameters (collective over the replica)."""
    begun = False

    def once() -> None:  # after a loss not again: others may have completed it
        nonlocal begun
        if not begun:
            begun = True
            with strategy.timer.waiting():
                same.stepped(strategy.trainer.lightning_module, lambda: describe(strategy.trainer))

    strategy.survival.again(once)
