"""Data parallelism beside this package, on emulated machines, for docs/images/timelines.py."""

from collections.abc import Sequence

from lanes import Lane

from lightning_hetero.batching.shares import Cost, split
from lightning_hetero.planning.cluster import Cluster, LinkModel

NODES = ((0, 1), (2, 3))


def of_nodes() -> list[str]:
    """Names of the rows of two nodes."""
    return [f"node {i}, rank {rank}" for i, ranks in enumerate(NODES) for rank in ranks]


DEVICES = [Cost(0.010, k) for k in (0.002, 0.002, 0.004, 0.008)]  # of benchmarks/emulated_speeds.py and the demo
BATCH = 64


def even_or_split(title: str, shares: Sequence[int], until: float = 700) -> Lane:
    """Data parallelism on unequal devices: a step is done when the last rank is."""
    lane, done = Lane(title, [f"{1e3 * d.per_sample:.0f} ms per sample" for d in DEVICES], until, "ms"), 0
    while lane.running:
        for row, (device, share) in enumerate(zip(DEVICES, shares, strict=True)):
            lane.add(row, 1e3 * device.seconds(share), text=str(share))
        lane.average(range(len(DEVICES)))
        done += max(lane.now) <= until
    lane.title += f": {done} steps in {until / 1e3:.1f} s"
    return lane


def ddp() -> list[Lane]:
    """Even shares, and the best ones."""
    even, best = [BATCH // len(DEVICES)] * len(DEVICES), split(BATCH, DEVICES, [1] * len(DEVICES))
    return [even_or_split("ddp", even), even_or_split("hetero_ddp", best)]


def slow_link(until: float = 1200) -> list[Lane]:
    """Two nodes of two ranks, a link of 200 Mbit, steps of 70 ms, 8.6 MB: that of benchmarks/cluster."""
    rank, size = Cost(0.01, 0.06 / 16), 8.6e6
    cluster = Cluster(((rank,) * 2,) * 2, 64, size, LinkModel(2e-5, 5e9), LinkModel(2e-4, 25e6))
    work, exposed = 1e3 * cluster.even, 1e3 * (cluster.gradients() - cluster.hidden * cluster.even)
    plain, done = Lane("ddp", of_nodes(), until, "ms"), 0
    while plain.running:
        for row in range(4):
            plain.add(row, work)
        plain.meet(range(4), exposed)
        done += max(plain.now) <= until
    plain.title += f": {done} steps in {until / 1e3:.1f} s"
    ours, lasts = Lane("hetero_daso", of_nodes(), until, "ms"), 1e3 * cluster.across(size / 2)
    member, done = 0, 0
    for step in range(1, 40):
        for ranks in NODES:
            for row in ranks:
                ours.add(row, work)
            ours.average(ranks)
        done += max(ours.now) <= until
        if step % 4 == 0:
            ours.begin([ranks[member] for ranks in NODES], lasts)
            member = 1 - member
    ours.title += f": {done} steps in {until / 1e3:.1f} s"
    return [plain, ours]


def gain() -> list[Lane]:
    """Both, column by column."""
    unequal, slow = ddp(), slow_link()
    unequal[0].title = f"Devices of unequal speed. {unequal[0].title}"
    slow[0].title = f"A slow link between nodes. {slow[0].title}"
    return [unequal[0], slow[0], unequal[1], slow[1]]
