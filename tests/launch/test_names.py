"""Strategy strings and environments resolve to what they are for Lightning's `ddp*` names."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import KubeflowEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_hetero import HeteroDDPStrategy

NAMES = [name for name in StrategyRegistry.available_strategies() if name.startswith("ddp")]
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "2345",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "1",
}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_ID": "77",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "10.0.0.[1-2]",
}
KUBEFLOW = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345", "WORLD_SIZE": "2", "RANK": "1"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345", "NODE_RANK": "1", "LOCAL_RANK": "1"}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in {name for name in os.environ if name.startswith("SLURM_")} | {*TORCHRUN, *BY_HAND}:
        monkeypatch.setenv(name, "")  # otherwise Lightning's changes in the test would stay
        monkeypatch.delenv(name)
    return monkeypatch


def facts(strategy: str, **options: Any) -> dict[str, Any]:
    """Properties of a Trainer's strategy, which follow from its name and from the environment."""
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    chosen = trainer.strategy
    assert isinstance(chosen, DDPStrategy)
    return {
        "ours": isinstance(chosen, HeteroDDPStrategy),
        "launcher": (getattr(chosen.launcher, "_start_method", None), chosen.launcher.is_interactive_compatible),
        "options": chosen._ddp_kwargs,
        "ranks": (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.num_devices),
        "outside": chosen.cluster_environment.creates_processes_externally,
        "address": chosen.cluster_environment.main_address,
        "environment": type(chosen.cluster_environment).__name__,
        "device": chosen.root_device,
    }


def same(name: str, **options: Any) -> dict[str, Any]:
    """The facts of a name; fails if they are not those of Lightning's own strategy."""
    theirs, ours = facts(name, **options), facts(f"hetero_{name}", **options)
    assert ours == {**theirs, "ours": True}
    return ours


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_ddp_has_a_namesake(clean: pytest.MonkeyPatch, name: str) -> None:
    found = same(name, devices=2)
    assert found["ranks"] == (2, 0, 0, 0, 2)
    assert found["environment"] == "LightningEnvironment"


@pytest.mark.parametrize(
    ("variables", "environment"),
    [
        (TORCHRUN, "TorchElasticEnvironment"),
        ({**SLURM, **TORCHRUN}, "TorchElasticEnvironment"),  # within a SLURM job, torchrun has started the rank
        (SLURM, "SLURMEnvironment"),
        (BY_HAND, "LightningEnvironment"),
    ],
)
def test_environments(clean: pytest.MonkeyPatch, variables: dict[str, str], environment: str) -> None:
    for name, value in variables.items():
        clean.setenv(name, value)
    found = same("ddp", devices=2, num_nodes=2)
    assert found["ranks"] == (4, 3, 1, 1, 2)
    assert found["environment"] == environment
    assert found["address"] == "10.0.0.1"


def test_slurm_with_nodes_that_are_not_alike(clean: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}.items():
        clean.setenv(name, value)
    assert facts("hetero_ddp")["ranks"][:4] == (3, 2, 0, 1)  # no `devices` to match


def test_an_environment_of_the_users(clean: pytest.MonkeyPatch) -> None:
    for name, value in KUBEFLOW.items():
        clean.setenv(name, value)
    assert same("ddp", devices=1, num_nodes=2, plugins=[KubeflowEnvironment()])["ranks"] == (2, 1, 0, 1, 1)


def test_notebooks(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    assert same("ddp_notebook", devices=2)["launcher"] == ("fork", True)
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive"):
        facts("hetero_ddp", devices=2)
