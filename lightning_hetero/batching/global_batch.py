"""Global batch sizes: of each loader, kept where a fit goes on with other ranks."""

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetero.checkpoint_sections import KEY, add_section, section

_GROUPS = 0
_UNITS = "samples", "batches of the batch sampler"


class GlobalBatchSizes:
    """Global batch size of each loader: ``batch_size`` times the ranks, unless a checkpoint or the user says another.

    A run that goes on with other ranks keeps its global batches: learning rates were chosen for them, and an epoch of
    which a part is done has no others to go on with. A loader that has another ``batch_size`` than before has been
    changed by the user, so that counts.

    Args:
        world: number of ranks.
        given: the user's ``global_batch_size``, if given.
    """

    def __init__(self, world: int, given: int | None) -> None:
        self._world, self._given = world, given
        self._loaded: dict[int, int] = {}  # of the checkpoint, by a loader's `batch_size`; 0: batch samplers in a group
        self._kept: dict[int, int] = {}  # those with which this fit goes on, unless the user says others
        self._taken: dict[int, int] = {}  # in this fit

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the sizes of a checkpoint, before the data are set up."""
        if KEY in checkpoint:  # a shard has none
            self._loaded = dict(section(checkpoint, "global_batches") or ())

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Add the sizes to a checkpoint; builtins only."""
        if self._taken:
            add_section(checkpoint, "global_batches", [list(pair) for pair in self._taken.items()])

    def begin(self, resumed: bool) -> None:
        """Training data are set up.

        Args:
            resumed: whether the fit goes on from a checkpoint.
        """
        self._kept = self._loaded if resumed else {}

    def evaluated(self, size: int) -> int:
        """The global batch in evaluation of a loader with this ``batch_size``."""
        return size * self._world if self._given is None else self._given

    def trained(self, size: int) -> int:
        """The global batch in training of a loader with this ``batch_size``."""
        return self._take(size, size * self._world, self._given)

    def of_groups(self, given: int | None) -> int:
        """Number of batches of the user's batch sampler that make a global one.

        Args:
            given: by the user, if so.
        """
        return self._take(_GROUPS, self._world, given)

    def changed(self) -> tuple[str, str] | None:
        """The sizes of the checkpoint and those of this fit, in words, if a loader has one that the former lack."""
        known, now = ({(key == _GROUPS, size) for key, size in each.items()} for each in (self._kept, self._taken))
        return (_in_words(self._kept), _in_words(self._taken)) if known and now - known else None

    def _take(self, key: int, usual: int, given: int | None) -> int:
        size = self._kept.get(key, usual) if given is None else given
        if given is None and size != usual and self._taken.get(key) != size:
            rank_zero_info(
                f"A step of all ranks takes {_in_words({key: size})}, as where the checkpoint was saved; with "
                f"{self._world} ranks it would be {usual}. To choose it yourself, give the strategy "
                f"{'whole_batches=..., which keeps them whole' if key == _GROUPS else 'global_batch_size'}."
            )
        self._taken[key] = size
        return size


def _in_words(sizes: Mapping[int, int]) -> str:
    return ", ".join(f"{size} {_UNITS[key == _GROUPS]}" for key, size in sizes.items())
