"""A center that a thread of one rank keeps; the others send it their values and get back how far they are."""

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hetero.comm.address import interface_towards
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.centers.center import Center, Job, Visit, copied, differ, push_by
from lightning_hetero.comm.centers.doorbell import Button, Doorbell
from lightning_hetero.comm.centers.line import Line, NarrowLine
from lightning_hetero.comm.deadline import cause, deadline
from lightning_hetero.comm.groups import new_group
from lightning_hetero.comm.leaving import close_at_exit
from lightning_hetero.comm.wire import DTYPES, Wire
from lightning_hetero.errors import CommunicationError

_VISIT, _LEAVE = 0.0, 1.0  # what visitors want


class ThreadCenter(Center):
    """Whoever comes first is served first. A visit is a few numbers and the values, each way.

    Args:
        job: who visits. Its other ranks take part in making the process group.
        in_turn: serve replicas in their order, over and over, instead (round robin).
        wire: number format of the values.
    """

    def __init__(self, job: Job, in_turn: bool = False, wire: Wire = "fp32") -> None:
        super().__init__(job)
        self._in_turn, self._wire = in_turn, wire
        self._group = new_group(self, job.leaders, job.timeout)
        self._doorbell: Doorbell | None = None  # the host's
        self._button: Button | None = None  # a visitor's
        self._changed = threading.Condition()  # guards all that follows
        self._values: list[Tensor] = []
        self._counts = [0] * len(job.leaders)
        self._next = 0  # replica whose turn it is
        self._host_left = self._closed = False
        self._error: BaseException | None = None
        self._lines: dict[int, Line] = {}  # by the rank at the other end
        self._server: threading.Thread | None = None

    @override
    def open(self, values: Sequence[Tensor]) -> None:
        job, seconds = self.job, self.job.timeout.total_seconds()
        if job.rank == job.host:
            self._doorbell = Doorbell(interface_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")))
        address = gather(self._doorbell and self._doorbell.address, "the center's address")[job.host]
        if not job.visits:
            return
        with self._in_time("reach"):
            if self._doorbell is None:
                self._button = Button(address, job.rank, seconds)
            else:
                self._doorbell.welcome(job.leaders[1:], seconds)
        self._lines = {rank: self._line(rank) for rank in (job.leaders[1:] if job.rank == job.host else [job.host])}
        self._values = [value.clone() for value in values] if job.rank == job.host else []
        self.write(values, self._counts)
        if job.rank == job.host and self._lines:
            close_at_exit(self)
            self._server = threading.Thread(target=self._serve, name="hetero-center", daemon=True)
            self._server.start()

    def _line(self, other: int) -> Line:
        dtype = DTYPES[self._wire]
        return Line(self._group, other) if dtype is None else NarrowLine(self._group, other, dtype)

    @override
    def visit(self, values: Sequence[Tensor], push: float) -> Visit:
        if self.job.rank == self.job.host:
            return self._visit_here(values, push)
        line, own = self._lines[self.job.host], list(values)
        with self._in_time("visit"):
            well = line.fits(own)
            assert self._button is not None
            self._button.press()
            line.send(torch.tensor([_VISIT, push if well else 0.0], dtype=torch.float64))
            line.tell(own)
            table = torch.empty(1 + len(self.job.leaders), dtype=torch.float64)
            line.receive(table)
            line.learn(own)
        square, *counts = table.tolist()
        sent = 16 + line.bytes(own)
        return Visit(square if well else math.inf, [int(count) for count in counts], sent)

    @contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        try:
            with deadline(f"{what} the center, which lives with rank {self.job.host}"):
                yield
        except OSError as error:
            raise CommunicationError(
                f"rank {self.job.rank} could not {what} the center, which lives with rank {self.job.host}: "
                f"{cause(error)}"
            ) from error

    @override
    def read(self, out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[int]]:
        with self._changed:
            return copied(self._values, out), list(self._counts)

    @override
    def write(self, values: Sequence[Tensor], counts: Sequence[int]) -> None:
        with self._changed:
            for own, value in zip(self._values, values, strict=False):  # none but with the host
                own.copy_(value)
            for line in self._lines.values():
                line.start(values)
            self._counts = list(counts)

    @override
    def leave(self) -> None:
        if self.job.rank == self.job.host:
            with self._changed:
                self._host_left = True
                self._changed.notify_all()
            if self._server is not None:
                self._server.join(self.job.timeout.total_seconds())  # or others might lose the connection too soon
        elif self.job.visits:
            with self._in_time("leave"):
                assert self._button is not None
                self._button.press()
                self._lines[self.job.host].send(torch.tensor([_LEAVE, 0.0], dtype=torch.float64))

    @override
    def close(self) -> None:
        with self._changed:
            self._host_left = self._closed = True
            self._changed.notify_all()
        if self._button is not None:
            self._button.close()
        if self._doorbell is not None:
            self._doorbell.end()
            if self._server is None:
                self._doorbell.close()
            else:  # which closes it
                self._server.join(self.job.timeout.total_seconds())  # at most the visit that it is at
        self._lines = {}

    # -- the host ----------------------------------------------------------------------------------

    def _visit_here(self, values: Sequence[Tensor], push: float) -> Visit:
        limit = self.job.timeout.total_seconds()
        with self._changed:
            mine = self._changed.wait_for(lambda: self._error or not self._in_turn or self._next == 0, limit)
            if self._error is not None:
                raise CommunicationError(
                    f"rank {self.job.rank} cannot keep the center any longer: {cause(self._error)}"
                ) from self._error
            if not mine:
                raise CommunicationError(
                    f"rank {self.job.rank} waited {limit:g} s for its turn at the center: rank "
                    f"{self.job.leaders[self._next]}, whose turn it was, did not come (the strategy's `timeout` is the "
                    "limit)."
                )
            square = differ(values, self._values)
            return self._receive(0, values, push, square)

    def _receive(self, index: int, difference: Sequence[Tensor], push: float, square: float) -> Visit:
        push_by(difference, self._values, push, square)
        self._counts[index] += 1
        self._pass_on(index)
        return Visit(square, list(self._counts))

    def _pass_on(self, index: int) -> None:
        self._next = (index + 1) % len(self.job.leaders)
        self._changed.notify_all()

    def _serve(self) -> None:
        """Serve all visitors until they have left; on a thread."""
        lines, difference = dict(self._lines), [torch.empty_like(value) for value in self._values]
        present, doorbell = set(lines), self._doorbell
        assert doorbell is not None
        with self._noting_errors(), closing(doorbell):
            while present:
                rank = doorbell.wait(self._expected())
                if rank is None or self._closed:
                    return
                request = torch.empty(2, dtype=torch.float64)
                lines[rank].receive(request)
                index, (wish, push) = self.job.leaders.index(rank), request.tolist()
                if wish == _LEAVE:
                    present.remove(rank)
                    doorbell.say_goodbye(rank)
                    with self._changed:
                        self._pass_on(index)
                    continue
                lines[rank].hear(difference)
                with self._changed:
                    square = differ(difference, self._values)
                    if not lines[rank].round(difference):
                        square = math.inf
                    visit = self._receive(index, difference, push, square)
                lines[rank].send(torch.tensor([square, *visit.counts], dtype=torch.float64))
                lines[rank].answer(difference)

    def _expected(self) -> list[int] | None:
        """The ranks that may be served next; ``None``: any."""
        if not self._in_turn:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._next != 0 or self._host_left)
            return [] if self._closed else [self.job.leaders[self._next or 1]]

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # the training thread shall see it
            with self._changed:
                self._error = error
                self._changed.notify_all()
