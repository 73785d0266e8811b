"""Training steps that return None on some ranks: their samples do not count."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from oracles import oracle, split
from ranks import attempt, run
from tasks import Net, TokenNet, dataset, error, fit, parameters, train
from test_left_out import POISON
from torch.utils.data import DataLoader

from lightning_hetero.errors import UnsupportedError

SHARES = [3.0, 1.0]  # of 12 samples 9 and 3


class Skipping(Net):
    """Returns None on a rank that has one of some samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)  # logging needs all ranks
        return None if POISON & set(batch[3].tolist()) else loss


class SkippingTokens(Skipping, TokenNet):
    pass


def without(base: Any) -> Any:
    """Model for one process, without the samples of the ranks that return None."""

    class Without(base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = torch.arange(len(batch[3])).split(split(len(batch[3]), SHARES))
            good = [rows for rows in parts if len(rows) and not POISON & set(batch[3][rows].tolist())]
            self.trainer.left_out = getattr(self.trainer, "left_out", 0) + len(parts) - len(good)
            return self.loss([part[torch.cat(good)] for part in batch]) if good else None

    return Without


CASES: list[tuple[Any, Any, dict[str, Any]]] = [
    (Skipping, Net, {}),
    (Skipping, Net, {"accumulate_grad_batches": 2}),
    (SkippingTokens, TokenNet, {}),
]


def _together() -> list[Any]:
    strategy = {"balance": SHARES, "on_nan": "skip"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*on_nan='skip'")  # there is no loss that is not finite
        results = [fit(make, 12, 96, strategy=strategy, **options)["parameters"] for make, _, options in CASES]
        unused = {**strategy, "find_unused_parameters": True}
        warnings.filterwarnings("ignore", ".*find_unused_parameters")
        return [*results, fit(Skipping, 12, 96, strategy=unused)["parameters"]]


def test_in_one_replica_the_step_is_that_of_the_others() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned `None`")
        truths = [oracle(without(base), 12, 96, **options) for _, base, options in CASES]
    assert all(truth.trainer.left_out >= 10 for truth in truths)
    for results in run(_together, 2):
        for result, truth in zip(results, [*truths, truths[0]], strict=True):
            assert error(result, parameters(truth)) <= 1e-10


def test_in_one_replica_it_is_refused_if_ranks_do_not_tell_each_other() -> None:
    outcomes = attempt(fit, 2, Skipping, 12, 96, strategy={"balance": SHARES})
    texts = [str(outcome.error) for outcome in outcomes if isinstance(outcome.error, UnsupportedError)]
    assert len(texts) == 1, outcomes
    for words in ("`training_step` returned None on rank", "on_nan='skip'", "`0.0 * loss`"):
        assert words in texts[0]


class EveryOther(Net):
    """Returns None at some batches of rank 1, or of all."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__(optimizer="adamw")
        self.everywhere, self.kept = everywhere, list[torch.Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(parameters(self))
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 and (self.everywhere or self.global_rank == 1) else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm(), sync_dist=True)

    def on_train_end(self) -> None:
        self.steps = float(next(iter(self.trainer.optimizers[0].state.values()))["step"])


def _in_replicas_of_one_rank(strings: list[str], everywhere: bool) -> list[Any]:
    results = []
    for string in strings:
        entry, module = StrategyRegistry[string], EveryOther(everywhere)
        one_rank_each = {"ranks_per_node": 1} if string in ("hetero_node", "hetero_daso") else {}
        options = {**entry["init_params"], **one_rank_each, "on_nan": "skip", "timeout": 60}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No replica has met the center")
            trainer = train(module, entry["strategy"](**options), DataLoader(dataset(48), batch_size=4), devices=2)
        moved = [not torch.equal(a, b) for a, b in zip(module.kept[:-1], module.kept[1:], strict=True)]
        results.append((module.steps, moved, trainer.global_step))
    return results


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    "strings",
    [["hetero_diloco"], pytest.param(["hetero_daso", "hetero_easgd", "hetero_gossip"], marks=pytest.mark.long)],
)
def test_in_replicas_of_one_rank_the_step_is_left_out(strings: list[str], everywhere: bool) -> None:
    strings = [*strings, "hetero_ddp"] if everywhere else strings
    for rank, results in enumerate(run(_in_replicas_of_one_rank, 2, strings, everywhere)):
        for string, (steps, moved, done) in zip(strings, results, strict=True):
            skips = everywhere or rank == 1
            assert (steps, done) == (4.0 if skips else 6.0, 6), string
            if string in ("hetero_ddp", "hetero_diloco"):  # others average at every step, or at some
                assert moved == [True, not skips, True, True, not skips], string
