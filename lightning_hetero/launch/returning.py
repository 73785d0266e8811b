"""Brings what callbacks, and the strategy, have learned back from processes that were forked or spawned."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from typing_extensions import override

from lightning_hetero._lightning import MultiProcessingLauncher
from lightning_hetero.comm.objects import packed, unpacked

if TYPE_CHECKING:
    import lightning.pytorch as pl

_FILE = "lightning_hetero_callbacks"  # in what a process sends back


@runtime_checkable
class GivesBack(Protocol):
    """A callback, or a strategy, that comes back to the process which has called the Trainer, as in a notebook.

    Example::

        >>> from lightning_hetero import HeteroMonitor
        >>> from lightning_hetero.launch.returning import GivesBack
        >>> isinstance(HeteroMonitor(), GivesBack)
        True
    """

    def give_back(self) -> Any:
        """What to send, once the run has ended, from the node's first rank; anything that can be pickled."""

    def take_back(self, given: Any) -> None:
        """Hold what that callback, or strategy, has sent."""


class ReturningLauncher(MultiProcessingLauncher):
    """Starts ranks by ``fork``, ``spawn`` or ``forkserver`` as Lightning does, and asks what else to bring back.

    Lightning brings back the weights, the state of the Trainer and the metrics, but nothing of callbacks; their
    ``state_dict`` is for checkpoints only. What they give travels as the weights do, in a file: Lightning reads the
    pipe only after the process has ended, and a process that sends more than the pipe holds, often 64 kB, never would.
    """

    @override
    def get_extra_results(self, trainer: "pl.Trainer") -> dict[str, Any]:
        given = [(_kind(one), one.give_back()) for one in _giving(trainer)]
        path = Path(tempfile.mkdtemp(), "callbacks.pickle")
        path.write_bytes(packed(given))
        return {**super().get_extra_results(trainer), _FILE: str(path)}

    @override
    def update_main_process_results(self, trainer: "pl.Trainer", extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        path = Path(extra[_FILE])
        given = unpacked(path.read_bytes())
        shutil.rmtree(path.parent)
        waiting = _giving(trainer)
        for kind, what in given:  # callbacks that a module has brought along exist in the other process only
            found = next((one for one in waiting if _kind(one) == kind), None)
            if found is not None:
                waiting.remove(found)
                found.take_back(what)


def _giving(trainer: "pl.Trainer") -> list[GivesBack]:
    found = (*trainer.callbacks, trainer.strategy)  # type: ignore[attr-defined]
    return [one for one in found if isinstance(one, GivesBack)]


def _kind(one: GivesBack) -> str:
    return type(one).__qualname__  # a spawned process has another name for the module of the script
