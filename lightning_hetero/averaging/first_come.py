"""Gossip in pairs, first come, first paired."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_hetero.averaging.averager import Outcome, StepContext
from lightning_hetero.averaging.gossip import PairAverager
from lightning_hetero.checks import at_least_one
from lightning_hetero.comm.gossip.peer_selector import ANY


@dataclass
class FirstComeAverager(PairAverager):
    """Whoever offers is paired with whoever else does; nobody waits, and training goes on meanwhile.

    Source: AD-PSGD, Lian et al. 2018, but with both sides choosing.

    Args:
        every_n_steps: at least so many optimizer steps lie between two offers.
    """

    every_n_steps: int = 1
    # What an exchange has brought that is yet to be added, and the part of the way to go.
    _late: tuple[list[Tensor], float] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("every_n_steps", self.every_n_steps)

    @override
    def after_step(self, context: StepContext) -> None:
        if self._late is not None:
            self.replica.add(*self._late)
            self._late = None
        if self._offered:
            self._offered = not self.take(0.0, withdraw=False)
        if not self._offered and context.step % self.every_n_steps == 0:
            others = [peer for peer in range(self.links.count) if peer != self.links.index]
            self.offer(context, others, ANY)
        if self._transport is not None:
            for peer, count in self._transport.misses.items():
                while self.missed[peer] < count:
                    self.miss(peer)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Exchange nothing meanwhile, so that all that one of a pair has counted the other has, too (collective)."""
        if self._transport is not None:
            self._transport.pause()
        try:
            yield
            self.links.gather(None)  # all have seen what they have, before anything changes
        finally:
            if self._transport is not None:
                self._transport.resume()

    def _brought(self) -> tuple[list[Tensor], float] | None:
        """What has been exchanged, but not added yet (collective over the replica)."""
        if self._late is not None or not self._offered:
            return self._late
        swap = self.found(0.0, withdraw=False)
        return None if swap is None else self.difference(swap)

    @override
    def consensus(self, context: StepContext) -> list[Tensor]:
        with self._quiet():
            self._packed = self.replica.pack(self._packed)
            if (late := self._brought()) is not None:
                for value, difference in zip(self._packed, late[0], strict=True):
                    value.add_(difference.to(value.device, value.dtype), alpha=late[1])
            return self.links.average(self._packed, context.samples_per_replica, self.reference).mean

    @override
    def finish(self, context: StepContext) -> Outcome | None:
        if self._offered:
            self.take(0.0)
            self._offered = False
        self.links.gather(None)  # nobody has anything on offer any more
        return super().finish(context)

    @override
    def complete(self, context: StepContext) -> None:
        if self._late is not None:
            self.replica.add(*self._late)
            self._late = None
        if self._offered:
            self.take(0.0)
            self._offered = False
        self.links.gather(None)  # nobody has anything on offer any more

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._quiet():
            late = self._brought()
            state = {**super().state_dict(), "late": None if late is None else [v.clone() for v in late[0]]}
            return {**state, "part": 0.0 if late is None else late[1]}

    @override
    def remains(self, kept: Sequence[int]) -> dict[str, Any]:
        if self.peers is not None:
            for peer in set(range(self.links.count)).difference(kept):
                self.peers.lose(peer)
        return super().remains(kept)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._late = None if state["late"] is None else (state["late"], state["part"])
