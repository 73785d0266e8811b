"""Thread by which ranks at their own pace agree on new plans; of a fit whose replicas do not exchange all at once."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed import Store

from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.plan import Plan
from lightning_hetero.batching.plan_agreement import (
    PlanDecision,
    PlanLeader,
    PlanMember,
    PlanProposal,
    decode_message,
    encode_message,
)
from lightning_hetero.batching.reports import Report
from lightning_hetero.comm.agreement import gather, value_of_rank
from lightning_hetero.comm.threads import THREADS, close_at_exit
from lightning_hetero.errors import CommunicationError


class PlanAgreement:
    """Agreement thread of a rank: reports to rank 0, and learns which plan all are to follow, and from when on.

    Each rank has a box in the job's store, in which it exchanges messages with rank 0: reports, proposals, answers,
    decisions. A rank writes its report only if nothing new from rank 0 is there, and else reads that instead, so one
    message in a second does for both. All that belongs to training is read and changed on the training's thread,
    before and after a batch, and before a step is drawn.

    Args:
        accounting: of this rank's batches.
        store: of the job, with keys of its own; :meth:`open_mailboxes` has been called on rank 0.
        rank: this rank.
        limit: longest wait for a decision, seconds.
        lost: says which rank is lost, if one is; where that is known no decision is waited for.
    """

    #: Seconds from one message to the next, and while ranks agree.
    POLL, QUICK = 1.0, 0.1

    def __init__(
        self, accounting: BatchAccounting, store: Store, rank: int, limit: float, lost: Callable[[], str | None]
    ) -> None:
        self._accounting, self._store, self._rank, self._limit, self._lost = accounting, store, rank, limit, lost
        self._world = accounting.planner.world
        self._closed, self._changed = threading.Event(), threading.Condition()
        self._broken = ""
        self._member, self._leader = PlanMember(accounting.loaders.next_step()), PlanLeader(self._world)
        self._drawn = time.monotonic(), self._member.next_step  # at the latest message
        # Between the threads: what is handed over is replaced, never changed.
        self._wanted, self._reports, self._report = True, 0, _NO_REPORT
        self._gathered: list[dict[str, Any]] | None = None  # for the training's thread of rank 0
        self._to_propose: Plan | None = None
        self._dropped = False
        accounting.agreement = self
        # All ranks know the plan of the latest step.
        accounting.planner.in_force = lambda: accounting.planner.at(max(accounting.step - 1, 0))
        work = self._run_leader if rank == 0 else self._run_follower
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name=f"{THREADS}plans")
        self._thread.start()
        close_at_exit(self)

    @staticmethod
    def open_mailboxes(store: Store, world: int) -> None:
        """Prepare the store, on rank 0, before any other rank uses it."""
        for rank in range(1, world):
            store.set(_box(rank), _NO_REPORT)

    def close(self) -> None:
        """End the thread; nobody waits for a decision any more. Idempotent."""
        self._stop()
        self._thread.join(2.0)  # a thread within the store would break the process's end off

    def _stop(self) -> None:
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def settle(self) -> None:
        """End with the same plan on all ranks, where one may have heard of a decision and another may not (collective).

        If ranks were lost, it is collective over those that remain.
        """
        self._stop()
        self._thread.join(0.5)  # if rank 0 is frozen the store does not answer
        self._adopt()
        planner, own = self._accounting.planner, self._member.latest
        number, plan = max(gather(own, "the plan that is agreed"), key=lambda latest: latest[0])
        if number > own[0]:
            planner.adopt(plan)
        self._accounting.agreement = None
        planner.before_draw, planner.in_force = (lambda step: None), (lambda: planner.plans[-1])

    # -- on the training's thread ------------------------------------------------------------------

    def before_draw(self, step: int) -> None:
        """Wait until it is sure which plan is in force at a step that is about to be drawn.

        Raises:
            CommunicationError: that is not known in time, or a rank was lost.
        """
        until = time.monotonic() + self._limit
        with self._changed:
            while not self._member.may_draw(step) and not self._closed.is_set():
                why = self._lost() or self._broken
                if not why and time.monotonic() > until:
                    why = f"no decision of rank 0 within {self._limit:.0f} s"
                if why:
                    raise CommunicationError(
                        f"rank {self._rank} of {self._world} could not agree on new shares with the others, and does "
                        f"not know by which ones to draw step {step}: {why}."
                    )
                self._changed.wait(self.QUICK)
            self._member.draws(step)
            self._adopt()

    def before_batch(self) -> None:
        """Follow the plans that were agreed; on rank 0 look for a better one."""
        with self._changed:
            self._adopt()
            gathered, dropped, self._dropped = self._gathered, self._dropped, False
        planner = self._accounting.planner
        if dropped:
            planner.drop()
        if gathered is None:
            return
        self._accounting.reports = [Report.of_row(told["row"]) for told in gathered]
        plan = planner.propose(min(told["step"] for told in gathered), self._accounting.reports)
        self._accounting.warn_of_slow_ranks()
        with self._changed:
            self._gathered, self._to_propose = None, plan

    def meet(self, step: int, reports: Sequence[Report]) -> None:
        """Follow a better plan at once, where all ranks have met, as at the end of an epoch (collective).

        Rank 0 alone has seen all earlier reports, so it decides. While a proposal is open, or a plan has yet to start,
        there is no other one: some ranks may not have heard of it.

        Args:
            step: that all ranks have done.
            reports: of all ranks, with the first step that each has not drawn.
        """
        planner, plan = self._accounting.planner, None
        with self._changed:
            self._adopt()
            if self._rank == 0 and not (self._leader.waits or self._member.waits or self._to_propose):
                plan = planner.propose(step, reports)
        if plan is not None:
            plan = replace(plan, start=max(int(report.drawn) for report in reports))
        with self._accounting.timer.waiting():
            plan = value_of_rank(plan, 0)
        if plan is not None:
            planner.adopt(plan)

    def after_batch(self) -> None:
        """Report, if that is due."""
        if self._wanted:
            self._wanted = False
            self._reports += 1
            row = self._accounting.report(taken=True).row
            self._report = _report_text(self._reports, row, self._accounting.step)

    def _adopt(self) -> None:
        for plan in self._member.new_plans():
            self._accounting.planner.adopt(plan)

    # -- on the thread of its own ------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:  # the store has gone, and the job with it
            self._broken = f"the job's store does not answer: {error}"

    def _rate(self) -> float:
        """Steps that this rank draws in a second."""
        (then, before), self._drawn = self._drawn, (time.monotonic(), self._member.next_step)
        return (self._drawn[1] - before) / max(self._drawn[0] - then, self.QUICK)

    def _answer(self, proposal: PlanProposal) -> int:
        rate = self._rate()
        with self._changed:
            return self._member.answer(proposal, rate)

    def _receive_decision(self, decision: PlanDecision) -> None:
        with self._changed:
            if not self._closed.is_set():
                self._member.decide(decision)
            self._changed.notify_all()

    def _run_follower(self) -> None:
        box, there = _box(self._rank), _NO_REPORT
        while not self._closed.wait(self.QUICK if self._member.waits else self.POLL):
            mine = there if self._member.waits else self._report
            found = self._store.compare_set(box, there, mine).decode()
            if found == mine:
                if mine != there:
                    self._wanted = True
                    self._rate()
                there = mine
                continue
            there, message = found, decode_message(json.loads(found))
            if isinstance(message, PlanProposal):
                there = json.dumps({"answer": message.number, "bound": self._answer(message)})
                self._store.set(box, there)
            else:
                self._receive_decision(message)

    def _run_leader(self) -> None:
        boxes, leader, reports = [_box(rank) for rank in range(1, self._world)], self._leader, [0] * self._world
        while not self._closed.wait(self.QUICK if leader.waits else self.POLL):
            if leader.waits:
                for rank, told in enumerate(self._read(boxes), start=1):
                    if "answer" in told:
                        leader.answered(rank, told["answer"], told["bound"])
                decision = leader.decide(time.monotonic())
                if decision is not None:
                    with self._changed:
                        self._dropped = decision.start is None
                    self._receive_decision(decision)
                    self._publish(boxes, decision)
            elif self._to_propose is not None:
                proposal = leader.propose(self._to_propose, time.monotonic())
                self._to_propose = None
                leader.answered(0, proposal.number, self._answer(proposal))
                self._publish(boxes, proposal)
            elif self._gathered is None:
                self._rate()
                everyone = [json.loads(self._report), *self._read(boxes)]
                if all(one.get("report", 0) > number for one, number in zip(everyone, reports, strict=True)):
                    reports = [one["report"] for one in everyone]
                    self._gathered, self._wanted = everyone, True

    def _read(self, boxes: list[str]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._store.multi_get(boxes)]

    def _publish(self, boxes: list[str], message: PlanProposal | PlanDecision) -> None:
        for box in boxes:
            self._store.set(box, encode_message(message))


def _box(rank: int) -> str:
    return f"rank{rank}"


def _report_text(number: int, row: list[float], step: int) -> str:
    return json.dumps({"report": number, "row": row, "step": step})


_NO_REPORT = _report_text(0, [], 0)
