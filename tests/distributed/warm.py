"""Imported by the server that ranks are forked from: does the work that each rank would do at its first fit.

Half of the CPU time of a short fit goes into caches: of abstract base classes, of installed packages, of signatures.
"""

import os
import warnings

import lightning.pytorch as pl
import pytest
import torch
from tasks import FAST, EvaluatedNet, dataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy

_LAUNCHED = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"), "1"),
    **dict.fromkeys(("MASTER_ADDR", "TORCHELASTIC_RUN_ID"), "tests"),
}


def warm() -> None:
    """A fit and a validation in this process alone. Leaves no thread, which would be missing in forked processes."""
    loader = DataLoader(dataset(8), batch_size=4)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        for name, value in _LAUNCHED.items():  # or Lightning would see whether MPI has, and MPI begins threads
            patch.setenv(name, value)
        pl.Trainer(strategy=HeteroDDPStrategy(), devices=1, **FAST)
        pl.Trainer(max_epochs=1, devices=1, **FAST).fit(EvaluatedNet(), loader, loader)
    assert len(os.listdir("/proc/self/task")) == 1


warm()
