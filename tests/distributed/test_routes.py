"""The route of gradients: one line on rank 0 names it, with the reason; ranks that share a card are warned."""

import logging
import os
import warnings
from typing import Any

import pytest
from ranks import run
from tasks import Net, dataset, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.strategies import job


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _messages(cards: list[str] | None, **options: Any) -> tuple[list[str], list[str]]:
    """Messages of a fit about routes, and about shared cards; the ranks are taken to have these cards."""
    lines = Lines()
    place_of = job.place_of
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if cards:
            card = cards[int(os.environ["RANK"])]
            patch.setattr(job, "place_of", lambda *args: place_of(*args)._replace(device=card))
        logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        logger.addHandler(lines)
        train(Net(), HeteroDDPStrategy(timeout=60, **options), DataLoader(dataset(), batch_size=4), max_steps=2)
        logger.removeHandler(lines)
    shared = [str(one.message) for one in warned if "share" in str(one.message)]
    return [text for text in lines.texts if "are averaged" in text], shared


def _all() -> list[Any]:
    cases = [(None, {}), (None, {"within": "gloo"}), (None, {"ddp_comm_hook": allreduce_hook})]
    cases += [(["card 1", "card 1"], {}), (["card 1", "cpu"], {})]
    return [_messages(cards, **options) for cards, options in cases]


def test_the_route_is_said_once_on_rank_0() -> None:
    first, second = run(_all, 2)
    assert all(messages == ([], []) for messages in second)
    routes = [[text.partition("averaged ")[2] for text in messages] for messages, _ in first]
    assert routes == [
        ["in shared memory: all are CPUs of one node."],
        ["over gloo: all are CPUs."],
        ["by ddp_comm_hook."],
        ["through the hosts' memory and gloo: ranks share card 1."],
        ["through the hosts' memory and gloo: 1 of the ranks are CPUs."],
    ]
    assert [len(shared) for _, shared in first] == [0, 0, 0, 1, 0]
    assert "Ranks [0, 1] share card 1" in first[3][1][0]
