"""What a checkpoint holds of the work's division. Any strategy can load the checkpoint; this part is extra."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetero.errors import CheckpointError
from lightning_hetero.strategies.workshare import Workshare
from lightning_hetero.workload.shares import Cost

KEY = "lightning_hetero"
REPLICAS = "lightning_hetero_replicas"  # where replicas differ: see replica_state.py


@contextmanager
def readable(path: Any) -> Iterator[None]:
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


def add_plan(checkpoint: dict[str, Any], share: Workshare) -> None:
    """Add the plan, and what it rests on, to a checkpoint; builtins only, for weights-only loading."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if not any(loops.get("combined_loader", [True])):
        del loops["combined_loader"]  # placeholders of the samplers, which other strategies would not expect
    fits = [[report.fixed, report.per_sample, max(report.samples, 1.0)] for report in share.reports]
    checkpoint[KEY] = {"planner": share.planner.state_dict(), "fits": fits}


def restore_plan(checkpoint: Mapping[str, Any], share: Workshare, rank: int) -> None:
    """Continue with the plan of a checkpoint, if it has one for as many ranks."""
    state = checkpoint.get(KEY)
    if state is None or not share.planner.auto:
        return
    saved = len(state["planner"]["costs"])
    if saved != share.planner.world:
        rank_zero_warn(
            f"The checkpoint's shares are for {saved} ranks; this job has {share.planner.world} and measures anew."
        )
        return
    share.planner.load_state_dict(state["planner"])
    if state["fits"]:
        fixed, per_sample, samples = state["fits"][rank]
        share.cost.assume(Cost(fixed, per_sample), int(samples))
