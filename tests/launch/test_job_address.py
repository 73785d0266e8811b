"""Address of a running job, in the launcher's store."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_hetero.comm import join_requests
from lightning_hetero.comm.join_requests import LauncherStore
from lightning_hetero.errors import CommunicationError

_SOON = timedelta(seconds=5)
_ADDRESS = ["127.0.0.1", 1234, "secret"]


def test_others_read_what_the_host_has_written() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_SOON)
    host, other = (LauncherStore("127.0.0.1", server.port, hosted) for hosted in (True, False))
    assert other.read(_SOON) is None
    host.write(_ADDRESS)
    assert other.read(_SOON) == _ADDRESS
    other.remove(_ADDRESS)
    assert other.read(_SOON) == _ADDRESS
    host.remove(_ADDRESS)
    assert other.read(_SOON) is None


def test_the_host_needs_no_new_connection_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_SOON)
    host, other = (LauncherStore("127.0.0.1", server.port, hosted) for hosted in (True, False))
    host.write(["127.0.0.1", 1, "former"])
    with monkeypatch.context() as patch:
        patch.setattr(dist, "TCPStore", None)
        host.write(_ADDRESS)
    assert other.read(_SOON) == _ADDRESS


def test_a_store_that_is_gone_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_requests, "_HERE", timedelta(seconds=0.2))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_SOON)
    port = server.port
    del server
    with pytest.raises(CommunicationError, match=f"store at 127.0.0.1:{port} does not answer"):
        LauncherStore("127.0.0.1", port, True).write(_ADDRESS)
    LauncherStore("127.0.0.1", port, True).remove(_ADDRESS)
