"""How fast a center on this machine is read and exchanged with, against a plain copy in memory, in the same run.

    mpiexec -n 2 python benchmarks/centers.py [--megabytes 100] [--repeats 9]

Rank 0 keeps a center in shared memory and one in a window of MPI; rank 1 reads and exchanges with them. Needs mpi4py
and an MPI library, such as ``pip install mpi4py mpich``.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI

from lightning_hetero.comm.centers import CenterLayout, MPICenter, SharedCenter


def seconds(repeats: int, function: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return times[1:]  # the first one finds its memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rank, world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if world < 2:
        raise SystemExit("Run it on two ranks: mpiexec -n 2 python benchmarks/centers.py")
    port = MPI.COMM_WORLD.bcast(20000 + os.getpid() % 10000)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    layout = CenterLayout(rank, world, tuple(range(world)), rank, timedelta(seconds=60))
    start = [torch.randn(options.megabytes * 250_000)]
    centers = {"shared memory": SharedCenter(layout), "MPI window": MPICenter(layout, across=False)}
    for center in centers.values():
        center.open(start)
    if rank == 1:
        source, target = torch.randn_like(start[0]), [torch.empty_like(start[0])]
        runs: dict[str, list[list[float]]] = {name: [] for name in ("copy", *centers)}
        exchanges: dict[str, list[list[float]]] = {name: [] for name in centers}
        for _ in range(3):  # alternating
            runs["copy"].append(seconds(options.repeats, lambda: target[0].copy_(source)))
            for name, center in centers.items():
                runs[name].append(seconds(options.repeats, lambda center=center: center.read(target)))
                exchanges[name].append(seconds(options.repeats, lambda center=center: center.push_pull(target, 0.1)))
        load = os.getloadavg()[0]
        print(
            f"{options.megabytes} MB, 3 alternating runs of {options.repeats}; {os.cpu_count()} cores, load {load:.2f}"
        )
        for name in centers:
            for what, of in (("reading", runs), ("an exchange", exchanges)):
                pairs = zip(runs["copy"], of[name], strict=True)
                rates = [statistics.median(copy) / statistics.median(own) for copy, own in pairs]
                ratio = f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"
                print(f"{name:14s} {what}: {ratio} of a copy's rate")
    dist.barrier()
    for center in centers.values():
        center.leave()
        center.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
