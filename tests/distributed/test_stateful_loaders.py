"""Loaders with a saved position go on there, on every rank, within an epoch and between two."""

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import Net, dataset, parameters, rank, train
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import (
    HeteroDDPStrategy,
    NodeAverageStrategy,
)

BATCH = 4
LENGTHS = (3, 7)  # batches of each rank and epoch
ONE_EACH = {"ranks_per_node": 1, "balance": "off"}
KINDS = [
    (HeteroDDPStrategy, {"balance": "off"}),
    (NodeAverageStrategy, {**ONE_EACH, "every_n_steps": 2}),
]
NAMES = [kind.__name__ for kind, _ in KINDS]


class Shard(IterableDataset):
    """This rank's samples, in another order in each pass, with a saved position. Workers take batches in turn."""

    def __init__(self) -> None:
        self.data = dataset(BATCH * sum(LENGTHS))
        self.passes, self.at = 0, 0

    def __iter__(self) -> Iterator[Any]:
        info, number = get_worker_info(), rank()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        order = torch.randperm(
            BATCH * LENGTHS[number], generator=torch.Generator().manual_seed(100 * number + self.passes)
        )
        own = [i for i in range(len(order)) if i // BATCH % workers == worker]
        for i in own[self.at :]:
            self.at += 1
            yield self.data[BATCH * sum(LENGTHS[:number]) + int(order[i])]
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at = state["passes"], state["at"]


class SaveAt(pl.Callback):
    """Saves after so many steps, or at the end of so many epochs."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (2, 5, 7, 9):
            trainer.save_checkpoint(f"{self.folder}/step-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/epoch-{trainer.current_epoch}.ckpt")


def _fit(kind: Any, options: Any, loader: Any, path: Any = None, **more: Any) -> dict[str, Any]:
    module = Net("adamw")
    trainer = train(module, kind(**options), loader, path=path, **{"max_epochs": 3, **more})
    return {"seen": module.seen, "parameters": parameters(module), "steps": trainer.global_step}


def _loader(data: str, workers: int) -> Any:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
    if data == "stream":
        return StatefulDataLoader(Shard(), batch_size=BATCH, num_workers=workers)
    samples = dataset(56)
    if data == "sharded":
        sampler = DistributedSampler(samples, num_replicas=2, rank=rank(), seed=3)
        return StatefulDataLoader(samples, batch_size=BATCH, sampler=sampler, num_workers=workers)
    return StatefulDataLoader(samples, batch_size=BATCH, shuffle=True, num_workers=workers)


#: Data, workers, and the checkpoints that fits go on from: at step 5 rank 0 has come to the end of its stream, at 7 all
#: have; step 9 is in the second epoch.
DONE = {"step-2": 2, "step-9": 9, "epoch-0": max(LENGTHS)}
LOADERS = [
    ("stream", 0, {**DONE, "step-5": 5, "step-7": 7}),
    ("stream", 2, DONE),
    ("sharded", 2, DONE),
    ("map", 2, DONE),
]


def _resumed(kind: Any, options: Any, folder: str, cases: Any) -> list[list[dict[str, Any]]]:
    found = []
    for data, workers, names in cases:
        results = []
        for name in (None, *names):
            pl.seed_everything(4)
            more = {"path": f"{folder}/{name}.ckpt"} if name else {"callbacks": [SaveAt(folder)]}
            results.append(_fit(kind, options, _loader(data, workers), **more))
        found.append(results)
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize("cases", [LOADERS[:1], LOADERS[1:]], ids=["stream", "others"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=NAMES)
def test_loaders_go_on_where_they_were(kind: Any, options: Any, cases: Any, tmp_path: Any) -> None:
    for results in run(_resumed, 2, kind, options, str(tmp_path), cases):
        for case, (whole, *resumed) in zip(cases, results, strict=True):
            assert whole["steps"] == 3 * max(LENGTHS)
            for (name, steps), rest in zip(case[2].items(), resumed, strict=True):
                assert rest["seen"] == whole["seen"][steps:], (case, name)
                assert torch.equal(rest["parameters"], whole["parameters"]), (case, name)


def _elsewhere(folder: str, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = f"{folder}/step-2.ckpt"
        kind, options = KINDS[0]
        if world == 2:
            _fit(kind, options, _loader("stream", 0), callbacks=[SaveAt(folder)], max_epochs=1)
        else:
            _fit(kind, options, _loader("stream", 0), path, max_epochs=1)
    return [str(w.message) for w in caught if "dataloaders of 2 ranks" in str(w.message)]


def test_states_of_another_number_of_ranks_are_not_used_and_it_is_said(tmp_path: Any) -> None:
    run(_elsewhere, 2, str(tmp_path), 2)
    [messages] = run(_elsewhere, 1, str(tmp_path), 1)
    assert len(messages) == 1
    assert "this job has 1 ranks. All of them begin their epoch again" in messages[0]


class Plain(IterableDataset):
    """This rank's samples, without a position."""

    def __iter__(self) -> Iterator[Any]:
        data = dataset(8 * BATCH)
        return (data[i] for i in range(rank(), len(data), 2))


class SaveFirst(pl.Callback):
    """Saves after the first batch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)


def _loses(folder: str, accumulated: int) -> list[str]:
    limits, loader = {"max_epochs": 1, "accumulate_grad_batches": accumulated}, DataLoader(Plain(), batch_size=BATCH)
    train(Net(), HeteroDDPStrategy(balance="off"), loader, callbacks=[SaveFirst(f"{folder}/a")], **limits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Net(), HeteroDDPStrategy(balance="off"), loader, path=f"{folder}/a", **limits)
    return [str(w.message) for w in caught if "The checkpoint was saved" in str(w.message)]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_is_said_what_a_checkpoint_does_not_hold(tmp_path: Any, accumulated: int) -> None:
    first, second = run(_loses, 2, str(tmp_path), accumulated)
    assert second == []
    assert len(first) == accumulated
    assert "after 1 batches of an epoch, and the training data cannot go on there" in first[-1]
    assert accumulated == 1 or "those of 1 batch(es) are not in it" in first[0]
