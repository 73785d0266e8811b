"""Place of a rank in its job: in one process."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_hetero.comm import job
from lightning_hetero.comm.groups import default_store
from lightning_hetero.comm.job import RendezvousAddress, join_world
from lightning_hetero.errors import CommunicationError

HERE, LIMIT = RendezvousAddress("127.0.0.1", 29400, 0, 1), timedelta(seconds=10)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    dist.destroy_process_group()


def _connect() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)


def test_a_place_that_is_taken_is_said_with_who_has_taken_it():
    def connect_where_another_is() -> None:
        _connect()
        default_store().set("rank 0 is", "process 1 of elsewhere")

    with pytest.raises(CommunicationError, match=r"rank 0 there is process 1 of elsewhere.*another job"):
        join_world(connect_where_another_is, HERE, LIMIT)


def test_a_process_comes_back_to_its_own_place():
    join_world(_connect, HERE, LIMIT)
    assert default_store().get("rank 0 is").startswith(b"process ")
    join_world(lambda: None, HERE, LIMIT)  # the group is there already: nothing is taken


def test_who_waits_for_long_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(job, "_LONG", 0.2)
    monkeypatch.setattr(job, "_LOOK", 0.1)

    def connect() -> None:
        time.sleep(1.0)
        _connect()

    join_world(connect, HERE, LIMIT, hint="Or else.")
    expected = (
        "lightning_hetero: rank 0 of 1 has waited for 0.2 s to meet the other ranks at 127.0.0.1:29400, and waits for "
        "up to 10 s (the strategy's `timeout`). Or else.\n"
    )
    assert capsys.readouterr().out == expected  # once
