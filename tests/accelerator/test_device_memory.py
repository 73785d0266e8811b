"""Memory that strategies take, beyond the model, its gradients and its optimizer: on a device, and on its host."""

import gc
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import fake_device
import lightning.pytorch as pl
import pytest
import torch
from mixed_tasks import Row
from ranks import run
from tasks import FAST
from test_mixed import ROWS, SLOW, name
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.replicas import vectors

STEPS, WIDTH, LAYERS = 10, 256, 8
#: Bytes per parameter that stay, and that an exchange takes for a moment: a sixteenth of the model, and what does not
#: fit into whole parts. DDP keeps buckets of gradients, as under Lightning's own strategy.
STAYS, PEAK = {"hetero_ddp": 4.0, "hetero_auto": 4.0}, 0.3


#: Bytes per parameter on the host, where none is named 12: the reference, this replica's values, the mean. Asynchronous
#: centers and gossip have buffers for messages; outer optimizers have momenta.
ON_HOST = {
    "hetero_ddp": 8,  # buckets on their way through gloo
    "hetero_auto": 16,
    **dict.fromkeys(("hetero_easgd_async", "hetero_easgd_hogwild", "hetero_measgd_async"), 16),
    "hetero_diloco": 16,
    "hetero_easgd_round_robin": 20,
    **dict.fromkeys(("hetero_gossip", "hetero_gossip_async", "hetero_gossip_push_sum"), 24),
    **dict.fromkeys(("hetero_diloco_async", "hetero_noloco"), 36),
}


#: Options with other vectors on their way than those of :data:`ROWS`.
FURTHER = [
    Row("hetero_gossip", {"every_n_steps": 2, "exchange": "push", "topology": "ring", **SLOW}),
    Row("hetero_gossip", {"every_n_steps": 2, "wire": "bf16", **SLOW}),
    Row("hetero_gossip_async", {"every_n_steps": 2, "wire": "bf16", **SLOW}),
    Row("hetero_gossip_push_sum", {"every_n_steps": 2, "wire": "bf16", **SLOW}),
    Row("hetero_noloco", {"tau": 4, "wire": "bf16", **SLOW}),
]


class Deep(pl.LightningModule):
    def __init__(self, momentum: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.momentum = momentum

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, nesterov=self.momentum == "nesterov")


class Memory(pl.Callback):
    """Bytes in use at the start of each step, and their peak within the step."""

    def __init__(self, module: Any) -> None:
        self.module, self.held, self.most = module, list[int](), list[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.held.append(self.module.memory_allocated())
        self.module.reset_peak_memory_stats()

    def on_train_batch_end(self, *_: Any) -> None:
        self.most.append(self.module.max_memory_allocated())


class OnHost(pl.Callback):
    """Bytes of all tensors on the host at the start of a step."""

    def on_train_batch_start(self, *_: Any) -> None:
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
        self.bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class MadeOnHost(TorchDispatchMode):
    """Notes each large vector that this thread makes on the host, and each in pinned memory, with the lines that ask.

    Args:
        least: bytes of a large one.
        made: the notes of all threads.
    """

    def __init__(self, least: float, made: list[str]) -> None:
        super().__init__()
        self.least, self.made = least, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_place(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(out):
            if not isinstance(one, torch.Tensor) or one.device.type != "cpu" or _place(one) in given:
                continue
            if one.untyped_storage().nbytes() >= self.least or (kwargs or {}).get("pin_memory"):
                own = [line for line in traceback.extract_stack() if "lightning_hetero/" in line.filename]
                lines = [f"{Path(line.filename).name}:{line.lineno}" for line in own[:-4:-1]]
                self.made.append(f"{func} in {' < '.join(lines)}")
        return out


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Made(pl.Callback):
    """How many vectors the threads that begin from now on have made before each step.

    Args:
        patch: ends it.
        least: see :class:`MadeOnHost`.
    """

    def __init__(self, patch: pytest.MonkeyPatch, least: float) -> None:
        self.least, self.made, self.steps, usual = least, list[str](), list[int](), threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            with MadeOnHost(least, self.made):
                usual(thread)

        patch.setattr(threading.Thread, "run", watched)

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append(len(self.made))


def measured(row: Row) -> tuple[Any, ...]:
    """Number of parameters; bytes on the device between steps and at the peak, once all strategies have exchanged.

    Then what large vectors were made on the host in three steps with exchanges, and the bytes on the host.
    """
    warnings.filterwarnings("ignore", "Ranks .* share ")
    kind = fake_device.load_if_given()
    vectors.SMALLEST = 1 << 10
    patch = pytest.MonkeyPatch()
    memory, host, model = Memory(getattr(torch, kind)), OnHost(), Deep(row.momentum)
    parameters = sum(p.numel() for p in model.parameters())
    made = Made(patch, parameters / 2)
    settings = {**FAST, "accelerator": kind, "devices": 1, "num_nodes": 2, "max_steps": STEPS}
    trainer = pl.Trainer(strategy=row.strategy(), callbacks=[memory, host, made], limit_val_batches=0, **settings)
    with MadeOnHost(made.least, made.made):
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(12 * STEPS, WIDTH)), batch_size=6))
    patch.undo()
    return parameters, memory.held[-1], max(memory.most[2:]), made.made[made.steps[-4] : made.steps[-1]], host.bytes


@pytest.fixture(scope="module")
def nothing(request: pytest.FixtureRequest) -> dict[str, tuple[Any, ...]]:
    """Memory of replicas that never exchange, by the optimizer's momentum."""
    device = "cuda" if torch.cuda.device_count() else request.getfixturevalue("fake")
    found = {}
    for momentum in ("plain", "nesterov"):
        row = Row("hetero_node", {"every_n_steps": 1000}, momentum=momentum)
        found[momentum] = run(measured, 2, row, nodes=[1, 1], env={"FAKE_LIBRARY": device})[0]
    return found


@pytest.mark.parametrize("row", [*ROWS, *FURTHER], ids=name)
def test_nothing_stays_on_the_device(nothing: dict[str, tuple[Any, ...]], device: str, row: Row) -> None:
    row = Row(row.name, row.options, momentum=row.momentum or "plain")
    parameters, held, most, made, host = run(measured, 2, row, nodes=[1, 1], env={"FAKE_LIBRARY": device})[0]
    _, held_alone, most_alone, *_ = nothing[row.momentum]
    stays = STAYS.get(row.name, 0.0)
    assert made == []
    assert host / parameters <= ON_HOST.get(row.name, 12) + 1.5  # data, and pieces that do not grow with the model
    assert (held - held_alone) / parameters <= stays + 0.01
    assert (most - most_alone) / parameters <= stays + PEAK


def test_vectors_of_all_threads_are_seen() -> None:
    def work(own: torch.Tensor) -> None:
        torch.add(own, 1, out=own)
        own.view(-1, 2).mul_(2)  # in the same memory
        own.add(1)

    with pytest.MonkeyPatch.context() as patch:
        made = Made(patch, least=400)
        thread = threading.Thread(target=work, args=[torch.zeros(100)])
        thread.start()
        thread.join()
        with MadeOnHost(made.least, made.made):
            work(torch.zeros(100))
            work(torch.zeros(98))
    assert [note.split(" in ")[0] for note in made.made] == ["aten.add.Tensor", "aten.zeros.default", "aten.add.Tensor"]


class Saves(pl.Callback):
    """Saves between two exchanges: bytes per parameter that the device needs for it."""

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.module, self.most = path, module, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step in (5, 7):
            held = self.module.memory_allocated()
            self.module.reset_peak_memory_stats()
            trainer.save_checkpoint(self.path)
            self.most = (self.module.max_memory_allocated() - held) / sum(p.numel() for p in module.parameters())


def saved(name: str, path: str) -> tuple[float, list[str], bool]:
    """Bytes per parameter for a save; devices in its file; whether this rank's model is as if it had saved nothing."""
    warnings.filterwarnings("ignore", "Ranks .* share ")
    kind = fake_device.load_if_given()
    vectors.SMALLEST = 1 << 10
    row = next(row for row in ROWS if row.name == name)
    settings = {**FAST, "accelerator": kind, "devices": 1, "num_nodes": 2, "max_steps": STEPS}
    finals, saves = [], Saves(path, getattr(torch, kind))
    for callbacks in ([], [saves]):
        model = Deep(row.momentum)
        trainer = pl.Trainer(strategy=row.strategy(), callbacks=callbacks, limit_val_batches=0, **settings)
        data = torch.randn(12 * STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
        trainer.fit(model, DataLoader(TensorDataset(data), batch_size=6))
        finals.append(torch.cat([p.detach().cpu().view(-1) for p in model.parameters()]))
    places = {str(value.device) for value in torch.load(path, weights_only=True)["state_dict"].values()}
    return saves.most, sorted(places), torch.equal(*finals)


@pytest.mark.parametrize("name", ["hetero_node", "hetero_daso", "hetero_gossip"])
def test_a_save_makes_no_second_model_on_the_device(device: str, tmp_path: Path, name: str) -> None:
    found = run(saved, 2, name, str(tmp_path / "saved.ckpt"), nodes=[1, 1], env={"FAKE_LIBRARY": device})
    for most, places, same in found:
        assert most <= PEAK
        assert (places, same) == (["cpu"], True)
