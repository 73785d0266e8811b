"""Declared state: an algorithm says what it keeps, and in which role; its whole lifecycle follows from that.

==============  =======================================  ==========  ========================  =====================
role            what it is                               checkpoint  a replica is lost         others join, other
                                                                                               replicas resume
==============  =======================================  ==========  ========================  =====================
`Shared`        equal on all replicas                    saved       from whom is furthest     from the job
`Own`           this replica's                           saved       kept                      starts over
`PerReplica`    a list or tensor, an entry per replica   saved       entries of the survivors  starts over
`InFlight`      exchanges under way                      waited for  dropped                   dropped
`Scratch`       can be made again at any time            saved       starts over               starts over
==============  =======================================  ==========  ========================  =====================

What follows from the model's values, such as a reference, begins with these where others join.

When parameters become trainable, or frozen, exchanges under way are completed, vectors are brought into the new layout,
in which added values start by the field's rule, and `Scratch` starts over.

What does not follow from roles has one of four hooks of an averager: `before_save` and `after_restore` for what threads
and peers hold, `complete` for what is under way besides `InFlight`, `join_values` if newcomers must not begin with the
consensus.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from inspect import get_annotations
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Generic, TypeVar, get_origin, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import Self, override

from lightning_hetero.comm.all_reduce import Average, Exchange
from lightning_hetero.comm.failures import is_communication_error
from lightning_hetero.comm.object_collectives import on_device_of
from lightning_hetero.errors import CheckpointError, ConfigurationError, HeteroError
from lightning_hetero.replicas.vectors import LayoutChange

T = TypeVar("T")


@dataclass(frozen=True)
class VectorStart:
    """Start rule of vectors like those that replicas exchange: a multiple of the model's values.

    The same rule holds when a fit starts, and for parameters that become trainable later.

    Attributes:
        factor: the multiple, or a function that gives it, from the algorithm.
        excluded: whether there are vectors of excluded values, too.

    Example::

        from lightning_hetero import Averager, Own, Shared, model_values, zeros


        class SlowMomentum(Averager):
            momentum = Shared(zeros)
            slow = Own(model_values)
    """

    factor: float | Callable[[Any], float]
    excluded: bool = False

    def factor_of(self, algorithm: Any) -> float:
        """The multiple."""
        return self.factor(algorithm) if callable(self.factor) else self.factor

    def __call__(self, algorithm: Any) -> list[Tensor]:
        """Vectors on the CPU, in fp32 or wider."""
        factor, vectors = self.factor_of(algorithm), algorithm.initial_values()
        vectors = vectors if self.excluded else vectors[: algorithm.replica.included]
        return (
            vectors if factor == 1 else [vector * factor if factor else torch.zeros_like(vector) for vector in vectors]
        )


#: Vectors on the CPU, in fp32 or wider, that start as the model's values.
model_values = VectorStart(1.0)
#: Vectors on the CPU, in fp32 or wider, that start as zeros.
zeros = VectorStart(0.0)


class StateField(Generic[T]):
    """An attribute of an algorithm on which its next steps depend. Use one of its subclasses, the roles.

    Args:
        start: the value at the beginning of a fit: :data:`model_values`, :data:`zeros`, a function of the algorithm, or
            a number, text or truth value. An object with ``state_dict`` and ``load_state_dict`` is saved and restored
            by these methods.
    """

    name: str

    def __init__(self, start: Any = None) -> None:
        self.start = start

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, algorithm: None, owner: type) -> Self: ...

    @overload
    def __get__(self, algorithm: object, owner: type) -> T: ...

    def __get__(self, algorithm: object | None, owner: type) -> Any:
        if algorithm is None:
            return self
        try:
            return algorithm.__dict__[self.name]
        except KeyError:
            raise AttributeError(
                f"{type(algorithm).__name__}.{self.name} is state, which is there from the beginning of a fit on."
            ) from None

    def __set__(self, algorithm: object, value: T) -> None:
        algorithm.__dict__[self.name] = value


class Shared(StateField[T]):
    """State that is equal on all replicas, such as a center, its momentum, or a rate.

    Example::

        from lightning_hetero import Averager, Shared, zeros


        class SlowMomentum(Averager):
            momentum = Shared(zeros)
    """


class Own(StateField[T]):
    """State of this replica alone, such as its slow weights.

    Example::

        from lightning_hetero import Averager, Own, model_values


        class SlowWeights(Averager):
            slow = Own(model_values)
    """


class PerReplica(StateField[T]):
    """A list or tensor with one entry per replica, equal on all replicas.

    Example::

        from lightning_hetero import Averager, PerReplica


        class Speeds(Averager):
            speeds = PerReplica(lambda averager: [0.0] * averager.links.count)
    """


class Scratch(StateField[T]):
    """State that can start over at any time, at the price of some quality, such as the residuals of error feedback.

    Args:
        start: see :class:`StateField`.
        about: what it is, for the warning when it starts over.

    Example::

        from lightning_hetero import Averager, Scratch


        class Smoothed(Averager):
            smoothed_loss = Scratch(float("inf"), "the smoothed loss")
    """

    def __init__(self, start: Any, about: str) -> None:
        super().__init__(start)
        self.about = about


@dataclass(eq=False)
class PendingExchange:
    """Exchange that has begun, and has not been applied yet.

    Attributes:
        step: optimizer step after which it began.
        wait: optimizer steps after which it is to be applied.
        average: what the exchange brings, or has brought.
        fragment: number of the fragment that it carries.
        on_arrival: is called with the seconds that the exchange took, once.
    """

    step: int
    wait: int
    average: Exchange | Average
    fragment: int = 0
    on_arrival: Callable[[float], None] | None = None

    @property
    def due(self) -> int:
        """The optimizer step after which it is to be applied."""
        return self.step + self.wait

    def result(self) -> Average:
        """Wait for the result."""
        if isinstance(self.average, Exchange):
            exchange, self.average = self.average, self.average.result()
            if self.on_arrival is not None:
                self.on_arrival(exchange.seconds)
        return self.average

    def state_dict(self) -> dict[str, Any]:
        """The exchange with its result, for which this waits."""
        average = self.result()._asdict()
        return {"step": self.step, "wait": self.wait, "fragment": self.fragment, "average": average}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PendingExchange":
        """An exchange of :meth:`state_dict`."""
        return cls(**{**state, "average": Average(**state["average"])})


class InFlight(StateField[list[PendingExchange]]):
    """Exchanges under way, those that began first come first.

    Example::

        from lightning_hetero import Averager, InFlight


        class Background(Averager):
            pending = InFlight()
    """

    def __init__(self) -> None:
        super().__init__(lambda algorithm: [])


# -- the lifecycle ---------------------------------------------------------------------------------


class Stateful:
    """Base of classes with declared state.

    Attributes:
        of_base: names of attributes that no subclass may declare.
    """

    of_base: ClassVar[frozenset[str]] = frozenset()
    # The values of what has no role, when the fit has started.
    _undeclared: Mapping[str, list[str]] = MappingProxyType({})

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotated = get_annotations(cls)
        options = {name for base in cls.__mro__[1:] for name in get_annotations(base)}
        states = {field.name for base in cls.__bases__ for field in fields_of(base)}
        for name in dict.fromkeys([*vars(cls), *annotated]):
            declared, title = vars(cls).get(name), f"{cls.__name__}.{name}"
            is_state = isinstance(declared, StateField)
            if is_state and (name in options or name in cls.of_base):
                raise ConfigurationError(
                    f"{title} is declared as state, but is also an option or an attribute of averagers. "
                    f"Give it another name: `my_{name.lstrip('_')} = {type(declared).__name__}(...)`."
                )
            if is_state and name in annotated:
                raise ConfigurationError(
                    f"{title} is declared as state, with an annotation, which makes it an option of a dataclass. Leave "
                    f"the annotation out: `{name} = {type(declared).__name__}(...)`."
                )
            if isinstance(declared, StateField) and (right := _start_instead(declared)) is not None:
                raise ConfigurationError(
                    f"{title} cannot start with {declared.start!r}. Write "
                    f"`{name} = {type(declared).__name__}(lambda averager: {right})`."
                )
            if not is_state and _names_role(declared, annotated.get(name)):
                raise ConfigurationError(
                    f"{title} names a role of state, but does not declare any. Write `{name} = Shared(zeros)`, "
                    "without an annotation; or another role, and another start."
                )
            if not is_state and name in annotated and name in states - cls.of_base:
                raise ConfigurationError(
                    f"{title} is an option, but a base class has state of that name. Give it another name: `my_{name}`."
                )


def _names_role(value: Any, annotation: Any) -> bool:
    """Whether a class attribute, or its annotation, is a role or a start rule, which alone declare nothing."""
    text = annotation if isinstance(annotation, str) else getattr(get_origin(annotation) or annotation, "__name__", "")
    role = text.partition("[")[0].rpartition(".")[2] in {kind.__name__ for kind in StateField.__subclasses__()}
    return role or isinstance(value, VectorStart) or (isinstance(value, type) and issubclass(value, StateField))


def _start_instead(field: Any) -> str | None:
    """The start, as text, that state must have instead of its own; ``None``: that will do.

    All fits would share one object; and state with an entry per replica starts with so many.
    """
    start = field.start
    if isinstance(field, PerReplica):
        return "[0.0] * averager.links.count" if isinstance(start, VectorStart) or not callable(start) else None
    if isinstance(start, list | dict | set):
        return repr(start)
    if isinstance(start, Tensor | np.ndarray):
        return f"{'torch' if isinstance(start, Tensor) else 'np'}.zeros({tuple(start.shape)})"
    return None


def fields_of(kind: type, *roles: type[StateField]) -> list[StateField]:
    """The declared state of a class, of some roles; by default of all."""
    found: dict[str, StateField] = {}
    for base in reversed(kind.__mro__):
        found |= {name: value for name, value in vars(base).items() if isinstance(value, StateField)}
    return [field for field in found.values() if isinstance(field, roles or StateField)]


def start(algorithm: Any, *roles: type[StateField]) -> None:
    """Give the state of some roles, by default all, its first values.

    Raises:
        ConfigurationError: a start cannot be made; names the field.
    """
    for field in fields_of(type(algorithm), *roles):
        try:
            first = field.start(algorithm) if callable(field.start) else deepcopy(field.start)
        except Exception as error:
            if isinstance(error, HeteroError) or is_communication_error(error):
                raise
            raise ConfigurationError(
                f"{type(algorithm).__name__}.{field.name}: what it starts with cannot be made: {type(error).__name__}: "
                f"{error}. Give a value, or a function of the averager, which has its options, `replica` and `links` "
                f"then: `{field.name} = {type(field).__name__}(lambda averager: ...)`."
            ) from error
        setattr(algorithm, field.name, first)


def in_flight(algorithm: Any) -> Iterator[PendingExchange]:
    """The exchanges of an algorithm that are under way."""
    for field in fields_of(type(algorithm), InFlight):
        yield from getattr(algorithm, field.name)


def remove_pending(algorithm: Any, pending: PendingExchange) -> None:
    """Take an exchange out of the state: it is about to be applied."""
    for field in fields_of(type(algorithm), InFlight):
        setattr(algorithm, field.name, [each for each in getattr(algorithm, field.name) if each is not pending])


def drop_in_flight(algorithm: Any) -> list[PendingExchange]:
    """Forget all exchanges under way, and return them."""
    dropped = list(in_flight(algorithm))
    start(algorithm, InFlight)
    return dropped


def read(algorithm: Any) -> dict[str, Any]:
    """The state of an algorithm by name, as tensors and builtins. The tensors are those in use.

    It waits for exchanges under way, but applies none.
    """
    return {field.name: _saved(getattr(algorithm, field.name)) for field in fields_of(type(algorithm))}


def write(algorithm: Any, state: dict[str, Any], *roles: type[StateField], but: Collection[str] = ()) -> list[str]:
    """Give the state of some roles, by default all, the values of :func:`read`.

    Args:
        algorithm: has been started.
        state: of this replica, or of another one.
        roles: whose state to restore.
        but: names of what to leave as it is.

    Returns:
        What could not be restored, and starts over, in words: `Scratch` of other sizes.

    Raises:
        CheckpointError: the state is of another algorithm, or other options.
    """
    renewed = list[str]()
    for field in fields_of(type(algorithm), *roles):
        if field.name in but:
            continue
        if field.name not in state:
            raise CheckpointError(
                f"The state that was saved lacks {field.name!r} of {type(algorithm).__name__}: it holds "
                f"{', '.join(sorted(state))}. Resume with the version and the strategy that have saved it."
            )
        saved = state[field.name]
        if isinstance(field, InFlight):
            setattr(algorithm, field.name, [PendingExchange.from_state(each) for each in saved])
        elif not _restore(algorithm, field, saved) and isinstance(field, Scratch):
            renewed.append(field.about)
    return renewed


def select(algorithm: Any, state: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The state of :func:`read` with the entries of some replicas only.

    Args:
        algorithm: whose state it is.
        state: to take them from.
        kept: indices of the replicas.
    """
    selected = {field.name: state[field.name] for field in fields_of(type(algorithm), PerReplica)}
    for name, entries in selected.items():
        selected[name] = entries[list(kept)] if isinstance(entries, Tensor) else [entries[index] for index in kept]
    return {**state, **selected}


def carry(algorithm: Any, state: dict[str, Any], layout_change: LayoutChange) -> dict[str, Any]:
    """The state of :func:`read` in another layout.

    Args:
        algorithm: in the old layout, with nothing under way.
        state: its state.
        layout_change: brings vectors into the new layout.
    """
    carried = {
        field.name: layout_change.carry(state[field.name], field.start.factor_of(algorithm), field.start.excluded)
        for field in fields_of(type(algorithm))
        if isinstance(field.start, VectorStart)
    }
    return {**state, **carried}


def scratch_in_use(algorithm: Any) -> list[str]:
    """In words, the `Scratch` state that an algorithm has."""
    found = fields_of(type(algorithm), Scratch)
    return [field.about for field in found if isinstance(field, Scratch) and getattr(algorithm, field.name) is not None]


_PLAIN = bool | int | float | complex | str | bytes | np.generic


def check_declared(algorithm: Stateful, starts: bool = False) -> None:
    """See that what has no role holds no tensors or arrays, if it is public, and no value that changes during a fit.

    Values are numbers, text and flags, also in lists, tuples, dictionaries, sets and dataclasses.

    Args:
        algorithm: has been started and prepared.
        starts: whether the fit starts: what there is now may stay as it is.

    Raises:
        ConfigurationError: names an attribute that must be declared.
    """
    kind, known = type(algorithm).__name__, algorithm.of_base | {field.name for field in fields_of(type(algorithm))}
    undeclared = {name: value for name, value in _attributes(algorithm).items() if name not in known}
    values = {name: _values(value) for name, value in undeclared.items()}
    _check_entries(algorithm, "starts with" if starts else "is now")
    if starts:
        algorithm._undeclared = values
    for name, value in undeclared.items():
        if isinstance(value, StateField | VectorStart):
            raise ConfigurationError(
                f"{kind}.{name} is declared in a method, where that has no effect. Move the line into the class: "
                f"`{name} = Shared(zeros)`, without self."
            )
        if not name.startswith("_") and _holds_vectors(value):
            raise ConfigurationError(
                f"{kind}.{name} holds tensors, but has no role: it would be lost when a run is resumed, a replica is "
                f"lost, or parameters become trainable. Declare it in the class: `{name} = Shared(zeros)` if it is "
                f"equal on all replicas, `{name} = Own(model_values)` if it is this replica's; or call it `_{name}` if "
                "nothing depends on it after a step."
            )
        if (now := values[name]) != (before := algorithm._undeclared.get(name, [])):
            own, first = name, before[0] if isinstance(value, _PLAIN) and len(before) == 1 else "..."
            if is_dataclass(algorithm) and name in {field.name for field in fields(algorithm) if field.init}:
                own, first = f"my_{name}", f"lambda averager: averager.{name}"
            changed = f"from {', '.join(before) or 'nothing'} to {', '.join(now) or 'nothing'}"
            raise ConfigurationError(
                f"{kind}.{name} has changed during the fit, {changed}, but has no role: it would be lost when a run is "
                f"resumed. Declare it in the class: `{own} = Shared({first})` if it is equal on all replicas, "
                f"`{own} = Own({first})` if it is this replica's."
            )


def _check_entries(algorithm: Any, verb: str) -> None:
    for field in fields_of(type(algorithm), PerReplica):
        value, count = getattr(algorithm, field.name), algorithm.links.count
        vector = isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)
        if not vector or len(value) != count:
            raise ConfigurationError(
                f"{type(algorithm).__name__}.{field.name} is PerReplica, but {verb} {value!r}, which is no list "
                f"or tensor with an entry for each of the {count} replicas. Write `{field.name} = PerReplica(lambda "
                "averager: [0.0] * averager.links.count)`."
            )


def _attributes(algorithm: object) -> dict[str, Any]:
    """The attributes of an algorithm, and of its classes outside of this package, by name."""
    found: dict[str, Any] = {}
    for base in reversed(type(algorithm).__mro__):
        if not base.__module__.startswith("lightning_hetero."):
            found |= {name: value for name, value in vars(base).items() if not name.startswith("__")}
    return found | vars(algorithm)


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        yield from sorted(leaf, key=repr) if isinstance(leaf, set | frozenset) else [leaf]


def _values(value: Any) -> list[str]:
    leaves = list(_leaves(value))
    leaves += [each for leaf in leaves if is_dataclass(leaf) for each in _leaves(_within(leaf))]
    return [repr(leaf) for leaf in leaves if isinstance(leaf, _PLAIN)]


def _holds_vectors(value: Any) -> bool:
    leaves = list(_leaves(value))
    leaves += [each for leaf in leaves for each in _leaves(_within(leaf))]
    return any(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves)


def _within(value: Any) -> dict[str, Any]:
    """The attributes of an object of a class outside of this package."""
    if isinstance(value, type | ModuleType) or type(value).__module__.startswith("lightning_hetero."):
        return {}
    return getattr(value, "__dict__", {})


def has_tensors(value: Any) -> bool:
    """Whether there are tensors in lists, tuples and dictionaries, to any depth."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _saved(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], PendingExchange):
        return [each.state_dict() for each in value]
    return value.state_dict() if hasattr(value, "state_dict") else value


def _restore(algorithm: Any, field: StateField, saved: Any) -> bool:
    """Restore one field; false if it must start over, which only `Scratch` may."""
    own = getattr(algorithm, field.name)
    if isinstance(field, Scratch) and (own is None) != (saved is None):
        return saved is None
    if hasattr(own, "load_state_dict"):
        return own.load_state_dict(saved) is not False or not isinstance(field, Scratch)
    shapes, there = _shapes(own), _shapes(saved)
    if isinstance(field.start, VectorStart) and shapes != there:
        then, now = ([size for (size,) in each] for each in (there, shapes))
        raise CheckpointError(
            f"The checkpoint holds {field.name!r} of {type(algorithm).__name__} as vectors of {then} values; in this "
            f"fit they are of {now}. Resume with the fragments and exclude of the run that was saved."
        )
    if shapes and shapes == there:
        for vector, value in zip(own, saved, strict=True):  # in place: others may hold views of it
            vector.copy_(value)
    else:
        setattr(algorithm, field.name, on_device_of(saved, own))
    return True


def _shapes(value: Any) -> list[torch.Size]:
    """The shapes in a list of tensors; empty: it is none."""
    vectors = isinstance(value, list) and all(isinstance(each, Tensor) for each in value)
    return [each.shape for each in value] if vectors else []
