"""A peer that freezes in the middle of an exchange: after it thaws both have counted it, or neither."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import homes
import pytest
import torch
from gossip_team import Member, Proxy, team
from test_gossip_cuts import LIMIT, Once

from lightning_hetero.comm import threads
from lightning_hetero.comm.gossip import ANY
from lightning_hetero.comm.shared_memory import MappedVectors

pytestmark = pytest.mark.clock

ranks = sys.modules["ranks"]
assert homes.HERE


def stop(process: int) -> None:
    """Freeze a process. Its threads stop once one of them has seen the signal, which may take a moment under load."""
    os.kill(process, signal.SIGSTOP)
    tasks = Path(f"/proc/{process}/task")
    while not all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in tasks.glob("*/stat")):
        time.sleep(0.001)


def _asked(end: Any) -> None:
    """Run in a process: offer, and send the result."""
    member = Member(1, 1.0, LIMIT)
    member.pairing.outbox.hide()
    member.x[:] = 8.0
    member.offer([])
    end.send(member.pairing.address)
    end.recv()
    end.send((member.take(2.0), member.x.tolist()))
    member.pairing.close()


@pytest.mark.parametrize("name", ["SWAP", "COMMIT"])
def test_the_peer_that_is_asked_freezes_before_a_message(name: str) -> None:
    # When it thaws, the message is in its socket; the peer must see that it is late.
    ours, theirs = ranks._context.Pipe()
    process = ranks._context.Process(target=_asked, args=(theirs,))
    process.start()

    def freeze(message: bytes) -> bytes:
        time.sleep(0.1)  # it waits for this message
        stop(process.pid)
        return message

    try:
        with team([1], limit=LIMIT) as [one]:
            proxy = Proxy(ours.recv(), Once(name, freeze))
            one.pairing.know({1: proxy.address})
            time.sleep(0.3)  # it waits now
            one.offer([1], ANY)
            time.sleep(3.2 * LIMIT)
            counted = one.take(0)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
            ours.send("now")
            assert ours.poll(20)
            there, x = ours.recv()
            proxy.close()
            assert counted == there
            assert torch.equal(one.x + torch.tensor(x), torch.full((3,), 8.0, dtype=torch.float64))
    finally:
        process.kill()
        process.join()


class Freezes:
    """Memory of a peer; this process freezes when it is about to read it."""

    def __init__(self, box: MappedVectors) -> None:
        self._box = box

    @property
    def vectors(self) -> list[torch.Tensor]:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)  # until then it has stopped
        return self._box.vectors


def _reads(end: Any) -> None:
    """In a process of its own: offers, freezes when it reads what the other one offers, and says what came of it."""
    member = Member(1, 1.0, LIMIT)
    end.send((member.pairing.address, member.path))
    member.pairing.set_outboxes({0: end.recv()})
    member.pairing.boxes[0] = Freezes(member.pairing.boxes[0])  # type: ignore[assignment]
    member.pairing.outbox.hide()
    member.x[:] = 8.0
    member.offer([])
    end.send("ready")
    end.recv()
    end.send((member.take(2.0), member.x.tolist()))
    member.pairing.close()


def test_the_peer_that_is_asked_freezes_while_it_reads_the_memory_of_the_other() -> None:
    # COMMIT is in its socket when it thaws, and other values in the memory.
    ours, theirs = ranks._context.Pipe()
    process = ranks._context.Process(target=_reads, args=(theirs,))
    process.start()
    one = Member(0, 1.0, LIMIT)
    try:
        address, path = ours.recv()
        one.pairing.know({1: address})
        one.pairing.set_outboxes({1: path})
        ours.send(one.path)
        assert ours.recv() == "ready"
        one.offer([1], ANY)
        time.sleep(3.2 * LIMIT)
        counted = one.take(0)
        one.pairing.outbox.vectors[0].fill_(1000.0)  # its next offer
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)
        ours.send("now")
        assert ours.poll(20)
        assert ours.recv() == (counted, [8.0] * 3) == (False, [8.0] * 3)
    finally:
        process.kill()
        process.join()
        one.pairing.outbox.hide()
        one.pairing.close()


@pytest.mark.parametrize("end", ["lost", "cut"])
@pytest.mark.parametrize("name", ["SWAP", "COMMIT"])
def test_nobody_waits_for_a_frozen_peer_that_is_known_to_be_lost(name: str, end: str) -> None:
    ours, theirs = ranks._context.Pipe()
    process = ranks._context.Process(target=_asked, args=(theirs,))
    process.start()

    def freeze(message: bytes) -> bytes:
        stop(process.pid)
        return message

    try:
        with team([1], limit=30.0) as [one]:
            proxy = Proxy(ours.recv(), Once(name, freeze))
            one.pairing.know({1: proxy.address})
            time.sleep(0.3)
            one.offer([1], ANY)
            time.sleep(1.0)
            began = time.monotonic()
            if end == "cut":
                threads.abort_sockets()
                time.sleep(0.1)  # it may have begun to ask again whether the exchange has counted
            one.pairing.lose(1)
            one.pairing.pause()
            assert time.monotonic() - began < 2.0
            assert not one.take(0)
            proxy.close()
    finally:
        process.kill()
        process.join()
