"""Declared state: what each role does at each event, and declarations that are refused."""

import datetime
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from time import perf_counter as now
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero import Averager, InFlight, Own, PerReplica, Scratch, Shared, StepContext, model_values, zeros
from lightning_hetero.algorithms.base import FitInfo, ReplicaLoss
from lightning_hetero.algorithms.diloco import OuterAverager
from lightning_hetero.algorithms.state import (
    PendingExchange,
    VectorStart,
    carry,
    check_declared,
    drop_in_flight,
    read,
    select,
    write,
)
from lightning_hetero.comm.all_reduce import Average
from lightning_hetero.errors import CheckpointError, ConfigurationError
from lightning_hetero.replicas.vectors import LayoutChange, Replica


class Rate:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.every = 8

    def state_dict(self) -> dict[str, Any]:
        return {"every": self.every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.every = state["every"]


@dataclass
class Everything(Averager):
    """Has state in each role."""

    tau: int = 4

    momentum = Shared(zeros)
    rate = Shared(lambda averager: Rate())
    slow = Own(model_values)
    doubled = Own(VectorStart(lambda averager: averager.tau / 2))
    best = Own(float("inf"))
    speeds = PerReplica(lambda averager: [1.0] * averager.links.count)
    table = PerReplica(lambda averager: torch.ones(averager.links.count))
    pending = InFlight()
    guess = Scratch(0, "the guess")

    def due(self, context: StepContext) -> bool:
        return False

    def arrive(self, pending: PendingExchange, step: int) -> None:
        self.best = step


def model() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False))
    for i, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, i + 1.0)
    return module


def started(module: nn.Module, averager: Averager | None = None, count: int = 3) -> Any:
    found = averager or Everything()
    links: Any = SimpleNamespace(count=count, index=0, is_leader=True, lay_out=lambda layout: None)
    found.setup(Replica(module), links, list, FitInfo())
    return found


def average(value: float) -> Average:
    return Average([torch.full((4,), value)], [], [], [True], 0.0, 0.0, [0.0])


def trained(module: nn.Module) -> Any:
    """An averager whose state differs from that at the start."""
    found = started(module)
    for vector in (*found.momentum, *found.slow):
        vector.add_(5.0)
    found.rate.every, found.best, found.guess, found.commits = 2, 0.25, 7, 3
    found.speeds, found.table = [1.0, 2.0, 4.0], torch.tensor([1.0, 2.0, 4.0])
    found.pending = [PendingExchange(8, 3, average(1.0), fragment=1)]
    return found


def values_of(averager: Any) -> dict[str, Any]:
    state = read(averager)
    return {name: [v.tolist() for v in value] if _vectors(value) else _plain(value) for name, value in state.items()}


def _vectors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Tensor) for each in value)


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [{**each, "average": each["average"]["mean"][0].tolist()} for each in value]
    return value.tolist() if isinstance(value, Tensor) else value


FRESH = {
    "reference": [[1.0, 1.0, 2.0, 2.0]],
    "commits": 0,
    "momentum": [[0.0] * 4],
    "rate": {"every": 8},
    "slow": [[1.0, 1.0, 2.0, 2.0]],
    "doubled": [[2.0, 2.0, 4.0, 4.0]],
    "best": float("inf"),
    "speeds": [1.0, 1.0, 1.0],
    "table": [1.0, 1.0, 1.0],
    "pending": [],
    "guess": 0,
}
TRAINED = {
    **FRESH,
    "commits": 3,
    "momentum": [[5.0] * 4],
    "rate": {"every": 2},
    "slow": [[6.0, 6.0, 7.0, 7.0]],
    "best": 0.25,
    "speeds": [1.0, 2.0, 4.0],
    "table": [1.0, 2.0, 4.0],
    "pending": [{"step": 8, "wait": 3, "fragment": 1, "average": [1.0] * 4}],
    "guess": 7,
}


def test_it_starts_by_its_rules_and_is_saved_and_resumed_whole() -> None:
    assert values_of(started(model())) == FRESH
    saved = trained(model())
    assert values_of(saved) == TRAINED
    again = started(model())
    views = [vector.view(2, 2) for vector in again.momentum]
    assert write(again, read(saved)) == []
    assert values_of(again) == TRAINED
    assert again.pending[0].due == 11
    assert views[0].tolist() == [[5.0, 5.0], [5.0, 5.0]]  # in place: an optimizer may hold parts of it


def test_a_lost_replica() -> None:
    """Exchanges are dropped, entries of survivors stay, `Scratch` starts over; `Shared` comes from another replica."""
    mine, ahead = trained(model()), trained(model())
    ahead.momentum[0].add_(1.0)
    ahead.rate.every, ahead.slow[0][:], ahead.best = 1, 9.0, 0.0
    assert [pending.step for pending in drop_in_flight(mine)] == [8]
    state, theirs = (select(one, read(one), [0, 2]) for one in (mine, ahead))
    theirs = {name: theirs[name] for name in ("reference", "commits", "momentum", "rate")}
    survivor = started(model(), count=2)
    write(survivor, {**state, **theirs}, Shared, Own, PerReplica)
    assert values_of(survivor) == {
        **TRAINED,
        "momentum": [[6.0] * 4],
        "rate": {"every": 1},
        "speeds": [1.0, 4.0],
        "table": [1.0, 4.0],
        "pending": [],
        "guess": 0,
    }


def test_others_join() -> None:
    """Shared state comes from the job, except the state that follows from the values with which all begin."""
    state = read(trained(model()))
    newcomer = started(model(), count=4)
    write(newcomer, {"momentum": state["momentum"], "rate": state["rate"]}, Shared, but=("reference", "commits"))
    expected = {**FRESH, "momentum": [[5.0] * 4], "rate": {"every": 2}}
    assert values_of(newcomer) == {**expected, "speeds": [1.0] * 4, "table": [1.0] * 4}


def test_unfrozen_and_frozen_parameters() -> None:
    module = model()
    module[0].requires_grad_(False)
    before = started(module)
    for vector in (*before.momentum, *before.slow, *before.doubled):
        vector.add_(5.0)
    module[0].requires_grad_(True)
    change = LayoutChange(before.replica, before.replica.with_current_trainable())
    state = carry(before, read(before), change)
    assert [state[name][0].tolist() for name in ("momentum", "slow", "doubled", "reference")] == [
        [0.0, 0.0, 5.0, 5.0],
        [1.0, 1.0, 7.0, 7.0],
        [2.0, 2.0, 9.0, 9.0],
        [1.0, 1.0, 2.0, 2.0],
    ]
    module[1].requires_grad_(False)
    after = before.replica.with_current_trainable()
    assert carry(before, read(before), LayoutChange(before.replica, after))["slow"][0].tolist() == [1.0, 1.0]


def test_excluded_parameters_that_are_unfrozen_join_only_what_has_excluded_values() -> None:
    module = model()
    module[0].requires_grad_(False)
    before, links = Everything(), SimpleNamespace(count=1, index=0, lay_out=lambda layout: None)
    before.setup(Replica(module, excluded=["0.*"]), links, list, FitInfo())  # type: ignore[arg-type]
    module[0].requires_grad_(True)
    change = LayoutChange(before.replica, before.replica.with_current_trainable())
    assert (len(change.new.layout), change.new.included) == (2, 1)
    state = carry(before, read(before), change)
    assert {name: [v.tolist() for v in state[name]] for name in ("momentum", "slow", "reference")} == {
        "momentum": [[0.0, 0.0]],
        "slow": [[2.0, 2.0]],
        "reference": [[2.0, 2.0], [1.0, 1.0]],
    }


def test_state_before_a_fit_and_of_another_algorithm() -> None:
    with pytest.raises(AttributeError, match=r"Everything\.momentum is state, which is there from the beginning of a"):
        _ = Everything().momentum
    state = read(trained(model()))
    del state["slow"]
    with pytest.raises(CheckpointError, match="lacks 'slow' of Everything"):
        write(started(model()), state)


def test_a_checkpoint_of_other_options() -> None:
    averager = started(model())
    state, averager.guess = read(averager), Rate()
    assert write(averager, {**state, "guess": None}) == []  # there was none, and it has not begun
    assert averager.guess.every == 8
    with pytest.raises(CheckpointError, match=r"'momentum' of Everything as vectors of \[3\] values; in this fit they"):
        write(averager, {**state, "momentum": [torch.zeros(3)]}, Shared)


def test_vectors_of_another_dtype_are_restored_in_their_place() -> None:
    averager = started(model())
    view = averager.momentum[0]
    write(averager, {**read(averager), "momentum": [torch.ones_like(view, dtype=torch.float16)]}, Shared)
    assert averager.momentum[0] is view
    assert view.eq(1).all()


def test_exchanges_under_way_of_which_nothing_would_become_are_refused() -> None:
    @dataclass
    class Forgetful(Averager):
        under_way = InFlight()

        def due(self, context: StepContext) -> bool:
            return False

    message = r"Forgetful\.under_way is InFlight, but Forgetful has no method arrive\(self, pending, step\)"
    with pytest.raises(ConfigurationError, match=message):
        started(model(), Forgetful())


def test_declarations_that_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"OfOption\.tau is declared as state, but is also an option"):

        class OfOption(Everything):
            tau = Own(0)  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match=r"OfBase\.links is declared as state.*`my_links = Shared\(\.\.\.\)`"):

        class OfBase(Everything):
            links = Shared(zeros)  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match=r"Annotated\.center is declared as state, with an annotation.*Leave"):

        class Annotated(Everything):
            center: Any = Shared(zeros)

    with pytest.raises(ConfigurationError, match=r"Typed\.center names a role.*`center = Shared\(zeros\)`"):

        class Typed(Everything):
            center: Shared[list] = zeros  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match=r"Rule\.center names a role"):

        class Rule(Everything):
            center = zeros

    with pytest.raises(ConfigurationError, match=r"Role\.center names a role"):

        class Role(Everything):
            center = Own

    with pytest.raises(
        ConfigurationError, match=r"Inherits\.momentum is an option, but a base class has state of that"
    ):

        class Inherits(Everything):
            momentum: float = 0.9  # type: ignore[assignment]


def test_an_exchange_that_depends_on_a_local_clock_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"BySeconds\.due reads a clock \(time\)"):

        class BySeconds(Everything):
            def due(self, context: StepContext) -> bool:
                return time.monotonic() % 60 < 1

    with pytest.raises(ConfigurationError, match=r"ByCounter\.due reads a clock \(time\.perf_counter\)"):

        class ByCounter(Everything):
            def due(self, context: StepContext) -> bool:
                return perf_counter() > 1

    class OfProperty(Everything):
        @property
        def is_late(self) -> bool:
            return now() > 1

    class OfClass(Everything):
        @classmethod
        def late(cls) -> bool:
            return now() > 1

    def by_property(self: Any, context: StepContext) -> bool:
        return self.is_late

    class OfRun(Everything):
        def late(self) -> bool:
            return self.run.in_steps(60.0) < 1

    class Mixin:
        def due(self, context: StepContext) -> bool:
            return late()

    def late() -> bool:
        return any(now() > second for second in (1, 2))

    def passed_on(method: Any) -> Any:
        @functools.wraps(method)
        def due(self: Any, context: StepContext) -> Any:
            return method(self, context)

        return due

    def by_date(self: Any, context: StepContext) -> bool:
        return datetime.datetime.now().second == 0

    def by_import(self: Any, context: StepContext) -> bool:
        from time import monotonic

        return monotonic() > 1

    def by_method(self: Any, context: StepContext) -> bool:
        return self.late()

    methods: dict[Any, tuple[type, ...]] = {
        r"time.perf_counter, in late": (Mixin, Averager),
        r"datetime": (Everything, by_date),
        r"datetime, in by_date": (Everything, passed_on(by_date)),
        r"time": (Everything, by_import),
        r"run.in_steps, in late": (OfRun, by_method),
        r"time.perf_counter, in is_late": (OfProperty, by_property),
        r"time.perf_counter, in late(?#of a class)": (OfClass, by_method),
    }
    for clock, (*bases, due) in methods.items():
        bases, body = (bases, {"due": due}) if not isinstance(due, type) else ([*bases, due], {})
        with pytest.raises(ConfigurationError, match=rf"Own\.due reads a clock \({clock}\)"):
            type("Own", tuple(bases), {"__module__": __name__, **body})

    class BySteps(Everything):
        time = step_seconds = 60  # not that of a clock

        def due(self, context: StepContext) -> bool:
            return context.step % self.time == 0 == context.step % self.step_seconds


def test_tensors_without_a_role_are_refused_at_the_exchange_that_makes_them() -> None:
    @dataclass
    class Lazy(Everything):
        velocity: Any = field(default=None, init=False)

    lazy = started(model(), Lazy())
    lazy.velocity = [torch.zeros(4)]
    with pytest.raises(ConfigurationError, match=r"Lazy\.velocity holds tensors"):
        check_declared(lazy)


def test_tensors_without_a_role_are_refused_when_a_fit_starts() -> None:
    @dataclass
    class Undeclared(Everything):
        def prepare(self) -> None:
            self.velocity = {"first": [torch.zeros(4)]}

    with pytest.raises(ConfigurationError, match=r"Undeclared\.velocity holds tensors.*`velocity = Shared\(zeros\)`"):
        started(model(), Undeclared())

    class Helper:
        def __init__(self) -> None:
            self.vector = torch.zeros(4)

    vectors: list[Callable[[], Any]] = [
        lambda: np.zeros(4),
        Helper,
        lambda: torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=1.0),
        lambda: {"first": nn.Linear(2, 2)},
    ]
    for make in vectors:
        undeclared: Any = dataclass(type("Undeclared", (Everything,), {"prepare": lambda self: self.hold()}))
        undeclared.hold = lambda self, make=make: setattr(self, "velocity", make())
        with pytest.raises(ConfigurationError, match=r"Undeclared\.velocity holds tensors"):
            started(model(), undeclared())

    @dataclass
    class OfClass(Everything):
        velocity = torch.zeros(4)  # of all fits

    with pytest.raises(ConfigurationError, match=r"OfClass\.velocity holds tensors"):
        started(model(), OfClass())

    @dataclass
    class InMethod(Everything):
        def prepare(self) -> None:
            self.velocity = Shared(zeros)

    with pytest.raises(ConfigurationError, match=r"InMethod\.velocity is declared in a method.*`velocity = Shared\("):
        started(model(), InMethod())

    @dataclass
    class Memory(Everything):
        def prepare(self) -> None:
            self._room, self.often, self._helper = [torch.zeros(4)], 3, Helper()

    started(model(), Memory())


def test_starts_that_are_refused() -> None:
    """An object that all fits would share; and no entry per replica, which the first loss would bring to light."""
    for start, right in (([], r"\[\]"), ({}, r"\{\}"), (torch.zeros(3), r"torch\.zeros\(\(3,\)\)")):
        with pytest.raises(
            ConfigurationError, match=rf"Mutable\.kept cannot.*`kept = Own\(lambda averager: {right}\)`"
        ):
            type("Mutable", (Everything,), {"kept": Own(start)})
    for start in ([0.0], 0.0, zeros, None):
        with pytest.raises(ConfigurationError, match=r"Entries\.counts cannot start with .*averager\.links\.count\)`"):
            type("Entries", (Everything,), {"counts": PerReplica(start)})
    for start in ([0.0], 0.0, torch.tensor(3.0)):

        @dataclass
        class Entries(Everything):
            counts = PerReplica(lambda averager, start=start: start)

        with pytest.raises(ConfigurationError, match=r"Entries\.counts is PerReplica, but starts with .* of the 3 rep"):
            started(model(), Entries())

    @dataclass
    class Shrinks(Everything):
        counts = PerReplica(lambda averager: [0.0] * averager.links.count)

    shrinks = started(model(), Shrinks())
    shrinks.counts = [1.0]
    with pytest.raises(
        ConfigurationError, match=r"Shrinks\.counts is PerReplica, but is now \[1\.0\], which .* of the 3 rep"
    ):
        check_declared(shrinks)

    @dataclass
    class Raises(Everything):
        late = Own(lambda averager: averager.sizes)

    with pytest.raises(
        ConfigurationError, match=r"Raises\.late: what it starts with cannot be made: AttributeError: .*sizes"
    ):
        started(model(), Raises())


def test_each_fit_has_its_own_start() -> None:
    @dataclass
    class Queue(Everything):
        kept = Own(([],))

    first, second = started(model(), Queue()), started(model(), Queue())
    first.kept[0].append(3)
    assert second.kept == ([],) == started(model(), Queue()).kept


def test_values_that_change_without_a_role_are_refused() -> None:
    @dataclass
    class Tally:
        count: int = 0

    @dataclass
    class Counts(Everything):
        history = [0.5]  # of all fits

        def prepare(self) -> None:
            self._steps, self.rows, self._room = 0, [["first", 1]], [torch.zeros(4)]
            self.seen, self.tally, self._least = {3}, Tally(), np.float32(2.0)

        def after_step(self, context: StepContext) -> None:
            self._room = [torch.ones(4)]  # memory
            getattr(self, f"change_{context.step}")()

        def change_1(self) -> None:
            self._steps += 1

        def change_2(self) -> None:
            self.tau = 8

        def change_3(self) -> None:
            self.rows[0][1] = 2

        def change_4(self) -> None:
            self._last = "text"

        def change_6(self) -> None:
            self.seen.add(4)

        def change_7(self) -> None:
            self.tally.count += 1

        def change_8(self) -> None:
            self._least = np.float32(1.0)

        def change_9(self) -> None:
            self.history.append(0.25)

        def change_5(self) -> None:
            self.momentum[0].add_(1.0)
            self.best = 0.25

    messages = {
        1: r"Counts\._steps has changed during the fit, from 0 to 1, but has no role.*`_steps = Shared\(0\)`",
        2: r"Counts\.tau has changed.* from 4 to 8.*`my_tau = Shared\(lambda averager: averager\.tau\)`",
        3: r"Counts\.rows has changed during the fit, from 'first', 1 to 'first', 2",
        4: r"Counts\._last has changed during the fit, from nothing to 'text'",
        6: r"Counts\.seen has changed during the fit, from 3 to 3, 4, .*`seen = Shared\(\.\.\.\)`",
        7: r"Counts\.tally has changed during the fit, from 0 to 1, .*`tally = Shared\(\.\.\.\)`",
        8: r"Counts\._least has changed during the fit, from np\.float32\(2\.0\) to np\.float32\(1\.0\)",
        9: r"Counts\.history has changed during the fit, from 0\.5 to 0\.5, 0\.25",
    }
    for step, message in messages.items():
        counts = started(model(), Counts())
        check_declared(counts)
        counts.after_step(StepContext(step, False, [1, 1, 1]))
        with pytest.raises(ConfigurationError, match=message):
            check_declared(counts)
    counts = started(model(), Counts())
    counts.after_step(StepContext(5, False, [1, 1, 1]))
    check_declared(counts)
    again = started(model(), counts)  # another fit begins, or parameters have become trainable
    check_declared(again)


def test_what_averagers_use_themselves_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Packs sets _packed, which averagers use themselves.*`my_packed`"):

        class Packs(Everything):
            def meet(self, context: StepContext) -> None:
                self._packed = []

    with pytest.raises(
        ConfigurationError, match=r"Spare\._spare is declared as state, but.*`my_spare = Own\(\.\.\.\)`"
    ):

        class Spare(Everything):
            _spare = Own(model_values)  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match=r"Runs sets run, which"):

        class Runs(Everything):
            def prepare(self) -> None:
                self.run, self.tau = FitInfo(), 3


def test_fragments_wait_after_a_loss_in_a_resumed_run_too() -> None:
    """Up to the furthest survivor's step no exchange begins."""

    def streaming() -> Any:
        links: Any = SimpleNamespace(count=2, index=0, prepare=lambda: None, lay_out=lambda layout: None)
        links.feedback, links.gather = lambda wire, lengths: None, lambda step: [step, 8]
        averager = OuterAverager(tau=4, delay=2)
        averager.setup(averager.make_replica(model()), links, list, FitInfo())
        return averager

    survivor, resumed = streaming(), streaming()
    survivor.after_restore(ReplicaLoss({"reference": survivor.reference}, [0, 1], StepContext(7, False, [1, 1])))
    write(resumed, read(survivor))
    assert streaming().beginning(8) == [0]
    assert survivor.beginning(8) == resumed.beginning(8) == []
    assert survivor.beginning(12) == resumed.beginning(12) == [0]
