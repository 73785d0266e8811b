"""One replica's part in gossip: push-sum's weights, and values that are too large for the wire."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_hetero.algorithms.base import FitInfo, Outcome, ReplicaLoss, StepContext
from lightning_hetero.algorithms.gossip import DirectedAverager, FirstComeAverager, MatchedAverager
from lightning_hetero.algorithms.noloco import NoLoCoAverager
from lightning_hetero.algorithms.peers import GossipAverager
from lightning_hetero.algorithms.push_sum import PushSumAverager
from lightning_hetero.algorithms.state import start
from lightning_hetero.comm.all_reduce import Traffic
from lightning_hetero.comm.gossip import ReceivedPush
from lightning_hetero.comm.gossip_client import Endpoint
from lightning_hetero.errors import NotFiniteError
from lightning_hetero.replicas.vectors import Replica


def push_sum(module: nn.Module) -> PushSumAverager:
    """The first of two replicas; the other one does not exist."""
    found = PushSumAverager()
    alone(found, module)
    return found


def alone(found: GossipAverager, module: nn.Module, skip: bool = False) -> None:
    links: Any = SimpleNamespace(index=0, count=2, columns=[], in_columns=None, gather=lambda value: [value])
    found.links, found.run = links, FitInfo(skip=skip)
    found.replica = Replica(module)
    found._packed, found._spare = found.replica.pack(), []
    start(found)
    found.reference = [torch.zeros_like(value) for value in found._packed]
    endpoint = Endpoint("127.0.0.1", "here", 1.0)
    found.client = found.connect(endpoint, links, found.reference, found.wire, found.met, found.missed)


def learn(one: PushSumAverager, samples: list[int]) -> None:
    one.keep(one.learned(one.x, one.pack(), samples))


def take(one: PushSumAverager, push: ReceivedPush) -> None:
    held = one.held(one.x)
    held[0].take([push])
    one.keep(held)


def step(module: nn.Module, size: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size)


def test_shares_may_change_meanwhile() -> None:
    module = nn.Linear(2, 1, bias=False).double()
    one = push_sum(module)
    learn(one, [6, 6])
    before = one.x[0].clone()
    step(module, 2.0)
    learn(one, [9, 3])
    assert torch.allclose(one.x[0], before + 1.5 * 2.0)
    assert one.weights == [1.0]  # weights are exchanged separately: their sum stays


def test_no_samples() -> None:
    module = nn.Linear(2, 1, bias=False).double()
    one, start = push_sum(module), module.weight.detach().clone().reshape(-1)
    learn(one, [0, 12])
    assert torch.equal(one.unbiased(one.held(one.x))[0], start)  # nothing has come yet
    take(one, ReceivedPush(1, 0, 0.5, [torch.full((2,), 3.0).double()]))
    assert torch.equal(one.unbiased(one.held(one.x))[0], torch.full((2,), 6.0).double())
    one.replica.unpack(one.unbiased(one.held(one.x)))
    learn(one, [0, 12])
    assert one.weights == [0.5]  # the received part is kept
    assert torch.equal(one.x[0], torch.full((2,), 3.0).double())


def test_one_that_could_not_be_set_up_can_be_closed() -> None:
    MatchedAverager().close()
    PushSumAverager().close()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("form", ["matched", "first_come", "push", "push_sum"])
def test_what_is_too_large_for_fp16_does_not_travel(form: str, skip: bool) -> None:
    module = nn.Linear(2, 1, bias=False)
    matched = MatchedAverager(overlap=False, wire="fp16")
    first_come = FirstComeAverager(wire="fp16")
    push = DirectedAverager(topology="one_peer_exponential", exchange="push", wire="fp16")
    summed = PushSumAverager(wire="fp16")
    one = {"matched": matched, "first_come": first_come, "push": push, "push_sum": summed}[form]
    alone(one, module, skip)
    step(module, 1e6)
    with pytest.raises(NotFiniteError):
        one.after_step(StepContext(1, False, [6, 6]))


def test_an_exchange_that_ended_before_a_replica_was_lost_counts_for_its_peer() -> None:
    one = FirstComeAverager()
    alone(one, nn.Linear(2, 1, bias=False))
    client: Any = one.client

    def poll(out: Any, withdraw: bool) -> None:
        one.met[2] += 1  # its number until now

    client.lose, client.paused, client.poll = lambda *_: None, nullcontext, poll
    one.met.update({1: 3, 2: 5})
    one.before_save(lost=[1])
    one.after_restore(ReplicaLoss({}, [0, 2], StepContext(1, False, [6, 6])))
    assert one.met == {1: 6}


def lose(one: GossipAverager, come: ReceivedPush, samples: list[int]) -> list[tuple[int, ReceivedPush]]:
    """Let the second of three replicas be lost, with a push waiting; what still waits after that."""
    box: list[tuple[int, ReceivedPush]] = []
    client: Any = one.client
    client.lose, client.waiting, client.restore = lambda *_: None, lambda: [[come]], box.extend
    one.met.update({1: 3, 2: 5})
    one.missed.update({0: 1, 1: 2})
    one.before_save(lost=[1])
    one.after_restore(ReplicaLoss({}, [0, 2], StepContext(1, False, samples)))
    assert (one.met, one.missed) == ({1: 5}, {0: 1})  # the third replica is the second now
    return box


def test_what_came_before_a_replica_was_lost_waits_for_the_next_round() -> None:
    one = DirectedAverager(topology="one_peer_exponential", exchange="push")
    alone(one, nn.Linear(2, 1, bias=False).double())
    [(column, push)] = lose(one, ReceivedPush(1, 7, 1.0, [torch.full((2,), 3.0).double()]), [6, 6])
    assert (column, push.peer) == (0, -1)  # the others' numbers have changed


def test_push_sum_takes_in_what_came_before_a_replica_was_lost() -> None:
    """Then the weights of the two that remain sum to their number, and the weighted mean is that of before."""
    module = nn.Linear(2, 1, bias=False).double()
    one = push_sum(module)
    learn(one, [4, 4, 4])
    z = (one.x[0] + 3.0) / 1.5
    step(module, 2.0)
    links: Any = one.links
    links.gather_in_columns = lambda weights: [[*weights, 0.9]]  # those of both that remain
    assert not lose(one, ReceivedPush(1, 7, 0.5, [torch.full((2,), 3.0).double()]), [9, 3])
    assert one.weights == pytest.approx([1.5 * 2 / 2.4])
    assert torch.allclose(one.x[0], 1.25 * z)
    assert torch.allclose(module.weight.detach().reshape(-1), z + 2.0)
    learn(one, [9, 3])  # what it has learned before the loss
    assert torch.allclose(one.x[0], 1.25 * z + 1.5 * 2.0)


def test_without_samples_weights_stay_when_a_replica_is_lost() -> None:
    """The other one has all samples, and no weight yet."""
    one = push_sum(nn.Linear(2, 1, bias=False).double())
    links: Any = one.links
    links.gather_in_columns = lambda weights: [[*weights, 0.0]]
    lose(one, ReceivedPush(1, 7, 0.5, [torch.full((2,), 3.0).double()]), [0, 12])
    assert one.weights == [0.5]
    assert torch.equal(one.x[0], torch.full((2,), 3.0).double())


def test_values_and_weight_stay_together_where_a_loss_breaks_a_round() -> None:
    """The round is broken once it has sent, before it has what has come; then it is called again."""
    module, sent = nn.Linear(2, 1, bias=False).double(), [torch.zeros(2).double(), torch.zeros(1).double()]
    one, start = push_sum(module), module.weight.detach().reshape(-1).clone()
    client: Any = one.client[0]
    broken = iter([False, True])

    def broadcast(table: torch.Tensor) -> None:
        if next(broken, False):
            raise ConnectionError

    def push(peer: int, round_number: int, weight: float) -> int:
        sent[0] += client.outgoing[0]
        sent[1] += weight
        return 1

    box = [ReceivedPush(1, 1, 0.5, [torch.full((2,), 3.0).double()])]
    client.links.broadcast, client.links.traffic = broadcast, Traffic()
    client.transport = SimpleNamespace(
        push=push, collect=lambda *_: [box.pop() for _ in list(box)], put=box.extend, recycle=list
    )
    with pytest.raises(ConnectionError):
        one.after_step(StepContext(1, False, [6, 6]))
    for _ in range(2):
        assert torch.allclose(module.weight.detach().reshape(-1), one.x[0] / one.weights[0])
        assert torch.allclose(one.x[0] + sent[0] + sum(each.vectors[0] for each in box), start + 3.0)
        assert one.weights[0] + sent[1].item() + sum(each.weight for each in box) == pytest.approx(1.5)
        one.after_step(StepContext(1, False, [6, 6]))
    assert sent[1] > 0.5


def test_mail_is_taken_in_beside_what_the_model_has_learned_since() -> None:
    """Where columns have other values after a loss, it cannot wait for the next round."""
    module = nn.Linear(2, 1, bias=False).double()
    one = push_sum(module)
    learn(one, [6, 6])
    total = one.x[0] + 2.0 + 3.0
    step(module, 2.0)
    one.mail = [(0, -1, 7, 0.5, [torch.full((2,), 3.0).double()])]
    one.take_mail()
    learn(one, [6, 6])
    assert one.weights == [1.5]
    assert torch.allclose(one.x[0], total)


def test_a_replica_that_begins_again_counts_once_it_has_heard_of_one_that_counts() -> None:
    one = MatchedAverager()
    alone(one, nn.Linear(2, 1, bias=False).double())
    one.restarted, seen = True, []
    for part in (0.0, 1.0):  # of the way to one that has begun again, too, and to one that has not
        one.keep(([torch.ones(2).double()], part))
        one.move()
        seen.append(one.restarted)
    assert seen == [True, False]


def test_noloco_takes_what_it_has_exchanged_before_a_loss_and_offers_no_more() -> None:
    one = NoLoCoAverager(tau=1, outer_momentum=0.0, gamma=0.5)
    alone(one, nn.Linear(2, 1, bias=False).double())
    one._gradient, one._spare = [torch.zeros(2).double()], [torch.zeros(2).double()]
    before, client = one.slow[0].clone(), cast(Any, one.client)
    one.arrived, one.arrived_part, client.offer = [torch.ones(2).double()], 0.25, None
    assert one.after_step(StepContext(1, False, [6, 6])) == Outcome(exchanged=True)
    assert torch.allclose(one.slow[0], before + 0.25)
    assert not one.arrived
