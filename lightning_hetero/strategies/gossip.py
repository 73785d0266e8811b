"""`hetero_gossip`, `hetero_gossip_push_sum`, `hetero_gossip_async`: replicas average with each other."""

from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.first_come import FirstComeAverager
from lightning_hetero.averaging.push_sum import PushSumAverager
from lightning_hetero.averaging.rounds import DirectedAverager, MatchedAverager
from lightning_hetero.strategies.of_averager import with_options_of
from lightning_hetero.strategies.replica import ReplicaStrategy


@with_options_of(MatchedAverager, replica="rank")
class GossipStrategy(ReplicaStrategy):
    """Replicas average in rounds, with few others each time.

    ``exchange="pairwise"``: who meets whom is a matching, and a pair meets halfway, by the samples that each takes:
    ``x_i += s_j / (s_i + s_j) (x_j' - x_i')``. ``"push"`` and ``"pull"``: each sends to others, or gets from them, and
    takes the mean with what has come. Replicas wait for each other at the ends of epochs only. An exact average of all
    precedes validation and checkpoints, and ends the run.

    Source: gossip between unlike processors, Georgiev and Gurov 2019; the rules are those of GoSGD, Blot et al. 2016,
    and GossipGraD, Daily et al. 2018.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import GossipStrategy

        trainer = Trainer(strategy=GossipStrategy(every_n_steps=4, exchange="pairwise"), accelerator="cpu", devices=2)
    """

    algorithm: MatchedAverager

    @override
    def make_averager(self) -> Averager:
        kind = MatchedAverager if self.algorithm.exchange == "pairwise" else DirectedAverager
        return kind(**self.algorithm.options())


@with_options_of(PushSumAverager, replica="rank")
class GossipPushSumStrategy(ReplicaStrategy):
    """Stochastic gradient push: each replica sends parts of its values, and of their weight, to others.

    The mean is exact on directed and irregular graphs. A message that comes late counts when it comes. Replicas
    wait for each other at the ends of epochs only. An exact average of all precedes validation and checkpoints, and
    ends the run.

    Source: SGP, Assran et al. 2019; in the spirit of Georgiev and Gurov 2019.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import GossipPushSumStrategy

        trainer = Trainer(strategy=GossipPushSumStrategy(every_n_steps=4), accelerator="cpu", devices=2)
    """


@with_options_of(FirstComeAverager, replica="rank")
class GossipAsyncStrategy(ReplicaStrategy):
    """Replicas average in pairs, first come, first paired; no replica waits for another one within an epoch.

    Every few steps a replica offers its values, in the background. The next replica that offers its own is its partner.
    A slow replica meets others as often as it can, and slows nobody down. An exact average of all precedes validation
    and checkpoints, and ends the run.

    Source: in the spirit of Georgiev and Gurov 2019; AD-PSGD, Lian et al. 2018.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import GossipAsyncStrategy

        trainer = Trainer(strategy=GossipAsyncStrategy(every_n_steps=4), accelerator="cpu", devices=2)
    """
