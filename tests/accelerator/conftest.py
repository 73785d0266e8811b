from pathlib import Path

import fake_build
import pytest


@pytest.fixture(scope="session")
def fake(pytestconfig: pytest.Config) -> str:
    """The compiled fake accelerator. Load it in forked processes only."""
    if reason := fake_build.problem():
        pytest.skip(reason)
    return str(fake_build.library(Path(pytestconfig.cache.mkdir("fake-accelerator"))))
