"""A center in a thread of one rank. Clients send it their values, and get back the difference from it."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.centers.center import Center, CenterLayout, PushPull, Rule, copied
from lightning_hetero.comm.centers.center_wire import CenterWire, NarrowCenterWire
from lightning_hetero.comm.centers.wakeup import Wakeup, WakeupClient
from lightning_hetero.comm.deadline import cause, deadline
from lightning_hetero.comm.groups import Groups
from lightning_hetero.comm.leaving import close_at_exit
from lightning_hetero.comm.wire import DTYPES
from lightning_hetero.errors import CommunicationError

_PUSH_PULL, _LEAVE = 0.0, 1.0  # kinds of requests


class ThreadCenter(Center):
    """A center in a thread of its host. It serves clients in the order in which they come.

    In a push-pull a few numbers and the values travel in each direction.

    Args:
        layout: which ranks use it.
        groups: makes the process group of its clients.
        interface: address to listen on, of the network between the replicas.
        in_turn: serve replicas in their order instead, over and over (round robin).
        wire: number format of the values.
        rule: what a push-pull does. Default: the elastic rule.
    """

    def __init__(
        self,
        layout: CenterLayout,
        groups: Groups,
        interface: str,
        in_turn: bool = False,
        wire: str = "fp32",
        rule: Rule | None = None,
    ) -> None:
        super().__init__(layout, rule)
        self._groups, self._interface, self._in_turn, self._wire = groups, interface, in_turn, wire
        self._wakeup: Wakeup | None = None  # on the host
        self._wakeup_client: WakeupClient | None = None  # elsewhere
        self._changed = threading.Condition()  # guards all that follows
        self._values: list[Tensor] = []
        self._counts = [0] * len(layout.leaders)
        self._next = 0  # the replica to serve next, if in turn
        self._host_left = self._closed = False
        self._error: BaseException | None = None
        self._wires: dict[int, CenterWire] = {}  # by the rank at the other end
        self._server: threading.Thread | None = None

    @override
    def open(self, values: Sequence[Tensor]) -> None:
        layout, seconds = self.layout, self.layout.timeout.total_seconds()
        if layout.rank == layout.host:
            self._wakeup = Wakeup(self._interface)
        address = gather(self._wakeup and self._wakeup.address, "the center's address")[layout.host]
        if not layout.is_client:
            return
        group = self._groups.get("the center", layout.leaders)
        with self._in_time("reach"):
            if self._wakeup is None:
                self._wakeup_client = WakeupClient(address, layout.rank, seconds)
            else:
                self._wakeup.accept_clients(layout.leaders[1:], seconds)
        self._wires = {
            rank: self._wire_to(rank, group)
            for rank in (layout.leaders[1:] if layout.rank == layout.host else [layout.host])
        }
        self._values = [value.clone() for value in values] if layout.rank == layout.host else []
        self.write(values, self._counts)
        if layout.rank == layout.host and self._wires:
            close_at_exit(self)
            self._server = threading.Thread(target=self._serve, name="hetero-center", daemon=True)
            self._server.start()

    def _wire_to(self, other: int, group: dist.ProcessGroup | None) -> CenterWire:
        assert group is not None
        dtype = DTYPES[self._wire]
        return CenterWire(group, other) if dtype is None else NarrowCenterWire(group, other, dtype)

    @override
    def push_pull(self, values: Sequence[Tensor], push: float) -> PushPull:
        if self.layout.rank == self.layout.host:
            return self._push_pull_here(values, push)
        wire, own = self._wires[self.layout.host], list(values)
        with self._in_time("exchange with"):
            well = wire.fits(own)
            assert self._wakeup_client is not None
            self._wakeup_client.announce()
            wire.send(torch.tensor([_PUSH_PULL, push if well else 0.0], dtype=torch.float64))
            wire.send_values(own)
            table = torch.empty(1 + len(self.layout.leaders), dtype=torch.float64)
            wire.receive(table)
            wire.receive_difference(own)
        square, *counts = table.tolist()
        sent = 16 + wire.bytes(own)
        return PushPull(square if well else math.inf, [int(count) for count in counts], sent)

    @contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        try:
            with deadline(f"{what} the center, which lives with rank {self.layout.host}"):
                yield
        except OSError as error:
            raise CommunicationError(
                f"rank {self.layout.rank} could not {what} the center, which lives with rank {self.layout.host}: "
                f"{cause(error)}"
            ) from error

    @override
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        with self._changed:
            return copied(self._values, out), list(self._counts)

    @override
    def look(self) -> tuple[list[Tensor], list[int]] | None:
        return (copied(self._values, None), list(self._counts)) if self.layout.rank == self.layout.host else None

    @override
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        with self._changed:
            for own, value in zip(self._values, values, strict=False):  # only the host has any
                own.copy_(value)
            for wire in self._wires.values():
                wire.start(values)
            self._counts = list(counts)

    @override
    def leave(self) -> None:
        if self.layout.rank == self.layout.host:
            with self._changed:
                self._host_left = True
                self._changed.notify_all()
            if self._server is not None:  # clients must not lose the connection too soon
                self._server.join(self.layout.timeout.total_seconds())
        elif self.layout.is_client:
            with self._in_time("leave"):
                assert self._wakeup_client is not None
                self._wakeup_client.announce()
                self._wires[self.layout.host].send(torch.tensor([_LEAVE, 0.0], dtype=torch.float64))

    @override
    def close(self) -> None:
        with self._changed:
            self._host_left = self._closed = True
            self._changed.notify_all()
        if self._wakeup_client is not None:
            self._wakeup_client.close()
        if self._wakeup is not None:
            self._wakeup.end()
            if self._server is None:
                self._wakeup.close()
            else:  # the thread closes it, after the push-pull that is under way
                self._server.join(self.layout.timeout.total_seconds())
        self._wires = {}

    # -- the host ----------------------------------------------------------------------------------

    def _push_pull_here(self, values: Sequence[Tensor], push: float) -> PushPull:
        limit = self.layout.timeout.total_seconds()
        with self._changed:
            mine = self._changed.wait_for(lambda: self._error or not self._in_turn or self._next == 0, limit)
            if self._error is not None:
                raise CommunicationError(
                    f"rank {self.layout.rank} cannot keep the center any longer: {cause(self._error)}"
                ) from self._error
            if not mine:
                raise CommunicationError(
                    f"rank {self.layout.rank} waited {limit:g} s for its turn at the center: rank "
                    f"{self.layout.leaders[self._next]} was next, and did not come (the strategy's `timeout` is "
                    "the limit)."
                )
            square = self.rule.measure(values, self.rule.travelling(self._values))
            return self._receive(0, values, push, square)

    def _receive(self, index: int, difference: Sequence[Tensor], push: float, square: float) -> PushPull:
        self.rule.move(difference, self._values, push, square)
        self._counts[index] += 1
        self._pass_on(index)
        return PushPull(square, list(self._counts))

    def _pass_on(self, index: int) -> None:
        self._next = (index + 1) % len(self.layout.leaders)
        self._changed.notify_all()

    def _serve(self) -> None:
        """Serve all clients until they have left; in a thread."""
        wires, center = dict(self._wires), self.rule.travelling(self._values)
        difference = [torch.empty_like(value) for value in center]
        present, wakeup = set(wires), self._wakeup
        assert wakeup is not None
        with self._noting_errors(), closing(wakeup):
            while present:
                rank = wakeup.wait(self._expected())
                if rank is None or self._closed:
                    return
                request = torch.empty(2, dtype=torch.float64)
                wires[rank].receive(request)
                index, (wish, push) = self.layout.leaders.index(rank), request.tolist()
                if wish == _LEAVE:
                    present.remove(rank)
                    wakeup.remove(rank)
                    with self._changed:
                        self._pass_on(index)
                    continue
                wires[rank].receive_values(difference)
                with self._changed:
                    square = self.rule.measure(difference, center)
                    if not wires[rank].round_difference(difference):
                        square = math.inf
                    learned = self._receive(index, difference, push, square)
                wires[rank].send(torch.tensor([square, *learned.counts], dtype=torch.float64))
                wires[rank].send_difference(difference)

    def _expected(self) -> list[int] | None:
        """The ranks that may be served next; ``None``: all."""
        if not self._in_turn:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._next != 0 or self._host_left)
            return [] if self._closed else [self.layout.leaders[self._next or 1]]

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # the training thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
