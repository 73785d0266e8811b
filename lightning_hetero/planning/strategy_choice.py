"""Choice of a strategy, when the steps of ``hetero_ddp`` have been measured on the cluster."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_hetero.batching.shares import too_slow
from lightning_hetero.planning.cluster import Cluster, duration
from lightning_hetero.planning.predictions import FRAGMENTS, WIRES, Prediction, predictions

_SHORTEST = 1e-9  # seconds of a step, where a device has measured none

#: All strategies, by how much replicas learn from each other in a step, the most first: a single replica, means over
#: all nodes, a center, and pairs. docs/peers.md has the losses after equal samples.
BY_LEARNING = (
    ("ddp", "hetero_ddp"),
    ("hetero_daso", "hetero_node", "hetero_diloco", "hetero_diloco (streaming)"),
    (
        "hetero_easgd_overlap",
        "hetero_easgd",
        "hetero_eamsgd",
        "hetero_diloco_async",
        "hetero_easgd_round_robin",
        "hetero_easgd_async",
        "hetero_measgd_async",
    ),
    ("hetero_gossip", "hetero_gossip_push_sum", "hetero_noloco", "hetero_gossip_async"),
)
#: What ``hetero_auto`` chooses from.
CANDIDATES = (
    "hetero_daso",
    "hetero_node",
    "hetero_diloco (streaming)",
    "hetero_easgd_overlap",
    "hetero_easgd_async",
    "hetero_gossip",
    "hetero_gossip_async",
)
#: Predictions nearer than this, as a fraction, are about equal.
EQUAL = 0.03


class AutoLimits(NamedTuple):
    """Limits that a user sets to the choice.

    Attributes:
        gain: how much faster a strategy must be than one that learns more in a step, as a fraction.
        exact: whether the weights must be those of one process.
        deterministic: whether two runs must give the same weights.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
        fragments: into how many the model can be cut.
    """

    gain: float = 0.2
    exact: bool = False
    deterministic: bool = False
    every: int = 16
    wire: str = "fp32"
    fragments: int = FRAGMENTS


class Choice(NamedTuple):
    """Choice of a strategy.

    Attributes:
        prediction: of the strategy; ``None``: stay with ``hetero_ddp``.
        why: the arithmetic, in a line.
    """

    prediction: Prediction | None
    why: str


def preferred(exact: Prediction, others: Iterable[Prediction], gain: float) -> Prediction:
    """The strategy to take: the exact one, unless others gain enough.

    Of those that do, it is the one that learns most in a step, and of these the one that exchanges most often, unless
    another one is faster by as much again.

    Args:
        exact: the prediction for it.
        others: those for other strategies.
        gain: that is enough, as a fraction of the samples per second.
    """
    enough = [one for one in others if one.speed > (1 + gain) * exact.speed] or [exact]
    most = max(one.speed for one in enough)
    return min((one for one in enough if (1 + gain) * one.speed >= most), key=_learning)


def _learning(one: Prediction) -> tuple[int, int, int]:
    """The place of a strategy among all, by what it learns in a step."""
    tier = next(number for number, names in enumerate(BY_LEARNING) if one.name in names)
    return tier, one.every, BY_LEARNING[tier].index(one.name)


def choose(cluster: Cluster, measured: float, wish: AutoLimits) -> Choice:
    """The strategy to change to from ``hetero_ddp``, by :func:`preferred`.

    A gain counts over the measured steps, as far as work and an exchange that hides behind nothing can explain how long
    they take: what the model does not know of is no reason to change.

    Args:
        cluster: the ranks, links and model, as measured.
        measured: seconds of a step under ``hetero_ddp``.
        wish: what the user allows.

    Example: four ranks with 0.1 s of work in a step, and a link that takes 0.8 s for the gradients::

        >>> from lightning_hetero.planning.strategy_choice import AutoLimits, choose
        >>> from lightning_hetero.planning.cluster import Cluster, LinkModel
        >>> from lightning_hetero.batching.shares import Cost
        >>> nodes = ((Cost(0.01, 0.09 / 16),) * 2,) * 2
        >>> cluster = Cluster(nodes, 64, 10e6, LinkModel(2e-5, 5e9), LinkModel(2e-4, 12.5e6))
        >>> choose(cluster, 1.2, AutoLimits()).prediction.name
        'hetero_diloco (streaming)'
        >>> choose(cluster, 1.2, AutoLimits(exact=True)).prediction is None
        True
    """
    found = {one.name: one for one in predictions(cluster, wish.every, wish.wire)}
    explained = cluster.split + cluster.gradients()  # by an exchange that hides behind nothing
    now = cluster.samples / max(min(measured, explained), _SHORTEST)
    step = (
        f"A step takes {duration(measured)}, of which {duration(cluster.split)} is work; an all-reduce of the "
        f"gradients over all ranks takes {duration(cluster.gradients())}"
    )
    if wish.exact:
        return Choice(None, f"{step}. Nothing else is exact.")
    allowed = [found[name] for name in CANDIDATES if name in found]
    allowed = [one for one in allowed if one.options.get("fragments", 1) <= wish.fragments]
    if wish.deterministic:
        allowed = [one for one in allowed if one.repeatable and one.options.get("wait") != "auto"]  # which is measured
    allowed = [one for one in allowed if not one.seldom] or allowed
    exact = found["hetero_ddp"]._replace(speed=now)
    best = preferred(exact, allowed, wish.gain)
    other = max(allowed, key=lambda one: one.speed) if best is exact else best
    then = (
        f"{step}. {other.strategy} would take {duration(other.step)}, {other.speed / now:.2f} times the samples/s: "
        f"{'not more' if best is exact else 'more'} than 1 + gain = {1 + wish.gain:g}."
    )
    return Choice(None if best is exact else best, then)


#: As many steps as ``tau="auto"`` lets lie between two exchanges: replicas that meet more rarely hardly train together.
RAREST = 500
#: Steps between two exchanges, as far as they are searched.
INTERVALS = (*(2**power for power in range(9)), RAREST)


class Setting(NamedTuple):
    """Settings of a strategy, and which ranks take part.

    Attributes:
        prediction: of the strategy, with its interval and wire.
        left_out: ranks that do not take part.
    """

    prediction: Prediction
    left_out: tuple[int, ...] = ()

    @property
    def price(self) -> tuple[object, ...]:
        """Price of the speed, less is better: idle devices, then what makes replicas drift apart."""
        one = self.prediction
        return len(self.left_out), one.every, tuple(WIRES).index(one.wire), -one.speed


def search(cluster: Cluster, every: int | None = None, wire: str | None = None) -> list[Setting]:
    """The best settings of each strategy, with and without the ranks that slow the job down.

    Of a strategy's settings that are about as fast as its fastest ones the one counts that costs least otherwise; see
    ``EQUAL`` and :attr:`Setting.price`. Of the strategies it recommends the :func:`preferred` one.

    Args:
        cluster: the ranks, links and model.
        every: steps between two exchanges. Default: all of ``INTERVALS`` are tried.
        wire: number format between replicas. Default: all are tried.

    Returns:
        The recommended ones; then those of each other strategy, the fastest first, but last those that could exchange
        too seldom.
    """
    found: dict[str, list[Setting]] = {}
    for left_out, some in _with_fewer(cluster):
        for steps in INTERVALS if every is None else (every,):
            for format_ in WIRES if wire is None else (wire,):
                for one in predictions(some, steps, format_):
                    found.setdefault(one.name, []).append(Setting(one, left_out))
    rows = {name: _cheapest(settings) for name, settings in found.items()}
    usual = [one.prediction for one in rows.values() if not one.prediction.seldom]
    exact = max((rows[name].prediction for name in BY_LEARNING[0]), key=lambda one: one.speed)
    best = preferred(exact, usual, AutoLimits().gain).name
    others = [one for name, one in rows.items() if name != best]
    return [rows[best], *sorted(others, key=lambda one: (one.prediction.seldom, -one.prediction.speed))]


def _cheapest(settings: Sequence[Setting]) -> Setting:
    """Of a strategy's settings that are about as fast as its fastest that exchanges often enough."""
    settings = [one for one in settings if not one.prediction.seldom] or settings
    most = max(one.prediction.speed for one in settings)
    return min((one for one in settings if one.prediction.speed >= (1 - EQUAL) * most), key=lambda one: one.price)


def _with_fewer(cluster: Cluster) -> Iterator[tuple[tuple[int, ...], Cluster]]:
    """The cluster, and the same without the ranks that slow it down, if there are some; with the same samples."""
    yield (), cluster
    if not cluster.given and (slow := too_slow(cluster.samples, cluster.ranks)) is not None:
        numbers = iter(range(cluster.world))
        nodes = [tuple(cost for cost in node if next(numbers) not in slow.ranks) for node in cluster.nodes]
        yield slow.ranks, replace(cluster, nodes=tuple(filter(None, nodes)))


class PossibleChange(NamedTuple):
    """Change of one thing of the cluster, and its gain.

    Attributes:
        what: it is, in words.
        best: the recommended strategy then.
        gain: its samples per second over those of the recommended one now; 1 is no gain.
    """

    what: str
    best: Prediction
    gain: float


def changes(cluster: Cluster, every: int | None = None, wire: str | None = None) -> list[PossibleChange]:
    """Possible changes of the machines or the batch, the most helpful first.

    Args:
        cluster: as it is.
        every: as for :func:`search`.
        wire: as for :func:`search`.
    """
    now = search(cluster, every, wire)[0].prediction.speed
    slowest = max(cost.seconds(cluster.samples / cluster.world) for cost in cluster.ranks)
    options = [
        ("twice the samples per step", replace(cluster, samples=2 * cluster.samples)),
        ("the slowest ranks as fast as the fastest", _alike(cluster, slowest)),
    ]
    if len(cluster.nodes) > 1:
        faster = cluster.between._replace(bandwidth=10 * cluster.between.bandwidth)
        options.append(("a link ten times as fast", replace(cluster, between=faster)))
    found = [(what, search(other, every, wire)[0].prediction) for what, other in options]
    return sorted((PossibleChange(what, best, best.speed / now) for what, best in found), key=lambda one: -one.gain)


def _alike(cluster: Cluster, slowest: float) -> Cluster:
    each = cluster.samples / cluster.world
    fastest = min(cluster.ranks, key=lambda cost: cost.seconds(each))
    nodes = tuple(tuple(fastest if cost.seconds(each) == slowest else cost for cost in node) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)
