"""`hetero_auto`: begins as `hetero_ddp`, measures, and goes on with what the cost model chooses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hetero import lightning_compat
from lightning_hetero.algorithms.automatic import AutoAverager
from lightning_hetero.algorithms.base import Averager
from lightning_hetero.batching.repartition import Repartition
from lightning_hetero.batching.reports import Report
from lightning_hetero.batching.sampler import ShareSampler
from lightning_hetero.batching.shares import Cost
from lightning_hetero.checkpoint.format import CheckpointIdentity
from lightning_hetero.checkpoint_sections import add_section, section
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.job import Job
from lightning_hetero.comm.topology import Topology
from lightning_hetero.comm.view import ReplicaMember, View
from lightning_hetero.errors import ConfigurationError, UnsupportedError
from lightning_hetero.planning import cluster
from lightning_hetero.planning.cluster import MEMORY, Cluster, LinkModel
from lightning_hetero.planning.strategy_choice import AutoLimits, Choice, choose
from lightning_hetero.replicas.fragments import modules_of
from lightning_hetero.replicas.sharding import is_sharded
from lightning_hetero.replicas.vectors import broadcast_values
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.default_groups import beyond
from lightning_hetero.strategies.replica import ReplicaStrategy, with_options_of
from lightning_hetero.strategies.trainer_checks import two_points
from lightning_hetero.strategies.weight_averaging import averages_weights

if TYPE_CHECKING:
    import lightning.pytorch as pl

_FIRST = 4  # optimizer steps after which it looks for the first time
_CLEAR = 2.0  # times as much as is enough: then it chooses at once
_TRIES = 10  # times that it waits for the ranks' speeds
_PAIRS = 4  # links of each kind that are measured, or it would take long on many nodes


@with_options_of(AutoAverager)
class AutoStrategy(ReplicaStrategy):
    """Begins as `hetero_ddp`, which is exact, measures, and changes to another strategy if that gains enough.

    After a few optimizer steps the ranks measure their links, and put these and the speeds that they have measured in
    training into the arithmetic of ``lightning-hetero plan``. Unless the gain is clear, they do so again after
    ``measure`` steps. If strategies promise more than ``1 + gain`` times the samples per second, all ranks go on with
    one of them from the next step, in the same fit, and rank 0 says so with the numbers: the one that learns most in a
    step, unless another is faster by as much again. The choice is in checkpoints: a fit that goes on from one begins
    with it.

    Source: the arithmetic of all-reduce and step times in You et al. 2017 (EASGD on HPC clusters) and Coquelin et al.
    2021 (DASO).

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import AutoStrategy

        trainer = Trainer(strategy=AutoStrategy(gain=0.3, deterministic=True), accelerator="cpu", devices=2)
    """

    algorithm: AutoAverager
    chosen: ReplicaStrategy | None = None  #: What goes on; ``None``: ``hetero_ddp``.
    choice: Choice | None = None  #: The latest one, with its arithmetic; ``None``: nothing has been chosen yet.
    stays = False  #: Whether it has chosen to stay with ``hetero_ddp``.
    _next = 0  # optimizer steps of this fit after which it looks; 0: no more
    _until = 0  # and after which it chooses, whatever the gain

    @override
    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        if self.replica != "node":
            raise ConfigurationError(
                f"replica={self.replica!r}: hetero_auto chooses the replicas with the strategy. Leave the option out."
            )
        if self.options.on_peer_loss == "continue":
            raise UnsupportedError(
                "hetero_auto with on_peer_loss='continue': who is lost with a rank would change with the strategy. "
                "Name the strategy that it has chosen for you (see its log), or use on_peer_loss='error'."
            )
        return (tuple(range(topology.world)),) if self.chosen is None else self.chosen.replicas(topology)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if is_sharded(trainer.lightning_module):
            raise UnsupportedError(
                "hetero_auto with a sharded model: its shards belong to one set of replicas, and cannot move to others "
                "within a fit. Name a strategy: hetero_ddp on fast links, hetero_diloco on slow ones."
            )
        super().setup(trainer)

    @override
    def make_averager(self) -> Averager:
        return super().make_averager() if self.chosen is None else self.chosen.make_averager()

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), "chosen": self._chosen_name()}

    def _chosen_name(self) -> str:
        return "hetero_ddp" if self.chosen is None else type(self.chosen).saved_as

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        decided = self.stays or self.algorithm.exact or self.chosen is not None
        undecided = not decided and self.job.view.world > 1 and not lightning_compat.searches_lr(self.trainer)
        left = max(self.algorithm.measure - self.trainer.global_step, 1)  # of a fit that goes on
        self._until = self.engine.windows + left
        self._next = min(self.engine.windows + _FIRST, self._until) if undecided else 0
        self._last = self._until + (_TRIES - 1) * self.algorithm.measure

    @override
    def _window_ended(self) -> None:
        super()._window_ended()
        if self._next and self.engine.windows >= self._next:
            self._choose()

    # -- the choice --------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose, and change, on all ranks after the same step; but early only if the gain is clear (collective)."""
        early = self.engine.windows < self._until
        with self.timer.waiting():
            self.accounting.apply_reports()
            if problem := next(filter(None, gather(self._unchangeable(), "whether replicas can change")), None):
                self._stay(f"{problem}, so that the replicas cannot change within this fit.")
                return
            if (unlinked := self._cluster()) is None:
                self._next = min(self._next + _FIRST, self._until) if early else self._next + self.algorithm.measure
                if self._next > self._last:
                    self._stay("not every rank has measured its speed, or steps differ in size.")
                return
            nodes = self.job.view.topology.nodes
            near, far = (self._measured(pairs, self._size()) for pairs in cluster.pairs_to_measure(nodes))
            measured = replace(unlinked, within=near, between=far)
            step = self.trainer.accumulate_grad_batches * max(
                report.compute + report.wait for report in self.accounting.reports
            )
            own, fragments = self.algorithm, len(modules_of(self._sizes()))
            wish = AutoLimits(own.gain, own.exact, own.deterministic, own.every, own.wire, fragments)
            if early and choose(measured, step, wish._replace(gain=_CLEAR * (1 + wish.gain) - 1)).prediction is None:
                self._next = self._until
                return
            self.choice = choose(measured, step, wish)
            if self.choice.prediction is None:
                self._stay(self.choice.why)
                return
            self._next = 0
            self._take(self.choice.prediction.string, self.choice.prediction.options)
            rank_zero_info(f"hetero_auto goes on as {self.choice.prediction.strategy}. {self.choice.why}")
            self._begin_replicas()

    def _stay(self, why: str) -> None:
        self._next, self.stays = 0, True
        rank_zero_info(f"hetero_auto stays with hetero_ddp: {why}")

    def _take(self, name: str, options: Mapping[str, Any]) -> None:
        self.chosen = StrategyRegistry[name]["strategy"](**options)

    def _measured(self, pairs: list[tuple[int, int]], size: float) -> LinkModel:
        """The slowest of some links for a message of ``size`` bytes (collective)."""
        some = pairs[:: -(-len(pairs) // _PAIRS)] if pairs else []
        return cluster.slowest_link(cluster.measure_links(some), size) or MEMORY

    def _cluster(self) -> Cluster | None:
        """The ranks as measured, the same everywhere; ``None``: not yet, or it is not known how large steps are."""
        planner, reports = self.accounting.planner, self.accounting.reports
        if planner.infers_total or not planner.total or len(reports) != planner.world:
            return None
        batches = self.trainer.accumulate_grad_batches  # gradients travel once in so many
        costs = [_straight(report, batches) for report in reports]
        if not all(cost.is_valid() and cost.fixed >= 0 for cost in costs):
            return None
        nodes = tuple(tuple(costs[rank] for rank in ranks) for ranks in self.job.view.topology.nodes)
        shares = () if planner.auto else tuple(batches * n for n in planner.shares(self.accounting.step))
        return Cluster(nodes, batches * planner.total, self._size(), MEMORY, MEMORY, given=shares)

    def _size(self) -> int:
        """Bytes of the gradients in fp32."""
        return 4 * sum(self._sizes().values())

    def _sizes(self) -> dict[str, int]:
        """Values of the parameters that are trained, by name."""
        module = self.trainer.lightning_module
        return {name: values.numel() for name, values in module.named_parameters() if values.requires_grad}

    def _view_of_replicas(self) -> View:
        """The view of the same ranks, with the replicas that the chosen strategy asks for now."""
        view = self.job.view
        members = tuple(ReplicaMember(id, ranks) for id, ranks in enumerate(self.replicas(view.topology)))
        return replace(view, number=view.number + 1, replicas=members, ranks_leave=len(members) == 1)

    def _unchangeable(self) -> str | None:
        """The reason why this fit cannot go on in several replicas; ``None`` if it can."""
        module, callbacks = self.trainer.lightning_module, self.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
            return "SyncBatchNorm takes its statistics over all ranks"
        if (hook := lightning_compat.comm_hook(self)) is not None and not getattr(hook[1], "__module__", "").startswith(
            "torch."
        ):
            return "ddp_comm_hook may average over all ranks"
        if (problem := beyond(module, self.optimizers, self._view_of_replicas().replica.ranks)) is not None:
            return str(problem).partition(",")[0]
        if names := [type(callback).__name__ for callback in callbacks if averages_weights(callback)]:
            return f"{names[0]} has begun to average the weights of one replica"
        if two_points(self.optimizers) is not None:
            return "the optimizer keeps an average of the weights of one replica (it has `train()` and `eval()`)"
        if any(not isinstance(source, ShareSampler) for source in self.accounting.loaders.sources()):
            return "the training data is no map-style dataset that this package splits"
        return None

    def _begin_replicas(self) -> None:
        """Let the replicas of the chosen strategy go on, between two windows, from equal weights (collective)."""
        accounting, former = self.accounting, self.job
        accounting.apply_reports()  # leave nothing in flight
        start = max(gather(accounting.loaders.next_step(), "the next batch to draw"))
        job = Job(self._view_of_replicas(), former.timeout, former.within)
        former_ranks = tuple(range(former.view.world))
        self.build(job, Repartition(former_ranks, start, accounting.reports_applied))
        broadcast_values(self.module)  # unlike devices round differently, and buffers are each rank's own
        self.start_averager()
        self.wrap_in_view()
        self.continue_in_view()

    # -- what is kept ------------------------------------------------------------------------------

    def _decision(self) -> dict[str, Any] | None:
        """The decision, in plain values; ``None``: there is none yet."""
        if self.chosen is not None:
            options = self.chosen.algorithm.options()  # type: ignore[union-attr]
            return {"strategy": self._chosen_name(), "options": options, "replica": self.chosen.replica}
        return {"strategy": "hetero_ddp", "options": {}, "replica": self.replica} if self.stays else None

    def give_back(self) -> tuple[dict[str, Any] | None, Choice | None]:
        """The decision and its arithmetic, for the process that has called the Trainer where ranks are forked."""
        return self._decision(), self.choice

    def take_back(self, given: tuple[dict[str, Any] | None, Choice | None]) -> None:
        """Know what :meth:`give_back` has sent."""
        decision, self.choice = given
        if decision is not None:
            self._recall(decision)

    def _recall(self, decision: Mapping[str, Any]) -> None:
        if decision["strategy"] == "hetero_ddp":
            self.stays = True
        else:
            self._take(decision["strategy"], {**decision["options"], "replica": decision["replica"]})

    @override
    def _identity(self) -> CheckpointIdentity:
        own = super()._identity()
        return own if self.chosen is None else own._replace(algorithm=type(self.chosen).saved_as)

    @override
    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        if (decision := self._decision()) is not None:
            add_section(checkpoint, "choice", decision)
        base = HeteroStrategy if self.chosen is None else ReplicaStrategy  # one replica has nothing of its own
        base._save(self, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        choice, fits = section(checkpoint, "choice"), False
        if choice is not None and (self.algorithm.exact or choice["strategy"] == "hetero_ddp"):
            self.stays, choice = True, None
        if (trainer := lightning_compat.trainer_of(self.lightning_module)) is not None:
            fits = trainer.state.fn == TrainerFn.FITTING
        if choice is not None and fits and self.chosen is None and self.joined:
            self._recall(choice)
            self.build(Job(self._view_of_replicas(), self.job.timeout, self.job.within))
            self._rank_state.read(checkpoint)  # the loaders are new ones
            rank_zero_info(f"hetero_auto goes on as {choice['strategy']}, as chosen before the checkpoint was saved.")
        return checkpoint

    @override
    def _restore_replicas(self, checkpoint: Mapping[str, Any]) -> None:
        if self.chosen is None:
            HeteroStrategy._restore_replicas(self, checkpoint)
        else:
            super()._restore_replicas(checkpoint)


def _straight(report: Report, batches: int) -> Cost:
    """A rank's cost of some batches as a straight line, through its time on as many samples as it has had lately."""
    cost, samples = report.cost, max(report.samples, 1.0)
    return Cost(batches * cost.fixed, (cost.seconds(samples) - cost.fixed) / samples)
