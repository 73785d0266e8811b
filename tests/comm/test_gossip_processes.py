"""Four peers, each a process: one is killed, frozen, or cut off; the others' exchanges go on."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import homes
import namespaces
import pytest
import torch
from gossip_team import Member, Proxy
from namespaces import Link, linked
from test_gossip_pushing import Giver

pytestmark = pytest.mark.clock

ranks = sys.modules["ranks"]
assert homes.HERE
COUNT, LIMIT, START = 4, 0.4, [0.0, 40.0, -80.0, 600.0]
Body = Callable[[Any, int, str], None]
needs_namespaces = pytest.mark.skipif(namespaces.missing, reason="needs root and iproute2, for a network namespace")


def counted(end: Any, index: int, interface: str) -> None:
    """Offer to all, again and again, until told to stop; report on demand the exchanges, the misses and the values."""
    member = Member(index, 1.0, LIMIT, interface=interface)
    member.x[:] = START[index]
    end.send((member.pairing.address, member.path))
    addresses, paths = end.recv()
    member.pairing.know(addresses)
    member.pairing.set_outboxes(paths)
    end.send(None)
    end.recv()
    met, offered, others = dict.fromkeys(range(COUNT), 0), False, [i for i in range(COUNT) if i != index]
    words, stepped = "", 0
    while words != "stop":
        words = end.recv() if end.poll() else ""
        if not offered:
            member.offer(others)
            offered = True
        swap = member.pairing.withdraw() if words == "stop" else member.pairing.result(0.02)
        if swap is not None:
            member.x += swap.weight / (swap.weight + member.weight) * (swap.vectors[0] - member.own)
            met[swap.peer] += 1
            offered = False
            member.x += index  # a step, so that they differ
            stepped += index
        if words:
            end.send((met, dict(member.pairing.misses), (member.x - stepped).tolist()))
    end.recv()
    member.pairing.close()


def pushed(end: Any, index: int, interface: str) -> None:
    """Push half to the others in turn, again and again, and take all pushes."""
    giver = Giver(index, [START[index]], LIMIT, interface=interface)
    end.send((giver.pushing.address, giver.path))
    addresses, paths = end.recv()
    giver.pushing.know(addresses)
    giver.pushing.set_outboxes(paths)
    end.send(None)
    end.recv()
    met, missed, turn, words = dict.fromkeys(range(COUNT), 0), dict.fromkeys(range(COUNT), 0), 0, ""
    others = [i for i in range(COUNT) if i != index]
    while words != "stop":
        turn += 1
        peer = others[turn % len(others)]  # in turn: random draws could all be the dead one
        [gone] = giver.give([peer], turn)
        met[peer] += gone
        missed[peer] += not gone
        giver.get(10**9, [], 0)
        words = end.recv() if end.poll(0.005) else ""
        if words:
            end.send((met, missed, [*giver.x.tolist(), giver.w]))
    end.recv()
    giver.get(10**9, [], 0)
    end.send([*giver.x.tolist(), giver.w])
    giver.pushing.close()


def beyond(link: Link, body: Body, end: Any, index: int) -> None:
    """Run a body at the other end of a link."""
    link.enter()
    body(end, index, link.there)


class PeerProcesses:
    """The processes, and the network between them."""

    def __init__(self, body: Body, boxes: bool, proxies: bool, link: Link | None) -> None:
        self.down, pipes = False, [ranks._context.Pipe() for _ in range(COUNT)]
        self.ends = [ours for ours, _ in pipes]
        interface = link.here if link else "127.0.0.1"
        bodies = [(body, (pipes[i][1], i, interface)) for i in range(COUNT)]
        if link:
            bodies[3] = beyond, (link, body, pipes[3][1], 3)
        self.processes = [ranks._context.Process(target=target, args=args) for target, args in bodies]
        for process in self.processes:
            process.start()
        cards = [end.recv() for end in self.ends]
        self.proxies: dict[int, dict[int, Proxy]] = {}
        for i, end in enumerate(self.ends):
            there = {j: address for j, (address, _) in enumerate(cards) if j != i}
            if proxies:
                self.proxies[i] = {j: Proxy(at, self._judge(3 in (i, j))) for j, at in there.items()}
                there = {j: proxy.address for j, proxy in self.proxies[i].items()}
            end.send((there, {j: path for j, (_, path) in enumerate(cards) if j != i} if boxes else {}))
        assert [end.recv() for end in self.ends] == [None] * COUNT
        for _, path in cards:
            os.unlink(path)
        for end in self.ends:
            end.send("go")

    def _judge(self, touches: bool) -> Callable[[str, bytes], bytes]:
        def judge(name: str, message: bytes) -> bytes:
            while touches and self.down:
                time.sleep(0.02)
            return message

        return judge

    def ask(self, words: str, peers: range = range(COUNT)) -> list[Any]:
        for i in peers:
            self.ends[i].send(words)
        for i in peers:
            assert self.ends[i].poll(20), f"peer {i} hangs"
        return [self.ends[i].recv() for i in peers]

    def ask_until(self, enough: Callable[[list[Any]], bool], peers: range) -> list[Any]:
        """State of these peers, as soon as ``enough`` accepts it, or after a while."""
        deadline = time.monotonic() + 20 * LIMIT
        while not enough(states := self.ask("how", peers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return states

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for proxy in (proxy for row in self.proxies.values() for proxy in row.values()):
            proxy.close()


@contextmanager
def peer_processes(
    body: Body, boxes: bool = False, proxies: bool = False, link: Link | None = None
) -> Iterator[PeerProcesses]:
    found = PeerProcesses(body, boxes, proxies, link)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("how", "body", "boxes"),
    [
        ("killed", counted, True),
        ("frozen", pushed, False),
        ("cut off", pushed, False),
        pytest.param("link down", counted, False, marks=needs_namespaces),
    ],
)
def test_the_others_go_on(how: str, body: Body, boxes: bool) -> None:
    others = range(3)
    missed = how != "killed"  # its connections end, by which others may know it before they ask it again
    with (
        linked() if how == "link down" else nullcontext() as link,
        peer_processes(body, boxes, proxies=how == "cut off", link=link) as peers,
    ):
        before = peers.ask_until(lambda states: all(sum(met.values()) > 0 for met, *_ in states), range(COUNT))
        assert all(sum(met.values()) > 0 for met, *_ in before)
        peers.down = how == "cut off"
        if link:
            link.go_down()
        elif how != "cut off":
            os.kill(peers.processes[3].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        time.sleep(4 * LIMIT)
        one = peers.ask("how", others)

        def gains(states: list[Any]) -> list[dict[int, int]]:
            return [{j: states[i][0][j] - one[i][0][j] for j in range(COUNT)} for i in others]

        time.sleep(2 * LIMIT)
        two = peers.ask_until(
            lambda states: (
                all(sum(gained.values()) > 0 for gained in gains(states))
                and all(answer[1].get(3, 0) >= missed for answer in states)
            ),
            others,
        )
        for i, gained in enumerate(gains(two)):
            assert sum(gained[j] for j in others) > 0, (i, gained)
            assert gained[3] == 0
            assert two[i][1].get(3, 0) >= missed


def test_a_peer_that_freezes_again_and_again_takes_nothing_along() -> None:
    with peer_processes(pushed) as peers:
        for i in range(4):
            time.sleep(0.2 + 0.05 * i)
            os.kill(peers.processes[i].pid, signal.SIGSTOP)
            time.sleep((0.3, 3)[i % 2] * LIMIT)
            os.kill(peers.processes[i].pid, signal.SIGCONT)
        time.sleep(3 * LIMIT)
        peers.ask("stop")
        held = peers.ask("what has come since")
        assert sum(part[1] for part in held) == pytest.approx(COUNT, abs=1e-9)
        assert sum(part[0] for part in held) == pytest.approx(sum(START), abs=1e-9)
        assert torch.tensor([part[0] for part in held]).isfinite().all()
        for process in peers.processes:
            process.join(10)
            assert process.exitcode == 0
