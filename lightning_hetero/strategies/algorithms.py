"""The strategy classes: `hetero_ddp`, and one class for each algorithm between replicas."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_hetero.algorithms.base import Averager
from lightning_hetero.algorithms.daso import DASOAverager
from lightning_hetero.algorithms.diloco import OuterAverager
from lightning_hetero.algorithms.diloco_async import OuterAsyncAverager
from lightning_hetero.algorithms.diloco_quorum import QuorumAverager
from lightning_hetero.algorithms.easgd import EAMSGDAverager, ElasticAverager, OverlappedElasticAverager
from lightning_hetero.algorithms.easgd_async import (
    AsyncElasticAverager,
    AsyncMomentumElasticAverager,
    HogwildAverager,
    RoundRobinAverager,
)
from lightning_hetero.algorithms.gossip import DirectedAverager, FirstComeAverager, MatchedAverager
from lightning_hetero.algorithms.noloco import NoLoCoAverager
from lightning_hetero.algorithms.periodic import PeriodicAverager
from lightning_hetero.algorithms.push_sum import PushSumAverager
from lightning_hetero.comm.agreement import raise_on_all
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.options import with_shared_options
from lightning_hetero.strategies.replica import ReplicaStrategy, with_options_of
from lightning_hetero.strategies.replica_ddp import WiredGradients


@with_shared_options
class HeteroDDPStrategy(HeteroStrategy):
    """Data-parallel training: batches are split by measured speed, and gradients are weighted by samples.

    There is one replica, the world. After every step all ranks hold the weights that one process would have reached
    on the whole batch, whatever the split, to rounding, for losses that are means over samples (or over
    ``batch_weight``) and layers that do not couple samples.

    Source: HetGrad, Moreno-Alvarez et al. 2022: ``g = sum_i (n_i / N) g_i``.

    Args:
        accelerator: set by the Trainer.
        wire: how gradients travel: ``"fp32"``, exact; ``"bf16"`` or ``"fp16"``; with error feedback in few bits,
            ``"int8"``, ``"int4"``, ``"2bit"`` or ``"topk:0.02"`` (any density), or as matrices of low rank,
            ``"powersgd:4"`` (any rank). Not together with ``ddp_comm_hook``, nor with shared memory (``within``).

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import HeteroDDPStrategy

        trainer = Trainer(strategy=HeteroDDPStrategy(balance=[3.0, 1.0]), accelerator="cpu", devices=2)
    """

    def __init__(self, accelerator: Accelerator | None = None, *args: Any, wire: str = "fp32", **kwargs: Any) -> None:
        self._gradients = WiredGradients(wire)
        self._gradients.check(kwargs)
        if wire != "fp32":
            kwargs["within"] = "gloo"
        super().__init__(accelerator, *args, **kwargs)

    @property
    def wire(self) -> str:
        """The wire format of gradients."""
        return self._gradients.wire

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), "wire": self.wire}

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            raise_on_all(self._gradients.problem(self.precision_plugin), "the Trainer's precision")
        super().setup(trainer)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._gradients.register(self.model, self.job)

    @override
    def teardown(self) -> None:
        self._gradients.forget()
        super().teardown()

    @override
    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        if not self.collectives.alone():
            self._gradients.add_to(checkpoint)
        super()._save(checkpoint, filepath, storage_options)

    @override
    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        super()._restore_replicas(checkpoint)
        self._gradients.load(checkpoint)


@with_options_of(PeriodicAverager)
class NodeAverageStrategy(ReplicaStrategy):
    """Averages gradients within each node at every step, and parameters between nodes every K steps.

    The slow links between nodes carry one message per K steps instead of one per step; between them nodes do not wait
    for each other. Nodes weigh by the samples that they take.

    Source: eDNNcomm, Moreno-Alvarez et al. 2023.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import NodeAverageStrategy

        trainer = Trainer(strategy=NodeAverageStrategy(every_n_steps=16), accelerator="cpu", devices=2)
    """


@with_options_of(DASOAverager)
class DASOStrategy(ReplicaStrategy):
    """Averages gradients within each node at every step, and mixes nodes in the background between.

    In the warm-up and the cool-down nodes average at every step. Between, every B steps one rank of each node (in
    rotation) exchanges parameters while training goes on, and mixes them in W steps later. B and W are halved whenever
    the training loss stalls, and start over from the rarest exchange.

    Source: DASO, Coquelin et al. 2021.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import DASOStrategy

        trainer = Trainer(strategy=DASOStrategy(global_every=4, ranks_per_node=1), accelerator="cpu", devices=2)
    """


@with_options_of(ElasticAverager, replica="rank")
class EASGDStrategy(ReplicaStrategy):
    """Replicas train apart, tied to a center by an elastic force; every tau steps, all at once (Sync EASGD).

    One packed all-reduce; every rank keeps the center. With fixed shares two runs are alike bit for bit. With ``D_i =
    x_i - c``, weights ``w_i`` (the part of the samples that replica ``i`` takes) and p replicas::

        x_i <- x_i - alpha D_i;  c <- c + beta sum_i w_i D_i

    Source: EASGD, Zhang et al. 2015; Sync EASGD, You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDStrategy

        trainer = Trainer(strategy=EASGDStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(OverlappedElasticAverager, replica="rank")
class EASGDOverlapStrategy(ReplicaStrategy):
    """Replicas train apart, tied to a center by an elastic force; they exchange in the background of a step.

    Every tau steps all exchange at once, while each computes its next step. The results are those of ``hetero_easgd``,
    bit for bit.

    Source: Sync EASGD3, You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDOverlapStrategy

        trainer = Trainer(strategy=EASGDOverlapStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(EAMSGDAverager, replica="rank")
class EAMSGDStrategy(ReplicaStrategy):
    """EASGD with Nesterov's momentum: ``v <- delta v - eta g(x + delta v);  x <- x + v - alpha (x - c)``.

    Replicas train apart, tied to a center ``c`` by an elastic force; every tau steps all exchange at once. The model's
    optimizer must be ``SGD(momentum=delta, nesterov=True)``; the paper's delta is 0.99.

    Source: EAMSGD, Zhang et al. 2015.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EAMSGDStrategy

        trainer = Trainer(strategy=EAMSGDStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(RoundRobinAverager, replica="rank")
class EASGDRoundRobinStrategy(ReplicaStrategy):
    """The original EASGD: replicas exchange with the center strictly in their order, over and over.

    It is the baseline that the others beat. A thread of the first replica keeps the center; an exchange is one message
    each way.

    Source: "Original EASGD", You, Buluc and Demmel 2017, algorithm 1.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDRoundRobinStrategy

        trainer = Trainer(strategy=EASGDRoundRobinStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(AsyncElasticAverager, replica="rank")
class EASGDAsyncStrategy(ReplicaStrategy):
    """Replicas train apart, tied to a center by an elastic force; each exchanges with it every tau steps of its own.

    Whoever comes first is served first, so no replica waits for a slow one within an epoch.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDAsyncStrategy

        trainer = Trainer(strategy=EASGDAsyncStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(AsyncMomentumElasticAverager, replica="rank")
class MEASGDAsyncStrategy(ReplicaStrategy):
    """Asynchronous EASGD with heavy-ball momentum: ``v <- mu v - eta g;  x <- x + v - alpha (x - c)``.

    Replicas train apart, tied to a center ``c`` by an elastic force. Each exchanges with it every tau steps of its own.
    The model's optimizer must be ``SGD(momentum=mu)``, not Nesterov's.

    Source: Momentum EASGD, You, Buluc and Demmel 2017, eq. 5 and 6.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import MEASGDAsyncStrategy

        trainer = Trainer(strategy=MEASGDAsyncStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(HogwildAverager, replica="rank")
class EASGDHogwildStrategy(ReplicaStrategy):
    """Asynchronous EASGD without a lock, in the shared memory of one node.

    Replicas train apart, tied to a center by an elastic force. Every tau steps of its own, each one reads the center
    and adds to it, without waiting for others that do so at the same moment.

    Source: Hogwild EASGD, You, Buluc and Demmel 2017.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import EASGDHogwildStrategy

        trainer = Trainer(strategy=EASGDHogwildStrategy(moving_rate="auto", tau=4), accelerator="cpu", devices=2)
    """


@with_options_of(OuterAverager, replica="rank")
class DiLoCoStrategy(ReplicaStrategy):
    """Replicas train apart for tau steps; the mean of what they have done is the gradient of an outer step.

    Source: DiLoCo, Douillard et al. 2023, algorithm 1; with other outer optimizers local SGD (``SGD(lr=1)``) and BMUF
    (heavy-ball momentum), Chen and Huo 2016.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import DiLoCoStrategy

        trainer = Trainer(strategy=DiLoCoStrategy(tau=50, outer_lr=0.7), accelerator="cpu", devices=2)
    """


@with_options_of(OuterAsyncAverager, replica="rank")
class DiLoCoAsyncStrategy(ReplicaStrategy):
    """Replicas train apart, and each brings what it has done to a center when it is done; nobody waits for others.

    The center applies each outer gradient at once, and its momentum once in as many arrivals as there are replicas
    (delayed Nesterov). A slow replica takes fewer local steps between two visits, so that all come equally often.

    Source: Liu et al. 2024, "Asynchronous local-SGD training for language modeling" (arXiv:2401.09135), algorithms 3
    and 4.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import DiLoCoAsyncStrategy

        trainer = Trainer(strategy=DiLoCoAsyncStrategy(tau=50, outer_lr=0.7), accelerator="cpu", devices=2)
    """

    algorithm: OuterAsyncAverager

    @override
    def make_averager(self) -> Averager:
        kind = OuterAsyncAverager if self.algorithm.quorum is None else QuorumAverager
        return kind(**self.algorithm.options())


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


@with_options_of(NoLoCoAverager, replica="rank")
class NoLoCoStrategy(ReplicaStrategy):
    """Replicas train apart for tau steps; then random pairs take an outer step with momentum, and pull at each other.

    A replica waits for its partner only, however many there are. All wait for each other at the ends of epochs only. An
    exact average of all precedes validation and checkpoints, and ends the run.

    Source: NoLoCo, Kolehmainen et al. 2025 (arXiv:2506.10911).

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import NoLoCoStrategy

        trainer = Trainer(strategy=NoLoCoStrategy(tau=50, gamma=0.7), accelerator="cpu", devices=2)
    """
