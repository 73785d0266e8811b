from pathlib import Path

import fake_build
import pytest
import torch


@pytest.fixture(scope="session")
def fake(pytestconfig: pytest.Config) -> str:
    """The compiled fake accelerator. Load it in forked processes only."""
    if reason := fake_build.problem():
        pytest.skip(reason)
    return str(fake_build.library(Path(pytestconfig.cache.mkdir("fake-accelerator"))))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Argument for ``fake_device.load``: ``"cuda"`` on a machine with such a device, otherwise the fake accelerator."""
    return "cuda" if torch.cuda.device_count() else request.getfixturevalue("fake")
