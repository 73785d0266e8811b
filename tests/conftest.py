import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from lightning_utilities.core.rank_zero import rank_zero_only

# Before torch is imported anywhere: ranks share this machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same last places on every processor: MKL takes square roots by other instructions on each.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# Processes that are forked cannot use CUDA where their parent has begun it, as asking whether there is a device does.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# PyTorch's store asks for the names of addresses, on both sides of each connection. Without an answer that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# `ranks` and `tasks`, which run functions on several ranks, and `scripts`; and `fake_device`.
sys.path[:0] = [str(Path(__file__).parent / "distributed"), str(Path(__file__).parent / "accelerator")]
# The same examples in every run, so that a failure is never a matter of luck; set HYPOTHESIS_PROFILE to explore.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _nothing_is_left_for_later_tests() -> Iterator[None]:
    """`seed_everything` leaves its seed in the environment, and a Trainer its rank."""
    yield
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_go_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also those of jobs that fail, which keep the traceback of each rank for their user."""
    folder = tmp_path_factory.mktemp("tmp", numbered=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest takes those that `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``long(after=n)``, the first ``n`` cases of a test are not long."""
    cases: Counter[str] = Counter()
    for item in items:
        marks = [mark for mark in item.own_markers if mark.name == "long" and "after" in mark.kwargs]
        for mark in marks:
            name = item.nodeid.partition("[")[0]
            cases[name] += 1
            if cases[name] <= mark.kwargs["after"]:
                item.own_markers.remove(mark)


def pytest_sessionfinish() -> None:
    """End MPI where a test has begun it in this process: workers of xdist end without it, and leave memory behind."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
