"""Lightning's `ddp*` names taken over: saved, restored, tuned and averaged states are those of Lightning."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.tuner import Tuner
from namesakes import both
from scripts import run_script
from tasks import EvaluatedNet, Net, parameters
from test_upstream import TOLERANCE, other_data, trainer_of, training_data
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

# -- checkpoints ---------------------------------------------------------------------------------------------


class Rated(EvaluatedNet):
    """Logs a quality that is best at step 12."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("quality", -float(abs(self.global_step - 11)), sync_dist=True)
        return super().training_step(batch, batch_idx)


class Look(pl.Callback):
    """Keeps the restored state when training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        moments = [v.detach().clone() for s in trainer.optimizers[0].state.values() for v in s.values()]
        self.found = [trainer.global_step, trainer.current_epoch, parameters(pl_module), *moments]


def _checkpoints(folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")  # callbacks are left out on purpose
    place = Path(folder, StrategyRegistry["ddp"]["strategy"].__name__)
    callbacks = [
        ModelCheckpoint(place / "steps", "{step}", every_n_train_steps=5, save_top_k=-1),
        ModelCheckpoint(place / "epochs", "{epoch}", every_n_epochs=2, save_top_k=-1, save_on_train_epoch_end=True),
        ModelCheckpoint(place / "best", "{epoch}-{val:.3f}", monitor="val", save_top_k=2, save_last=True),
        ModelCheckpoint(
            place / "quality", "{step}", monitor="quality", mode="max", save_top_k=2, every_n_train_steps=3
        ),
    ]
    options = {"limit_train_batches": 6, "enable_checkpointing": True}
    module = Rated(optimizer="adamw")
    trainer = trainer_of(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(module, training_data(), other_data())
    best, last = callbacks[2].best_model_path, place / "best" / "last.ckpt"
    found: dict[str, Any] = {
        "best": [str(Path(callback.best_model_path).relative_to(place)) for callback in callbacks],
        "files": sorted(str(path.relative_to(place)) for path in place.rglob("*.ckpt")),
        "keys": sorted(set(torch.load(last, weights_only=True)) - {"lightning_hetero"}),
    }
    numbers = [parameters(module), trainer.test(module, other_data(), ckpt_path=best, verbose=False)]
    numbers.append(parameters(Rated.load_from_checkpoint(last, optimizer="adamw")))
    look, module = Look(), Rated(optimizer="adamw")
    trainer = trainer_of(max_epochs=6, callbacks=[look], **{**options, "enable_checkpointing": False})
    trainer.fit(module, training_data(), other_data(), ckpt_path=last)
    numbers += [*look.found, parameters(module)]
    trainer.fit_loop.max_epochs = 7  # the same Trainer once more
    trainer.fit(module, training_data(), other_data())
    return {**found, "numbers": [*numbers, parameters(module), trainer.global_step]}


@pytest.mark.long
def test_checkpoints_are_as_many_and_restore_as_much(tmp_path: Path) -> None:
    for theirs, ours in zip(*both(_checkpoints, str(tmp_path)), strict=True):
        torch.testing.assert_close(ours.pop("numbers"), theirs.pop("numbers"), **TOLERANCE)
        assert ours == theirs
    assert ours["best"][3] == "quality/step=12.ckpt"


class Sharded(Net):
    """Each rank keeps the optimizer's state for its part of the parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # PyTorch's import of it warns

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01)


def _sharded(folder: str) -> list[Any]:
    warnings.filterwarnings("ignore", "`torch.jit")
    path = Path(folder, f"{StrategyRegistry['ddp']['strategy'].__name__}.ckpt")
    module = Sharded()
    trainer = trainer_of()
    trainer.fit(module, training_data())
    trainer.save_checkpoint(path)
    first, module = parameters(module), Sharded()
    trainer = trainer_of(max_epochs=3)
    trainer.fit(module, training_data(), ckpt_path=path)
    return [first, parameters(module), len(torch.load(path, weights_only=True)["optimizer_states"][0]["state"])]


@pytest.mark.long
def test_an_optimizer_that_is_sharded(tmp_path: Path) -> None:
    for theirs, ours in zip(*both(_sharded, str(tmp_path)), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


# -- tuner, averaged weights, hooks --------------------------------------------------------------------------


def _tuned(folder: str) -> list[Any]:
    module, trainer = Net(), trainer_of(default_root_dir=folder)
    finder = Tuner(trainer).lr_find(
        module, training_data(), num_training=12, early_stop_threshold=None, update_attr=False
    )
    assert finder is not None
    trainer.fit(module, training_data())
    return [finder.results["lr"], trainer.global_step, parameters(module)]


def test_looking_for_a_learning_rate_leaves_no_trace(tmp_path: Path) -> None:
    for theirs, ours in zip(*both(_tuned, str(tmp_path)), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def _averaged() -> torch.Tensor:
    module = Net()
    trainer = trainer_of(max_epochs=4, callbacks=[StochasticWeightAveraging(0.01, swa_epoch_start=1)])
    trainer.fit(module, training_data())
    return parameters(module)


def test_stochastic_weight_averaging() -> None:
    for theirs, ours in zip(*both(_averaged), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


class HookedDDP(DDPStrategy):
    """Lightning's strategy with its hooks, which it leaves out on CPUs."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


def _hooked() -> dict[str, Any]:
    for message in ("`torch.jit", "When period is 1, no need"):
        warnings.filterwarnings("ignore", message)
    entry, found = StrategyRegistry["ddp"], {}
    strategy = HookedDDP if entry["strategy"] is DDPStrategy else entry["strategy"]
    for name, options in {
        "power": {"ddp_comm_state": PowerSGDState(None, start_powerSGD_iter=2), "ddp_comm_hook": powerSGD_hook},
        "local": {
            "ddp_comm_state": PostLocalSGDState(None, None, start_localSGD_iter=5, post_local_gradient_allreduce=False),
            "ddp_comm_hook": post_localSGD_hook,
            "model_averaging_period": 1,
        },
    }.items():
        module = Net()
        trainer_of(strategy(**entry["init_params"], **options)).fit(module, training_data())
        found[name] = parameters(module)
    return found


@pytest.mark.long
def test_hooks_with_a_state() -> None:
    # These hooks are linear in the gradients, so that uneven shares give the same.
    for theirs, ours in zip(*both(_hooked), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


# -- processes of Lightning's own ----------------------------------------------------------------------------

SCRIPT = """
import torch, lightning_hetero, lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
    def step(self, batch, name):
        loss = (self.net(batch[0]) - 1).square().mean()
        self.log(name, loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss
    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")
    def test_step(self, batch, batch_idx):
        self.step(batch, "test")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def result(size, **options):
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=size)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    model, trainer = Model(), pl.Trainer(accelerator="cpu", max_epochs=2, **quiet, **options)
    trainer.fit(model, data)
    logged = float(trainer.callback_metrics["train"])
    tested = trainer.test(model, data, verbose=False)[0]["test"]
    return [model.net.weight.detach(), logged, tested, trainer.global_step, trainer.current_epoch]

if __name__ == "__main__":
    theirs, ours = (result(4, strategy=name, devices=2) for name in ("ddp_fork", "hetero_ddp_fork"))
    torch.testing.assert_close(ours, theirs)
    print("as Lightning's")
"""


def test_forked_ranks_give_back_what_they_have_learned(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    [(_, output)] = run_script(tmp_path / "train.py", folder=tmp_path)
    assert "as Lightning's" in output
