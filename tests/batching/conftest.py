"""A clock that stands still unless a test moves it."""

import pytest
import torch

from lightning_hetero.batching.timer import StepTimer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    return StepTimer(torch.device("cpu"), clock)
