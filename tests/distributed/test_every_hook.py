"""Every hook that Lightning calls in a step runs equally often on all ranks, whatever is left out of the step."""

import warnings
from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from ranks import run
from tasks import GanLike, Net, dataset, train
from torch.utils.data import DataLoader

#: Hooks of a module; those of a callback are the names in :class:`LambdaCallback`.
HOOKS = [name for name in (*vars(ModelHooks), *vars(DataHooks)) if name.startswith("on_") or "transfer_batch" in name]
HOOKS += ["training_step", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward"]
HOOKS += ["configure_gradient_clipping", "clip_gradients"]

#: 17 samples in global batches of 8: in the last batch one rank of two has no sample.
SAMPLES, STEPS = 17, 3


class Hooked(Net):
    """Counts its hooks; reduces a value over all ranks in some of them, as users do."""

    broken = False  # whether the loss of rank 1 is not finite in the second step

    def __init__(self, **options: Any) -> None:
        super().__init__(optimizer="adamw", **options)
        self.calls: Counter[str] = Counter()
        self.norms: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        broken = self.broken and self.calls["training_step"] == 2 and self.global_rank == 1
        return super().loss(batch) * (float("nan") if broken else 1.0)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.calls["optimizer_step"] > 1:  # gradients of the step before
            self.reduced("left", self.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.norm().item())
        self.reduced("norm", self.norm())

    def on_after_backward(self) -> None:
        self.reduced("after", self.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms.append(self.norm().item())  # after clipping
        self.reduced("end", self.norm())

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        largest = self.trainer.strategy.reduce(self.norm(), reduce_op="max")
        self.clip_gradients(optimizer, 0.5 * float(largest), "norm")

    def reduced(self, name: str, value: torch.Tensor) -> None:
        self.log(name, value, sync_dist=True, on_step=True, on_epoch=True)

    def norm(self) -> torch.Tensor:
        return self.net[0].weight.grad.norm()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.calls.update(["optimizer's pre-hook"]))
        optimizer.register_step_post_hook(lambda *_: self.calls.update(["optimizer's post-hook"]))
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Broken(Hooked):
    broken = True


class ByHand(GanLike):
    """Two optimizers by hand."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def loss(self, batch: Any) -> torch.Tensor:
        return Hooked.loss(self, batch)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.broken and batch_idx == 1 and self.global_rank == 1:
            batch = [batch[0] * float("nan"), *batch[1:]]
        super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first = optimizer.param_groups[0]["params"][0]
        self.log("norm", first.grad.norm(), sync_dist=True, on_step=True)


class BrokenByHand(ByHand):
    broken = True


def count(module: Any) -> pl.Callback:
    """Count the calls of all hooks of a module, and of a callback."""
    for name in HOOKS:
        if (hook := getattr(module, name, None)) is not None:
            setattr(module, name, partial(_counted, module.calls, name, hook))
    names = [name for name in dir(pl.Callback) if name.startswith("on_") and "load" not in name and "save" not in name]
    return LambdaCallback(**{name: partial(_counted, module.calls, f"callback's {name}", None) for name in names})


def _counted(calls: Counter[str], name: str, hook: Any, *args: Any, **kwargs: Any) -> Any:
    calls[name] += 1
    return None if hook is None else hook(*args, **kwargs)


def _fit(make: Any, strings: list[str], options: dict[str, Any], plugins: Any = lambda: None) -> list[dict[str, Any]]:
    results = []
    for string in strings:
        entry, module = StrategyRegistry[string], make()
        places = {"ranks_per_node": 1} if string in ("hetero_node", "hetero_daso") else {}
        strategy = entry["strategy"](**{**entry["init_params"], **places, **options, "timeout": 60})
        data = DataLoader(dataset(SAMPLES, module.net[0].weight.dtype), batch_size=4)
        counting = count(module)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*on_nan='skip'|No replica has met the center|Replica 1 .* was left out")
            trainer = train(module, strategy, data, devices=2, plugins=plugins(), callbacks=[counting])
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        steps = [float(state["step"]) for state in trainer.optimizers[-1].state.values()]
        calls = dict(module.calls)
        results.append({"calls": calls, "metrics": metrics, "steps": steps, "norms": getattr(module, "norms", None)})
    return results


APART = ["hetero_node", "hetero_daso", "hetero_diloco", "hetero_easgd", "hetero_gossip"]
PER_STEP = ["training_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward"]
PER_STEP += ["on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients", "optimizer_step", "backward"]
PER_STEP += ["on_train_batch_start", "on_train_batch_end", "transfer_batch_to_device", "lr_scheduler_step"]
PER_STEP += ["optimizer's pre-hook", "optimizer's post-hook"]
PER_STEP += [f"callback's {name}" for name in PER_STEP if name.startswith("on_")]


@pytest.mark.parametrize(("make", "options"), [(Hooked, {}), (Broken, {"on_nan": "skip"})])
@pytest.mark.parametrize("strings", [["hetero_ddp", "hetero_diloco"], pytest.param(APART, marks=pytest.mark.long)])
def test_all_ranks_run_all_hooks(make: Any, options: dict[str, Any], strings: list[str]) -> None:
    for string, *ranks in zip(strings, *run(_fit, 2, make, strings, options), strict=True):
        for result in ranks:
            assert result["calls"] == ranks[0]["calls"], string
            assert {name: result["calls"].get(name, 0) for name in PER_STEP} == dict.fromkeys(PER_STEP, STEPS), string
        steps = [set(result["steps"]) for result in ranks]
        if string == "hetero_ddp":
            assert steps == [{STEPS}] * 2
        else:  # only the optimizer's own step was left out, of the rank without a sample
            assert sorted(map(sorted, steps)) == [[STEPS - 1], [STEPS]], string


@pytest.mark.parametrize(("make", "options"), [(ByHand, {}), (BrokenByHand, {"on_nan": "skip"})])
def test_with_manual_optimization(make: Any, options: dict[str, Any]) -> None:
    strings = ["hetero_diloco"]
    for string, *ranks in zip(strings, *run(_fit, 2, make, strings, options), strict=True):
        for result in ranks:
            assert result["calls"] == ranks[0]["calls"], string
            assert result["calls"]["on_before_optimizer_step"] == 2 * STEPS


def _scaler() -> Any:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))]


def test_with_a_gradient_scaler() -> None:
    first, second = run(_fit, 2, partial(Hooked, dtype=torch.float32), ["hetero_diloco"], {}, _scaler)
    assert first[0]["calls"] == second[0]["calls"]
    assert {*first[0]["steps"], *second[0]["steps"]} == {STEPS, STEPS - 1}


def test_what_hooks_log_without_a_sample_counts_for_nothing() -> None:
    everyone = run(_fit, 2, Hooked, ["hetero_diloco"], {})
    norms, empty = sorted((result["norms"][::2] for (result,) in everyone), key=lambda norms: -norms[-1])
    assert empty[-1] == 0.0 < norms[-1]
    for (result,) in everyone:
        assert result["metrics"]["norm_step"] == pytest.approx(norms[-1], rel=1e-12)
        whole = [4 * a + 4 * b for a, b in zip(norms[:-1], empty[:-1], strict=True)] + [norms[-1]]
        assert result["metrics"]["norm_epoch"] == pytest.approx(sum(whole) / SAMPLES, rel=1e-12)
        assert result["metrics"]["end_step"] == max(result["norms"][-1] for (result,) in everyone) > 0.0
