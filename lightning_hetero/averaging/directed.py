"""Gossip one way: each takes the mean of what it has and what has come."""

from typing_extensions import override

from lightning_hetero.averaging.averager import StepContext
from lightning_hetero.averaging.gossip import PushAverager
from lightning_hetero.averaging.mixing import Rule, sends
from lightning_hetero.comm.gossip.introduction import Endpoint
from lightning_hetero.comm.wire import Wire


class DirectedAverager(PushAverager):
    """``x_i += sum_j (x_j - x_i) / (d + 1)`` over the ``d`` peers from which something has come in a round.

    The sum of all is kept if nothing is lost, since everyone sends as much as it gets; unlike push-sum it knows no
    weights and does not make good what was lost.

    Source: GossipGraD, Daily et al. 2018.

    Args:
        every: optimizer steps from one exchange to the next.
        rule: who sends to whom.
        pull: the other way round: who would be sent to sends.
        seed: of what is drawn at random.
        wire: number format; in 16 bits differences from the initial values travel.
        endpoint: where this rank can be reached.
        skip: whether a replica that is not finite begins again at the initial values, instead of raising an error.
    """

    def __init__(
        self, every: int, rule: Rule, pull: bool, seed: int, wire: Wire, endpoint: Endpoint, skip: bool
    ) -> None:
        super().__init__(every, wire, endpoint, skip)
        self.rule, self.pull, self.seed = rule, pull, seed

    @override
    def after_step(self, context: StepContext) -> None:
        if context.step % self.every:
            return
        turn, me = context.step // self.every, self.links.index
        to = sends(self.rule, range(self.links.count), turn, self.seed)
        targets, sources = to[me], tuple(peer for peer, others in to.items() if me in others)
        if self.pull:
            targets, sources = sources, targets
        self.lay_out(self._outgoing)
        for peer in targets:
            self.send(peer, turn, 1.0)
        with self.receiving(turn, sources) as pushes:
            fresh = [push for push in pushes if push.round_number >= turn]  # others' values have long moved on
            for push in fresh:
                self.replica.add(self.apart(push.vectors, self._outgoing), 1 / (len(fresh) + 1))
