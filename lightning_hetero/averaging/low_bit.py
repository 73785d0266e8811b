"""What averagers need whose exchanges may take low-bit wires: residuals, in checkpoints too."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.comm.encodings import Feedback
from lightning_hetero.comm.regrowth import Regrowth

log = logging.getLogger("lightning_hetero")


class LowBitAverager(Averager):
    """Keeps what low-bit messages have left out, for the next message.

    A subclass makes :attr:`feedback` with :meth:`residuals` when it is prepared, and gives it to each exchange on its
    wire. Buffers travel as they are: rounded, a variance could become negative.

    Attributes:
        wire: number format of exchanges.
        feedback: the residuals; ``None`` where the wire needs none.
    """

    wire: str
    feedback: Feedback | None = None

    def residuals(self, vectors: Sequence[Tensor]) -> Feedback | None:
        """Make residuals, all 0.

        Args:
            vectors: that will be exchanged; the first of the replica's vectors.
        """
        lengths = self.replica.parameter_lengths[: len(vectors)]
        return self.links.feedback(self.wire, lengths)

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {} if self.feedback is None else {"feedback": self.feedback.state_dict()}
        return {**super().state_dict(), **own}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        saved = state.get("feedback")
        if saved is not None and (self.feedback is None or not self.feedback.load_state_dict(saved)):
            self._say_dropped("the checkpoint was saved with another wire, another model or other replicas")

    @override
    def regrown(self, state: dict[str, Any], growth: Regrowth) -> dict[str, Any]:
        if self.feedback is not None:
            self._say_dropped("other parameters are trainable now")
        return _without(super().regrown(state, growth))

    @override
    def remains(self, kept: Sequence[int]) -> dict[str, Any]:
        return _without(super().remains(kept))

    @override
    def go_on(self, state: dict[str, Any], context: StepContext) -> None:
        super().go_on(state, context)
        if self.feedback is not None:
            self._say_dropped("replicas were lost")

    def _say_dropped(self, why: str) -> None:
        if self.links.index == 0 and self.links.leads:
            log.warning(
                f"wire={self.wire!r}: {why}, so what earlier messages have left out is dropped. Error feedback begins "
                "anew, from 0."
            )


def _without(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "feedback"}
