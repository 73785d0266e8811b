"""Controls: each of these mistakes is caught by what the tests of mixed jobs compare."""

import contextlib
from pathlib import Path
from typing import Any

import fake_device
import pytest
import test_border
import torch
from mixed_tasks import Row, fit
from ranks import run
from test_mixed import alike, check_no_device
from test_mixed_features import measured

from lightning_hetero.checkpoint import shards
from lightning_hetero.comm import object_collectives
from lightning_hetero.comm.staging import HostStage
from lightning_hetero.strategies import base, saving, training_step


def files_hold_devices() -> None:
    saving.portable = shards.portable = lambda value: value  # type: ignore[attr-defined]


def a_device_in_messages() -> None:
    object_collectives._Packer.reducer_override = lambda self, obj: NotImplemented  # type: ignore[method-assign]


def weights_are_shared_on_the_device() -> None:
    base.values_shared = lambda *_: contextlib.nullcontext()  # type: ignore[attr-defined]


def metrics_are_gathered_on_the_device() -> None:
    training_step.sync_anywhere = lambda _: None  # type: ignore[attr-defined]


def sums_stay_on_the_host() -> None:
    def through(self: HostStage, tensor: torch.Tensor, use: Any) -> None:
        use(tensor.detach().cpu().view(-1))

    HostStage.through = through  # type: ignore[method-assign]


def one_fit(mutant: Any, row: Row, path: str) -> dict[str, Any]:
    mutant()
    return fit(row, fake_device.load_if_given(), save=(path, 5))


def broadcasts(mutant: Any, row: Row, _: str) -> dict[str, Any]:
    mutant()
    test_border.fit(fake_device.load_if_given())
    return {"final": torch.zeros(1)}


def measures(mutant: Any, row: Row, _: str) -> dict[str, Any]:
    mutant()
    return measured(row)


DDP, NODE = Row("hetero_ddp"), Row("hetero_node", {"every_n_steps": 3})
#: Each mutant, the job that shows it, and the words of the failure.
MUTANTS = [
    (files_hold_devices, one_fit, NODE, "fake"),
    (weights_are_shared_on_the_device, one_fit, NODE, "No backend type"),
    (metrics_are_gathered_on_the_device, measures, NODE, "No backend type"),
    (a_device_in_messages, broadcasts, DDP, "tagged with fake:0"),
    (sums_stay_on_the_host, one_fit, DDP, "differ"),
]


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("mutant", "job", "row", "words"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS])
def test_mistakes_are_caught(fake: str, tmp_path: Path, mutant: Any, job: Any, row: Row, words: str) -> None:
    env_of: Any = lambda rank: {"FAKE_LIBRARY": fake} if rank == 0 else {}  # noqa: E731

    def check() -> None:
        results = run(job, 2, mutant, row, str(tmp_path / "saved.ckpt"), nodes=[1, 1], env_of=env_of, timeout=120)
        alike(results)
        check_no_device(tmp_path)

    with pytest.raises(AssertionError, match=words):
        check()
