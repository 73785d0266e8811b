"""What to say of replicas with values that are not finite."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.errors import NotFiniteError

if TYPE_CHECKING:
    from lightning_hetero.engine.replicas import ReplicaEngine


def about(
    broken: Sequence[int],
    replicas: Sequence[Sequence[int]],
    step: int,
    seen: Sequence[tuple[str | None, int | None]],
    fresh_start: str,
) -> str:
    """What to say of replicas that are not finite.

    Args:
        broken: their numbers.
        replicas: the ranks of each.
        step: optimizer step after which they were found.
        seen: of each rank, the first parameter or buffer that is not finite, and the step of the first such loss.
        fresh_start: with what such a replica would go on, were it left out.
    """
    parts = []
    for index in broken:
        ranks = replicas[index]
        name = next((seen[rank][0] for rank in ranks if seen[rank][0]), None)
        if name is None:
            parts.append(
                f"the changes of replica {index} (ranks {list(ranks)}) are too large for the wire; use 'bf16' or 'fp32'"
            )
            continue
        losses = [f"of rank {rank} at step {seen[rank][1]}" for rank in ranks if seen[rank][1] is not None]
        parts.append(
            f"replica {index} (ranks {list(ranks)}) holds values that are not finite, the first in {name!r}"
            + (f"; the first loss that was not: {', '.join(losses)}" if losses else "; its losses were all finite")
        )
    spread = "No value that is not finite has reached the others."
    firsts = sorted((seen[rank][1] or 0, rank) for i in broken for rank in replicas[i] if seen[rank][1] is not None)
    if len(broken) > 1 and firsts:
        spread = (
            f"The loss of rank {firsts[0][1]} was the first that was not finite, at step {firsts[0][0]}: before that "
            "it may have given the others values that were finite, but far too large."
        )
    return (
        f"When replicas met after step {step}, {'; '.join(parts)}. {spread} Lower the "
        "learning rate or clip gradients; or give on_nan='skip' to leave such replicas out, who then go on with "
        f"{fresh_start}."
    )


@contextmanager
def explained(engine: "ReplicaEngine") -> Iterator[None]:
    """In a block in which replicas meet, say more about those that are not finite than they tell each other.

    All ranks alike do where all exchange after the same steps (collective then, if a replica is not finite).

    Raises:
        NotFiniteError: a replica is not finite, and may not be left out.
    """
    assert engine.averager is not None
    skipped, facts = len(engine.traffic.skipped), engine.averager.facts
    try:
        yield
    except NotFiniteError as error:
        mine = engine.averager.replica.broken(), engine.losses.broken_at
        if facts.lockstep:
            seen = engine.links.gather(mine)
        else:  # nobody else knows
            seen = [mine if rank == engine.view.rank else (None, None) for rank in range(engine.view.world)]
        message = about(error.replicas, engine.view.ranks, engine.windows, seen, facts.fresh_start)
        told = NotFiniteError(error.replicas, message)
        raise (told.of_all() if facts.lockstep else told) from None
    for index in engine.traffic.skipped[skipped:]:
        warn = rank_zero_warn if facts.lockstep else warnings.warn
        warn(
            f"Replica {index} (ranks {list(engine.view.ranks[index])}) was left out of the average after step "
            f"{engine.windows}: its values were not finite. It goes on with {facts.fresh_start}."
        )
