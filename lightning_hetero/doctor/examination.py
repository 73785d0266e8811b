"""The examination: ranks meet as for a training, measure, and the first one reports."""

import logging
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_hetero.comm.agreement import gather
from lightning_hetero.doctor import report, saving, speed
from lightning_hetero.doctor.advice import Slowest, advise
from lightning_hetero.doctor.availability import available, extras
from lightning_hetero.errors import ConfigurationError, HeteroError
from lightning_hetero.forecast import links
from lightning_hetero.strategies import HeteroDDPStrategy


def examine(
    ranks_per_node: int | None,
    config: Path | None,
    batch_size: int,
    timeout: float,
    save: Path | None = None,
    **trainer_options: Any,
) -> None:
    """Measure ranks and links, and print a suggestion on the first rank.

    Args:
        ranks_per_node: treat so many consecutive ranks as one node.
        config: a YAML file with the model and the data to measure. Default: a built-in model.
        batch_size: samples of each rank, for the built-in model.
        timeout: longest wait for another rank, in seconds.
        save: write what was measured to this file, as JSON.
        **trainer_options: ``devices`` and the like. The ranks are those that such a Trainer would have: a launcher's,
            such as those of torchrun or mpiexec, or new ones.

    Raises:
        ConfigurationError: Lightning makes no such Trainer, or the file to save cannot be written.
        HeteroError: the launcher's variables or an option are wrong, or another rank has failed.
    """
    for source in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(source).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", UserWarning)  # Lightning's advice is for trainings
    warnings.simplefilter("ignore", FutureWarning)
    strategy = HeteroDDPStrategy(ranks_per_node=ranks_per_node, timeout=timeout)
    try:
        trainer = Trainer(
            strategy=strategy,
            **trainer_options,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except HeteroError:
        raise
    except (MisconfigurationException, TypeError, ValueError) as error:  # Lightning's ways to refuse
        given = ", ".join(f"{name}={value!r}" for name, value in trainer_options.items())
        raise ConfigurationError(f"there is no such Trainer ({given}): {error}") from error
    if save is not None and trainer.global_rank == 0:  # which will write it; others may have other folders
        saving.check_target(save)
    launcher = trainer.strategy.launcher
    assert launcher is not None
    try:
        launcher.launch(_take_part, strategy, config, batch_size, save)
    finally:
        _end(getattr(launcher, "procs", ()), timeout)


def _take_part(strategy: HeteroDDPStrategy, config: Path | None, batch_size: int, save: Path | None) -> None:
    strategy.setup_environment()
    topology = strategy.cluster
    assert topology is not None
    if config is None:
        work = speed.built_in(batch_size)
    else:
        work = speed.of_config(config, strategy.local_rank == 0, lambda: gather(None, "who has prepared the data"))
    gather(None, "who is ready")  # so that ranks that share a machine share it while they are measured, as in training
    speeds = gather(speed.measure(work, strategy.root_device), "the speed of ranks")
    near, far = links.pairs(topology.nodes)
    within, between = links.measure(near), links.measure(far)
    if topology.rank == 0:
        slowest = Slowest(*(links.slowest(some, work.size) for some in (within, between)))
        costs, spread = [one.cost for one in speeds], max(one.spread for one in speeds)
        advice = advise(costs, topology.nodes, work.samples, work.size, slowest, spread)
        rows = [*available(topology), *extras(topology.world)]
        report.show(topology, work, speeds, (within, between), rows, advice)
        if save is not None:
            saving.save_examination(save, speeds, topology.nodes, work.samples, work.size, slowest)
    gather(None, "who is done")
    dist.destroy_process_group()


def _end(children: Sequence[subprocess.Popen], patience: float) -> None:
    """Wait for the ranks that were started here, and kill who is late."""
    for child in children:
        try:
            child.wait(min(patience, 15.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
