"""Ranks that are not at the same batch agree on one, and nobody waits for it."""

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from ranks import attempt, run

from lightning_hetero.engine.agreed_batch import AgreedBatch
from lightning_hetero.errors import CommunicationError


def _open(seconds: float, limit: float = 60.0, patience: float = 0.0) -> AgreedBatch:
    dist.init_process_group("gloo")
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    return AgreedBatch(store, seconds, limit, lambda: patience)


def _steps(paces: list[float], seconds: float) -> tuple[list[int], list[float]]:
    """After which batches this rank does it, and how long each batch made it wait."""
    agreed, at, waits = _open(seconds), [], []
    for batch in range(1, 10**5):
        time.sleep(paces[dist.get_rank()])
        before = time.monotonic()
        due = agreed.batch_ended(batch)
        waits.append(time.monotonic() - before)
        if due:
            at.append(batch)
            dist.barrier()  # as to save does
            agreed.done()
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


def _unanswered() -> Any:
    agreed = _open(0.3, limit=2.0)
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
    assert "could not agree with the others on a step to save at: no answer from rank(s) [1] within 2 s" in str(
        outcome.error
    )


def _without_an_answer(patience: float) -> int:
    """How many batches a rank takes in 6 s, though another one never answers."""
    agreed = _open(0.3, patience=patience)
    if dist.get_rank() == 1:
        agreed._closed.set()
        dist.distributed_c10d._get_default_store().get("done")
        return 0
    until, batch = time.monotonic() + 6.0, 0
    closing = threading.Timer(8.0, agreed._known.set)  # else it waits for the limit
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
    assert run(_without_an_answer, 2, 30.0, timeout=60)[0] > 80
    assert run(_without_an_answer, 2, 0.0, timeout=60)[0] < 60
