"""Steps of recovery and of joining, on one rank: what is left to the others, what is kept, and what is dropped."""

import gc
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_hetero.checkpoint.writer import AtomicCheckpointIO
from lightning_hetero.comm.failure_detector import LEFT
from lightning_hetero.comm.membership_protocol import NextView
from lightning_hetero.comm.quorum import Roster
from lightning_hetero.comm.retry import CollectiveRetry
from lightning_hetero.errors import CommunicationError, MembershipLostError
from lightning_hetero.strategies import join, recovery_policy
from lightning_hetero.strategies.job import scale_gradients
from lightning_hetero.strategies.join import ElasticJoin
from lightning_hetero.strategies.recovery import PeerRecovery
from lightning_hetero.strategies.recovery_policy import MissedWork, Progress, catch_up


@pytest.mark.parametrize("between", [True, False])
def test_who_fails_while_others_begin_again_leaves_the_job_to_them(between: bool) -> None:
    """Who waits to join is not refused, and finds the job: it goes on. Who is alone takes the job along."""
    strategy: Any = SimpleNamespace(lightning_module=None)
    recovery, ends = PeerRecovery(strategy), list[bool]()
    recovery._newcomers = SimpleNamespace(end=lambda over: ends.append(over))  # type: ignore[assignment]
    if between:  # with whom it has left the fit
        recovery._former = SimpleNamespace(announce=lambda kind, how: None, close=lambda: None)  # type: ignore[assignment]
    recovery.failed(ValueError("no"))
    assert ends == [not between]


def test_who_has_agreed_to_go_on_and_cannot_ends_at_once() -> None:
    """It does not agree again and again until the limit, as if one more rank had been lost."""
    strategy: Any = SimpleNamespace(options=SimpleNamespace(limit=timedelta(seconds=1)))
    recovery, at = PeerRecovery(strategy), Progress(5, 2, 9, 6, 1, 4)
    agreed = NextView(Roster(1, 0, ((0,), (1,))), {0: at, 1: at}, {2: "died"}, ["host", 1], {})
    recovery._membership = SimpleNamespace(me=0, agree=lambda own: agreed)  # type: ignore[assignment]

    def rejoin(*_: Any) -> None:
        raise MembershipLostError("Ranks [0, 1] cannot go on: each has shards of its own.")

    recovery._progress, recovery._rejoin = lambda: at, rejoin  # type: ignore[method-assign, assignment]
    for call in (lambda: recovery._recover(0.0), lambda: recovery.retry(rejoin)):
        with pytest.raises(MembershipLostError, match=r"^Ranks \[0, 1\] cannot go on"):
            call()


def test_missed_collectives_are_made_up_for_or_end_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has broadcast 40 values, of which another rank has got some. It keeps the latest 32."""
    ahead, sent = CollectiveRetry(print), dict[int, Any]()
    for number in range(40):
        ahead.once(lambda number=number: 100 + number)

    def value_of_rank(results: dict[int, Any], rank: int) -> dict[int, Any]:
        sent.update(results)  # rank 0 comes first
        return dict(sent)

    monkeypatch.setattr(recovery_policy, "value_of_rank", value_of_rank)
    for done, ends in ((20, False), (8, False), (7, True)):
        sent.clear()
        behind, both = CollectiveRetry(print), [Progress(0, 0, calls, 0, 0, 0) for calls in (40, done)]
        catch_up(ahead, both, both[0])
        if ends:
            with pytest.raises(MembershipLostError, match="it has missed 33 collectives"):
                catch_up(behind, both, both[1])
        else:
            catch_up(behind, both, both[1])
            assert behind.received == {number: 100 + number for number in range(done, 40)}


@pytest.mark.parametrize(
    ("members", "lost", "ends"),
    [
        ((1,), {0: LEFT, 2: "died"}, True),  # both would count half of the ranks for themselves, or more
        ((1, 2), {0: LEFT, 3: "died"}, True),
        ((1, 2, 3), {0: LEFT, 4: "died"}, False),
        ((0, 1), {2: "died"}, False),
    ],
)
def test_fewer_than_those_that_have_begun_again_do_not_begin_by_themselves(
    members: tuple[int, ...], lost: dict[int, str], ends: bool
) -> None:
    """A rank is lost just when all begin again: some are in the new view, and have left the former one."""
    strategy: Any = SimpleNamespace()
    roster = Roster(4, 1, tuple((one,) for one in members))
    recovery, agreed = PeerRecovery(strategy), NextView(roster, {}, lost, ["host", 1], {})
    recovery._former = SimpleNamespace(me=1, agree=lambda progress: agreed)  # type: ignore[assignment]
    if ends:
        with pytest.raises(MembershipLostError, match="Rank 1 cannot go on: rank"):
            recovery.remaining()
    else:
        assert recovery.remaining() == (agreed, 1, None)


def test_gradients_of_earlier_batches_are_weighed_anew_at_each_loss() -> None:
    """The step breaks twice, and each time half of the ranks are lost, over which these gradients are a mean."""
    module: Any = nn.Linear(1, 1, bias=False)
    module.automatic_optimization, module.weight.grad = True, torch.tensor([[4.0]])
    trainer = SimpleNamespace(_results=None)
    strategy: Any = SimpleNamespace(module=module, accumulates_locally=True, trainer=trainer)
    recovery, begun = PeerRecovery(strategy), list[float]()
    recovery._membership = object()  # type: ignore[assignment]

    def recover(stopped: float) -> MissedWork:
        scale_gradients(module, 0.5)
        return MissedWork(False, False, 0)

    def step() -> float:
        begun.append(module.weight.grad.item())
        module.weight.grad.add_(8.0)  # of the batch that the step takes
        if len(begun) < 3:
            raise CommunicationError("a rank was lost")
        return module.weight.grad.item()

    recovery._recover = recover  # type: ignore[method-assign]
    assert recovery.step(step, lambda: 0.0) == 9.0
    assert begun == [4.0, 2.0, 1.0]


class Closing(ElasticJoin):
    """Another thread closes the requests as soon as somebody has looked at them."""

    looks = 0

    @property
    def _requests(self) -> Any:
        self.looks += 1
        return SimpleNamespace(waiting=1) if self.looks == 1 else None

    @_requests.setter
    def _requests(self, value: Any) -> None: ...

    def _most(self, waiting: int) -> int:
        return waiting


def test_whether_others_wait_may_be_asked_while_the_fit_ends() -> None:
    strategy: Any = SimpleNamespace()
    assert Closing(strategy).wanted


def test_what_was_saved_for_others_is_dropped_if_they_cannot_join_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost while the state is saved: the weights must not stay in memory for the rest of the fit."""
    view = SimpleNamespace(number=1, rank=0, world=2, ranks=((0, 1),), replica=SimpleNamespace(id=0), entries=(0, 1))
    kept: list[weakref.ref[torch.Tensor]] = []

    def save(path: str) -> None:
        state = strategy.checkpoint_io.keep({"weight": torch.ones(3)}, ["weight"])
        strategy.checkpoint_io.save_checkpoint({"state_dict": state}, path)
        kept.append(weakref.ref(state["weight"]))
        strategy.job.view = SimpleNamespace(**vars(view))

    strategy: Any = SimpleNamespace(
        job=SimpleNamespace(view=view),
        trainer=SimpleNamespace(global_step=5, save_checkpoint=save),
        options=SimpleNamespace(limit=timedelta(seconds=1)),
        interface="127.0.0.1",
        module=nn.Linear(1, 1),
        precision_plugin=Precision(),
        checkpoint_io=AtomicCheckpointIO(),
        accounting=SimpleNamespace(apply_reports=lambda: None),
        recovery=SimpleNamespace(retry=lambda operation: operation()),
    )
    put_off: list[int] = []
    newcomers: Any = ElasticJoin(strategy)
    newcomers._most = lambda waiting: waiting
    newcomers._requests = SimpleNamespace(waiting=1, invite=lambda most: [7], put_off=put_off.extend)
    monkeypatch.setattr(join, "open_store", lambda *_: (None, ("127.0.0.1", 1)))
    monkeypatch.setattr(join, "value_of_rank", lambda value, rank: value)
    monkeypatch.setattr(join, "gather", lambda value, what: [value])
    newcomers.admit()
    gc.collect()
    assert put_off == [7]
    assert kept[0]() is None
