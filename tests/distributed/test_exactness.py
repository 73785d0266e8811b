"""The trained weights are those of one process on the whole batch, whatever the split, the model and the settings."""

from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from oracles import oracle
from ranks import run
from tasks import GanLike, Net, TokenNet, error, fits, parameters
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

WORLD = 3
UNEVEN: dict[str, Any] = {"strategy": {"balance": [3.0, 1.0, 2.0]}}
CHANGES = {3: [5.0, 1.0, 1.0], 10: [0.0, 1.0, 4.0], 17: [1.0, 8.0, 1.0]}
WORKERS = {"num_workers": 2, "persistent_workers": True}


class SparseTokens(Net):
    """A mean over tokens; many samples have none, and a rank's own mean may be 0 / 0."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, length, _ = batch
        tokens = (length > 3) * length
        return (tokens * (self.net(x) - y) ** 2).sum() / tokens.sum()

    def batch_weight(self, batch: Any) -> torch.Tensor:
        return ((batch[2] > 3) * batch[2]).sum()


class Weightless(Net):
    """No sample of one batch weighs anything."""

    def counts(self) -> bool:
        return self.trainer.fit_loop.epoch_loop.batch_idx != 3

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.counts()

    def batch_weight(self, batch: Any) -> int:
        return self.counts() * len(batch[0])


class LineSearch(Net):
    """Its optimizer goes by the loss, several times in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn="strong_wolfe")


class Logs(Net):
    """Logs values that are no means, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        options: dict[str, Any] = {"sync_dist": True, "batch_size": len(batch[0]), "on_epoch": True}
        self.log("sum", torch.tensor(float(len(batch[0]))), reduce_fx="sum", on_step=True, **options)
        self.log("largest", batch[3].max().float(), reduce_fx="max", on_step=False, **options)
        self.log("least", batch[3].min().float(), reduce_fx="min", on_step=False, **options)
        return super().training_step(batch, batch_idx)


class Thaw(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)


class Thawing(Net):
    """Optimizes only the parameters that are trainable at first."""

    def configure_callbacks(self) -> Any:
        return [Thaw()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class ByHand(Net):
    """Accumulates gradients by hand; what is left of them at the end of an epoch is taken in by a hook."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def step(self) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = [*self.seen, batch[3].tolist()]
        self.manual_backward(self.loss(batch) / 4)
        if batch_idx % 4 == 3:
            self.step()

    def on_train_epoch_end(self) -> None:
        self.step()


class Silent(Net):
    """Logs nothing: torch.compile does not get through `self.log`."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


def compiled() -> Any:
    return torch.compile(Silent(), backend="aot_eager", dynamic=True)


class Case(NamedTuple):
    """A fit of ours, and of one process.

    Attributes:
        ours: arguments of ours.
        make: the model.
        both: arguments of both.
        theirs: of the one process; ``make`` may be another one.
        limit: the largest relative difference.
    """

    ours: dict[str, Any]
    make: Any = Net
    both: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    limit: float = 1e-10


SPLITS: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": UNEVEN,
    "a rank with zero samples": {"strategy": {"balance": [3.0, 0.0, 1.0]}},
    "measured": {"strategy": {"balance": "auto", "rebalance_every_n_steps": 1}},
    "changed mid-run": {"changes": CHANGES},
    "changed mid-run, workers that prefetch": {"changes": CHANGES, "loader": WORKERS},
    "limits": {"strategy": {"balance": [9.0, 1.0, 1.0], "min_batch_size": 2, "max_batch_size": [6, 12, 12]}},
}
LOGGED: dict[str, Any] = {"make": Logs, "both": {"samples": 98, "max_epochs": 1}}
FLOATS = partial(Net, dtype=torch.float32)
SINGLE: dict[str, Any] = {"make": FLOATS, "both": {"dtype": torch.float32}}


def accumulated(samples: int) -> dict[str, Case]:
    """Cases with clipping. With 101 samples the last window is short; with 98 the last batch has 2, for 3 ranks."""
    changes = {2: [4.0, 1.0, 2.0], 12: [1.0, 0.0, 1.0]}
    options = {"samples": samples, "gradient_clip_val": 0.1}
    return {
        f"accumulate {k} batches": Case({"changes": changes}, both={**options, "accumulate_grad_batches": k})
        for k in (1, 2, 3)
    }


# 101 samples in batches of 12: the last one has 5, which leaves ranks with few or none.
JOBS: dict[str, dict[str, Case]] = {
    "splits": {name: Case(ours) for name, ours in SPLITS.items()},
    "accumulation": accumulated(101),
    "models": {
        "tokens": Case(UNEVEN, TokenNet),
        "tokens, accumulated": Case(UNEVEN, TokenNet, {"accumulate_grad_batches": 2}),
        "a part without tokens": Case({"strategy": {"balance": [8.0, 1.0, 3.0]}}, SparseTokens),
        "a line search": Case({"strategy": {**UNEVEN["strategy"], "timeout": 60.0}}, LineSearch, {"max_epochs": 1}),
        "a batch without weight": Case(UNEVEN, Weightless),
        "a batch without weight, on_nan='skip'": Case(
            {"strategy": {**UNEVEN["strategy"], "on_nan": "skip"}}, Weightless
        ),
        "two optimizers by hand": Case(  # each backward pass leaves the other network out
            {"strategy": {"find_unused_parameters": True}, "changes": {1: [4.0, 1.0, 2.0], 12: [1.0, 0.0, 1.0]}},
            GanLike,
        ),
        "accumulated by hand": Case(UNEVEN, ByHand),
        # Lightning's own strategy lets the ranks drift apart here: DDP does not know of such layers.
        "unfrozen": Case(UNEVEN, Thawing),
        "unfrozen, accumulated": Case(UNEVEN, Thawing, {"accumulate_grad_batches": 3}),
        "float32": Case(UNEVEN, **SINGLE, limit=1e-5),
        "bf16": Case(UNEVEN, FLOATS, {**SINGLE["both"], "precision": "bf16-mixed"}, limit=0.02),  # of 3 digits
    },
    "settings": {
        "no tail": Case({**UNEVEN, "loader": {"drop_last": True}}, theirs={"drop_last": True}),
        "some batches": Case({}, both={"samples": 96, "max_epochs": 2, "limit_train_batches": 3}),
        "half of the batches": Case({}, both={"samples": 96, "max_epochs": 2, "limit_train_batches": 0.5}),
        "logs": Case({"strategy": {"balance": [7.0, 1.0, 1.0]}}, **LOGGED),
        "logs of a rank with zero samples": Case({"strategy": {"balance": [1.0, 0.0, 1.0]}}, **LOGGED),
        "a hook": Case({"strategy": {**UNEVEN["strategy"], "ddp_comm_hook": fp16_compress_hook}}, limit=0.02),
    },
    "splits, AdamW": {name: Case(ours, partial(Net, "adamw")) for name, ours in SPLITS.items()},
    "accumulation, other samples": accumulated(98),
    "compiled": {"compiled": Case(UNEVEN, compiled, theirs={"make": Net})},
}


def truth_of(case: Case, **options: Any) -> pl.LightningModule:
    return oracle(**{"make": case.make, "batch_size": 12, **case.both, **case.theirs, **options})


@pytest.mark.long(after=4)
@pytest.mark.parametrize("job", JOBS)
def test_a_fit_comes_to_what_one_process_comes_to(job: str) -> None:
    cases, truths = JOBS[job], {}
    for name, case in cases.items():
        truths[name] = module = truth_of(case)
        assert error(parameters(module), parameters(type(module)())) > 1e-3, name  # or nothing is compared
        if "gradient_clip_val" in case.both:
            assert error(parameters(truth_of(case, gradient_clip_val=None)), parameters(module)) > 1e-3, name
    calls = {name: {"make": case.make, "batch_size": 12, **case.both, **case.ours} for name, case in cases.items()}
    ranks = run(fits, WORLD, calls)
    for results in ranks:
        for name, case in cases.items():
            result, trainer = results[name], truths[name].trainer
            assert error(result["parameters"], parameters(truths[name])) <= case.limit, name
            assert error(result["parameters"], ranks[0][name]["parameters"]) <= 1e-12, name
            assert result["steps"] == trainer.global_step, name
            if "changes" in case.ours:  # an even split has full batches and a last one
                assert len({len(batch) for batch in ranks[0][name]["seen"]}) > 2, name
            if case.make in (Net, Logs) and case.limit == 1e-10:  # values that count by samples; padding does not
                logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
                assert result["metrics"] == pytest.approx(logged, rel=1e-10), name
    if job == "settings":
        assert error(ranks[0]["a hook"]["parameters"], parameters(truths["a hook"])) > 0  # of 3 digits


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()


def test_batch_norm_never_gets_a_single_sample() -> None:
    balances: list[Any] = ["auto", [1.0, 0.0, 1.0], [20.0, 1.0, 1.0]]
    calls = {str(b): {"make": Normed, "batch_size": 12, "strategy": {"balance": b}} for b in balances}
    for results in run(fits, WORLD, calls):
        assert all(result["parameters"].isfinite().all() for result in results.values())
