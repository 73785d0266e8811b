"""Interface of an algorithm between replicas: the averager, its traits, and what it is given and returns at a step."""

import datetime
import dis
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import getattr_static, getclosurevars
from types import CodeType, FunctionType
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.algorithms.state import (
    InFlight,
    Own,
    PendingExchange,
    PerReplica,
    Scratch,
    Shared,
    Stateful,
    VectorStart,
    carry,
    check_declared,
    fields_of,
    in_flight,
    read,
    remove_pending,
    scratch_in_use,
    start,
    write,
)
from lightning_hetero.comm.all_reduce import Average, ReplicaLinks
from lightning_hetero.comm.compression import Feedback
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.object_collectives import finite
from lightning_hetero.comm.staging import memory_like
from lightning_hetero.comm.topology import Topology
from lightning_hetero.errors import ConfigurationError, NotFiniteError, UnsupportedError
from lightning_hetero.replicas.optimizer_states import zero_nonfinite_state
from lightning_hetero.replicas.vectors import LayoutChange, Replica, wide_dtype

__all__ = ["Averager", "FitInfo", "Outcome", "StepContext", "Traits"]
log = logging.getLogger("lightning_hetero")


@dataclass(frozen=True)
class Traits:
    """Constant properties of an algorithm.

    Attributes:
        blocking: all ranks wait for each other after a step that is :meth:`~Averager.due`.
        lockstep: all replicas exchange after the same steps.
        needs_others: one replica alone has nothing to average, and the averager is not asked.
        fresh_start: what a replica continues with after its own values were left out of an average because they were
            not finite, in words.
        between: what is validated and saved between two exchanges, in words, if that is worth a warning when it happens
            more often than exchanges. Then :attr:`Outcome.exchanged` must be told.

    Example::

        from lightning_hetero import Traits

        traits = Traits(needs_others=False)  # one replica alone has something to do, too
    """

    blocking: bool = True
    lockstep: bool = True
    needs_others: bool = True
    fresh_start: str = "the mean of the others"
    between: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a step, or of the preparation or the end of a fit.

    Attributes:
        exchanged: this replica has completed an exchange.
        warning: what to warn the user of.
        info: what to tell the user, without alarm. The strategy's name will stand before it.

    Example::

        from lightning_hetero import Outcome

        outcome = Outcome(exchanged=True, info="replicas have met for the first time")
    """

    exchanged: bool = False
    warning: str | None = None
    info: str | None = None


@dataclass(frozen=True)
class FitInfo:
    """Job and length of the fit that is about to begin.

    Attributes:
        topology: where the ranks live; ``None`` in tests that have no job.
        replicas: the ranks of each replica.
        groups: makes process groups; ``None`` in tests that have no job.
        interface: this rank's address in the network between the ranks.
        skip: whether a replica that holds values that are not finite is left out, instead of raising an error.
        length: gives the number of optimizer steps of the fit, and of an epoch; infinite where nobody knows. It sets
            the training data up, so ask only if you need to know.
        fast_dev_run: whether this is the Trainer's trial of a few batches.
        step_seconds: gives the median seconds of this rank's latest optimizer steps, without exchanges between
            replicas, measured on its device; NaN before the first.
        regrouped: whether ranks have left the job, or joined it, since it began.

    Example::

        from lightning_hetero import FitInfo

        steps, steps_per_epoch = FitInfo().length()  # in tests nothing is known
    """

    topology: Topology | None = None
    replicas: tuple[tuple[int, ...], ...] = ()
    groups: Groups | None = None
    interface: str = "127.0.0.1"
    skip: bool = False
    length: Callable[[], tuple[float, float]] = lambda: (math.inf, math.inf)
    fast_dev_run: bool = False
    step_seconds: Callable[[], float] = lambda: math.nan
    regrouped: bool = False

    def in_steps(self, seconds: float) -> float:
        """Optimizer steps that this rank takes in so many seconds; NaN before its first step."""
        step = self.step_seconds()
        return seconds / step if step > 0 else math.nan

    @property
    def job(self) -> tuple[Topology, Groups]:
        """The topology and the process groups of the job.

        Raises:
            UnsupportedError: there is no job.
        """
        if self.topology is None or self.groups is None:
            raise UnsupportedError("this averager needs a job: let a strategy call its setup.")
        return self.topology, self.groups


class StepContext(NamedTuple):
    """Facts of the optimizer step just taken, the same on all ranks.

    A step takes in all batches over which gradients accumulate.

    Attributes:
        step: optimizer steps since the start of the fit, this one included.
        epoch_ends: whether it was the last of its epoch.
        samples_per_replica: samples of a full batch that each replica takes by the plan in force.
        training_loss: gives the mean training loss over the samples of all ranks since it was last asked for
            (collective).
        metric: gives the mean over all ranks of the latest value of a logged metric, by its name; ``None`` if it has
            not been logged since it was last asked for (collective).

    Example::

        from lightning_hetero import StepContext

        context = StepContext(step=8, epoch_ends=False, samples_per_replica=[48, 16])
    """

    step: int
    epoch_ends: bool
    samples_per_replica: Sequence[int]
    training_loss: Callable[[], float] = lambda: math.nan
    metric: Callable[[str], float | None] = lambda name: None


class ReplicaLoss(NamedTuple):
    """Loss of replicas, as one that remains sees it.

    Attributes:
        former: this replica's state before.
        kept: of each replica that remains, its index before.
        context: of this replica's latest step.
    """

    former: Mapping[str, Any]
    kept: Sequence[int]
    context: StepContext


#: Attributes that only the base, and algorithms of this package, set.
RESERVED = "_optimizers", "_packed", "_spare", "links", "replica", "run"


class Averager(Stateful, ABC):
    """Base of algorithms between replicas. It touches neither Lightning, nor the data, nor the network.

    Write one as a dataclass. Its fields are its options: check them in ``__post_init__``. What its next steps depend on
    is its state: declare it, without annotations, in one of the roles :class:`Shared`, :class:`Own`,
    :class:`PerReplica`, :class:`InFlight` and :class:`Scratch`. Checkpoints, lost replicas, newcomers and parameters
    that become trainable are then seen to (:mod:`lightning_hetero.algorithms.state`). A new instance serves each fit.

    Only :meth:`before_step` and :meth:`after_step` change parameters. :meth:`consensus` and :meth:`before_save` may
    wait for other replicas, but never mix, cancel or advance, so that validating and saving do not change the training.

    Decide by what all ranks know alike: the step, the samples. A local loss or a local clock would let one rank wait
    for an exchange that the others do not make.

    Attributes:
        traits: what is always true of the algorithm.
        replica: this rank's values, since :meth:`setup`.
        links: the network between replicas, since :meth:`setup`.
        run: what is known of the job and the fit, since :meth:`setup`.
        reference: the last mean that all ranks know, on the CPU, in fp32 or wider. What travels is the difference from
            it, which is small, so that rounding it on the wire is harmless.
        commits: how many exchanges this replica has completed.
        pairings: where replicas exchange one to one, at the end of the fit: of each replica, the number of its
            completed exchanges with each.

    Example::

        from dataclasses import dataclass

        from lightning_hetero import Averager

        @dataclass
        class LocalSGD(Averager):
            every: int = 8

            def due(self, context):
                return context.step % self.every == 0
    """

    traits: ClassVar[Traits] = Traits()
    replica: Replica
    links: ReplicaLinks
    run: FitInfo
    # Memory for the next exchange, empty where something else uses it: for this replica's values, and the mean.
    _packed: list[Tensor]
    _spare: list[Tensor]
    _optimizers: Callable[[], Sequence[Optimizer]]
    reference = Shared[list[Tensor]](VectorStart(1.0, excluded=True))
    commits = Shared[int](0)
    pairings: list[list[int]] | None = None

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in set_by(cls, RESERVED):
            raise ConfigurationError(
                f"{cls.__name__} sets {name}, which averagers use themselves. Take another name, such as "
                f"`my_{name.lstrip('_')}`."
            )
        if (clock := clock_in(cls, cls.due)) is not None:
            raise ConfigurationError(
                f"{cls.__name__}.due reads a clock ({clock}). Each rank has its own, so that one would wait for an "
                "exchange that others do not make. Decide by what all ranks know alike: context.step, samples, state."
            )

    # -- options -----------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """The options by name, as they are compared between ranks and shown in reports."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}  # type: ignore[arg-type]

    # -- the beginning of a fit --------------------------------------------------------------------

    def make_replica(self, module: nn.Module, settle: Callable[[], None] | None = None) -> Replica:
        """The values of a model that replicas exchange.

        Args:
            module: the model, on its device.
            settle: makes the ranks of the replica alike in what only one of them keeps, such as buffers.
        """
        return Replica(module, settle)

    def setup(
        self,
        replica: Replica,
        links: ReplicaLinks,
        optimizers: Callable[[], Sequence[Optimizer]],
        run: FitInfo | None = None,
    ) -> Outcome | None:
        """Take what the fit gives, and start the state; returns what :meth:`prepare` returns.

        All replicas hold the same values now.

        Args:
            replica: this rank's values.
            links: the network between replicas.
            optimizers: gives the optimizers.
            run: what is known of the job and the fit. Default: nothing.

        Raises:
            ConfigurationError: its class declares :class:`InFlight` state, but not what to do with it.
        """
        kind = type(self)
        if (declared := fields_of(kind, InFlight)) and kind.arrive is Averager.arrive:
            raise ConfigurationError(
                f"{kind.__name__}.{declared[0].name} is InFlight, but {kind.__name__} has no method "
                "arrive(self, pending, step), which applies an exchange when it has passed. Add one."
            )
        self.replica, self.links, self._optimizers, self.run = replica, links, optimizers, run or FitInfo()
        links.lay_out(replica.layout)
        self._packed, self._spare = replica.pack(), []
        start(self)
        outcome = self.prepare()
        check_declared(self, starts=True)
        return outcome

    def initial_values(self) -> list[Tensor]:
        """The values of the model at :meth:`setup`: new vectors on the CPU, in fp32 or wider."""
        return [memory_like(flat, wide_dtype(flat)).copy_(flat) for flat in self._packed]

    def prepare(self) -> Outcome | None:
        """Make what the fit needs besides its state; :attr:`replica`, :attr:`links` and the state are there."""
        return None

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers. Their state appears with their first step."""
        return self._optimizers()

    # -- steps -------------------------------------------------------------------------------------

    @abstractmethod
    def due(self, context: StepContext) -> bool:
        """Whether all replicas meet after this step; the same on all ranks. It changes nothing.

        Where replicas meet anyway, ranks also tell each other how fast they are.
        """

    def before_step(self, context: StepContext) -> None:
        """Before the first forward pass of a step; ``context.step`` counts the steps before it."""

    def after_step(self, context: StepContext) -> Outcome | None:
        """After the optimizer's step: :meth:`meet` if that is :meth:`due`.

        It is called again if the loss of a replica breaks it, as :meth:`before_step` is: take the number of steps from
        ``context``, and change state after what can break.
        """
        return self.meet(context) if self.due(context) else None

    def meet(self, context: StepContext) -> Outcome | None:
        """Bring all replicas together (collective): take the mean over."""
        self.adopt(self.average(context))
        return None

    def average(self, context: StepContext, payload: float = math.nan) -> Average:
        """The mean of all replicas, weighted by samples (collective).

        Args:
            context: of the step.
            payload: a number of this replica for all.

        Returns:
            The mean, in memory that the next call will overwrite unless :meth:`adopt` has made it the reference.
        """
        self._packed = self.replica.pack(self._packed or None)
        self._spare = self._spare or [memory_like(old) for old in self.reference]
        samples = context.samples_per_replica
        return self.links.average(self._packed, samples, self.reference, self._spare, payload=payload)

    def adopt(self, average: Average) -> None:
        """Let the model take over the mean of :meth:`average`, and let that be the new reference."""
        self.apply_mean(average)
        self._spare = self.set_reference(average)

    def apply_mean(self, average: Average) -> None:
        """Let the model take over a mean."""
        self.replica.unpack(average.mean)
        if not average.healthy[self.links.index]:
            zero_nonfinite_state(self.optimizers)

    def set_reference(self, average: Average) -> list[Tensor]:
        """Let the mean be the new reference: an exchange is complete. Returns memory that is free now: the old one."""
        free, self.reference = self.reference, average.mean
        self.commits += 1
        return free

    def is_finite(self, values: Sequence[Tensor]) -> bool:
        """Whether values of this replica are finite; if not, it counts as left out.

        Raises:
            NotFiniteError: it may not be left out (``on_nan="error"``).
        """
        if finite(values):
            return True
        if not self.run.skip:
            raise NotFiniteError([self.links.index])
        self.links.traffic.skipped.append(self.links.index)
        return False

    # -- what others see ---------------------------------------------------------------------------

    def consensus(self, context: StepContext) -> list[Tensor]:
        """The values to evaluate and to save: here the mean of all replicas, weighted by samples (collective)."""
        return self.average(context).mean

    @property
    def consensus_is_mean(self) -> bool:
        """Whether the consensus at the end of a step is the mean of the replicas' values, or a center.

        The same on all ranks. Then that of a checkpoint is found in the background.
        """
        return type(self).consensus is Averager.consensus

    def join_values(self, context: StepContext) -> list[Tensor]:
        """The values from which all replicas go on together when others join (collective): here the consensus."""
        return self.consensus(context)

    def finish(self, context: StepContext) -> Outcome | None:
        """End of the fit, with nothing under way any more: make all replicas equal (collective); here the mean."""
        self.adopt(self.average(context))
        return None

    def status(self, step: int) -> dict[str, float | str]:
        """The algorithm's own numbers and words for logs and reports, by name."""
        return {}

    # -- exchanges in the background ---------------------------------------------------------------

    def arrive(self, pending: PendingExchange, step: int) -> None:
        """Apply an exchange that has passed in the background; only algorithms with :class:`InFlight` state need it.

        Args:
            pending: is no longer in the state.
            step: optimizer steps done.
        """
        raise NotImplementedError  # `setup` refuses an algorithm that lacks it

    def complete(self, context: StepContext) -> None:
        """Complete what is under way, before the fit ends or other parameters become trainable (collective).

        Here all :class:`InFlight` exchanges arrive.
        """
        self.arrive_all(list(in_flight(self)), context.step)

    def arrive_all(self, arriving: Sequence[PendingExchange], step: int) -> None:
        """Wait for exchanges, then apply them: all of them, or none if a replica is lost.

        Args:
            arriving: exchanges under way.
            step: optimizer steps done.
        """
        for pending in arriving:
            pending.result()
        for pending in arriving:
            remove_pending(self, pending)
            self.arrive(pending, step)

    # -- the lifecycle, beyond what follows from the declared state ----------------------------------

    def before_save(self, lost: Sequence[int] | None = None) -> None:
        """Bring the state up to date with what is kept elsewhere, before it is saved (collective).

        It is for a checkpoint, when others join, when other parameters become trainable, and when replicas are lost.

        Args:
            lost: indices, in the links before, of replicas that were lost. Then :attr:`links` connects the survivors
                alone already; what the averager has made of the links before may be broken, and is closed next.
        """

    def after_restore(self, loss: ReplicaLoss | None = None) -> None:
        """Bring what is kept elsewhere up to date with the state, which has been restored (collective).

        Args:
            loss: the state is that of the survivors of this loss. Repair what does not follow from the roles.
        """

    def on_missed(self, step: int) -> Literal["adopt", "keep"]:
        """The policy for this replica's values if the others have completed an exchange in which it lost connections.

        Args:
            step: optimizer steps done.

        Returns:
            ``"adopt"``: the reference takes their place; ``"keep"``: they stay as they are.
        """
        return "adopt"

    def close(self) -> None:
        """Let go of all resources; local, idempotent, also after an error."""


def set_by(kind: type, names: Sequence[str]) -> list[str]:
    """Those of some names that a class outside of this package sets in a method, on whatever object."""
    if kind.__module__.startswith("lightning_hetero."):
        return []
    codes = [value.__code__ for value in vars(kind).values() if hasattr(value, "__code__")]
    stored = {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return [name for name in names if name in stored]


def clock_in(kind: type, function: Any, seen: tuple[Any, ...] = ()) -> str | None:
    """The name of a clock that a method reads, itself or by what it calls; ``None``: it is seen to read none.

    Args:
        kind: class of the method. It, and functions and methods from the same package as this class, are looked into.
        function: the method.
        seen: functions that call it.
    """
    package = kind.__module__.partition(".")[0]
    # Of a property, or of a classmethod:
    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
    if function in seen or not isinstance(function, FunctionType) or function.__module__.partition(".")[0] != package:
        return None
    names = {**function.__globals__, **getclosurevars(function).nonlocals}
    attributes = {name: getattr_static(kind, name, None) for name in dir(kind)}
    loads = {"IMPORT_NAME": sys.modules, "LOAD_GLOBAL": names, "LOAD_DEREF": names}
    loads |= {"LOAD_ATTR": attributes, "LOAD_METHOD": attributes}
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for step in [step for step in dis.get_instructions(code) if step.opname in loads]:
            if step.argval in ("in_steps", "step_seconds") and attributes.get(step.argval) is None:
                return f"run.{step.argval}"
            value = loads[step.opname].get(step.argval)
            module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
            if value is time or value is datetime or module in ("time", "datetime"):
                return f"{module}.{name}" if module else name
            if (found := clock_in(kind, value, (*seen, function))) is not None:
                return f"{found}, in {name or step.argval}"
    return None


@dataclass
class BufferAverager(Averager):
    """Averages what still changes after training, such as BatchNorm's statistics, where it is evaluated and at the end.

    Between these replicas do not meet.

    Args:
        pairings: of the averager that has served the replicas before.
    """

    pairings: list[list[int]] | None = None

    @override
    def due(self, context: StepContext) -> bool:
        return False


Averager.of_base = frozenset(dir(Averager)) | frozenset(Averager.__annotations__)


def change_layout(averager: Averager, context: StepContext, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
    """Let an averager go on with the parameters that are trainable now, between two steps (collective).

    What is under way is completed first. What the averager holds of old values it keeps; added ones begin by the start
    rules of its state, from the model's values, which must be the same on all ranks. Parameters that are frozen now get
    the consensus.

    Args:
        averager: of the running fit.
        context: of the latest step.
        optimizers: gives the optimizers.

    Raises:
        UnsupportedError: on every rank: there are more fragments of the model now, or fewer.
    """
    layout_change = LayoutChange(averager.replica, averager.replica.with_current_trainable())
    before, now = (len(replica.fragments) for replica in (averager.replica, layout_change.new))
    if before != now:
        raise UnsupportedError(
            f"other parameters are trainable now, so that fragments='blocks' makes {now} fragments of the model, until "
            f"now {before}. Give a number of fragments, which stays."
        ).of_all()
    averager.complete(context)
    if layout_change.left:
        layout_change.write_dropped(averager.consensus(context))
    averager.before_save()
    state = carry(averager, read(averager), layout_change)
    dropped = scratch_in_use(averager)
    averager.links.gather(None)  # all have what they need of the others
    averager.close()
    averager.setup(layout_change.new, averager.links, optimizers, averager.run)
    write(averager, state, Shared, Own, PerReplica)
    averager.after_restore()
    warn_of_scratch(averager, dropped, "Other parameters are trainable now")


def warn_of_scratch(averager: Averager, dropped: Sequence[str], why: str) -> None:
    """Say on one rank what of an averager's state starts over.

    Args:
        averager: of the running fit.
        dropped: what starts over, in words.
        why: it does.
    """
    if dropped and averager.links.index == 0 and averager.links.is_leader:
        log.warning(f"{type(averager).__name__}: {why}, so this starts over: {'; '.join(dropped)}.")


class LowBitAverager(Averager):
    """Base of averagers with low-bit wires: keeps the error feedback, for the next message.

    A subclass gives :attr:`feedback` to each exchange on its wire. Buffers travel as they are: rounded, a variance
    could become negative.

    Attributes:
        wire: number format of exchanges.
        feedback: the residuals; ``None`` where the wire needs none.
    """

    wire: str
    feedback = Scratch[Feedback | None](
        lambda averager: averager.links.feedback(
            averager.wire, averager.replica.parameter_lengths[: averager.replica.included]
        ),
        "error feedback, which is what earlier low-bit messages have left out",
    )
