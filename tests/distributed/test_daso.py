"""`hetero_daso` where it is plain data parallelism, and what its schedule looks at."""

import warnings

import lightning.pytorch as pl
from oracles import oracle
from ranks import run
from tasks import FAST, Net, dataset, error, fit, parameters
from torch.utils.data import DataLoader

from lightning_hetero import DASOStrategy

DASO = {"strategy_class": DASOStrategy}
NODES, SHARES = [2, 1], [3.0, 1.0, 2.0]  # ranks per node; shares per rank


def test_blocking_at_every_step_is_flat_data_parallel() -> None:
    truth = parameters(oracle(Net, 12, 96))
    strategy = {"warmup": 0, "cooldown": 0, "global_every": 1, "wait": 0, "max_global_every": 1, "balance": SHARES}
    for result in run(fit, 3, Net, 12, 96, nodes=NODES, strategy=strategy, **DASO):
        assert error(result["parameters"], truth) <= 1e-10


def test_a_single_node_says_so_and_trains_alone() -> None:
    truth = parameters(oracle(Net, 12, 96))
    for result in run(fit, 2, Net, 12, 96, strategy={"balance": [2.0, 1.0]}, **DASO):
        assert error(result["parameters"], truth) <= 1e-10


class Logging(Net):
    """Logs a level that rises on one rank as it falls on the other: its mean stays."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[tuple[int, int]] = []

    def on_train_epoch_end(self) -> None:
        schedule = self.trainer.strategy.averager.schedule
        self.rates.append((schedule.every, schedule.wait))
        self.log("level", 10.0 + self.current_epoch * (1 if self.global_rank else -1))


def _monitored() -> list[tuple[int, int]]:
    warnings.filterwarnings("ignore", ".*recommended to use.*sync_dist=True")
    module = Logging()
    strategy = DASOStrategy(balance="off", global_batch_size=12, warmup=0, cooldown=0, patience=1, monitor="level")
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 4})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4))
    return module.rates


def test_the_monitored_metric_is_the_mean_of_all_ranks() -> None:
    for rates in run(_monitored, 2, nodes=[1, 1]):
        assert rates == [(4, 1), (4, 1), (2, 1), (1, 1)]
