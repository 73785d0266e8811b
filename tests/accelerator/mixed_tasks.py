"""Tasks for the ranks of mixed jobs: the life of a model, on the device of one rank and the CPU of another."""

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_device
import lightning.pytorch as pl
import torch
from tasks import FAST, EvaluatedNet, Save, dataset
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_hetero.strategies.table import ENTRIES

SAMPLES, BATCH, EPOCHS = 48, 12, 3  # 12 steps
STOPS = 5, 9  # the steps at which checkpoints are saved, within the second and the third epoch


@dataclass
class Row:
    """A strategy in a mixed job.

    Attributes:
        name: its string.
        options: of the strategy.
        limit: how near a resumed run comes to one that was not stopped; ``None``: nobody promises anything.
        momentum: the kind that it needs: ``"nesterov"`` or ``"plain"``. Default: AdamW.
        nodes: ranks of each node.
        balance: the option, if shares are not fixed ones.
        gloo: ``"stage"`` where DDP needs it to take tensors of the device, as it does with CUDA's.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    limit: float | None = 1e-9
    momentum: str = ""
    nodes: tuple[int, ...] = (1, 1)
    gloo: str = ""
    balance: str = ""

    def strategy(self) -> Any:
        [entry] = [entry for entry in ENTRIES if entry.name == self.name]
        balance = self.balance or [float(3 - rank % 2) for rank in range(sum(self.nodes))]
        return entry.strategy(balance=balance, global_batch_size=BATCH, **self.options)


class MixedNet(EvaluatedNet):
    """Has buffers too, and optimizers with state of every kind."""

    def __init__(self, momentum: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.momentum = momentum

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.momentum:
            return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, nesterov=self.momentum == "nesterov")
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class OnOwnDevice(pl.Callback):
    """Checks after every step that all that belongs to the model is on this rank's own device."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        home = {trainer.strategy.root_device.type}
        assert {t.device.type for t in (*module.parameters(), *module.buffers())} == home
        for optimizer in trainer.optimizers:
            states = {key: leaf for state in optimizer.state.values() for key, leaf in state.items()}
            assert {state.device.type for key, state in states.items() if key != "step"} == home
            assert {state.device.type for key, state in states.items() if key == "step"} <= {"cpu", *home}


def loaders() -> tuple[DataLoader, DataLoader]:
    data = dataset(SAMPLES)
    return DataLoader(data, batch_size=4, shuffle=True), DataLoader(dataset(31), batch_size=4)


def values(module: nn.Module) -> torch.Tensor:
    """All parameters and buffers, flat."""
    return torch.cat([v.detach().double().cpu().reshape(-1) for v in module.state_dict().values()])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ranks agree: to the last bit, but for CUDA, whose kernels round in other ways than a CPU's."""
    return torch.allclose(one, other, rtol=0, atol=1e-9 if torch.cuda.device_count() else 0)


def fit(row: Row, accelerator: str, save: tuple[str, int] | None = None, resume: str | None = None) -> dict[str, Any]:
    """Fits with validation, saves on the way, then validates and tests."""
    module, (training, evaluation) = MixedNet(row.momentum), loaders()
    callbacks = [OnOwnDevice(), *([Save(*save, stop=False)] if save else [])]
    trainer = pl.Trainer(
        strategy=row.strategy(),
        **{**FAST, "accelerator": accelerator, "devices": "auto" if accelerator == "fake" else 1},
        num_nodes=len(row.nodes),
        max_epochs=EPOCHS,
        callbacks=callbacks,
        num_sanity_val_steps=1,
    )
    assert trainer.strategy.root_device.type == accelerator
    torch.manual_seed(trainer.global_rank)
    trainer.fit(module, training, evaluation, ckpt_path=resume)
    assert trainer.global_step == EPOCHS * SAMPLES // BATCH
    final = values(module)
    [validated], [tested] = trainer.validate(module, evaluation), trainer.test(module, evaluation)
    return {"final": final, "validated": validated["val"], "tested": tested["test"], "truth": truth(module)}


def truth(module: MixedNet) -> float:
    """The loss over all samples, computed in this process."""
    module = module.to("cpu").eval()
    with torch.no_grad():
        return float(module.loss(dataset(31)[:]))


def life(row: Row, folder: str, library: str) -> dict[str, Any]:
    """Train with the device on rank 0; resume with the device on rank 1; resume again as at first."""
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
    warnings.filterwarnings("ignore", "Replicas have not met between step")
    rank, there, back = int(os.environ["RANK"]), str(Path(folder, "there.ckpt")), str(Path(folder, "back.ckpt"))
    kinds = "cpu", "cpu"
    if rank == 0:
        kinds = fake_device.load(library), "cpu"
    results = {"first": fit(row, kinds[0], save=(there, STOPS[0]))}
    if rank == 1:  # until now this process could not have made a tensor of the device
        kinds = "cpu", fake_device.load(library)
    results["crossed"] = fit(row, kinds[1], save=(back, STOPS[1]), resume=there)
    results["returned"] = fit(row, kinds[0], resume=back)
    return results


def devices_in(path: Path) -> set[str]:
    """Devices on which the tensors of a file were when it was written."""
    seen: set[str] = set()

    def place(storage: Any, location: str) -> Any:
        seen.add(location)
        return storage

    assert tree_leaves(torch.load(path, map_location=place, weights_only=True))
    return seen
