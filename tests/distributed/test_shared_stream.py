"""Streams that all ranks read alike: each sample once, and a resumed run at the right sample."""

import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from ranks import run
from tasks import Net, Save, dataset, error, one_process, parameters, train
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy, SharedStream

SAMPLES, BATCH = 50, 4  # of 2 ranks: six batches of 8 samples, and one of 2
KINDS = [(HeteroDDPStrategy, {}), (NodeAverageStrategy, {"ranks_per_node": 1, "every_n_steps": 2})]


class Plain(IterableDataset):
    """A stream with another order in each epoch."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.data, self.epoch = dataset(samples), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in self.order())


class Jumping(Plain):
    def iter_from(self, index: int) -> Iterator[Any]:
        return (self.data[i] for i in self.order()[index:])


class Sized(Plain):
    def __len__(self) -> int:
        return len(self.data)


class Costly(Plain):
    """Has costs of samples, with few very large ones."""

    def sample_cost(self, sample: Any) -> int:
        return cost(int(sample[3]))


def cost(index: int) -> int:
    return 1 + 7 * index % 29 + 90 * (index % 11 == 0)


def orders(epochs: int) -> list[list[int]]:
    """The global batches of all epochs."""
    data, batches = Plain(), []
    for epoch in range(epochs):
        data.set_epoch(epoch)
        order = iter(data.order())
        while batch := list(islice(order, 2 * BATCH)):
            batches.append(batch)
    return batches


def _fit(kind: Any, options: Any, data: Any, workers: int = 0, path: Any = None, **more: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # Lightning always warns
    module = Net()
    loader = DataLoader(SharedStream(data), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)
    trainer = train(module, kind(**{"balance": [3, 1], **options}), loader, path=path, **{"max_epochs": 2, **more})
    return {"seen": module.seen, "parameters": parameters(module), "steps": trainer.global_step}


#: Streams, and the workers that read them.
STREAMS = [(data, workers) for data in (Plain, Jumping, Sized) for workers in (0, 2)]


def _fits() -> list[dict[str, Any]]:
    return [_fit(HeteroDDPStrategy, {}, data(), workers) for data, workers in STREAMS]


def test_the_global_batches_are_those_of_one_process() -> None:
    truth = one_process(SAMPLES, orders(2), epochs=1)
    for case, *results in zip(STREAMS, *run(_fits, 2), strict=True):
        for step, batch in enumerate(orders(2)):
            seen = [i for result in results for i in result["seen"][step]]
            assert Counter(seen) == Counter(batch) if len(batch) > 2 else set(seen) == set(batch), case
        assert {len(batch) for batch in results[0]["seen"][:6]} == {6}  # three quarters of 8
        assert all(error(result["parameters"], truth) <= 1e-10 for result in results), case


#: Resumed fits: strategy, options, stream, workers, and the step of the checkpoint, within an epoch or at its end.
RESUMED = [(kind, options, data, 0, 7) for kind, options in KINDS for data in (Plain, Sized)]
RESUMED.append((HeteroDDPStrategy, {}, Jumping, 2, 10))


def _resumed(folder: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = []
    for number, (kind, options, data, workers, steps) in enumerate(RESUMED):
        path = f"{folder}/{number}.ckpt"
        whole = _fit(kind, options, data(), workers, callbacks=[Save(path, steps, False)])
        found.append((whole, _fit(kind, options, data(), workers, path=path)))
    return found


def test_a_run_goes_on_with_the_next_batch_or_epoch(tmp_path: Any) -> None:
    for results in run(_resumed, 2, tmp_path):
        for case, (whole, rest) in zip(RESUMED, results, strict=True):
            assert rest["seen"] == whole["seen"][case[-1] :], case
            assert torch.equal(rest["parameters"], whole["parameters"]), case


#: Streams that are dealt by cost: the rule, the number of workers, and the step of the checkpoint.
DEALT = [(rule, workers, steps) for rule in ("additive", "padded") for workers, steps in ((0, 10), (2, 3))]


def _dealt(folder: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = []
    for rule, workers, steps in DEALT:
        path, options = f"{folder}/{rule}-{workers}.ckpt", {"cost": rule, "balance": "off"}
        whole = _fit(HeteroDDPStrategy, options, Costly(), workers, callbacks=[Save(path, steps, False)])
        found.append((whole, _fit(HeteroDDPStrategy, options, Costly(), workers, path=path)))
    return found


def test_a_stream_is_dealt_by_cost(tmp_path: Any) -> None:
    truth = one_process(SAMPLES, orders(2), epochs=1)
    for case, *results in zip(DEALT, *run(_dealt, 2, tmp_path), strict=True):
        largest_parts = []
        for step, batch in enumerate(orders(2)):
            parts = [whole["seen"][step] for whole, _ in results]
            assert Counter(i for part in parts for i in part) == Counter(batch), case
            sizes = [sum(map(cost, p)) if case[0] == "additive" else len(p) * max(map(cost, p)) for p in parts]
            largest_parts.append(max(sizes) / sum(sizes))
        assert len({len(batch) for batch in results[0][0]["seen"]}) > 2, case
        assert sum(largest_parts) / len(largest_parts) < 0.65, case
        for whole, rest in results:
            assert error(whole["parameters"], truth) <= 1e-10, case
            assert rest["seen"] == whole["seen"][case[-1] :], case
            assert torch.equal(rest["parameters"], whole["parameters"]), case


def _under_ddp(workers: int) -> list[int]:
    module, loader = Net(), DataLoader(SharedStream(Plain(48)), batch_size=BATCH, num_workers=workers)
    train(module, "ddp", loader, devices=2)
    return [i for batch in module.seen for i in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_under_ddp_ranks_take_turns(workers: int) -> None:
    first, second = run(_under_ddp, 2, workers)
    assert len(first) == len(second) == 24
    assert Counter(first + second) == Counter(range(48))
