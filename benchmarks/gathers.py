"""Small messages between all ranks: by way of one rank, and around PyTorch's ring; ratios of alternating runs.

    python benchmarks/gathers.py [--repeats 15] [--ranks 8]

The message is a small dictionary, as ranks send many when a fit begins, saves, or lets others join.
"""

import time
from collections.abc import Callable
from typing import Any

import jobs
import torch
import torch.distributed as dist

ROUNDS = 20  # of each run, one after the other


def seconds(gather: Callable[[], Any]) -> float:
    """That one of many takes, of which each rank begins the next one as soon as it has the last one's values."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        gather()
    return (time.perf_counter() - began) / ROUNDS


def worker(repeats: int) -> dict[str, list[float]]:
    from lightning_hetero.comm import objects

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    value = {"rank": dist.get_rank(), "speeds": [1.0, 2.0, 3.0]}
    values: list[Any] = [None] * dist.get_world_size()

    def ring() -> list[Any]:
        dist.all_gather_object(values, value)
        return values

    assert objects.all_gather(value) == ring()
    kinds = {"ring": lambda: seconds(ring), "one": lambda: seconds(lambda: objects.all_gather(value))}
    return jobs.alternate(repeats, kinds)


def main() -> None:
    """Print how many times as fast the way by one rank is."""
    options = jobs.options(__doc__, 15, ranks=8)
    times = jobs.launch(options.ranks, options.repeats)
    ratios = [ring / one for ring, one in zip(times["ring"], times["one"], strict=True)]
    print(f"{options.ranks} ranks, {options.repeats} alternating runs of {ROUNDS} gathers; {jobs.machine()}")
    print(f"all_gather_object / by way of one rank: {jobs.spread(ratios)}")


if __name__ == "__main__":
    jobs.start(main, worker)
