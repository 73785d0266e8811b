"""A checkpoint is saved once more if ranks were lost meanwhile: by all ranks, or by none."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetero.checkpoint.writer import AtomicCheckpointIO
from lightning_hetero.strategies import saving


def _saves(
    monkeypatch: pytest.MonkeyPatch, lost: str, others: list[tuple[int, int]] | None = None
) -> tuple[int, tuple[int, int]]:
    """Number of times that a rank saves, and the value that it sends to the others.

    Args:
        monkeypatch: replaces what the ranks gather.
        lost: when this rank learns of a loss: "never", while it "saves", or while ranks "gather".
        others: values of other ranks.
    """
    recovery: Any = SimpleNamespace(view_number=3)
    saves, sent, theirs = [], [], list(others or [])

    def gather(value: tuple[int, int], what: str) -> list[tuple[int, int]]:
        sent.append(value)
        if lost == "gather":
            recovery.view_number = 4
        views = [value, *theirs]
        theirs[:] = [(4, 4) for _ in theirs]
        return views

    def save() -> None:
        saves.append(recovery.view_number)
        if lost == "saves":
            recovery.view_number = 4

    monkeypatch.setattr(saving, "gather", gather)
    saving.retry_on_peer_loss(recovery, AtomicCheckpointIO(), save)
    return len(saves), sent[0]


@pytest.mark.parametrize(
    ("when", "times"),
    [
        (("never", "never"), 1),
        (("never", "gather"), 1),  # one rank has the result already when the connection of the other breaks
        (("gather", "gather"), 1),
        (("saves", "saves"), 2),
        (("saves", "gather"), 2),
        (("saves", "never"), 2),
    ],
)
def test_ranks_decide_alike_whenever_they_learn_of_a_loss(
    monkeypatch: pytest.MonkeyPatch, when: tuple[str, str], times: int
) -> None:
    sent = [_saves(monkeypatch, one)[1] for one in when]
    assert [_saves(monkeypatch, one, [other])[0] for one, other in zip(when, sent[::-1], strict=True)] == [times] * 2
