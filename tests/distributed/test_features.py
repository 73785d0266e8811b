"""Lightning's features over several ranks: each works as in one process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from ranks import run
from scripts import run_script
from tasks import FAST, EvaluatedNet, Net, Save, dataset, error, fit, parameters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy

WORLD = 3
UNEVEN = [5.0, 1.0, 2.0]


# -- checkpoints --------------------------------------------------------------------------------------------


def _portable(folder: str) -> dict[str, Any]:
    module, strategy = Net(), HeteroDDPStrategy()
    options = {**FAST, "max_epochs": 2, "callbacks": [Save(f"{folder}/step=10.ckpt", 10, False)]}
    trainer = pl.Trainer(strategy=strategy, **options)
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True))
    return {"weights": parameters(module)}


def test_checkpoints_load_without_this_strategy(tmp_path: Path) -> None:
    run(_portable, 2, str(tmp_path))
    checkpoint = torch.load(tmp_path / "step=10.ckpt", weights_only=True)
    assert "lightning_hetero" in checkpoint
    module = Net()
    trainer = pl.Trainer(devices=1, **{**FAST, "max_epochs": 3})
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        trainer.fit(module, DataLoader(dataset(96), batch_size=8), ckpt_path=str(tmp_path / "step=10.ckpt"))
    assert trainer.current_epoch == 3


# -- precision, compilation, hooks ---------------------------------------------------------------------------


def test_bf16_mixed() -> None:
    from functools import partial

    make = partial(Net, dtype=torch.float32)
    single = run(fit, 1, make, 12, dtype=torch.float32, precision="bf16-mixed")[0]
    strategy = {"balance": UNEVEN}
    results = run(fit, WORLD, make, 12, dtype=torch.float32, precision="bf16-mixed", strategy=strategy)
    for result in results:
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert error(result["parameters"], single["parameters"]) < 0.02  # bf16 keeps 3 digits


class Silent(Net):
    """Logs nothing: torch.compile does not get through `self.log`."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


def _compiled(balance: Any) -> dict[str, Any]:
    module, strategy = Silent(), HeteroDDPStrategy(global_batch_size=12, balance=balance)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2})
    compiled = torch.compile(module, backend="aot_eager", dynamic=True)
    trainer.fit(compiled, DataLoader(dataset(101), batch_size=2, shuffle=True))
    return {"parameters": parameters(module)}


@pytest.mark.long
def test_torch_compile() -> None:
    single = run(fit, 1, Net, 12, max_epochs=2)[0]
    for result in run(_compiled, WORLD, UNEVEN):
        assert error(result["parameters"], single["parameters"]) <= 1e-10


CALLS: list[int] = []


def counting_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    CALLS.append(bucket.index())
    return fp16_compress_hook(state, bucket)


def _hooked() -> dict[str, Any]:
    result = fit(Net, 12, strategy={"balance": UNEVEN, "ddp_comm_hook": counting_hook})
    return {**result, "calls": len(CALLS)}


def test_comm_hooks_on_cpu() -> None:
    single = run(fit, 1, Net, 12)[0]
    for result in run(_hooked, WORLD):
        assert result["calls"] >= result["steps"]
        assert 0 < error(result["parameters"], single["parameters"]) < 0.02  # fp16 keeps 3 digits


# -- callbacks and signals -----------------------------------------------------------------------------------


def _early() -> dict[str, Any]:
    module, strategy = EvaluatedNet(), HeteroDDPStrategy(balance=UNEVEN)
    stop = EarlyStopping("val", patience=1, min_delta=10.0)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 9, "callbacks": [stop]})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), DataLoader(dataset(50), batch_size=4))
    return {"epochs": trainer.current_epoch, "value": stop.best_score.item()}


def test_early_stopping_agrees() -> None:
    results = run(_early, WORLD)
    assert {result["epochs"] for result in results} == {2}
    assert len({result["value"] for result in results}) == 1


# -- launches ------------------------------------------------------------------------------------------------


def _ragged() -> dict[str, Any]:
    module = Net()
    trainer = pl.Trainer(strategy="hetero_ddp", **{**FAST, "max_epochs": 2})
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True))
    topology = trainer.strategy.cluster
    return {"nodes": topology.nodes, "node": topology.node, "weights": parameters(module), "seen": module.seen}


def test_nodes_with_different_numbers_of_ranks() -> None:
    results = run(_ragged, 3, nodes=[2, 1])
    assert [result["nodes"] for result in results] == [((0, 1), (2,))] * 3
    assert [result["node"] for result in results] == [(0, 1), (0, 1), (2,)]
    assert torch.equal(results[0]["weights"], results[2]["weights"])
    assert sorted(i for r in results for batch in r["seen"] for i in batch) == sorted(list(range(96)) * 2)


def test_one_machine_tried_as_several_nodes() -> None:
    results = run(_as_nodes, 3)
    assert results == [((0,), (1, 2))] * 3


def _as_nodes() -> Any:
    strategy = HeteroDDPStrategy(ranks_per_node=[1, 2])
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1, "limit_train_batches": 1})
    trainer.fit(Net(), DataLoader(dataset(96), batch_size=4))
    return strategy.cluster.nodes


def test_one_rank_alone() -> None:
    result = run(fit, 1, Net, 12)[0]
    assert result["shares"] == [12]


SCRIPT = """
import torch, lightning_hetero, lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def on_train_end(self):
        if self.trainer.is_global_zero:
            print("ranks", len(self.trainer.strategy.accounting.planner.shares(0)))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    for strategy in STRATEGIES:
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **quiet)
        trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4))
"""


@pytest.mark.long
@pytest.mark.parametrize("names", [["hetero_ddp"], ["hetero_ddp_fork", "hetero_ddp_spawn"]], ids=lambda names: names[0])
def test_lightning_starts_the_ranks(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("STRATEGIES", repr(names)))
    [(status, output)] = run_script(tmp_path / "train.py", folder=tmp_path)
    assert status == 0, output
    assert output.count("ranks 2") == len(names)


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_when_a_rank_that_lightning_started_fails_its_name_is_said(tmp_path: Path, failing: int) -> None:
    script = SCRIPT.replace("STRATEGIES", "[lightning_hetero.HeteroDDPStrategy()]").replace(
        "        return self.net",
        f"        if batch_idx == 1 and self.global_rank == {failing}:\n"
        f"            raise ValueError('a fault of rank {failing}')\n"
        "        return self.net",
    )
    (tmp_path / "train.py").write_text(script)
    # A process that ends as Python does: what it says at its exit counts.
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    status, output = done.returncode, done.stdout + done.stderr
    assert f"a fault of rank {failing}" in output
    assert status == 1, output  # by its own error, not killed
    if failing == 1:
        assert "local rank 1 ended with exit code 1" in output
        assert "rank 1 failed with ValueError: a fault of rank 1" in output
