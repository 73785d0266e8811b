"""Repeatable examples, and a clock that stands still unless a test moves it."""

import os

import pytest
import torch
from hypothesis import settings

from lightning_hetero.batching.timer import StepTimer

# The same examples in every run, so that a failure is never a matter of luck; set HYPOTHESIS_PROFILE to explore.

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


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
