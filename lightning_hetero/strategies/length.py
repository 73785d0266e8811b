"""What an averager may want to know of the job and the fit, such as its length."""

import math
from typing import TYPE_CHECKING

from lightning_hetero.averaging.averager import Run
from lightning_hetero.comm.address import interface_towards

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategies.base import HeteroStrategy


def run_of(strategy: "HeteroStrategy") -> Run:
    """What is known of the job and the fit of a strategy."""
    assert strategy.job is not None
    assert strategy.cluster_environment is not None
    return Run(
        strategy.job.view.topology,
        strategy.job.view.ranks,
        strategy.job.groups,
        interface_towards(strategy.cluster_environment.main_address),
        strategy.options.on_nan == "skip",
        lambda: length_of(strategy.trainer),
        bool(getattr(strategy.trainer, "fast_dev_run", False)),
    )


def length_of(trainer: "pl.Trainer") -> tuple[float, float]:
    """Optimizer steps of a fit, and of an epoch; infinite where nobody knows."""
    total = trainer.estimated_stepping_batches
    if math.isinf(trainer.num_training_batches):  # it has not asked for the data yet
        trainer.fit_loop.setup_data()
    batches = trainer.num_training_batches / trainer.accumulate_grad_batches
    return total if total >= 0 else math.inf, batches if math.isinf(batches) else math.ceil(batches)
