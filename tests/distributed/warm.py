"""Imported by the server that ranks are forked from: what each rank would do for the first time, is done here once.

Half of the CPU time of a short fit goes into caches: of abstract base classes, of installed packages, of signatures.
"""

import threading
import warnings

import lightning.pytorch as pl
import torch
from tasks import FAST, EvaluatedNet, dataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy


def warm() -> None:
    """A fit and a validation in this process alone. Leaves no thread, which would be missing in forked processes."""
    loader = DataLoader(dataset(8), batch_size=4)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        pl.Trainer(strategy=HeteroDDPStrategy(), devices=1, **FAST)
        pl.Trainer(max_epochs=1, devices=1, **FAST).fit(EvaluatedNet(), loader, loader)
    assert threading.active_count() == 1


warm()
