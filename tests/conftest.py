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
# The same last digits on every processor: MKL computes square roots by other instructions on each.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# Forked processes cannot use CUDA if their parent has initialized it, which the question for a device would do.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# PyTorch's store looks up the names of addresses on both sides of each connection, which may take 5 s in vain.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# For imports of `ranks` and `tasks`, which run functions on several ranks, of `scripts` and of `fake_device`.
sys.path[:0] = [str(Path(__file__).parent / "distributed"), str(Path(__file__).parent / "accelerator")]
# The same examples in every run, so that failures can be repeated; set HYPOTHESIS_PROFILE to try others.
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
    """Temporary files of failed jobs go too; these keep the traceback of each rank for their user."""
    folder = tmp_path_factory.mktemp("tmp", numbered=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
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
    """End MPI if a test has begun it in this process: workers of xdist end without that, and leave shared memory."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
