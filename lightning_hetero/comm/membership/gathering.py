"""The coordinator's part: gather the members, propose a view, commit it."""

from typing import TYPE_CHECKING

from lightning_hetero.comm.membership.majority import Key, Roster, decide
from lightning_hetero.comm.membership.state import Proposal, State
from lightning_hetero.comm.membership.surroundings import Channel

if TYPE_CHECKING:
    from lightning_hetero.comm.membership.member import Member


class Gathering:
    """What the coordinator knows of a change of view.

    A proposal is void as soon as one of its members begins anew (on another connection, say) or is lost; then there is
    another one, with a higher number. Only when all members of a proposal have acknowledged it, it is committed.

    Args:
        member: the coordinator.
    """

    def __init__(self, member: "Member") -> None:
        self._member = member
        self._told: dict[int, State] = {}  # of members, on their connections of now
        self._proposal: Proposal | None = None
        self._acks: set[int] = set()
        self._since = member.around.now()
        self._untold = False

    def begin(self) -> None:
        """This member becomes the coordinator, or follows another one."""
        member = self._member
        self._proposal, self._since = None, member.around.now()
        if member.leads:
            member.hearing.expect(member.others, self._since)
        for channel in member.inbound.values():  # those that follow this member
            channel.send(member.state())

    def tell(self) -> None:
        """All members must learn what has changed."""
        self._untold = True

    def spread(self) -> None:
        """Tell all members what has changed, if this one is the coordinator."""
        for channel in self._member.inbound.values() if self._untold else ():
            self.inform(channel)
        self._untold = False

    def inform(self, channel: Channel) -> None:
        """Tell one member."""
        member = self._member
        if member.leads:
            channel.send({"k": "news", "v": member.gone.written(), "changing": member.changing})

    def void(self) -> None:
        """Drop the proposal: the others may have gone on without this member."""
        self._proposal = None

    def forget(self, peer: int) -> None:
        """What a member has said does not hold any more: its connection is another one."""
        self._told.pop(peer, None)

    def stands(self, peer: int, state: State) -> None:
        """A member says where it stands."""
        member = self._member
        self._told[peer] = state
        if self._proposal is not None and peer in self._proposal.roster.members:
            self._proposal = None
        if member.leads and peer in member.others and (state.changing or state.standing is not None):
            member.change()

    def acknowledged(self, peer: int, key: Key) -> None:
        """A member has acknowledged a proposal."""
        if self._proposal is not None and self._proposal.key == key:
            self._acks.add(peer)

    def committed(self) -> None:
        """A view has been committed; all must come again for the next one."""
        self._proposal = None
        for peer, state in self._told.items():
            self._told[peer] = state._replace(standing=None, changing=False)

    def advance(self) -> None:
        """Do what the coordinator can do now."""
        self._gather()
        self.spread()

    def _gather(self) -> None:
        member = self._member
        for peer in member.others:
            if peer not in member.inbound:
                member.reach(peer)  # is it alive?
        if not member.changing and any(
            one in member.gone and one not in member.gone.left for one in member.view.members
        ):
            member.change()
        if not member.changing or self._dropped_units() or self._missed():
            return
        standings = {one: come for one in self._needed() if (come := self._come(one)) is not None}
        if len(standings) < len(self._needed()):
            return
        proposal = self._proposal
        if proposal is None or proposal.roster.members != tuple(sorted(standings)):
            proposal = self._propose(standings)
        if proposal is not None and self._acks.issuperset(proposal.roster.members):
            member.commit(proposal)  # tells the others

    # -- who is there ------------------------------------------------------------------------------

    def _base(self) -> Roster:
        """The last view that anybody here knows to be committed."""
        member = self._member
        return max([member.view, *(self._told[peer].view for peer in member.inbound if peer in self._told)])

    def _rosters(self) -> list[Roster]:
        """That view, and those that may have been committed since."""
        member, base = self._member, self._base()
        acked = [proposal.roster for proposal in member.acked.values()]
        for peer in member.inbound:
            acked += self._told[peer].acked if peer in self._told else ()
        return [base, *{roster for roster in acked if roster.key > base.key}]

    def _needed(self) -> list[int]:
        """Members that live, and all of whose unit live."""
        gone = self._member.gone
        return [one for unit in self._base().units if not any(each in gone for each in unit) for one in unit]

    def _come(self, one: int) -> tuple[int, ...] | None:
        """What a member's training thread has given to ``agree()``; ``None`` if it has not come."""
        member = self._member
        if one == member.me:
            return member.standing
        return self._told[one].standing if one in member.inbound and one in self._told else None

    def _dropped_units(self) -> bool:
        """Count members as lost if another one of their unit is; whether this member is one of them."""
        member = self._member
        for unit in self._base().units:
            gone = [one for one in unit if one in member.gone]
            for one in unit if gone else ():
                if one not in member.gone:
                    member.lose(one, f"lost rank {gone[0]} of its replica", final=True)
        return self._resigned()

    def _missed(self) -> bool:
        """Wait no longer for those that have not come in time; whether this member is one of them."""
        member = self._member
        missing = [one for one in self._needed() if self._come(one) is None]
        seconds = member.terms.timeout
        now, due = member.around.now(), max(member.began + seconds, self._since + member.hearing.grace)
        if missing and now >= due:
            for one in missing:
                member.lose(one, f"did not come within {seconds:g} s", final=True)
            return self._resigned() or self._dropped_units()
        return False

    def _resigned(self) -> bool:
        """Whether this member itself is lost for the others; then another one must be the coordinator."""
        member = self._member
        if member.me in member.gone:
            member.advance()
            return True
        return False

    # -- what becomes of it ------------------------------------------------------------------------

    def _propose(self, standings: dict[int, tuple[int, ...]]) -> Proposal | None:
        member, rosters = self._member, self._rosters()
        units, lacks = decide(standings, rosters, member.gone.left, member.terms.minimum, member.terms.unit)
        missing = {one: why for one, why in member.gone.reasons.items() if one in rosters[0].members}
        if lacks:
            listed = "; ".join(f"rank {one} {why}" for one, why in sorted(missing.items()))
            text = f"{lacks}. Missing: {listed}. Start the job again from its last checkpoint."
            for peer, channel in member.inbound.items():
                if peer in self._told and self._told[peer].leader == member.me:
                    channel.send({"k": "out", "n": rosters[0].number, "v": text})
            member.finish(text)
            return None
        number = 1 + max(roster.number for roster in rosters)
        try:
            offer = member.around.offer(number)
        except Exception as error:
            member.lose(member.me, f"could not prepare view {number}: {type(error).__name__}: {error}", final=True)
            self._resigned()
            return None
        roster = Roster(number, member.me, units)
        steps = {one: done for one, done in member.pulse.steps.items() if one not in roster.members}
        proposal = Proposal(roster, standings, member.gone.reasons, offer, steps)
        self._proposal, self._acks = proposal, {member.me}
        member.acked[proposal.key] = proposal
        for peer in proposal.roster.members:
            if peer != member.me:
                member.inbound[peer].send({"k": "propose", "v": proposal.written()})
        return proposal
