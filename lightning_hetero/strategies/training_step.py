"""The parts of a training step: begin, forward, backward, the optimizer's step, and what comes of it."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_hetero import lightning_compat
from lightning_hetero.algorithms.base import Outcome
from lightning_hetero.algorithms.engine import Engine
from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.nonfinite import NonFiniteGuard
from lightning_hetero.batching.passes import batches_of
from lightning_hetero.batching.repartition import Repartition
from lightning_hetero.batching.sampler import Drawn
from lightning_hetero.batching.streams import EvaluatedStream
from lightning_hetero.batching.weights import (
    gradient_weight,
    preserve_buffers,
    replaced,
    skip_step_if,
    zero_backward,
    zero_gradients,
    zero_loss,
)
from lightning_hetero.comm.collectives import Collectives
from lightning_hetero.comm.failures import deadline
from lightning_hetero.errors import UnsupportedError, not_none
from lightning_hetero.lightning_compat import (
    ClosureResult,
    DataFetcherWrapper,
    evaluated_loader,
    fetched_batch,
    results_of,
)
from lightning_hetero.replicas.sharding import is_dtensor
from lightning_hetero.replicas.vectors import broadcast_tensors
from lightning_hetero.strategies.default_groups import CollectiveObserver
from lightning_hetero.strategies.idle_steps import IdleSteps
from lightning_hetero.strategies.metrics import (
    LoggedInPasses,
    restore_logged,
    sync_anywhere,
    warn_of_losses_over_all,
    weigh_logged,
)
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.position import describe
from lightning_hetero.strategies.trainer_checks import closure_again

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TrainingStep:
    """Weighs and measures what a rank does in a step.

    A batch goes through :meth:`begin`, :meth:`forward`, :meth:`weigh`, :meth:`backward` and :meth:`batch_ended`. A
    window, an optimizer's step with all the batches that it takes in, ends in :meth:`window_ended`, after which
    replicas may meet.

    Args:
        accounting: of this rank's batches.
        engine: what happens between replicas.
        finite: looks for losses and gradients that are not finite.
        collectives: what reduces values that are logged.
        options: of the strategy.
    """

    def __init__(
        self,
        accounting: BatchAccounting,
        engine: Engine,
        finite: NonFiniteGuard,
        collectives: Collectives,
        options: Options,
    ) -> None:
        self._accounting, self._engine, self._finite, self._collectives = accounting, engine, finite, collectives
        self._options, self._several = options, engine.view.count > 1
        self._observer = CollectiveObserver(accounting.timer, self._several)
        self._idle = IdleSteps(accounting, self._several)
        self._timer = accounting.timer
        self._draws: dict[int, Drawn] = {}  # of each batch since optimizers have stepped
        self.accumulated_scale = (
            1.0  # of gradients accumulated in the view before, to be means over the ranks of this one
        )
        self._stepped: dict[Optimizer, int] = {}  # the batch in which each has stepped last, by hand
        self._loss: Tensor | None = None  # of the running backward pass
        self._weight: float | None = None  # of the loss in the running backward pass; 0 if its samples are left out
        self._part = 0.0  # n_i / N of this rank in the latest backward pass, of the samples that count
        self._logged: Any | None = None  # the Trainer's collection of logged values
        self._counted = 0.0  # this rank's samples of the latest batch, for what is logged about it
        self._epoch, self._of_epoch = -1, 0.0  # the running one, and this rank's samples in it
        self._none = False  # whether the running training_step has returned None
        self._hooks: list[RemovableHandle] = []  # of the fit, on modules
        self._overrides = lightning_compat.Overrides()  # of the fit, if there may be passes
        self.passes = 0  # backward passes on the latest batch
        self._batches: Sequence[Any] = [None]  # of the latest one, of which this rank runs one after the other
        self._pass = 0  # the number of the running one
        self._mean: Tensor | None = None  # of the losses so far, if there are several
        self._result: ClosureResult  # of the running pass, after the first
        self._run: Callable[[Any], Any] = lambda batch: None
        self._logging = LoggedInPasses()

    def begin_fit(self, module: "pl.LightningModule") -> None:
        """Training of a module starts."""
        self.close()
        self._draws, self._stepped = {}, {}
        if self._options.max_batch_size is not None or self._options.whole_batches:
            lightning_compat.transfer_each_pass(module, self._overrides)
        weighed = self._options.balance != "off" and len(self._accounting.replica) > 1
        self._observer.weighed = weighed and not callable(getattr(module, "batch_weight", None))
        if self._observer.weighed:
            self._hooks = warn_of_losses_over_all(module)

    def begin(self, trainer: "pl.Trainer") -> None:
        """A batch is on its way to the device."""
        lightning_compat.watch_fetching(trainer, self._timer.fetching, self._timer.fetched)
        if trainer.training:
            self.batch_ended(trainer)  # if nothing else has ended the last one
            self._accounting.begin()
            self._counted = self._accounting.current().samples
            if trainer.current_epoch != self._epoch:
                self._epoch, self._of_epoch = trainer.current_epoch, 0.0
            self._of_epoch += self._counted
            self.passes = 0
            self._log_to(lightning_compat.results_of(trainer))
        else:
            self._collectives.settle()  # in training the step does so

    def _log_to(self, results: Any | None) -> None:
        self._logged = results
        weigh_logged(results, self._collectives, lambda: self._counted, lambda: self._of_epoch, self._logging)

    def forward(self, trainer: "pl.Trainer", batch: Any, run: Callable[[Any], Any]) -> Any:
        """Run the module's training step on a batch, or on the first of its passes.

        What it logs counts by this rank's samples.

        Args:
            trainer: runs the fit.
            batch: this rank's, or its :class:`~lightning_hetero.batching.passes.Passes`.
            run: the training step, given the batch of a pass.

        Returns:
            What the training step has returned.
        """
        module, drawn = trainer.lightning_module, self._accounting.current()
        self._draws[self._accounting.step] = drawn
        self._batches, self._run = batches_of(batch, len(drawn.pass_sizes)), run
        self._pass, self._mean = 0, None
        self._logging.begin(drawn.pass_sizes)
        if len(self._batches) > 1:
            lightning_compat.ResultOfPasses.of(trainer)
        if callable(measure := getattr(module, "batch_weight", None)):
            self._accounting.weigh(measure, batch)
        self._finite.before_forward(module)
        with nullcontext() if drawn.samples > 0 or self._accounting.idle else preserve_buffers(module):
            return self._run_pass(trainer)

    @property
    def goes_on(self) -> bool:
        """Whether another pass on this batch follows the running one."""
        return self._pass + 1 < len(self._batches)

    def _run_pass(self, trainer: "pl.Trainer") -> Any:
        """Run the training step on the batch of the running pass."""
        in_passes, self._none = self._accounting.current().in_passes, False
        instead = self._instead_of_step(trainer.lightning_module) if trainer.world_size > 1 or in_passes else None
        local = trainer.strategy.block_backward_sync() if self.goes_on else None  # type: ignore[attr-defined]
        self._observer.met = self._ranks_meet
        with ExitStack() as stack:
            meet, logged = self._collectives.preceding(self._ranks_meet), self._collectives.deferring()
            for context in filter(None, (instead, local, logged, meet)):
                stack.enter_context(context)
            with self._collectives.weighing(lambda: self._counted), self._observer.forward():
                output = self._run(self._batches[self._pass])
                self._logging.ended()
                return output

    def _ranks_meet(self, name: str = "a collective") -> None:
        """Refuse a collective that the user's training step calls, where ranks may run it different times."""
        self._idle.met(name)
        if self._accounting.current().in_passes and not self._logging.under_way:
            raise UnsupportedError(
                f"training_step calls {name}, while ranks run their parts of a batch in passes: each may run another "
                "number of them, so that some would wait forever. Raise max_batch_size, use a smaller batch with "
                "accumulate_grad_batches, or call it in a hook such as on_train_batch_end. self.log may be called."
            )

    def finish_pass(self, trainer: "pl.Trainer", loss: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        """Run the backward pass of one pass, of which the gradients stay on this rank, and begin the next.

        Args:
            trainer: runs the fit.
            loss: of the pass.
            backward: runs the backward pass of a loss.

        Returns:
            The loss of the next pass.
        """
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        with trainer.strategy.block_backward_sync(), self._observer.backward():  # type: ignore[attr-defined]
            weighed = self.weigh(loss, trainer.accumulate_grad_batches)
            with self._zero_backward(trainer.lightning_module) if self._weight == 0 else nullcontext():
                backward(weighed if scaler is None else scaler.scale(weighed))
        self._pass += 1
        self._result = lightning_compat.pass_result(trainer, lambda: self._run_pass(trainer))
        return not_none(self._result.closure_loss, "the loss of a pass")

    @contextmanager
    def _instead_of_step(self, module: "pl.LightningModule") -> Iterator[None]:
        """Go on with a loss that counts for nothing where the module's training step returns ``None`` in this block.

        Lightning, which refuses that among several ranks, leaves out the step on a single one. So does a rank that gets
        no samples because it is too slow.
        """
        step = module.training_step

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            output = self._idle.run(module, partial(step, *args, **kwargs), lambda: self._logging.repeat(self._logged))
            if output is not None or not module.automatic_optimization:
                return output
            if self._accounting.current().in_passes:
                raise UnsupportedError(
                    f"`training_step` returned None on rank {module.global_rank} at {describe(module.trainer)}, in one "
                    "of several passes on a batch, of which the others count already. Return `0.0 * loss`: its samples "
                    "then count, with a gradient of zero."
                )
            if len(self._accounting.replica) > 1 and self._finite.shard_traffic is not None:
                raise UnsupportedError(
                    f"`training_step` returned None on rank {module.global_rank} at {describe(module.trainer)}. The "
                    "model is sharded, and the other ranks need this one in their backward passes. Return "
                    "`0.0 * loss`: its samples then count, with a gradient of zero."
                )
            if len(self._accounting.replica) > 1 and not self._finite.asks:
                raise UnsupportedError(
                    f"`training_step` returned None on rank {module.global_rank} at {describe(module.trainer)}. The "
                    "other ranks of its replica weigh their samples without knowing that this rank's are left out. "
                    "Under hetero_ddp `on_nan='skip'` tells them, by a small message before each backward pass. Else "
                    "return `0.0 * loss`: its samples then count, with a gradient of zero."
                )
            self._none = True
            return zero_loss(module)

        with replaced(module, "training_step", training_step):
            yield

    def weigh(self, loss: Tensor, batches_per_window: int) -> Tensor:
        """The loss times this rank's weight, with which DDP's plain mean over ranks is that over all samples.

        Args:
            loss: the mean over this rank's samples, divided by the number of batches in a window.
            batches_per_window: that number.
        """
        drawn, (before, total) = self._accounting.current(), self._accounting.weights()
        if len(self._batches) > 1:
            part = self._accounting.pass_fractions()[self._pass]
            before *= part
            self._mean = part * loss.detach() + (0.0 if self._mean is None else self._mean)
        mean = loss.detach() if self._mean is None else self._mean
        self._loss = None if self._none else mean * batches_per_window
        own, total = self._finite.count(loss, before, total, not self._none, drawn.in_passes)
        if self._none and not self._finite.asks:  # of a replica of one rank
            own, self._draws[self._accounting.step] = 0.0, drawn._replace(total=0.0, parts={})
        left_out = own < before and (total or self._none)
        if left_out:  # what hooks log from now on counts as little as its samples
            self._counted = 0.0
        self._weight = gradient_weight(own, total, len(self._accounting.replica))
        self._part = own / total if total else 0.0
        return self._finite.weigh(loss, self._weight, drawn.in_passes)

    @contextmanager
    def backward(self, trainer: "pl.Trainer", loss: Tensor, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Run the backward pass of a weighted loss in this block."""
        model = trainer.strategy.model
        if not self._several:  # else ranks may run backward passes of their own
            self._collectives.reduce_deferred()
        self.passes += 1
        self._finite.watch(loss, optimizers, model)
        self._timer.watch(loss)  # last, so that the guard's look counts as this rank's own work
        nothing = self._zero_backward(trainer.lightning_module) if self._weight == 0 else nullcontext()
        with deadline("average gradients", self._timer.works), nothing, self._observer.backward():
            yield
        self._timer.backward_done()
        if self._loss is not None:  # once, also where the step is repeated
            self._engine.take_loss(self._loss)
        if self._mean is not None:
            lightning_compat.ResultOfPasses.of(trainer).replace(self._mean, self._result)
            del self._result  # with the graph of the last pass
            self._batches, self._pass = [None], 0
        self._weight = self._loss = None
        self._engine.before_overwrite(after_backward=True)  # before hooks, which may do so
        self._finite.check(optimizers, model)

    def _zero_backward(self, module: nn.Module) -> AbstractContextManager[None]:
        """A block in which a backward pass gives zeros, whatever the loss is."""
        shard_traffic = self._finite.shard_traffic
        return zero_backward(module) if shard_traffic is None else shard_traffic.zeros()

    @property
    def counts(self) -> bool:
        """Whether this rank's samples have a part in the gradient of the running step."""
        return self._accounting.counts if self._weight is None else self._weight > 0

    def optimize(
        self, trainer: "pl.Trainer", optimizer: Optimizer, closure: Callable, step: Callable[[Callable], Any]
    ) -> Any:
        """Let an optimizer step, unless what it would take in is not finite, or no sample at all.

        All hooks run either way, since ranks may meet in them; if the step is left out, with gradients of zero.

        Args:
            trainer: runs the fit.
            optimizer: that is to step.
            closure: makes the gradients.
            step: lets it step, given the closure.
        """
        module, scaled = trainer.lightning_module, getattr(trainer.precision_plugin, "scaler", None) is not None
        left_out = called = False

        def gradients() -> Any:
            nonlocal left_out, called
            if called and self._options.on_peer_loss == "continue":
                raise closure_again(type(optimizer).__name__).of_all()
            called = True
            output = closure()
            if isinstance(optimizer, LBFGS):  # it goes by the loss: how far it steps, and how often it asks again
                output = self._accounting.mean_loss(float(output), self._part)
            self._engine.before_overwrite()  # also without a backward pass
            left_out = self._finite.skips_step(module, scaled, optimizer) or self._padding_only(optimizer)
            if left_out:
                zero_gradients(optimizer)
            if self._finite.shard_traffic is not None and self._options.on_peer_loss == "continue":
                with self._timer.waiting(), deadline("learn that all ranks have their gradients"):
                    self._finite.shard_traffic.on_any_rank(False)  # a step that some have taken cannot be repeated
            return output

        with (
            self._finite.stepping(optimizer),
            skip_step_if(lambda: left_out, optimizer),
            self._collectives.weighing(lambda: self._counted),
        ):
            output = step(gradients)
        self._stepped[optimizer] = max(self._draws, default=-1)
        return output

    def _padding_only(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer would take in padding only: momentum and decay would move the replica all the same."""
        before, running = self._stepped.get(optimizer, -1), self._accounting.step
        found = [drawn.total for step, drawn in self._draws.items() if step > before or step == running]
        return bool(found) and not any(found)

    def batch_ended(self, trainer: "pl.Trainer", window: bool = False) -> None:
        """This rank has done its work on a batch, and perhaps on a window."""
        self._finite.restore(trainer.lightning_module)
        if self._accounting.drawn is not None:
            last = lightning_compat.epoch_ends(trainer) or 0 <= trainer.max_steps <= trainer.global_step + 1
            if self._idle.left_out and last:
                counted, self._counted = self._counted, 0.0
                follows, self._idle.left_out = self._accounting.loaders.rank in self._idle.left_out, set()
                self._logging.agree(trainer.lightning_module, self._collectives, follows)
                self._counted = counted
            ends = window and not lightning_compat.accumulates(trainer)
            self._accounting.end(
                report=self._engine.decide_exchange(
                    self._accounting.step + 1, ends, lightning_compat.epoch_ends(trainer)
                )
            )
        else:
            self._accounting.send_report()

    def hooks(self) -> AbstractContextManager[None]:
        """A block in which the hooks around a backward pass and an optimizer's step run."""
        return self._observer.hooks()

    def window_ended(self, manual: bool) -> None:
        """An optimizer has stepped (with manual optimization, however often); after :meth:`batch_ended`."""
        if manual:  # it may step later on, by what this batch has given: the latest one, and one with samples, tell
            latest = [*self._draws][-1:] + [step for step, drawn in self._draws.items() if drawn.total][-1:]
            self._draws = {step: self._draws[step] for step in sorted({*latest})}
        else:
            self._draws = {}
        self._engine.window_ended()

    @property
    def window_start(self) -> int:
        """The first batch since optimizers have stepped."""
        return min(self._draws, default=self._accounting.step)

    def continue_from(self, former: "TrainingStep", repartition: Repartition) -> None:
        """Go on in the midst of a window where another one has stopped, which was made from an earlier view."""
        replica, running = self._accounting.replica, self._accounting.step
        self._draws = {
            step: drawn.for_survivors(repartition.former_ranks, replica) for step, drawn in former._draws.items()
        }
        pairs = [(drawn.total, former._draws[step].total) for step, drawn in self._draws.items() if step != running]
        now, before = map(sum, zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        # Each accumulated gradient is a part of W / N times a sum over N samples.
        self.accumulated_scale = len(replica) / len(former._accounting.replica) * (before / now if now else 1.0)
        self._stepped, self._counted = former._stepped, former._counted
        self._epoch, self._of_epoch = former._epoch, former._of_epoch
        self.passes, self._hooks, self._overrides = former.passes, former._hooks, former._overrides
        self._batches, self._run, self._pass, self._mean = former._batches, former._run, former._pass, former._mean
        self._logging = former._logging
        self._log_to(former._logged)

    def close(self) -> None:
        """The fit has ended; idempotent."""
        restore_logged(self._logged)
        self._overrides.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def say_outcome(outcome: Outcome | None, strategy: str) -> None:
    """Tell the user what a step has brought about.

    Args:
        outcome: of the step, if any.
        strategy: its name.
    """
    if outcome is not None and outcome.warning is not None:
        rank_zero_warn(outcome.warning)
    if outcome is not None and outcome.info is not None:
        rank_zero_info(f"{strategy}: {outcome.info}")


def explain_unused(exception: BaseException, strategy: str) -> None:
    """Say in a strategy's terms what to do about parameters without a gradient, if an error is about them."""
    lightning_compat.augment_message(
        exception,
        pattern=".*Expected to have finished reduction in the prior iteration.*",
        new_message=(
            "Some parameters had no part in the loss that training_step returned. If this is meant, give "
            f"`find_unused_parameters=True` to {strategy}, or add `_find_unused_parameters_true` to the strategy's "
            "name."
        ),
    )


def mark_sizes_dynamic(batch: Any) -> None:
    """Tell ``torch.compile``, where it is in use, that the sizes of batches vary: else each size is compiled anew.

    Args:
        batch: its tensors' first dimension is that of samples.
    """
    if (dynamo := sys.modules.get("torch._dynamo")) is None or not hasattr(dynamo, "maybe_mark_dynamic"):
        return
    for value in tree_leaves(batch):
        if isinstance(value, Tensor) and value.dim() and len(value) > 1:
            dynamo.maybe_mark_dynamic(value, 0)


class EvaluationStep:
    """Runs the module's step on a batch that is validated, tested or predicted, and counts the samples.

    It goes around DDP, which would wait for the other ranks: these need not run the same number of batches.

    Args:
        collectives: of the strategy.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._done: float | None = 0.0  # samples of this rank in the running evaluation; None if they are unknown

    def run(
        self, trainer: "pl.Trainer", step: Callable, context: AbstractContextManager, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step.

        Args:
            trainer: that evaluates.
            step: of the module.
            context: of the precision plugin, to run it in.
            *args: of the step: the batch or what fetches it, then the batch's number and the loader's.
            **kwargs: of the step.
        """
        source = args[0] if args else None
        fetched = _Fetched(source) if isinstance(source, DataFetcherWrapper) else None  # by the step itself
        samples = fetched or (lambda: _samples(source))
        results = results_of(trainer)
        weigh_logged(results, self._collectives, samples, lambda: self._done)
        loader = args[2] if len(args) > 2 else 0
        stream, steps = evaluated_loader(trainer, loader)
        own = isinstance(stream, EvaluatedStream)
        met = self._collectives.preceding(lambda: stream.before_collective(steps)) if own else nullcontext()
        with context, self._collectives.weighing(samples), met:
            output = step(*args, **kwargs)
        if results is not None:
            if loader == 0 and (len(args) < 2 or args[1] == 0):
                self._done = 0.0
            found = samples()
            self._done = None if found is None or self._done is None else self._done + found
            weigh_logged(results, self._collectives, lambda: found, lambda: self._done)  # the batch may go
        return output


_IGNORED = "_ddp_params_and_buffers_to_ignore"  # by which a module tells DDP, and Lightning, what not to share


@contextmanager
def values_shared(module: nn.Module, stage: str | None, device: torch.device) -> Iterator[None]:
    """Set a strategy up in this block; outside of a fit all ranks then have rank 0's whole values (collective).

    Lightning would share them on the model's device, of which gloo may know nothing. They go through the CPU instead,
    and so do the states of the model's metrics.

    Args:
        module: to be evaluated, or trained.
        stage: what the Trainer is to do. In a fit DDP, or the strategy, sees to the values.
        device: on which this rank computes.
    """
    if device.type != "cpu":
        sync_anywhere(module)
    if stage == TrainerFn.FITTING:
        yield
        return
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with replaced(module, _IGNORED, list(values)):
        yield
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}  # on their device now
    whole = {name: value for name, value in values.items() if not is_dtensor(value)}
    broadcast_tensors(value.data for name, value in whole.items() if name not in vars(module).get(_IGNORED, ()))


class _Fetched:
    """The samples of the batch that a step fetches, once it has done so; unknown if it fetches another number."""

    def __init__(self, batches: DataFetcherWrapper) -> None:
        self._fetcher, self._before = batches.data_fetcher, batches.fetched

    def __call__(self) -> float | None:
        return _samples(fetched_batch(self._fetcher)) if self._fetcher.fetched == self._before + 1 else None


def _samples(batch: Any) -> float | None:
    """The samples in a batch as Lightning counts them; ``None`` if they are unknown."""
    if isinstance(batch, Iterator):  # to look into it would use it up
        return None
    try:
        return float(extract_batch_size(batch))
    except Exception:  # a class of the user's can do anything when it is looked into
        return None
