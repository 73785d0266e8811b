"""A member's part of the protocol, without sockets, threads or clocks of its own."""

from typing import Any

from lightning_hetero.comm.failure_watch import GONE
from lightning_hetero.comm.membership.casualties import Casualties
from lightning_hetero.comm.membership.farewell import Farewell
from lightning_hetero.comm.membership.following import Following
from lightning_hetero.comm.membership.gathering import Gathering
from lightning_hetero.comm.membership.hearing import Hearing
from lightning_hetero.comm.membership.majority import Key, Roster
from lightning_hetero.comm.membership.pulse import Pulse
from lightning_hetero.comm.membership.state import Proposal, State
from lightning_hetero.comm.membership.surroundings import Channel, Surroundings
from lightning_hetero.comm.membership.terms import Terms
from lightning_hetero.comm.membership.watching import Watching

_TICK = 0.02  # seconds: it is not worthwhile to look at all members more often


class Member:
    """What a member knows of the others, and how it answers what happens.

    It follows the coordinator: the lowest living member of the last view. If the coordinator is lost, the next one
    takes its place, and its part is then done by :class:`Gathering`.

    Args:
        me: id of this member.
        first: the first view.
        terms: what the user has asked for.
        around: what it needs of the outside.

    Attributes:
        view: the last one that was committed.
        acked: proposals that were acknowledged since. They may have been committed by others.
        gone: who is lost or has left.
        changing: whether a new view is wanted.
        standing: what the training thread gave to ``agree()``; ``None`` if it is not there.
        agreed: the last view that was committed while the training thread waited for it.
        over: why this member must end.
    """

    def __init__(self, me: int, first: Roster, terms: Terms, around: Surroundings) -> None:
        self.me, self.view, self.terms, self.around = me, first, terms, around
        self.hearing = Hearing(terms.grace, len(first.members))
        self.acked: dict[Key, Proposal] = {}
        self.gone = Casualties(me)
        self.changing, self.began = False, 0.0
        self.standing: tuple[int, ...] | None = None
        self.agreed: Proposal | None = None
        self.over: str | None = None
        self.inbound: dict[int, Channel] = {}
        self.outbound: dict[int, Channel] = {}
        self._ticked = float("-inf")
        self._stirred = False
        self.following, self.watching, self.gathering = Following(self), Watching(self), Gathering(self)
        self.farewell, self.pulse = Farewell(self), Pulse(self)
        first_contact = around.now() + max(terms.timeout - self.hearing.grace, 0.0)
        self.hearing.expect(self.others, first_contact)  # they may begin later
        # Attempts to connect: how many, and time of the next. Members connect to the coordinator by themselves.
        self._tries = {peer: (0, around.now() + 1.0) for peer in self.others if self.leads}

    # -- what is known -----------------------------------------------------------------------------

    @property
    def others(self) -> list[int]:
        """Members of the last view that live, as far as is known, without this one."""
        return [m for m in self.view.members if m != self.me and m not in self.gone]

    @property
    def leader(self) -> int:
        """The coordinator, as far as this member knows."""
        return self.following.leader

    @property
    def leads(self) -> bool:
        """Whether this member is the coordinator."""
        return self.leader == self.me

    def state(self) -> dict[str, Any]:
        """The message that says where this member stands."""
        acked = [proposal.roster for proposal in self.acked.values()]
        state = [self.leader, self.following.term, self.view, acked, self.standing, self.changing]
        return self.pulse.along({"k": "state", "v": state})

    def left_out(self, peer: int) -> dict[str, Any]:
        """The message to a member that does not take part any more."""
        why = self.gone.reasons.get(peer, "was not among those that went on")
        text = (
            f"it has been left out since view {self.view.number}: it {why}. The others go on without it. Start it "
            "again if the job lets replicas join."
        )
        return {"k": "out", "n": self.view.number, "v": text}

    # -- what the training thread does -------------------------------------------------------------

    def come(self, standing: tuple[int, ...]) -> None:
        """The training thread has come to the agreement."""
        self.standing = standing
        self.change()
        self._tell_leader()
        self.advance()

    def _tell_leader(self) -> None:
        if self.leader in self.outbound:
            self.outbound[self.leader].send(self.state())

    def change(self) -> None:
        """Ask for a new view."""
        if not self.changing:
            self.changing, self.began = True, self.around.now()
            self.around.note("changing", self.me)
            self.gathering.tell()

    def lose(self, member: int, why: str, final: bool = False) -> None:
        """Count a member as lost."""
        if not self.gone.lose(member, why, final):
            return
        self.watching.heard(member)
        self.around.note("lost", member, why)
        for channels in (self.inbound, self.outbound):
            if channel := channels.pop(member, None):
                channel.close()
        if member in self.view.members:
            self.change()
        self.gathering.tell()

    def finish(self, text: str) -> None:
        """This member must end."""
        if self.over is None:
            self.over = text
            self.changing = True
            self.around.note("over", self.me, text)

    # -- what happens on connections ---------------------------------------------------------------

    def opened(self, channel: Channel) -> None:
        """A connection can be used."""
        self.hearing.meet(channel.peer, self.around.now())
        if not channel.mine:
            old, self.inbound[channel.peer] = self.inbound.get(channel.peer), channel
            if old is not None:
                old.close()
            self.gathering.forget(channel.peer)
        channel.send(self.state())
        if not channel.mine and self.gone.reasons:
            self.gathering.inform(channel)
        self.farewell.opened(channel)

    def closed(self, channel: Channel, refused: bool) -> None:
        """A connection has ended, or nobody listens at its other end."""
        peer = channel.peer
        channels = self.outbound if channel.mine else self.inbound
        if channels.get(peer) is not channel:
            return
        del channels[peer]
        if not channel.mine:
            self.gathering.forget(peer)
        tries, _ = self._tries.get(peer, (0, 0.0))
        self._tries[peer] = (tries + 1, self.around.now() + (min(0.05 * 2**tries, 1.0) if tries else 0.0))
        if refused:
            self.lose(peer, GONE)
        self._stirred = True

    def received(self, channel: Channel, message: dict[str, Any]) -> None:
        """A message has come."""
        peer = channel.peer
        self.hearing.hear(peer, self.around.now())
        if peer == self.leader:
            self.watching.asked = {}
        kind, value = message["k"], message.get("v", ())
        self.pulse.take(peer, message)
        if kind == "beat":
            return
        if kind == "state":
            self._state(channel, State.read(value))
        elif kind == "news" and peer == self.leader:
            self.gone.read(value)
            if message["changing"]:
                self.change()
        elif kind == "bye":
            self.farewell.received(channel, message["how"])
        elif kind == "heard":
            self.farewell.heard(peer)
        elif kind == "propose" and channel is self.outbound.get(self.leader):
            self._acknowledge(channel, Proposal.read(value))
        elif kind == "ack" and channel is self.inbound.get(peer):
            self.gathering.acknowledged(peer, tuple(value))
        elif kind == "commit" and tuple(value) in self.acked:
            self.commit(self.acked[tuple(value)])
            if peer != self.leader:
                self._tell_leader()
        elif kind == "out" and message["n"] >= self.view.number:
            self.finish(value)
        self._stirred = True

    def _state(self, channel: Channel, state: State) -> None:
        peer = channel.peer
        self._tries[peer] = (0, self.around.now() + (0.0 if peer == self.leader else 0.5))
        self.watching.heard(peer)
        if peer not in self.view.members and state.view.key <= self.view.key:
            channel.send(self.left_out(peer))
            return
        if state.view.key in self.acked:
            self.commit(self.acked[state.view.key])
        if self.view.key in [roster.key for roster in state.acked]:  # it was not there to hear of it
            channel.send({"k": "commit", "v": self.view.key})
            self.gathering.tell()  # perhaps there is a change again
            state = state._replace(view=self.view, standing=None, changing=False)
        if self.gone.returns(peer):
            self.around.note("returned", peer)
            self.gathering.tell()
        self.following.consider(peer, state)
        if not channel.mine:
            self.gathering.stands(peer, state)
        elif peer == self.leader:
            if state.changing:
                self.change()
        else:
            self.outbound.pop(peer, None)  # it was only asked whether it is alive
            channel.close()

    def _acknowledge(self, channel: Channel, proposal: Proposal) -> None:
        if self.standing is not None and self.me in proposal.roster.members and proposal.key > self.view.key:
            self.acked[proposal.key] = proposal
            self.pulse.learn(proposal.steps)
            channel.send({"k": "ack", "v": proposal.key})
        else:
            channel.send(self.state())

    def commit(self, proposal: Proposal) -> None:
        """A view has been committed."""
        if self.over is not None or proposal.key != max(self.acked):
            return  # a later view has been acknowledged, which is the one that counts
        self.view, self.acked = proposal.roster, {}
        self.gone.take_back(self.view.members)
        for member, why in proposal.lost.items():
            self.gone.lose(member, why, final=True)
        for peer, channel in self.inbound.items():
            stays = peer in self.view.members
            channel.send({"k": "commit", "v": self.view.key} if stays else self.left_out(peer))
        self.gathering.committed()
        self.around.note("agreed", proposal.roster.number)
        if self.standing is None:
            self.change()  # the training thread does not wait for it any more
            return
        self.agreed, self.standing, self.changing = proposal, None, False

    # -- what time brings --------------------------------------------------------------------------

    def tick(self) -> None:
        """Messages have come, or some time has passed: do what can be done now."""
        now = self.around.now()
        if now - self._ticked >= _TICK:
            self._ticked, self._stirred = now, True
            self.pulse.tick(now)
            if self.over is None:
                self.watching.tick()
        if self._stirred:
            self._stirred = False
            self.advance()

    @property
    def connected(self) -> bool:
        """Whether there are all connections that should be there."""
        return all(one in self.inbound for one in self.others) if self.leads else self.leader in self.outbound

    def restart(self) -> None:
        """This process itself did not run for a while: others' silence in that time means nothing."""
        now = self.around.now()
        self.hearing.restart(now)
        self.watching.asked = {}
        self.gathering.void()
        self.began = now if self.changing else self.began

    def advance(self) -> None:
        """Do what can be done now."""
        self.farewell.advance()
        if self.over is not None:
            return
        if not self.following.choose():
            self.finish(f"rank {self.me} {self.gone.reasons[self.me]}, and nobody else remains.")
        elif self.leads:
            self.gathering.advance()
        else:
            self.reach(self.leader)
            for other in list(self.watching.asked):
                self.reach(other)

    def hurry(self, peer: int) -> None:
        """Let the next attempt to connect to a member be at once."""
        self._tries.pop(peer, None)

    def reach(self, peer: int) -> None:
        """Connect to a member, unless there is a connection or the last attempt was just now."""
        _, due = self._tries.get(peer, (0, 0.0))
        if peer not in self.outbound and self.around.now() >= due:
            try:
                self.outbound[peer] = self.around.connect(peer)
            except OSError:  # too many open files, say
                self._tries[peer] = (0, self.around.now() + 1.0)
