"""Membership protocol of one member: pure, without sockets, threads or clocks of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lightning_hetero.comm.failure_detector import AdaptiveTimeout, LostMembers
from lightning_hetero.comm.failure_reports import GONE, Failure, FailureReports
from lightning_hetero.comm.quorum import Key, MemberState, Roster, decide


class MemberChannel(Protocol):
    """A connection to another member."""

    peer: Any
    mine: bool

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""

    def close(self) -> None:
        """Close the connection; nothing is heard of it any more."""


class MemberEnvironment(Protocol):
    """Environment of a member: clock, connections and counters."""

    def now(self) -> float:
        """Seconds, on a clock that never goes back."""

    def connect(self, peer: int) -> MemberChannel:
        """Begin to connect to a member."""

    def offer(self, number: int, /) -> Any:
        """The store at which the members of a view meet."""

    def busy(self) -> float:
        """Number of processes for each core of this machine, at least 1."""

    def steps(self) -> int:
        """Number of steps that this member has done."""

    def failed(self, failure: Failure, /) -> None:
        """Another member has told of its failure, or has ended."""

    def heard(self, message: dict[str, Any], /) -> None:
        """Another member has told something to this one, or to all."""


class NextView(NamedTuple):
    """A view that the coordinator proposes, and on which its members then agree.

    Attributes:
        roster: who takes part.
        progress: what each of them gave to ``agree()``.
        lost: all that are lost, each with the reason, which completes "rank 3 ...".
        offer: what the coordinator's ``offer`` returned.
        steps: that each member has done; lost ones too, as far as is known. They told it with their heartbeats, so they
            may have done more.
    """

    roster: Roster
    progress: dict[int, tuple[int, ...]]
    lost: dict[int, str]
    offer: Any
    steps: dict[int, int]

    @property
    def key(self) -> Key:
        """Key that tells the view from all others."""
        return self.roster.key

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of those that take part, ascending."""
        return self.roster.members

    def written(self) -> list[Any]:
        """For JSON, which has no numbers as keys."""
        by_member = [list(one.items()) for one in (self.progress, self.lost, self.steps)]
        return [self.roster, *by_member, self.offer]

    @classmethod
    def read(cls, value: Any) -> "NextView":
        """The proposal that was written as JSON."""
        roster, all_progress, lost, steps, offer = value
        come = {member: tuple(one) for member, one in all_progress}
        return cls(Roster.read(roster), come, dict(lost), offer, dict(steps))


class ViewChange:
    """View change, on the coordinator: it gathers all, proposes a view, and commits it.

    A proposal is void as soon as one of its members begins again (on another connection, say) or is lost; then there is
    another one, with a higher number. Only when all members of a proposal have acknowledged it, it is committed.

    Args:
        member: the coordinator.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self._told: dict[int, MemberState] = {}  # of members, on their connections of now
        self._proposal: NextView | None = None
        self._acks: set[int] = set()
        self._since = member.environment.now()
        self._untold = False

    def begin(self) -> None:
        """This member becomes the coordinator, or follows another one."""
        member = self._member
        self._proposal, self._since = None, member.environment.now()
        if member.is_coordinator:
            member.timeout.expect(member.others, self._since)
        for channel in member.inbound.values():  # those that follow this member
            channel.send(member.state())

    def mark_changed(self) -> None:
        """All members must learn what has changed."""
        self._untold = True

    def broadcast(self) -> None:
        """Tell all members what has changed, if this one is the coordinator."""
        for channel in self._member.inbound.values() if self._untold else ():
            self.send_to(channel)
        self._untold = False

    def send_to(self, channel: MemberChannel) -> None:
        """Tell one member."""
        member = self._member
        if member.is_coordinator:
            run = member.reports.run
            channel.send({"k": "news", "v": member.lost.written(), "changing": member.changing, "run": run})

    def drop_proposal(self) -> None:
        """Drop the proposal: the others may have gone on without this member."""
        self._proposal = None

    def begin_again(self) -> None:
        """A new run: what members have said before counts no more."""
        self._proposal, self._told = None, {}

    @property
    def wanted(self) -> bool:
        """Whether a member that turns to this one wants a new view."""
        member = self._member
        if not member.is_coordinator and member.coordinator not in member.lost.left:
            return False
        told = [self._told[one] for one in member.others if one in self._told]
        return any(state.changing or state.progress is not None for state in told)

    def forget(self, peer: int) -> None:
        """Forget what a member has said: its connection is another one."""
        self._told.pop(peer, None)

    def state_received(self, peer: int, state: MemberState) -> None:
        """A member says where it stands."""
        self._told[peer] = state
        if self._proposal is not None and peer in self._proposal.roster.members:
            self._proposal = None

    def acknowledged(self, peer: int, key: Key) -> None:
        """A member has acknowledged a proposal."""
        if self._proposal is not None and self._proposal.key == key:
            self._acks.add(peer)

    def committed(self) -> None:
        """A view has been committed; all must come again for the next one."""
        self._proposal = None
        for peer, state in self._told.items():
            self._told[peer] = state._replace(progress=None, changing=False)

    def advance(self) -> None:
        """Do what the coordinator can do now."""
        self._gather()
        self.broadcast()

    def _gather(self) -> None:
        member = self._member
        for peer in member.others:
            if peer not in member.inbound:
                member.reach(peer)  # is it alive?
        if not member.changing or self._dropped_units() or self._drop_late():
            return
        all_progress = {one: come for one in self._required() if (come := self._progress_of(one)) is not None}
        if len(all_progress) < len(self._required()):
            return
        proposal = self._proposal
        if proposal is None or proposal.roster.members != tuple(sorted(all_progress)):
            proposal = self._propose(all_progress)
        if proposal is not None and self._acks.issuperset(proposal.roster.members):
            member.commit(proposal)  # tells the others

    # -- who is there ------------------------------------------------------------------------------

    def _base(self) -> Roster:
        """The last view that anybody here knows to be committed."""
        member = self._member
        return max([member.view, *(self._told[peer].view for peer in member.inbound if peer in self._told)])

    def _rosters(self) -> list[Roster]:
        """The last committed view, and those that may have been committed since."""
        member, base = self._member, self._base()
        acked = [proposal.roster for proposal in member.acked.values()]
        for peer in member.inbound:
            acked += self._told[peer].acked if peer in self._told else ()
        return [base, *{roster for roster in acked if roster.key > base.key}]

    def _required(self) -> list[int]:
        """Members that live, and all of whose unit live."""
        gone = self._member.lost
        return [one for unit in self._base().units if not any(each in gone for each in unit) for one in unit]

    def _progress_of(self, one: int) -> tuple[int, ...] | None:
        """The progress that a member's training thread has given to ``agree()``; ``None`` if it has not come."""
        member = self._member
        if one == member.me:
            return member.progress
        return self._told[one].progress if one in member.inbound and one in self._told else None

    def _dropped_units(self) -> bool:
        """Count members as lost if another one of their unit is; whether this member is one of them."""
        member = self._member
        for unit in self._base().units:
            gone = [one for one in unit if one in member.lost]
            for one in unit if gone else ():
                if one not in member.lost:
                    member.lose(one, f"lost rank {gone[0]} of its replica", final=True)
        return self._resigned()

    def _drop_late(self) -> bool:
        """Wait no longer for those that have not come in time; whether this member is one of them."""
        member = self._member
        missing = [one for one in self._required() if self._progress_of(one) is None]
        seconds = member.terms.timeout
        now, due = member.environment.now(), max(member.began + seconds, self._since + member.timeout.grace)
        if missing and now >= due:
            for one in missing:
                member.lose(one, f"did not come within {seconds:g} s", final=True)
            return self._resigned() or self._dropped_units()
        return False

    def _resigned(self) -> bool:
        """Whether this member itself is lost for the others; then another one must be the coordinator."""
        member = self._member
        if member.me in member.lost:
            member.advance()
            return True
        return False

    # -- what becomes of it ------------------------------------------------------------------------

    def _propose(self, all_progress: dict[int, tuple[int, ...]]) -> NextView | None:
        member, rosters = self._member, self._rosters()
        units, lacks = decide(all_progress, rosters, member.lost.left, member.terms.minimum, member.terms.unit)
        missing = {one: why for one, why in member.lost.reasons.items() if one in rosters[0].members}
        if lacks:
            listed = "; ".join(f"rank {one} {why}" for one, why in sorted(missing.items()))
            text = f"{lacks}. Missing: {listed}. Start the job again from its last checkpoint."
            for peer, channel in member.inbound.items():
                if peer in self._told and self._told[peer].coordinator == member.me:
                    channel.send({"k": "out", "n": rosters[0].number, "v": text})
            member.evict(text)
            return None
        number = 1 + max(roster.number for roster in rosters)
        try:
            offer = member.environment.offer(number)
        except Exception as error:
            member.lose(member.me, f"could not prepare view {number}: {type(error).__name__}: {error}", final=True)
            self._resigned()
            return None
        roster = Roster(number, member.me, units)
        steps = {**member.heartbeat.steps, member.me: member.environment.steps()}
        proposal = NextView(roster, all_progress, member.lost.reasons, offer, steps)
        self._proposal, self._acks = proposal, {member.me}
        member.acked[proposal.key] = proposal
        for peer in proposal.roster.members:
            if peer != member.me:
                member.inbound[peer].send({"k": "propose", "v": proposal.written()})
        return proposal


class Heartbeat:
    """Heartbeats: sends them, and takes in what others say of themselves.

    How many steps a member has done is in its heartbeats, and in the first message on a connection and the last one.
    So what is known of it is up to a heartbeat old.

    Args:
        member: that lives.

    Attributes:
        steps: that each other member has done, as far as is known; fewer than it really has.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self._sent = float("-inf")
        self.steps: dict[int, int] = {}

    def tick(self, now: float) -> None:
        """Send a heartbeat, if it is time."""
        member = self._member
        if now - self._sent < member.timeout.beat:
            return
        self._sent = now
        beat = self.with_steps({"k": "beat", "v": round(member.environment.busy(), 2)})
        for channel in (*member.inbound.values(), *member.outbound.values()):
            channel.send(beat)

    def with_steps(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with the number of steps that this member has done in this fit, too."""
        return {**message, "steps": self._member.environment.steps() if self._member.survives else 0}

    def received(self, peer: int, message: Mapping[str, Any]) -> None:
        """Another member has sent a message, of any kind."""
        if message["k"] == "beat":
            self._member.timeout.busy(peer, float(message.get("v", 1.0)))
        if "steps" in message:
            self.learn({peer: int(message["steps"])})

    def learn(self, steps: Mapping[int, int]) -> None:
        """Hear how far members have come, from themselves or from others; it may be old."""
        for peer, done in steps.items():
            self.steps[peer] = max(done, self.steps.get(peer, done))


class FailureDetector:
    """Failure detector: the coordinator judges the silence of all members, a member that of the coordinator.

    If the coordinator is silent, members ask others whether they are alive before they give it up. So all that are on
    the other side of a broken network are known at once.

    Args:
        member: that watches.

    Attributes:
        asked: members that were asked and have not answered yet, and since when.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self.asked: dict[int, float] = {}

    def heard(self, other: int) -> None:
        """A member has answered, or is not waited for any more."""
        self.asked.pop(other, None)

    def tick(self) -> None:
        """Some time has passed."""
        member = self._member
        if not member.survives:
            return
        now, grace = member.environment.now(), member.timeout.grace
        for other in member.others if member.is_coordinator else [member.coordinator]:
            silence = member.timeout.silence(other, now)
            if silence > grace:
                asked = {} if member.is_coordinator else dict(self.asked)
                member.lose(other, f"has not been heard of for {silence:.1f} s")
                for silent, since in asked.items():
                    if now - since > 0.4 * grace:  # asked when half of it was over
                        member.lose(silent, f"has not been heard of for {now - since:.1f} s")
            elif silence > grace / 2 and not member.is_coordinator:
                self._ask(now)

    def _ask(self, now: float) -> None:
        """Ask those that would be the coordinator before this member; and all, if it is the next one itself."""
        member = self._member
        others = [other for other in member.others if other != member.coordinator]
        next_in_line = all(other > member.me for other in others)
        for other in others:
            if next_in_line or other < member.me:
                self.asked.setdefault(other, now)


class LeaderElection:
    """Election of the coordinator: the lowest living member, unless others already follow another.

    Two members may take themselves for the coordinator for a while. That does no harm: a view needs the
    acknowledgement of all its members, and each of them follows one coordinator only.

    Args:
        member: that follows.

    Attributes:
        coordinator: the member that leads, as far as this one knows.
        term: how often it has changed, as far as is known. Members turn to the one with the highest term.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self.coordinator, self.term = min(member.view.members), 0

    def choose(self) -> bool:
        """Follow the lowest living member if the coordinator is lost; whether there is one."""
        member = self._member
        while not self._leads():
            living = [*member.others, *([member.me] if member.me not in member.lost else [])]
            if not living:
                return False
            self.follow(min(living), self.term + 1)
        return True

    def _leads(self) -> bool:
        """Whether the coordinator does its part. One that has left does, unless it ends or there is a view to make."""
        member, coordinator = self._member, self.coordinator
        stays = coordinator in member.lost.left and not member.changing and coordinator in member.outbound
        return coordinator in member.view.members and (stays or coordinator not in member.lost)

    def consider(self, peer: int, state: MemberState) -> None:
        """Perhaps follow the coordinator that another member names."""
        member, coordinator = self._member, state.coordinator
        if coordinator == self.coordinator:
            self.term = max(self.term, state.term)
        elif coordinator in member.lost:
            return
        elif peer == self.coordinator:  # it is not the coordinator (any more)
            self.follow(coordinator, max(self.term, state.term) + (coordinator == member.me))
        elif coordinator != member.me and (state.term, -coordinator) > (self.term, -self.coordinator):
            silence = member.timeout.silence(self.coordinator, member.environment.now())
            if member.is_coordinator or (peer == coordinator and silence > member.timeout.grace / 2):
                self.follow(coordinator, state.term)

    def follow(self, coordinator: int, term: int) -> None:
        """Follow another coordinator, or become it."""
        self._member.leave_coordinator()
        self.coordinator, self.term = coordinator, term
        self._member.coordinator_chosen()


class MembershipTerms(NamedTuple):
    """Options of the user.

    Attributes:
        grace: seconds of silence after which a member counts as lost; ``None``: learned from how often members are
            heard.
        minimum: units that must remain.
        timeout: longest wait, in seconds, for a living member to come to the agreement.
        unit: what people call a unit.
    """

    grace: float | None
    minimum: int
    timeout: float
    unit: str = "replica"


_TICK = 0.02  # seconds: it is not worthwhile to look at all members more often


class Member:
    """Member of a job: its knowledge of the others, and its answers to what happens.

    It follows the coordinator: the lowest living member of the last view. If the coordinator is lost, the next one
    takes its place. In a fit that goes on without lost members, its part is then done by :class:`ViewChange`. At all
    other times nobody is judged by silence, and a lost member is a failure of which all learn.

    Args:
        me: id of this member.
        members: ids of all.
        environment: what it needs of the outside.

    Attributes:
        view: the last one that was committed.
        acked: proposals that were acknowledged since. They may have been committed by others.
        lost: who is lost or has left.
        reports: failures of members.
        survives: whether this member goes on without lost ones.
        changing: whether a new view is wanted.
        progress: what the training thread gave to ``agree()``; ``None`` if it is not there.
        agreed: the last view that was committed while the training thread waited for it.
        evicted: why this member must end.
    """

    def __init__(self, me: int, members: Sequence[int], environment: MemberEnvironment) -> None:
        self.me, self.view, self.environment = me, Roster(0, -1, tuple((one,) for one in sorted(members))), environment
        self.terms = MembershipTerms(None, 1, 0.0)
        self.timeout = AdaptiveTimeout(None, len(members))
        self.acked: dict[Key, NextView] = {}
        self.lost, self.reports = LostMembers(me), FailureReports(me, self.view.members)
        self.survives = self.changing = False
        self.began = 0.0
        self.progress: tuple[int, ...] | None = None
        self.agreed: NextView | None = None
        self.evicted: str | None = None
        self.inbound: dict[int, MemberChannel] = {}
        self.outbound: dict[int, MemberChannel] = {}
        self._connected_once: set[int] = set()
        self._own: list[Failure] = []  # of this member in this run: each coordinator hears of them
        self._ticked = float("-inf")
        self._stirred = False
        self.election, self.detector, self.view_change = LeaderElection(self), FailureDetector(self), ViewChange(self)
        self.heartbeat = Heartbeat(self)
        # Attempts to connect: how many, and time of the next. Members connect to the coordinator by themselves.
        self._tries = {peer: (0, environment.now() + 1.0) for peer in self.others if self.is_coordinator}

    # -- what is known -----------------------------------------------------------------------------

    @property
    def others(self) -> list[int]:
        """Members of the last view that live, as far as is known, without this one."""
        return [m for m in self.view.members if m != self.me and m not in self.lost]

    @property
    def coordinator(self) -> int:
        """The coordinator, as far as this member knows."""
        return self.election.coordinator

    @property
    def is_coordinator(self) -> bool:
        """Whether this member is the coordinator."""
        return self.coordinator == self.me

    def leave_coordinator(self) -> None:
        """This member is about to follow another coordinator."""
        self.view_change.broadcast()  # its last news, if it was the coordinator itself
        if (old := self.outbound.pop(self.coordinator, None)) is not None:
            old.close()

    def coordinator_chosen(self) -> None:
        """This member follows another coordinator, or is it itself."""
        self.detector.asked = {}
        self.view_change.begin()
        self.timeout.expect([self.coordinator], self.environment.now())
        self._tries.pop(self.coordinator, None)  # the next attempt to connect is at once
        if self.is_coordinator:
            for channel in self.inbound.values():
                self._send_reports(channel, self.reports.all())
            for failure in self._own:
                self._enter(failure)

    def state(self) -> dict[str, Any]:
        """The message that says where this member stands."""
        acked = [proposal.roster for proposal in self.acked.values()]
        state = [self.coordinator, self.election.term, self.view, acked, self.progress, self.changing]
        return self.heartbeat.with_steps({"k": "state", "v": state})

    def left_out(self, peer: int) -> dict[str, Any]:
        """The message to a member that does not take part any more."""
        why = self.lost.reasons.get(peer, "was not among those that went on")
        text = (
            f"it has been left out since view {self.view.number}: it {why}. The others go on without it. Start it "
            "again if the job lets replicas join."
        )
        return {"k": "out", "n": self.view.number, "v": text}

    # -- what the training thread does -------------------------------------------------------------

    def begin_run(self) -> None:
        """A fit, a validation, a test or a prediction begins, on all members."""
        self._own, self.heartbeat.steps = [], {}
        self.lost.begin_again()
        self.view_change.begin_again()

    def survive(
        self, terms: MembershipTerms, number: int, units: Sequence[Sequence[int]], longest: float | None
    ) -> None:
        """Go on without lost members from now on.

        Args:
            terms: what the user has asked for.
            number: of the view, at least.
            units: of all members.
            longest: see :class:`~lightning_hetero.comm.failure_detector.AdaptiveTimeout`.
        """
        self.terms, self.survives, self.acked = terms, True, {}
        sorted_units = tuple(sorted(tuple(sorted(unit)) for unit in units))
        self.view = Roster(max(number, self.view.number), self.view.host, sorted_units)
        self.timeout = AdaptiveTimeout(terms.grace, len(self.view.members), longest)
        self.timeout.expect(self.others, self.environment.now())
        self._tell_coordinator()
        self.advance()

    def stop(self) -> None:
        """From now on a lost member is a failure, and nobody is judged by silence."""
        self.survives = self.changing = False
        self.progress, self.acked = None, {}
        self.view_change.drop_proposal()
        self.lost.begin_again()

    def announce(self, failure: Failure) -> None:
        """Let all members know that this one has failed, or leaves: it takes no part in their views any more."""
        self._own.append(failure)
        if self.is_coordinator:
            self._enter(failure)
        elif self.coordinator in self.outbound:
            self._send_reports(self.outbound[self.coordinator], [failure])
        if failure.kind != "told":
            self.stop()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to all other members, or to the one in ``to``, by way of the coordinator."""
        if self.is_coordinator:
            self._pass_on({**message, "by": self.me})
        elif self.coordinator in self.outbound:
            self.outbound[self.coordinator].send({"k": "say", "v": message})

    def arrive(self, progress: tuple[int, ...]) -> None:
        """The training thread has come to the agreement."""
        self.progress = progress
        self.request_view()
        self._tell_coordinator()
        self.advance()

    def _tell_coordinator(self) -> None:
        if self.coordinator in self.outbound:
            self.outbound[self.coordinator].send(self.state())

    def request_view(self) -> None:
        """Ask for a new view."""
        if self.survives and not self.changing:
            self.changing, self.began = True, self.environment.now()
            self.view_change.mark_changed()

    def lose(self, member: int, why: str, final: bool = False) -> None:
        """Count a member as lost."""
        if not self.lost.lose(member, why, final):
            return
        self.detector.heard(member)
        for channels in (self.inbound, self.outbound):
            if channel := channels.pop(member, None):
                channel.close()
        if member in self.view.members:
            self.request_view()
        self.view_change.mark_changed()

    def evict(self, text: str) -> None:
        """This member must end, for the reason that the text gives."""
        if self.evicted is None:
            self.evicted, self.changing = text, self.survives

    # -- what happens on connections ---------------------------------------------------------------

    def opened(self, channel: MemberChannel) -> None:
        """A connection can be used."""
        self._connected_once.add(channel.peer)
        self.timeout.connected(channel.peer, self.environment.now())
        if not channel.mine:
            old, self.inbound[channel.peer] = self.inbound.get(channel.peer), channel
            if old is not None:
                old.close()
            self.view_change.forget(channel.peer)
        channel.send(self.state())
        if not channel.mine and self.lost.reasons:
            self.view_change.send_to(channel)
        if channel.peer == self.coordinator:
            self._send_reports(channel, self._own)
        elif self.is_coordinator and not channel.mine:
            self._send_reports(channel, self.reports.all())

    def closed(self, channel: MemberChannel, refused: bool, unreachable: bool = False) -> None:
        """A connection has ended, or nobody listens at its other end, or the machine there does not answer."""
        peer = channel.peer
        channels = self.outbound if channel.mine else self.inbound
        if channels.get(peer) is not channel:
            return
        del channels[peer]
        if not channel.mine:
            self.view_change.forget(peer)
        tries, _ = self._tries.get(peer, (0, 0.0))
        self._tries[peer] = (tries + 1, self.environment.now() + (min(0.05 * 2**tries, 1.0) if tries else 0.0))
        # Where silence is not judged, a machine that ends a connection and cannot be reached again has ended.
        if refused or (unreachable and peer in self._connected_once and not self.survives):
            self.lose(peer, GONE)
            self._enter(self.reports.ended(peer))
        self._stirred = True

    def received(self, channel: MemberChannel, message: dict[str, Any]) -> None:
        """A message has come."""
        peer = channel.peer
        self.timeout.message_came(peer, self.environment.now())
        if peer == self.coordinator:
            self.detector.asked = {}
        kind, value = message["k"], message.get("v", ())
        self.heartbeat.received(peer, message)
        if kind == "beat":
            return
        if kind == "state":
            self._state(channel, MemberState.read(value))
        elif kind == "news" and peer == self.coordinator:
            if self.survives and message["run"] == self.reports.run:
                self.lost.read(value)
                if message["changing"]:
                    self.request_view()
        elif kind == "report":
            failure = Failure(*value)
            if peer in (failure.rank, self.coordinator):
                self._enter(failure)
        elif kind == "say":
            if self.is_coordinator:
                self._pass_on({**value, "by": peer})
            elif peer == self.coordinator:
                self.environment.heard(value)
        elif kind == "propose" and channel is self.outbound.get(self.coordinator):
            self._acknowledge(channel, NextView.read(value))
        elif kind == "ack" and channel is self.inbound.get(peer):
            self.view_change.acknowledged(peer, tuple(value))
        elif kind == "commit" and tuple(value) in self.acked:
            self.commit(self.acked[tuple(value)])
            if peer != self.coordinator:
                self._tell_coordinator()
        elif kind == "out" and message["n"] >= self.view.number:
            self.evict(value)
        self._stirred = True

    # -- failures, and what else members tell each other -------------------------------------------

    def _enter(self, failure: Failure) -> None:
        """A failure is known; in the order of the coordinator."""
        if self.is_coordinator and failure.rank != self.me and self.reports.knows(failure):
            return
        new = self.reports.add(failure)
        for channel in self.inbound.values() if self.is_coordinator else ():
            self._send_reports(channel, [failure])
        rank, kind, run, how = failure
        if not new or rank == self.me or kind == "told":
            return
        if kind != "left":
            self.environment.failed(failure)
        if not self.survives or run != self.reports.run or kind == "gone":
            return
        if kind != "left":
            self.lose(rank, how, final=True)
        elif self.lost.mark_left(rank):
            self.view_change.mark_changed()

    def _send_reports(self, channel: MemberChannel, failures: Sequence[Failure]) -> None:
        for failure in failures:
            channel.send(self.heartbeat.with_steps({"k": "report", "v": failure}))

    def _pass_on(self, message: dict[str, Any]) -> None:
        """Pass a message on to all other members, or to the one for which it is."""
        for peer, channel in self.inbound.items():
            if peer != message["by"] and message.get("to") in (None, peer):
                channel.send({"k": "say", "v": message})
        if message["by"] != self.me and message.get("to") in (None, self.me):
            self.environment.heard(message)

    # -- views -------------------------------------------------------------------------------------

    def _state(self, channel: MemberChannel, state: MemberState) -> None:
        peer = channel.peer
        self._tries[peer] = (0, self.environment.now() + (0.0 if peer == self.coordinator else 0.5))
        self.detector.heard(peer)
        if peer not in self.view.members and state.view.key <= self.view.key:
            channel.send(self.left_out(peer))
            return
        if state.view.key in self.acked:
            self.commit(self.acked[state.view.key])
        if self.view.key in [roster.key for roster in state.acked]:  # it was not there to hear of it
            channel.send({"k": "commit", "v": self.view.key})
            self.view_change.mark_changed()  # perhaps there is a change again
            state = state._replace(view=self.view, progress=None, changing=False)
        if self.lost.mark_alive(peer):
            self.view_change.mark_changed()
        self.election.consider(peer, state)
        if not channel.mine:
            self.view_change.state_received(peer, state)
            if self.changing and not state.changing:
                self.view_change.send_to(channel)
        elif peer == self.coordinator:
            if state.changing:
                self.request_view()
        else:
            self.outbound.pop(peer, None)  # it was only asked whether it is alive
            channel.close()

    def _acknowledge(self, channel: MemberChannel, proposal: NextView) -> None:
        if self.progress is not None and self.me in proposal.roster.members and proposal.key > self.view.key:
            self.acked[proposal.key] = proposal
            self.heartbeat.learn(proposal.steps)
            channel.send({"k": "ack", "v": proposal.key})
        else:
            channel.send(self.state())

    def commit(self, proposal: NextView) -> None:
        """A view has been committed."""
        if self.evicted is not None or proposal.key != max(self.acked):
            return  # a later view has been acknowledged, which is the one that counts
        self.view, self.acked = proposal.roster, {}
        self.reports.members = self.view.members
        self.lost.readmit(self.view.members)
        for member, why in proposal.lost.items():
            self.lost.lose(member, why, final=True)
        for peer, channel in self.inbound.items():
            stays = peer in self.view.members
            channel.send({"k": "commit", "v": self.view.key} if stays else self.left_out(peer))
        self.view_change.committed()
        if self.progress is None:
            self.request_view()  # the training thread does not wait for it any more
            return
        self.agreed, self.progress, self.changing = proposal, None, False

    # -- what time brings --------------------------------------------------------------------------

    def tick(self) -> None:
        """Messages have come, or some time has passed: do what can be done now."""
        now = self.environment.now()
        if now - self._ticked >= _TICK:
            self._ticked, self._stirred = now, True
            self.heartbeat.tick(now)
            if self.evicted is None:
                self.detector.tick()
        if self._stirred:
            self._stirred = False
            self.advance()

    @property
    def connected(self) -> bool:
        """Whether there are all connections that should be there."""
        return (
            all(one in self.inbound for one in self.others)
            if self.is_coordinator
            else self.coordinator in self.outbound
        )

    @property
    def met(self) -> bool:
        """Whether the coordinator has answered."""
        return self.is_coordinator or self.coordinator in self.heartbeat.steps

    def restart(self) -> None:
        """This process itself did not run for a while: others' silence in that time means nothing."""
        now = self.environment.now()
        self.timeout.restart(now)
        self.detector.asked = {}
        self.view_change.drop_proposal()
        self.began = now if self.changing else self.began

    def advance(self) -> None:
        """Do what can be done now."""
        if self.evicted is not None:
            return
        lost = any(one in self.lost and one not in self.lost.left for one in self.view.members)
        if lost or self.view_change.wanted:
            self.request_view()
        if not self.election.choose():
            self.evict(f"rank {self.me} {self.lost.reasons[self.me]}, and nobody else remains.")
        elif self.is_coordinator:
            self.view_change.advance()
        else:
            self.reach(self.coordinator)
            for other in list(self.detector.asked):
                self.reach(other)

    def reach(self, peer: int) -> None:
        """Connect to a member, unless there is a connection or the last attempt was just now."""
        _, due = self._tries.get(peer, (0, 0.0))
        if peer not in self.outbound and self.environment.now() >= due:
            try:
                self.outbound[peer] = self.environment.connect(peer)
            except OSError:  # too many open files, say
                self._tries[peer] = (0, self.environment.now() + 1.0)
