"""Replica under torchft: LocalSGD or DiLoCo in a plain loop.

It reads orders from its standard input, a line of JSON each: a `Place` for a replica, or a path to write the address of
a new lighthouse to. For each it forks a process, so that one that starts again need not import anything, and prints its
number. All end with it.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "peers"))
socket.gethostname = lambda: "127.0.0.1"  # what torchft tells the other replicas

import torch
import torch.distributed as dist
from place import (
    BATCH,
    FIRST,
    GRACE,
    LATEST,
    PAUSE,
    RANK,
    RATE,
    SAMPLES,
    STEPS,
    Place,
    progress,
    write_ending,
)
from text import Text, gpt, inner_optimizer, loss_of, windows
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

EVERY = 16
_DIE_WITH_PARENT = 1


def serve(file: Path) -> None:
    """Be the lighthouse; its address goes to a file."""
    lighthouse = LighthouseServer(
        "[::]:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=int(1000 * GRACE)
    )
    file.with_suffix(".new").write_text(f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
    file.with_suffix(".new").rename(file)
    time.sleep(3600)


def fit(place: Place, address: str) -> dict[str, Any]:
    """Train until so many steps are averaged."""
    torch.manual_seed(place.seed)
    net = gpt()
    optimizer = inner_optimizer(net.parameters(), RATE)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=GRACE)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=timedelta(seconds=GRACE),
        quorum_timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica{place.number}",
        hostname="127.0.0.1",
    )
    averaging: Any
    if place.strategy == "torchft_diloco":
        outer = torch.optim.SGD(net.parameters(), lr=1.0)  # the mean, with which this task learns most
        averaging = DiLoCo(manager, [net], optimizer, outer, sync_every=EVERY)
    else:
        averaging = LocalSGD(manager, net, optimizer, sync_every=EVERY)
    os.environ |= place.variables
    text = Text(20_000, place.seed)
    dice = torch.Generator().manual_seed(1000 * place.seed + place.number)
    seen, local = progress(place.folder, place.number), 0
    seen[RANK] = int(place.variables["RANK"])
    with averaging:
        while manager.current_step() * EVERY < place.steps:
            before, local = manager.current_step(), local + 1
            chosen = torch.randint(len(text), (BATCH,), generator=dice)
            until = time.monotonic() + place.step
            optimizer.zero_grad()
            loss = loss_of(net, torch.stack([text[int(index)] for index in chosen]))
            time.sleep(max(0.0, until - time.monotonic()))
            loss.backward()
            optimizer.step()  # and an average, when it is time
            now = time.monotonic()
            if seen[LATEST]:
                seen[PAUSE] = max(seen[PAUSE], now - seen[LATEST] - place.step)
            seen[FIRST] = seen[FIRST] or now
            seen[STEPS], seen[LATEST] = EVERY * manager.current_step(), now
            if manager.current_step() == before + 1:  # more: it has copied another replica, and its own steps are lost
                seen[SAMPLES] += EVERY * BATCH
    with torch.no_grad():
        return {"loss": loss_of(net, windows()[1]).item()}


def replica(place: Place, address: str) -> None:
    """Be a replica, and write down how it has ended."""
    log = os.open(Path(place.folder, f"log{place.number}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result: dict[str, Any] = {"error": "", "ours": True, "text": ""}
    try:
        result |= fit(place, address)
    except Exception as error:
        result |= {"error": type(error).__name__, "ours": False, "text": str(error)[:300]}
    write_ending(place, result)
    time.sleep(2.0)  # the others may still ask for what it has


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    windows()  # once for all that are forked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        order = json.loads(line)
        number = os.fork()
        if number:
            print(number, flush=True)
            continue
        try:
            ctypes.CDLL("libc.so.6").prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if "lighthouse" in order:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                serve(Path(order["lighthouse"]))
            else:
                replica(Place(**order["place"]), order["address"])
        finally:
            os._exit(0)  # torchft's threads do not all end by themselves


if __name__ == "__main__":
    main()
