"""Rank under torchft: its LocalSGD and DiLoCo, in a plain loop.

Contenders: ``torchft_localsgd:every=16`` and
``torchft_diloco:every=16,fragments=2,delay=4,blend=0.5,outer_lr=0.7,outer_momentum=0.9,replica=node``.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

_own_address = os.environ["OWN_ADDR"]
socket.gethostname = lambda: _own_address  # what torchft tells the other replicas; names of nodes are not known here

import plain
import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD


@contextmanager
def managed(options: dict[str, str], meeting: plain.Meeting) -> Iterator[tuple[Manager, bool]]:
    """A manager among all others, and whether the ranks of a node are one replica."""
    rank, node = meeting.rank, int(os.environ["GROUP_RANK"])
    whole = options.get("replica", "rank") == "node"
    local, size = (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])) if whole else (0, 1)
    replica, replicas = (node, int(os.environ["GROUP_WORLD_SIZE"])) if whole else (rank, meeting.world)
    port = 30000 + 50 * meeting.times + replica
    store = dist.TCPStore(_own_address, port, is_master=local == 0, timeout=plain.LIMIT, wait_for_workers=False)
    lighthouse = LighthouseServer("[::]:0", min_replicas=replicas, join_timeout_ms=10_000) if rank == 0 else None
    own = f"http://{_own_address}:{lighthouse.address().rpartition(':')[2]}" if lighthouse else ""
    address = meeting.gather(own)[0]
    if whole:
        dist.init_process_group("gloo", store=dist.PrefixStore("replica", store), rank=local, world_size=size)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=plain.LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=replicas,
        use_async_quorum=False,
        timeout=plain.LIMIT,
        init_sync=False,  # all begin with the same weights
        rank=local,
        world_size=size,
        store_addr=_own_address,
        store_port=port,
        lighthouse_addr=address,
        replica_id=f"replica{replica}",
        hostname=_own_address,
    )
    try:
        yield manager, whole
        meeting.gather("done")
    finally:
        manager.shutdown(wait=False)
        if whole:
            dist.destroy_process_group()
        if lighthouse:
            lighthouse.shutdown()


@contextmanager
def local_sgd(setting: plain.Setting) -> Iterator[plain.Parts]:
    """Averages of all parameters every few steps."""
    with managed(setting.options, setting.meeting) as (manager, whole):
        model = nn.parallel.DistributedDataParallel(setting.net) if whole else setting.net
        with LocalSGD(manager, setting.net, setting.optimizer, sync_every=setting.number("every", 16)):
            yield plain.Parts(model, setting.optimizer)


@contextmanager
def diloco(setting: plain.Setting) -> Iterator[plain.Parts]:
    """An outer optimizer on what replicas have learned in a few steps; whole, or streamed in parts."""
    layers, count = list(setting.net), setting.number("fragments", 1)
    cuts = [round(part * len(layers) / count) for part in range(count + 1)]
    fragments = [nn.Sequential(*layers[first:last]) for first, last in pairwise(cuts)] if count > 1 else [setting.net]
    usual = {"outer_lr": 0.7, "outer_momentum": 0.9, "blend": 0.0}
    rate, momentum, blend = (float(setting.options.get(name, value)) for name, value in usual.items())
    outer = [torch.optim.SGD(p.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0) for p in fragments]
    with managed(setting.options, setting.meeting) as (manager, whole):
        model = nn.parallel.DistributedDataParallel(setting.net) if whole else setting.net
        algorithm = DiLoCo(
            manager,
            fragments,
            setting.optimizer,
            outer,
            sync_every=setting.number("every", 16),
            fragment_sync_delay=setting.number("delay", 0),
            fragment_update_alpha=blend,
            use_bucketization=True,
        )
        with algorithm:
            yield plain.Parts(model, setting.optimizer)


if __name__ == "__main__":
    plain.main({"torchft_localsgd": local_sgd, "torchft_diloco": diloco})
