"""Checkpoint format: what this package adds. Any strategy can load the checkpoint without it.

The checkpoint itself holds the consensus, the plan, and what is small of each rank. Where replicas differ, each one's
own state is in a shard (:mod:`~lightning_hetero.checkpoint.shards`).
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.shares import cost_of, row_of
from lightning_hetero.checkpoint_sections import add_section, section, unreadable
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.view import View
from lightning_hetero.errors import CheckpointError

COMMON = "lightning_hetero_common"  #: In memory only, when others join: what the averager holds alike on all replicas.


@contextmanager
def explain_unreadable(path: Any) -> Iterator[None]:
    """Say in plain words that a file is no whole checkpoint.

    Raises:
        CheckpointError: names the file.
    """
    try:
        yield
    except (EOFError, UnpicklingError, OSError, RuntimeError) as error:
        cut_off = isinstance(error, EOFError | UnpicklingError) or "PytorchStreamReader" in str(error)
        if not cut_off and getattr(error, "errno", None) != errno.EINVAL:  # of a seek to before the beginning
            raise
        raise CheckpointError(
            f"{path} is not a whole checkpoint: it was cut off while it was written or copied, or is something else. "
            f"Nothing has been changed; resume from an earlier one. Cause: {error}"
        ) from error


def warn_if_unreadable(checkpoint: Mapping[str, Any]) -> None:
    """Say that this version leaves out what another one has added."""
    if (problem := unreadable(checkpoint)) is not None:
        rank_zero_warn(f"{problem} Only what Lightning itself has saved is restored.")


# -- the model --------------------------------------------------------------------------------------


def add_trainable(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Add which parameters are trainable to a checkpoint."""
    trainable = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    add_section(checkpoint, "trainable", trainable)


def trainable_in(checkpoint: Mapping[str, Any]) -> Mapping[str, bool]:
    """By name, whether a parameter was trainable; empty if the checkpoint does not tell."""
    return section(checkpoint, "trainable") or {}


# -- the plan --------------------------------------------------------------------------------------


def add_plan(checkpoint: dict[str, Any], accounting: BatchAccounting) -> None:
    """Add the plan, and what it rests on, to a checkpoint; builtins only, for weights-only loading."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if not any(loops.get("combined_loader", [True])):
        del loops["combined_loader"]  # placeholders of the samplers, which other strategies would not expect
    fits = [[r.fixed, r.per_sample, max(r.samples, 1.0), *row_of(r.cost)[2:]] for r in accounting.reports]
    add_section(checkpoint, "planner", accounting.planner.state_dict())
    add_section(checkpoint, "fits", fits)


def restore_plan(checkpoint: Mapping[str, Any], accounting: BatchAccounting, rank: int, grown: bool = False) -> None:
    """Continue with the plan of a checkpoint, if it has one for as many ranks.

    Args:
        checkpoint: that was read.
        accounting: of this rank's batches.
        rank: this rank.
        grown: whether others have just joined, so that the plan cannot fit.
    """
    plan, fits = section(checkpoint, "planner"), section(checkpoint, "fits")
    if plan is None or not accounting.planner.auto:
        return
    saved = len(plan["costs"])
    if saved != accounting.planner.world:
        (rank_zero_info if grown else rank_zero_warn)(
            f"The checkpoint's shares are for {saved} ranks; this job has {accounting.planner.world} "
            "and measures again."
        )
        return
    accounting.planner.load_state_dict(plan)
    if fits:
        fixed, per_sample, samples, *bends = fits[rank]
        most = max(accounting.planner.high[rank], 1)  # in one pass, of which it is the cost
        accounting.assume(cost_of(fixed, per_sample, *bends), min(int(samples), most))


# -- replicas --------------------------------------------------------------------------------------


class CheckpointIdentity(NamedTuple):
    """Identity of the job that saves, or wants to go on.

    Attributes:
        strategy: name of the strategy's class, for people.
        algorithm: tells which states fit. It stays when a subclass of a strategy gets another name.
    """

    strategy: str
    algorithm: str


def add_replicas(
    checkpoint: dict[str, Any],
    who: CheckpointIdentity,
    view: View,
    save: str,
    of_rank: Mapping[str, Any],
    sharded: bool = False,
    buffers: Sequence[str] = (),
) -> None:
    """Describe the replicas in rank 0's checkpoint (collective).

    Args:
        checkpoint: to add to.
        who: saves.
        view: who takes part.
        save: the name of this save, which its shards bear.
        of_rank: what this rank has seen, by names beside those of a replica's state; builtins only.
        sharded: whether each rank has a part of its replica's state.
        buffers: names of the buffers that replicas exchange.
    """
    everyone = gather(of_rank, "the ranks' losses and metrics to save")
    if view.rank == 0:
        ids = [member.id for member in view.replicas]
        names = {"strategy": who.strategy, "algorithm": who.algorithm, "save": save, "ids": ids}
        sizes = {"sizes": [len(member.ranks) for member in view.replicas]} if sharded else {}
        replicas = {**names, "ranks": everyone, "sharded": sharded, **sizes, "buffers": list(buffers)}
        add_section(checkpoint, "replicas", replicas)


def shard_names(checkpoint: Mapping[str, Any]) -> tuple[str, ...]:
    """The replicas in the names of a checkpoint's shards: their ids, and where models are sharded places in them."""
    saved = section(checkpoint, "replicas")
    if not saved:
        return ()
    if not saved.get("sharded"):
        return tuple(map(str, saved["ids"]))
    sizes = zip(saved["ids"], saved.get("sizes", ()), strict=False)
    return tuple(f"{id}.{place}" for id, size in sizes for place in range(size))


def save_name(checkpoint: Mapping[str, Any]) -> str | None:
    """The name of the save to which a checkpoint belongs, if it has shards."""
    return (section(checkpoint, "replicas") or {}).get("save")


def replica_mismatch(checkpoint: Mapping[str, Any], who: CheckpointIdentity, view: View, sharded: bool) -> str | None:
    """In words, why the states of a checkpoint's replicas do not fit; ``None`` if they do.

    Args:
        checkpoint: that was read.
        who: wants to go on.
        view: who takes part.
        sharded: whether the model is sharded.
    """
    saved = section(checkpoint, "replicas")
    if saved is None:
        return unreadable(checkpoint) or (
            "The checkpoint holds no state of replicas: it was saved by a strategy without them, after the end of a "
            "fit, or while a rank had failed."
        )
    if saved["algorithm"] != who.algorithm:
        return f"The checkpoint was saved by {saved['strategy']}, this is {who.strategy}."
    ids, ranks = saved["ids"], len(saved["ranks"])
    if len(ids) != view.count or ranks != view.world:
        then = f"{len(ids)} replicas with {ranks} ranks"
        return f"The checkpoint was saved by {then}; this job has {view.count} with {view.world}."
    if saved.get("sharded", False) != sharded:
        then, now = ("in shards", "whole") if not sharded else ("whole", "in shards")
        return f"The checkpoint holds the states of replicas {then}; here they are {now}."
    here = [member.id for member in view.replicas]
    return None if ids == here else f"The checkpoint was saved by replicas {ids}; this job has {here}."


def nearest_replicas(checkpoint: Mapping[str, Any], who: CheckpointIdentity, view: View) -> list[int]:
    """The replicas from which this one may take an optimizer's state where there are others than were saved.

    The first is the one with the same id; else with the nearest id, the lower of two. Replicas are numbered by their
    ranks, so these are neighbours, of the same node or the next one.

    Returns:
        Their ids; none if what was saved does not fit this strategy.
    """
    saved = section(checkpoint, "replicas") or {}
    if not saved or saved["algorithm"] != who.algorithm:
        return []
    return sorted(saved["ids"], key=lambda other: (abs(other - view.replica.id), other))


def warn_of_replicas(checkpoint: Mapping[str, Any], strategy: str) -> None:
    """Say that a strategy with one replica leaves out what a checkpoint holds of several."""
    if (saved := section(checkpoint, "replicas")) is not None:
        rank_zero_warn(
            f"The checkpoint was saved by {saved['strategy']}, this is {strategy}. Training starts from the "
            "checkpoint's weights, the consensus of its replicas, with the optimizer state of the first one."
        )
