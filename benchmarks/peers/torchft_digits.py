"""What each rank of `torchft_diloco.py` runs under torchft: its DiLoCo in a plain loop. Needs neither Lightning nor us.

Arguments: a path to write JSON to, optimizer steps, samples per rank and step, seconds that a step takes at least, a
seed, and contenders such as ``torchft_diloco:every=16,replica=rank``.
"""

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

_own_address = os.environ["OWN_ADDR"]
socket.gethostname = lambda: _own_address  # what torchft tells the other replicas; names of nodes are not known here
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import network
import torch
import torch.distributed as dist
from digits import Digits, cnn
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

LIMIT = timedelta(seconds=60)


class Meeting:
    """Where all ranks meet between two fits.

    Args:
        rank: of this process.
        world: how many there are.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.times = rank, world, 0
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=rank == 0, timeout=LIMIT, wait_for_workers=False)

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has brought; waits for all."""
        self.times += 1
        self.store.set(f"{self.times}/{self.rank}", json.dumps(mine))
        return [json.loads(self.store.get(f"{self.times}/{rank}")) for rank in range(self.world)]


@contextmanager
def managed(options: dict[str, str], meeting: Meeting) -> Iterator[tuple[Manager, bool]]:
    """A manager among all others, and whether the ranks of a node are one replica."""
    rank, node = meeting.rank, int(os.environ["GROUP_RANK"])
    whole = options.get("replica", "rank") == "node"
    local, size = (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])) if whole else (0, 1)
    replica, replicas = (node, int(os.environ["GROUP_WORLD_SIZE"])) if whole else (rank, meeting.world)
    port = 30000 + 50 * meeting.times + replica
    store = dist.TCPStore(_own_address, port, is_master=local == 0, timeout=LIMIT, wait_for_workers=False)
    lighthouse = LighthouseServer("[::]:0", min_replicas=replicas, join_timeout_ms=10_000) if rank == 0 else None
    own = f"http://{_own_address}:{lighthouse.address().rpartition(':')[2]}" if lighthouse else ""
    address = meeting.gather(own)[0]
    if whole:
        dist.init_process_group("gloo", store=dist.PrefixStore("replica", store), rank=local, world_size=size)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=replicas,
        use_async_quorum=False,
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


def fit(options: dict[str, str], numbers: tuple[int, int, float, int], meeting: Meeting) -> dict[str, Any]:
    """Train; when each step began, its loss, and the bytes that its node had sent by then."""
    steps, batch, delay, seed = numbers
    torch.manual_seed(seed)
    net = cnn()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    layers: list[nn.Module] = list(net) if options.get("fragments", "1") == "2" else []
    fragments = [nn.Sequential(*layers[:5]), nn.Sequential(*layers[5:])] if layers else [net]
    momentum = float(options.get("momentum", 0.9))
    outer = [
        torch.optim.SGD(part.parameters(), lr=float(options.get("lr", 0.7)), momentum=momentum, nesterov=momentum > 0)
        for part in fragments
    ]
    stream = Digits(batch * steps * meeting.world, seed)
    figures: dict[str, Any] = {"times": [], "losses": [], "sent": []}
    with managed(options, meeting) as (manager, whole):
        model = nn.parallel.DistributedDataParallel(net) if whole else net
        diloco = DiLoCo(
            manager,
            fragments,
            optimizer,
            outer,
            sync_every=int(options.get("every", 16)),
            fragment_sync_delay=int(options.get("delay", 0)),
            use_bucketization=True,
        )
        meeting.gather("ready")
        with diloco:
            for step in range(steps):
                began = time.perf_counter()
                first = batch * (step * meeting.world + meeting.rank)
                samples = stream.__getitems__(list(range(first, first + batch)))
                images, labels = (torch.stack(column) for column in zip(*samples, strict=True))
                figures["times"].append(began)
                figures["sent"].append(network.bytes_sent())
                computing = time.perf_counter()
                loss = nn.functional.cross_entropy(model(images), labels)
                figures["losses"].append(loss.item())
                time.sleep(max(0.0, delay - 2 * (time.perf_counter() - computing)))  # the backward pass is to come
                optimizer.zero_grad()
                loss.backward()
                time.sleep(max(0.0, delay - (time.perf_counter() - computing)))
                optimizer.step()
    return figures


def main() -> None:
    output, numbers = Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    meeting = Meeting(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    runs = []
    for name in sys.argv[6:]:
        options = dict(pair.split("=") for pair in name.partition(":")[2].split(",") if pair)
        runs.append({"contender": name, "ranks": meeting.gather(fit(options, numbers, meeting))})
    if meeting.rank == 0:
        output.write_text(json.dumps(runs))
    meeting.gather("end")
    time.sleep(1.0 if meeting.rank == 0 else 0.0)  # its store serves the others until they have read
    os._exit(0)  # torchft's threads do not all end by themselves


if __name__ == "__main__":
    main()
