"""A process that cannot join its job ends with an error, in time."""

import socket
import time
from typing import Any

import pytest
from center_tasks import Line, fit
from ranks import attempt

from lightning_hetero import NodeAverageStrategy
from lightning_hetero.errors import CommunicationError


def _fit() -> None:
    fit(NodeAverageStrategy, Line(), epochs=1, timeout=4, every_n_steps=1)


@pytest.mark.parametrize("silent", [True, False])
def test_a_stranger_on_the_main_port_keeps_nobody_waiting(silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        if not silent:
            stranger.close()  # no other rank is there; rank 0 has not been started either
        of_rank_0 = {} if silent else {"MASTER_PORT": "1"}
        outcomes = attempt(
            _fit, 2, nodes=[1, 1], env={"MASTER_PORT": port}, env_of=lambda rank: {} if rank else of_rank_0, timeout=60
        )
    for outcome in outcomes:
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert "could not join the job" in str(outcome.error)
    if silent:
        assert "within 4 s" in str(outcomes[1].error)
        assert f"127.0.0.1:{port}" in str(outcomes[1].error)
    assert "error of rank 0" not in str(outcomes[0].error)


def _late(options: dict[str, Any]) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        fit(NodeAverageStrategy, Line(), epochs=1, timeout=6, every_n_steps=1, **options)
    return str(caught.value), time.monotonic() - began


@pytest.mark.clock
@pytest.mark.parametrize("options", [{}, {"on_peer_loss": "continue"}])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_started_again_after_its_job_has_ended_waits_once(rank: int, options: dict[str, Any]) -> None:
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    [outcome] = attempt(_late, 1, options, env=env, timeout=60)
    assert outcome.value is not None, outcome.trace
    text, seconds = outcome.value
    assert "within 6 s" in text
    assert "the job seems to have ended" in text.lower()
    assert "start all" in text
    assert seconds < 11
