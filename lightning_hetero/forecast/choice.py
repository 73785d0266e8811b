"""Which strategy to go on with, when the steps of ``hetero_ddp`` have been measured on the cluster."""

from typing import NamedTuple

from lightning_hetero.forecast.cluster import Cluster
from lightning_hetero.forecast.predictions import Prediction, predictions

#: What to choose from; of those that are about equally fast the first. Repeatable ones come before asynchronous ones.
CANDIDATES = (
    "hetero_node",
    "hetero_daso",
    "hetero_easgd_overlap",
    "hetero_gossip",
    "hetero_easgd_async",
    "hetero_gossip_async",
)
#: Predictions nearer than this, as a fraction, are about equal.
EQUAL = 0.03


class Wish(NamedTuple):
    """What a user allows.

    Attributes:
        gain: how much faster another strategy must be, as a fraction.
        exact: whether the weights must be those of one process.
        deterministic: whether two runs must give the same weights.
        every: steps between two exchanges of strategies that meet now and then.
        wire: number format between replicas.
    """

    gain: float = 0.2
    exact: bool = False
    deterministic: bool = False
    every: int = 16
    wire: str = "fp32"


class Choice(NamedTuple):
    """What to go on with.

    Attributes:
        prediction: of the strategy; ``None``: stay with ``hetero_ddp``.
        why: the arithmetic, in a line.
    """

    prediction: Prediction | None
    why: str


def choose(cluster: Cluster, measured: float, wish: Wish) -> Choice:
    """The strategy that gains most over the steps that have been measured, if one gains enough.

    A gain counts over the measured steps, as far as work and an exchange that hides behind nothing can explain how long
    they take: what the model does not know of is no reason to change.

    Args:
        cluster: the ranks, links and model, as measured.
        measured: seconds of a step under ``hetero_ddp``.
        wish: what the user allows.

    Example: four ranks with 0.1 s of work in a step, and a link that takes 0.8 s for the gradients::

        >>> from lightning_hetero.forecast.choice import Wish, choose
        >>> from lightning_hetero.forecast.cluster import Cluster, Way
        >>> from lightning_hetero.workload.shares import Cost
        >>> nodes = ((Cost(0.01, 0.09 / 16),) * 2,) * 2
        >>> cluster = Cluster(nodes, 64, 10e6, Way(2e-5, 5e9), Way(2e-4, 12.5e6))
        >>> choose(cluster, 1.2, Wish()).prediction.name
        'hetero_daso'
        >>> choose(cluster, 1.2, Wish(exact=True)).prediction is None
        True
    """
    found = {one.name: one for one in predictions(cluster, wish.every, wish.wire)}
    explained = cluster.split + cluster.gradients()  # by an exchange that hides behind nothing
    now = cluster.samples / min(measured, explained)
    step = (
        f"A step takes {_ms(measured)}, of which {_ms(cluster.split)} is work; an all-reduce of the gradients over all "
        f"ranks takes {_ms(cluster.gradients())}"
    )
    if wish.exact:
        return Choice(None, f"{step}. Nothing else is exact.")
    measured_waits = [name for name, one in found.items() if one.options.get("wait") == "auto"]  # never twice alike
    repeatable = [name for name in CANDIDATES if found[name].repeatable and name not in measured_waits]
    allowed = [found[name] for name in (repeatable if wish.deterministic else CANDIDATES)]
    allowed = [one for one in allowed if not one.seldom] or allowed
    most = max(one.speed for one in allowed)
    best = next(one for one in allowed if one.speed >= (1 - EQUAL) * most)
    then = (
        f"{step}. {best.strategy} would take {_ms(best.step)}, {best.speed / now:.2f} times the samples/s: "
        f"{'more' if best.speed > (1 + wish.gain) * now else 'not more'} than 1 + gain = {1 + wish.gain:g}."
    )
    return Choice(best if best.speed > (1 + wish.gain) * now else None, then)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
