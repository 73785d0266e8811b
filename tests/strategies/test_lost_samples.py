"""Number of samples that are lost with ranks, from the known progress of ranks."""

import pytest

from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.repartition import ShareHistory
from lightning_hetero.strategies import recovery_policy
from lightning_hetero.strategies.recovery_policy import (
    AT_LEAST,
    AT_MOST,
    EXACT,
    LostSamples,
    Progress,
    count_lost_samples,
    sentence,
)


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> ShareHistory:
    """Four ranks with the ids 2, 3, 5 and 7, which take 3 samples each; from step 100 on others share them."""
    monkeypatch.setattr(recovery_policy, "gather", lambda value, what: [value])
    made = Planner(4)
    made.expect(12)
    made_past = ShareHistory()
    made_past.end([2, 3, 5, 7], made, 100)
    return made_past


def progress(*remain: int, met: int = 0) -> dict[int, Progress]:
    return {id: Progress(0, 0, 0, 0, 0, met) for id in remain}


def test_what_lost_ranks_have_told(past: ShareHistory) -> None:
    assert count_lost_samples(
        {5: "", 7: ""}, {2: 99, 3: 40, 5: 60, 7: 99}, progress(2, 3), past, alike=False
    ) == LostSamples(40 * 3 + 3, AT_MOST)


def test_a_rank_that_was_ahead_has_lost_nothing(past: ShareHistory) -> None:
    assert count_lost_samples({3: ""}, {2: 99, 3: 150, 5: 40}, progress(2, 5), past, alike=False) == LostSamples(
        0, AT_MOST
    )


def test_nothing_is_known_of_one(past: ShareHistory) -> None:
    """Such a rank was not behind the slowest one, as far as is known."""
    assert count_lost_samples({5: "", 7: ""}, {2: 99, 3: 90, 7: 99}, progress(2, 3), past, alike=False) == LostSamples(
        10 * 3 + 3, AT_LEAST
    )


def test_where_all_meet_after_the_same_steps_a_rank_has_done_those(past: ShareHistory) -> None:
    met, known = {**progress(2, met=90), **progress(3, met=96)}, {2: 96, 3: 99}
    assert count_lost_samples({5: ""}, {**known, 5: 60}, met, past, alike=False) == LostSamples(4 * 3, AT_MOST)
    assert count_lost_samples({5: ""}, known, met, past, alike=False) == LostSamples(4 * 3, AT_MOST)
    assert count_lost_samples({5: ""}, {**known, 5: 98}, met, past, alike=False) == LostSamples(2 * 3, AT_MOST)


def test_where_all_take_each_step_together_the_number_is_exact(past: ShareHistory) -> None:
    assert count_lost_samples({5: ""}, {2: 98, 3: 99, 5: 60}, progress(2, 3, met=90), past, alike=True) == LostSamples(
        2 * 3, EXACT
    )


def test_a_rank_that_was_lost_before_holds_nobody_back(past: ShareHistory) -> None:
    steps = {2: 98, 3: 99, 5: 60, 7: 20}
    assert count_lost_samples({5: ""}, steps, progress(2, 3), past, alike=True) == LostSamples(2 * 3, EXACT)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (LostSamples(3, EXACT), " 3 samples that it had are not trained on."),
        (LostSamples(3, AT_MOST), " Up to 3 samples that it had are not trained on."),
        (LostSamples(3, AT_LEAST), " At least 3 samples that it had are not trained on."),
        (LostSamples(0, EXACT), ""),
        (LostSamples(0, AT_MOST), ""),
        (LostSamples(0, AT_LEAST), " How many samples that it had are not trained on is not known."),
    ],
)
def test_in_words(found: LostSamples, text: str) -> None:
    assert sentence(*found, "that it had") == text
