"""Threads in the background use the device of the rank, and not the first one."""

import sys
import threading
from pathlib import Path
from typing import Any

import fake_device
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import run

from lightning_hetero.comm.threads import Background


def _devices() -> tuple[int, int]:
    fake_device.load_if_given()
    torch.fake.set_device(1)
    found: list[Any] = []
    plain = threading.Thread(target=lambda: found.append(torch.fake.current_device()))
    plain.start()
    plain.join()
    return found[0], Background(torch.fake.current_device).result()


def test_background_threads_keep_the_device(fake: str) -> None:
    assert run(_devices, 1, env={"FAKE_LIBRARY": fake, "FAKE_DEVICES": "2"}) == [(0, 1)]
