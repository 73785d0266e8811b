"""A simulated network of members: random delays, deaths, freezes and partitions, on a clock that needs no waiting."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from lightning_hetero.comm.failure_detector import LEFT
from lightning_hetero.comm.failure_reports import Failure
from lightning_hetero.comm.membership_protocol import Member, MembershipTerms, NextView
from lightning_hetero.comm.quorum import Roster

TICK = 0.3
TERMS = MembershipTerms(grace=2.0, minimum=1, timeout=8.0)


class End:
    """One end of a connection."""

    def __init__(self, node: "Node", peer: int, mine: bool) -> None:
        self.node, self.peer, self.mine = node, peer, mine
        self.other: End | None = None
        self.open = self.dropped = self.ended = False
        self.free = 0.0  # arrival of the last message at the other end; messages keep their order

    def send(self, message: dict[str, Any]) -> None:
        if not self.dropped and not self.ended:
            self.node.world.carry(self, ("message", message))

    def close(self) -> None:
        if not self.dropped:
            self.dropped = True
            self.node.world.carry(self, ("closed", {}))


class Watched(Member):
    """A member that records lost members and views; its process ends when it must."""

    environment: "Node"

    def lose(self, member: int, why: str, final: bool = False) -> None:
        before = self.lost.reasons.get(member)
        super().lose(member, why, final)
        if self.survives and self.lost.reasons.get(member) != before:
            self.environment.world.lost.append((self.me, member, why))

    def commit(self, proposal: NextView) -> None:
        before = self.view
        super().commit(proposal)
        if self.view is not before:
            self.environment.world.on_agreed(self.environment)

    def evict(self, text: str) -> None:
        if self.evicted is None:
            self.environment.end_soon()
        super().evict(text)


class Node:
    """A process: its member, its training thread, and its unread messages."""

    def __init__(self, world: "World", me: int, first: Roster, terms: MembershipTerms | None) -> None:
        self.world, self.me = world, me
        self.dead = self.frozen = False
        self.stopped = 0.0  # the time at which it was killed, or last frozen
        self.inbox: list[tuple[End, str, dict[str, Any]]] = []
        self.ends: list[End] = []
        self.coming = False
        self.views: list[Roster] = []
        self.member = Watched(me, first.members, self)
        self.member.reports.run += 1
        self.member.begin_run()
        if terms is not None:
            self.member.survive(terms, 0, first.units, None)
        self.slow = 0.0

    def now(self) -> float:
        return self.world.time

    def busy(self) -> float:
        return 1.0

    def steps(self) -> int:
        """Number of steps, at its own pace, for as long as it runs."""
        return self.done(self.stopped or self.world.time)

    def done(self, time: float) -> int:
        return int((20 + 10 * self.me) * time)

    def failed(self, failure: Failure) -> None: ...

    def heard(self, message: dict[str, Any]) -> None: ...

    def end_soon(self) -> None:
        self.world.after(self.world.random.uniform(0.1, 2.0), self._end)

    def _end(self) -> None:
        """The process ends, unless it is frozen."""
        if self.frozen:
            self.world.after(0.5, self._end)
        else:
            self.world.kill(self.me)

    def offer(self, number: int) -> Any:
        return [self.me, number]

    def connect(self, peer: int) -> End:
        mine = End(self, peer, True)
        self.ends.append(mine)
        self.world.after(self.world.delay(), lambda: self.world.dial(mine))
        return mine

    @property
    def runs(self) -> bool:
        return not self.dead and not self.frozen

    def turn(self) -> None:
        """Run one turn of the service thread, and let the training thread come if it is time."""
        if not self.runs:
            return
        inbox, self.inbox = self.inbox, []
        for end, what, message in inbox:
            if end.dropped:
                continue
            if what == "opened":
                self.member.opened(end)
            elif what == "message":
                self.member.received(end, message)
            else:
                end.ended = True
                self.member.closed(end, what == "refused")
        self.member.tick()
        member = self.member
        if member.agreed is not None and (not self.views or member.agreed.roster != self.views[-1]):
            self.views.append(member.agreed.roster)
            self.world.agreed.setdefault(member.agreed.roster.key, member.agreed)
        if member.changing and member.progress is None and member.evicted is None and not self.coming:
            self.coming = True
            self.world.after(self.slow or self.world.random.uniform(0, 0.3), self._come)

    def _come(self) -> None:
        if self.dead:
            return
        if self.frozen:
            self.world.after(0.2, self._come)
            return
        self.coming = False
        if self.member.changing and self.member.evicted is None and self.member.progress is None:
            self.member.arrive((self.me,))


class World:
    """All nodes, the network between them, and the clock."""

    def __init__(self, seed: int, units: Sequence[Sequence[int]], terms: MembershipTerms | None = TERMS) -> None:
        self.random, self.time = random.Random(seed), 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.cut: set[frozenset[int]] = set()  # pairs of nodes that cannot reach each other
        self.agreed: dict[tuple[int, int], Any] = {}
        self.lost: list[tuple[int, int, str]] = []  # the reporting node, the lost member, the reason
        self.on_agreed: Callable[[Node], None] = lambda node: None
        first = Roster(0, -1, tuple(sorted(tuple(unit) for unit in units)))
        self.nodes = {one: Node(self, one, first, terms) for one in first.members}
        for node in self.nodes.values():
            self.after(self.random.uniform(0, TICK), lambda node=node: self._turns(node))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.time + seconds, next(self._count), action))

    def run(self, seconds: float) -> None:
        end = self.time + seconds
        while self._queue and self._queue[0][0] <= end:
            self.time, _, action = heapq.heappop(self._queue)
            action()
        self.time = end

    def delay(self) -> float:
        return self.random.choice([0.001, 0.001, 0.01, 0.05])

    def _turns(self, node: Node) -> None:
        node.turn()
        if not node.dead:
            self.after(TICK, lambda: self._turns(node))

    # -- the network -------------------------------------------------------------------------------

    def reaches(self, one: int, other: int) -> bool:
        return frozenset((one, other)) not in self.cut

    def dial(self, mine: End) -> None:
        if mine.dropped or mine.node.dead:
            return
        node = self.nodes[mine.peer]
        if not self.reaches(mine.node.me, mine.peer):
            self.after(1.0, lambda: self.dial(mine))  # as TCP does
        elif node.dead:
            self.arrive(mine, "refused", {})
        else:
            theirs = End(node, mine.node.me, False)
            mine.other, theirs.other = theirs, mine
            node.ends.append(theirs)
            self.arrive(theirs, "opened", {})
            self.arrive(mine, "opened", {})

    def carry(self, end: End, what: tuple[str, dict[str, Any]]) -> None:
        if end.other is not None:
            end.free = max(end.free, self.time + self.delay())
            self.after(end.free - self.time, lambda: self._deliver(end, what))

    def _deliver(self, end: End, what: tuple[str, dict[str, Any]]) -> None:
        if not self.reaches(end.node.me, end.peer):
            end.free = max(end.free, self.time + 0.5)
            self.after(end.free - self.time, lambda: self._deliver(end, what))
        elif end.other is not None:
            self.arrive(end.other, *what)

    def arrive(self, end: End, what: str, message: dict[str, Any]) -> None:
        if not end.node.dead and not end.dropped and not end.ended:
            end.node.inbox.append((end, what, message))
            self.after(0.0, end.node.turn)

    # -- faults ------------------------------------------------------------------------------------

    def kill(self, one: int) -> None:
        node = self.nodes[one]
        if not node.dead:
            node.dead, node.stopped = True, node.stopped if node.frozen else self.time
            for end in node.ends:
                if not end.dropped and not end.ended:
                    self.carry(end, ("closed", {}))

    def end(self, one: int, how: str | None) -> None:
        """End a process by itself, because of an error, or because its run is over."""
        node = self.nodes[one]
        if node.runs and node.member.evicted is None:
            node.coming = True  # its training thread comes no more
            node.member.announce(Failure(one, "failed" if how else "left", node.member.reports.run, how or LEFT))
            self.after(1.5, lambda: self.kill(one))

    def freeze(self, one: int) -> None:
        node = self.nodes[one]
        node.frozen, node.stopped = True, node.stopped if node.frozen or node.dead else self.time

    def thaw(self, one: int) -> None:
        node = self.nodes[one]
        if node.frozen and not node.dead:
            node.frozen, node.stopped = False, 0.0
            node.member.restart()

    def part(self, side: Sequence[int]) -> None:
        for one in self.nodes:
            for other in self.nodes:
                if (one in side) != (other in side):
                    self.cut.add(frozenset((one, other)))

    def heal(self) -> None:
        self.cut.clear()

    def break_links(self, one: int) -> None:
        """End connections for both sides, as a router's restart does."""
        for end in list(self.nodes[one].ends):
            if end.other is not None and not end.ended and not end.other.ended:
                for each in (end, end.other):
                    self.arrive(each, "closed", {})

    @property
    def going(self) -> list[int]:
        """Members that go on."""
        return [one for one, node in self.nodes.items() if node.runs and node.member.evicted is None]
