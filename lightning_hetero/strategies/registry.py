"""The strategy strings: what each stands for, and when to use it. Written once; Lightning and the table read it."""

from typing import Literal, NamedTuple

from lightning_hetero.strategies.auto import AutoStrategy
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.daso import DASOStrategy
from lightning_hetero.strategies.ddp import HeteroDDPStrategy
from lightning_hetero.strategies.diloco import DiLoCoAsyncStrategy, DiLoCoStrategy
from lightning_hetero.strategies.easgd import EAMSGDStrategy, EASGDOverlapStrategy, EASGDStrategy
from lightning_hetero.strategies.easgd_async import (
    EASGDAsyncStrategy,
    EASGDHogwildStrategy,
    EASGDRoundRobinStrategy,
    MEASGDAsyncStrategy,
)
from lightning_hetero.strategies.gossip import GossipAsyncStrategy, GossipPushSumStrategy, GossipStrategy
from lightning_hetero.strategies.node import NodeAverageStrategy
from lightning_hetero.strategies.noloco import NoLoCoStrategy
from lightning_hetero.strategies.of_averager import register_name


class Entry(NamedTuple):
    """One strategy string.

    Attributes:
        name: the string.
        strategy: the class that it makes.
        replica: what trains apart from the others: the whole world, a node, or a rank (or, if asked for, a node).
        what: what it does, in a line.
        when: when to use it.
        paper: where it comes from.
    """

    name: str
    strategy: type[HeteroStrategy]
    replica: Literal["world", "node", "rank"]
    what: str
    when: str
    paper: str


_ELASTIC = "Zhang et al. 2015"
_ON_CLUSTERS = "You, Buluç and Demmel 2017"
_GOSSIP = "Georgiev and Gurov 2019"

ENTRIES = (
    Entry(
        "hetero_ddp",
        HeteroDDPStrategy,
        "world",
        "batches split by measured speed, gradients weighted by samples",
        "the links are fast, or there is one machine; exact",
        "HetGrad, Moreno-Álvarez et al. 2022",
    ),
    Entry(
        "hetero_auto",
        AutoStrategy,
        "world",
        "begins as hetero_ddp, measures, and goes on with what gains most",
        "you do not know the links, or do not want to choose",
        f"{_ON_CLUSTERS}; DASO, Coquelin et al. 2021 (the arithmetic)",
    ),
    Entry(
        "hetero_node",
        NodeAverageStrategy,
        "node",
        "gradients within a node, parameter averages between nodes",
        "slow links between nodes; the simplest that leaves them out of the step",
        "eDNNcomm, Moreno-Álvarez et al. 2023",
    ),
    Entry(
        "hetero_daso",
        DASOStrategy,
        "node",
        "gradients within a node, stale background mixing between nodes",
        "slow links between nodes; exchanges pass in the background",
        "DASO, Coquelin et al. 2021",
    ),
    Entry(
        "hetero_easgd",
        EASGDStrategy,
        "rank",
        "an elastic center, all at once",
        "slow links between ranks; repeatable bit for bit",
        f"EASGD, {_ELASTIC}; {_ON_CLUSTERS}",
    ),
    Entry(
        "hetero_easgd_overlap",
        EASGDOverlapStrategy,
        "rank",
        "an elastic center, in the background of a step",
        "the same numbers, sooner",
        f"Sync EASGD3, {_ON_CLUSTERS}",
    ),
    Entry(
        "hetero_easgd_round_robin",
        EASGDRoundRobinStrategy,
        "rank",
        "an elastic center, in turn",
        "as the baseline that the others beat",
        f"Original EASGD, {_ON_CLUSTERS}",
    ),
    Entry(
        "hetero_easgd_async",
        EASGDAsyncStrategy,
        "rank",
        "an elastic center, first come, first served",
        "ranks stall now and then, so that nobody should wait for them",
        f"Async EASGD, {_ELASTIC}; {_ON_CLUSTERS}",
    ),
    Entry(
        "hetero_easgd_hogwild",
        EASGDHogwildStrategy,
        "rank",
        "an elastic center in shared memory, without a lock",
        "many ranks on one machine, at short intervals",
        f"Hogwild EASGD, {_ON_CLUSTERS}",
    ),
    Entry(
        "hetero_measgd_async",
        MEASGDAsyncStrategy,
        "rank",
        "an elastic center and heavy-ball momentum, asynchronous",
        "as hetero_easgd_async, with SGD(momentum=)",
        f"Async MEASGD, {_ON_CLUSTERS}",
    ),
    Entry(
        "hetero_eamsgd",
        EAMSGDStrategy,
        "rank",
        "an elastic center and Nesterov's momentum",
        "as hetero_easgd, with SGD(nesterov=True)",
        f"EAMSGD, {_ELASTIC}",
    ),
    Entry(
        "hetero_gossip",
        GossipStrategy,
        "rank",
        "averages in pairs, in rounds",
        "many replicas, no point that all must pass",
        f"GoSGD, Blot et al. 2016; {_GOSSIP}",
    ),
    Entry(
        "hetero_gossip_push_sum",
        GossipPushSumStrategy,
        "rank",
        "pushes of values with their weight, in rounds",
        "messages come late, or links go one way",
        f"SGP, Assran et al. 2019; {_GOSSIP}",
    ),
    Entry(
        "hetero_gossip_async",
        GossipAsyncStrategy,
        "rank",
        "averages in pairs, first come, first paired",
        "as hetero_gossip, beside ranks that stall",
        f"AD-PSGD, Lian et al. 2018; {_GOSSIP}",
    ),
    Entry(
        "hetero_diloco",
        DiLoCoStrategy,
        "rank",
        "an outer optimizer on what replicas have done",
        "very slow links: hundreds of steps between exchanges",
        "DiLoCo, Douillard et al. 2023; Streaming DiLoCo, 2025",
    ),
    Entry(
        "hetero_diloco_async",
        DiLoCoAsyncStrategy,
        "rank",
        "an outer optimizer at a center that replicas visit one by one",
        "as hetero_diloco, with ranks of unequal speed and fixed shares",
        "Delayed Nesterov and DyLU, Liu et al. 2024",
    ),
    Entry(
        "hetero_noloco",
        NoLoCoStrategy,
        "rank",
        "an outer optimizer in random pairs, without an all-reduce",
        "as hetero_diloco, with many replicas, or links that are not alike",
        "NoLoCo, Kolehmainen et al. 2025",
    ),
)


def register() -> None:
    """Make the strategy strings known to Lightning; importing ``lightning_hetero.strategies`` does it."""
    for entry in ENTRIES:
        register_name(entry.name, entry.strategy, entry.what)
