"""Ranks that are not at the same batch agree on one, and nobody waits for it."""

import os
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from ranks import attempt, run

from lightning_hetero.batching.plan_agreement import ActionRequest, AgreedBatch
from lightning_hetero.errors import CommunicationError


class Clock:
    """Rank 0 asks from a time on."""

    def __init__(self, seconds: float, notice: float = 1.0) -> None:
        self.seconds, self.notice, self.began = seconds, notice, time.monotonic()

    def __call__(self) -> ActionRequest | None:
        due = time.monotonic() >= self.began + self.seconds
        return ActionRequest("to save at", self.notice) if due and dist.get_rank() == 0 else None


def _open(clock: Clock, limit: float = 60.0, **options: Any) -> AgreedBatch:
    dist.init_process_group("gloo")
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    return AgreedBatch(store, clock, limit, **options)


def _steps(paces: list[float], seconds: float, notice: float = 1.0) -> tuple[list[int], list[float]]:
    """After which batches this rank does it, and how long each batch made it wait."""
    clock = Clock(seconds, notice)
    agreed, at, waits = _open(clock), list[int](), list[float]()
    for batch in range(1, 10**5):
        time.sleep(paces[dist.get_rank()])
        before = time.monotonic()
        due = agreed.batch_ended(batch)
        waits.append(time.monotonic() - before)
        if due:
            at.append(batch)
            dist.barrier()  # as to save does
            clock.began = time.monotonic()
            agreed.again()
        if len(at) == 3:
            break
    agreed.close()
    dist.barrier()
    return at, waits


def test_ranks_at_unlike_speeds_agree_on_the_same_batches() -> None:
    first, second = run(_steps, 2, [0.01, 0.013], 0.5, timeout=120)
    assert first[0] == second[0]
    assert len(first[0]) == 3
    # In 0.5 s and more it is not time yet, whatever this machine does besides.
    assert all(later - earlier > 1 for earlier, later in zip([0, *first[0]], first[0], strict=False))


@pytest.mark.clock
def test_nobody_waits_for_the_agreement() -> None:
    for _, waits in run(_steps, 2, [0.02, 0.02], 0.5, timeout=120):
        assert max(waits) < 0.2


@pytest.mark.clock
def test_without_notice_it_is_the_next_batch_that_all_can_do() -> None:
    """They wait for each other's answers instead, which notice would take several batches for."""
    (first, _), (second, _) = run(_steps, 2, [0.2, 0.2], 0.5, 0.0, timeout=120)
    assert first == second
    gaps = [later - earlier for earlier, later in zip([0, *first], first, strict=False)]
    assert max(gaps) <= 5  # 0.5 s until it is asked, 0.5 until all have heard


def _behind() -> list[int]:
    """Rank 1 is a batch ahead, and has counted them in an earlier fit; the thread answers before the first one ends."""
    done, at = 7 + int(os.environ["RANK"]), list[int]()
    agreed = _open(Clock(0.0, 0.0), done=done)
    time.sleep(1.0)
    for batch in range(done + 1, 20):
        if agreed.batch_ended(batch):
            at.append(batch)
            break
    agreed.close()
    dist.barrier()
    return at


def test_who_has_not_ended_a_batch_yet_answers_by_what_was_done_before() -> None:
    assert run(_behind, 2, timeout=60) == [[9], [9]]


def _unanswered() -> Any:
    agreed = _open(Clock(0.3), limit=2.0)
    if dist.get_rank() == 1:
        agreed._closed.set()  # it does not answer
    until = time.monotonic() + (60 if dist.get_rank() == 0 else 8)
    for batch in range(1, 10**5):
        time.sleep(0.05)
        agreed.batch_ended(batch)
        if time.monotonic() > until:
            break


def test_a_rank_that_does_not_answer_is_not_waited_for_without_end() -> None:
    outcome = attempt(_unanswered, 2, timeout=30)[0]
    assert isinstance(outcome.error, CommunicationError), outcome.trace
    assert "could not agree with the others on a step to save at: no answer from rank(s) 1 within 2 s" in str(
        outcome.error
    )


def _without_an_answer(patience: float) -> int:
    """How many batches a rank takes in 3 s, though another one never answers."""
    agreed = _open(Clock(0.3), patience=lambda: patience)
    if dist.get_rank() == 1:
        agreed._closed.set()
        dist.distributed_c10d._get_default_store().get("done")
        return 0
    until, batch = time.monotonic() + 3.0, 0
    closing = threading.Timer(5.0, agreed._known.set)  # else it waits for the limit
    closing.start()
    while time.monotonic() < until:
        time.sleep(0.05)
        batch += 1
        agreed.batch_ended(batch)
    dist.distributed_c10d._get_default_store().set("done", "1")
    closing.cancel()
    return batch


def test_who_has_patience_goes_on_until_it_is_known_who_is_lost() -> None:
    """A lost rank is left out by then, and nobody has waited for it."""
    assert run(_without_an_answer, 2, 30.0, timeout=60)[0] > 40
    assert run(_without_an_answer, 2, 0.0, timeout=60)[0] < 35


def _ranks_change(seconds: float) -> float:
    """How long a rank waits for one that does not answer, where the ranks that remain are about to begin anew."""
    changing = threading.Event()
    agreed = _open(Clock(0.3, 0.0), changing=changing.is_set)
    if dist.get_rank() == 1:
        agreed._closed.set()
        dist.distributed_c10d._get_default_store().get("done")
        return 0.0
    while not agreed.asked:
        time.sleep(0.01)
    timer = threading.Timer(seconds, changing.set)
    timer.start()
    began = time.monotonic()
    assert not agreed.batch_ended(1)
    waited = time.monotonic() - began
    dist.distributed_c10d._get_default_store().set("done", "1")
    timer.join()
    agreed.close()
    return waited


def test_where_the_ranks_change_nobody_waits_for_who_is_lost() -> None:
    assert 0.9 < run(_ranks_change, 2, 1.0, timeout=60)[0] < 20  # of 60
