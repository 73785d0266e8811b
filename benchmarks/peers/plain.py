"""The plain training loop in which peers run that bring none of their own, and what their ranks do around it."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import common
import systems
import torch
import torch.distributed as dist
from text import Text, gpt, inner_optimizer, loss_of
from torch import nn

LIMIT = timedelta(minutes=10)  # for all ranks to come


class Meeting:
    """Rendezvous of all ranks before and after a fit, whatever they train with."""

    def __init__(self) -> None:
        self.rank, self.world, self.times = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=self.rank == 0, timeout=LIMIT, wait_for_workers=False)

    def gather(self, mine: Any) -> list[Any]:
        """Gather a value of each rank; waits for all."""
        self.times += 1
        self.store.set(f"{self.times}/{self.rank}", json.dumps(mine))
        return [json.loads(self.store.get(f"{self.times}/{rank}")) for rank in range(self.world)]

    def process_group(self) -> None:
        """One of gloo among all ranks, if there is none yet."""
        if not dist.is_initialized():
            store = dist.PrefixStore("group", self.store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=LIMIT)


class Options(dict[str, str]):
    """Options of a contender: ``every=16`` is ``{"every": "16"}``.

    Attributes:
        unread: those that nobody has asked for.
    """

    def __init__(self, text: str) -> None:
        super().__init__(pair.split("=") for pair in text.split(",") if pair)
        self.unread = set(self)

    def get(self, name: str, default: Any = None) -> Any:
        """An option, which is read now."""
        self.unread.discard(name)
        return super().get(name, default)


@dataclass(frozen=True)
class Setting:
    """Input of a peer.

    Attributes:
        net: the network, with the first weights.
        rate: learning rate of the inner optimizer.
        options: as they were given.
        task: what is trained.
        meeting: of all ranks.
    """

    net: nn.Module
    rate: float
    options: Options
    task: common.Task
    meeting: Meeting

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner one."""
        return inner_optimizer(self.net.parameters(), self.rate)

    def number(self, option: str, default: float) -> int:
        """An option that is a whole number."""
        return int(self.options.get(option, default))


def _nothing() -> None:
    pass


class Parts(NamedTuple):
    """Parts with which a peer trains.

    Attributes:
        model: called with codes of characters.
        optimizer: its `zero_grad` and `step` are called at each step.
        after: called after each step.
        backward: called with the loss.
    """

    model: nn.Module
    optimizer: Any
    after: Callable[[], None] = _nothing
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward


Peer = Callable[[Setting], AbstractContextManager[Parts]]


def fit(peer: Peer, setting: Setting, board: common.Board, folder: Path) -> dict[str, list[Any]]:
    """Train; what has been noted."""
    net, task, meeting = setting.net, setting.task, setting.meeting
    rank, world = meeting.rank, meeting.world
    fixed, per_sample = task.costs[rank]
    device = fixed + per_sample * task.batch
    stream = Text(task.batch * task.steps * world, task.seed)
    record = common.Record(task.every)
    ends = 0.0  # when the device has computed the step

    def until(end: float) -> None:
        time.sleep(max(0.0, end - time.perf_counter()))

    # The last gradient of a pass, for which averages within the pass wait. The hook runs before DDP hears of it.
    next(net.parameters()).register_hook(lambda _: until(ends))
    with peer(setting) as (model, optimizer, after, backward):
        if unread := setting.options.unread:
            raise SystemExit(f"No such option: {', '.join(sorted(unread))}.")
        meeting.gather("ready")
        while board.go_on(step := len(record.figures["samples"])):
            first = step * task.batch * world
            batch = torch.stack([stream[index] for index in range(first + rank, first + task.batch * world, world)])
            began = time.perf_counter()
            record.begin(net, len(batch))
            loss = loss_of(model, batch)
            record.loss(loss)
            # A backward pass computes two gradients where the forward pass computes one output: `EmulatedSpeed`, too.
            until(began + device / 3)
            ends = began + device
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            after()
        record.times_and_bytes()
    record.leave(net, folder)
    return record.figures


def main(peers: dict[str, Peer], together: bool = True) -> None:
    """Be a rank: run each contender that the command line names, and write what all ranks have noted.

    Args:
        peers: by name.
        together: whether all ranks take the same number of steps.
    """
    output, task, names = Path(sys.argv[1]), common.Task(**json.loads(sys.argv[2])), sys.argv[3:]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    meeting, runs = Meeting(), []
    for index, contender in enumerate(names):
        text, rate = systems.without_rate(contender)
        name, _, options = text.partition(":")
        torch.manual_seed(task.seed)
        net = gpt()
        board = common.Board(output.with_name(f"board-{index}"), task, together)
        ranks = meeting.gather(
            fit(peers[name], Setting(net, rate, Options(options), task, meeting), board, output.parent)
        )
        if meeting.rank == 0:
            tested = common.tested(output.parent, meeting.world)
            runs.append({"contender": contender, "together": together, "ranks": ranks, **tested})
            output.write_text(json.dumps(runs))
    meeting.gather("end")
    time.sleep(1.0 if meeting.rank == 0 else 0.0)  # its store serves the others until they have read
    os._exit(0)  # not all threads of all peers end by themselves
