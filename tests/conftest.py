import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere: ranks share this machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `ranks` and `tasks`, which run functions on several ranks, and `scripts`.
sys.path.insert(0, str(Path(__file__).parent / "distributed"))


@pytest.fixture(autouse=True)
def _seed_of_one_test_only() -> Iterator[None]:
    """`seed_everything` leaves its seed in the environment, where samplers of later tests would find it."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
