"""Rank of `predicted.py`: the links are measured, and then every contender trains in turn."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import contenders
import torch.distributed as dist
from job import fit

from lightning_hetero.planning import cluster


def ways() -> dict[str, tuple[float, float] | None]:
    """Seconds and bytes per second of the slowest link within the nodes, and of that between them (collective)."""
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    within, between = (
        min(cluster.measure_links(pairs), key=lambda link: link.bandwidth, default=None)
        for pairs in cluster.pairs_to_measure(nodes)
    )
    return {"within": within and within[1:], "between": between and between[1:]}


def main() -> None:
    output, model, batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    costs, runs = json.loads(sys.argv[4]), json.loads(sys.argv[5])
    with contenders.on_cluster():
        everything: list[dict[str, Any]] = [ways()]
        for name, (skip, steps) in runs.items():
            dist.barrier()
            mine = fit(name, model, skip + steps + 1, skip, batch, costs)
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            everything.append({"contender": name, "ranks": ranks})
        if dist.get_rank() == 0:
            output.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
