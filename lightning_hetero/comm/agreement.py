"""Checks that all ranks of a job have the same values, and raises errors on all of them together."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm import objects
from lightning_hetero.comm.collective import collective
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.errors import DisagreementError, HeteroError

_MISSING = "(missing)"


def gather(value: Any, what: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """One value per rank, in the order of ranks (collective). Tensors arrive on the CPU.

    Args:
        value: this rank's; anything that can be pickled.
        what: completes "rank 1 of 4 could not gather ..." in an error.
        group: the ranks. Default: all.

    Raises:
        CommunicationError: another rank did not take part in time.
    """

    def everyone() -> list[Any]:
        return objects.all_gather(value, group)

    if group is None:
        return collective(f"gather {what}", everyone)
    with deadline(f"gather {what}"):
        return everyone()


def of_rank(value: Any, rank: int, home: torch.device = objects.CPU, place: str = "") -> Any:
    """The value of one rank, on every rank (collective).

    Args:
        value: this rank's; anything that can be pickled.
        rank: which one counts.
        home: the device on which this rank computes. Tensors of the source that were on its own such device arrive on
            this one; all others on the CPU. Default: all on the CPU.
        place: names the function that asks, the same on every rank.

    Raises:
        CommunicationError: another rank did not take part in time.
        DisagreementError: that rank sends something else, as far as ``place`` and ``rank`` tell.
    """
    mine = False

    def received() -> bytes:
        nonlocal mine
        mine = dist.get_rank() == rank
        return objects.broadcast(objects.packed(value, home) if mine else b"", rank)

    message = collective(f"receive an object from rank {rank}{place and f' in {place}'}", received)
    return value if mine else objects.unpacked(message, home)


def check_equal(what: str, values: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank has the same named values (collective).

    Args:
        what: describes the values in the error.
        values: can be pickled, and differ in their ``repr`` if they differ.
        group: the ranks. Default: all.

    Raises:
        DisagreementError: on every rank, with the names and each rank's value. If all ranks were asked, the fault is on
            those that differ from rank 0.
        CommunicationError: another rank did not take part in time.
    """
    digest = repr(sorted(values.items(), key=lambda item: item[0]))
    if len(set(gather(hash_of(digest), what, group))) == 1:
        return
    everyone = gather(dict(values), what, group)
    names = dict.fromkeys(name for one in everyone for name in one)
    differing = [name for name in names if len({repr(one.get(name, _MISSING)) for one in everyone}) > 1]
    ranks = range(len(everyone)) if group is None else dist.get_process_group_ranks(group)
    lines = [
        f"  {name}: "
        + ", ".join(f"rank {rank}: {one.get(name, _MISSING)}" for rank, one in zip(ranks, everyone, strict=True))
        for name in differing[:8]
    ]
    more = f"\n  and {len(differing) - 8} more" if len(differing) > 8 else ""
    error = DisagreementError(f"the ranks differ in {what}; make them the same:\n" + "\n".join(lines) + more)
    wrong = [rank for rank, one in enumerate(everyone) if any(_differs(one, everyone[0], name) for name in differing)]
    raise error.of_all(wrong) if group is None else error


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return repr(one.get(name, _MISSING)) != repr(other.get(name, _MISSING))


def hash_of(text: str) -> str:
    """A short digest that is the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()


def raise_on_all(problem: HeteroError | None, what: str) -> None:
    """Raise an error on every rank if any rank has a problem (collective).

    Args:
        problem: of this rank, if it has one.
        what: describes what the ranks were about to do, in the error of the other ranks.

    Raises:
        HeteroError: this rank's own problem.
        DisagreementError: the problem of another rank, with its number.
        CommunicationError: another rank did not take part in time.
    """
    problems = gather(None if problem is None else str(problem), what)
    wrong = [rank for rank, text in enumerate(problems) if text is not None]
    if wrong:
        first = wrong[0]
        error = problem or DisagreementError(f"rank {first} cannot take part ({what}): {problems[first]}")
        raise error.of_all(wrong)
