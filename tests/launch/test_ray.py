"""Strategies under Ray Train: in its environment and its process group, and with Ray itself where it is installed."""

import os
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from leftovers import completed
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy
from lightning_hetero.errors import LaunchError, UnsupportedError
from lightning_hetero.launch import environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "train_digits.py"
needs_ray = pytest.mark.skipif(
    "ray" not in packages_distributions(), reason="Ray is not installed: pip install 'lightning-hetero[ray]'"
)


class LikeRays(LightningEnvironment):
    """Has the launcher's values, as Ray's environment does, which extends the same class."""

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass

    def teardown(self) -> None:
        pass


class LikeRaysDDP(DDPStrategy):
    """Knows the device, and the part of samplers, as Ray's strategy does."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class OursDDP(HeteroDDPStrategy, LikeRaysDDP):
    pass


class OursDiLoCo(DiLoCoStrategy, LikeRaysDDP):
    pass


KINDS = {"ddp": OursDDP, "diloco": OursDiLoCo}


def _fit(kind: str, made: bool, **options: Any) -> Any:
    """Train; as under Ray, where the process group exists already, or as with torchrun."""
    del os.environ["TORCHELASTIC_RUN_ID"]
    if made:
        dist.init_process_group("gloo")
    else:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    plugins = [LikeRays()] if made else []
    trainer = pl.Trainer(
        strategy=KINDS[kind](timeout=60, balance=[2.0, 1.0], **options), plugins=plugins, max_steps=9, **FAST
    )
    net = Net()
    trainer.fit(net, DataLoader(dataset(48), batch_size=4))
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach().tolist()
    return net.seen, weights, trainer.world_size, dist.get_world_size()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_in_the_launchers_group_is_that_of_torchrun(kind: str) -> None:
    options = {"tau": 3} if kind == "diloco" else {}
    theirs, ours = (run(_fit, 2, kind, made, nodes=[1, 1], **options) for made in (True, False))
    assert theirs == ours
    assert theirs[0][2:] == (2, 2)
    assert {len(batch) for batch in theirs[0][0]} != {len(batch) for batch in theirs[1][0]}


def _refused(backend: str, **options: Any) -> str:
    del os.environ["TORCHELASTIC_RUN_ID"]
    dist.init_process_group(backend)
    trainer = pl.Trainer(strategy=OursDDP(timeout=30, **options), plugins=[LikeRays()], max_steps=1, **FAST)
    kind = LaunchError if backend != "gloo" else UnsupportedError
    with pytest.raises(kind) as caught:
        trainer.fit(Net(), DataLoader(dataset(8), batch_size=4))
    return str(caught.value)


def test_a_group_of_another_backend_is_refused() -> None:
    for message in run(_refused, 2, "cpu:gloo,cuda:gloo"):
        assert "TorchConfig(backend='gloo')" in message


def test_a_group_that_cannot_be_left_is_refused_where_that_is_asked_for() -> None:
    for message in run(_refused, 2, "gloo", on_peer_loss="continue"):
        assert "FailureConfig(max_failures=...)" in message


def test_the_launchers_group_is_known_also_to_a_second_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    group = object()
    monkeypatch.setattr(environment, "_given", None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(type(dist.group), "WORLD", group)
    environment.check_process_group(used=True, continues=True)  # our own
    environment.check_process_group(used=False, continues=False)
    with pytest.raises(UnsupportedError, match="max_failures"):
        environment.check_process_group(used=True, continues=True)


@needs_ray
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["hetero_ddp", "hetero_diloco"])
def test_the_example_trains_on_two_workers(tmp_path: Path, strategy: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, str(EXAMPLE), "--workers", "2", "--emulate", "--strategy", strategy, "--epochs", "4"]
    command += ["--folder", str(tmp_path / "runs")]
    done = completed(command, env, patience=30.0, timeout=500)
    line = re.search(r"^(\d+) ranks took (\d+) steps; samples per step: \[(\d+), (\d+)\]$", done.stdout, re.MULTILINE)
    assert line is not None, done.stdout[-3000:]
    ranks, steps, fast, slow = map(int, line.groups())
    assert (ranks, steps) == (2, 4 * 45)
    assert fast + slow == 32
    assert fast > 1.5 * slow  # by hand: 24.6 and 7.4
    accuracy = re.search(r"test accuracy: ([\d.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy.group(1)) > 80
    assert list((tmp_path / "runs").glob("step=*-complete.ckpt"))
