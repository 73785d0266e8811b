"""Batch samplers of the user: used as they are, every sample once, and as under `ddp`."""

import itertools
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from ranks import run
from tasks import EvaluatedNet, Net, Predictions, dataset, error, one_process, parameters, rank, train
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler

from lightning_hetero import HeteroDDPStrategy

SAMPLES = 50


class Lists:
    """No subclass of torch's: lists of 3 and of 4 indices in turn, and one of 5 at the end."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        for index in range(len(self)):
            first = 7 * (index // 2) + 3 * (index % 2)
            yield order[first : first + 3 + index % 2] if index < 13 else order[first:]

    def __len__(self) -> int:
        return 14


class Buckets(BatchSampler):
    """A subclass with a constructor of its own, which Lightning cannot call."""

    def __init__(self, borders: list[int]) -> None:
        self.borders = borders

    def __iter__(self) -> Iterator[list[int]]:
        for first, last in zip([0, *self.borders], [*self.borders, SAMPLES], strict=True):
            yield list(range(first, last))

    def __len__(self) -> int:
        return len(self.borders) + 1


class Own(BatchSampler):
    """A subclass that shards by itself."""

    def __init__(self, data: Any, rank: int, world: int) -> None:
        super().__init__(DistributedSampler(data, world, rank, shuffle=False), 5, drop_last=False)


BUCKETS = Buckets([4, 9, 15, 22, 26, 33, 41, 44])


def _sampler(kind: str, data: Any) -> Any:
    if kind == "own shards":
        return Own(data, rank(), 2)
    return {"lists": Lists(), "buckets": BUCKETS, "sequential": BatchSampler(SequentialSampler(data), 4, False)}[kind]


class Whole(Dataset):
    """Takes the indices of a batch, and makes all of it at once."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, indices: list[int]) -> Any:
        assert isinstance(indices, list)
        return [tensor[indices] for tensor in self.data.tensors]


#: Two forms of a DataLoader with a sampler of batches: the dataset makes samples, or whole batches.
FORMS = {
    "samples": lambda data, sampler, **options: DataLoader(data, batch_sampler=sampler, **options),
    "batches": lambda data, sampler, **options: DataLoader(Whole(data), sampler=sampler, batch_size=None, **options),
}


def _pairs(batches: list[list[int]]) -> list[list[int]]:
    return [list(itertools.chain(*batches[i : i + 2])) for i in range(0, len(batches), 2)]


KINDS = ["lists", "buckets", "sequential", "own shards"]
JOB = [(kind, form, 0) for form in FORMS for kind in KINDS] + [("buckets", "batches", 1)]


def _fits() -> list[dict[str, Any]]:
    torch.manual_seed(rank())
    return [_fit(*case) for case in JOB]


def _fit(kind: str, form: str, workers: int) -> dict[str, Any]:
    data, module, writer = dataset(SAMPLES), EvaluatedNet(), Predictions()
    sampler = _sampler(kind, data)
    loader = FORMS[form](data, sampler, num_workers=workers)
    strategy = HeteroDDPStrategy(balance="auto" if kind == "own shards" else [2.0, 1.0])
    trainer = train(module, strategy, loader, DataLoader(data, batch_size=5), max_epochs=2, callbacks=[writer])
    assert sampler in (loader.batch_sampler, loader.sampler)  # the user's loader stays as it was
    result = {"seen": module.seen, "parameters": parameters(module), "steps": trainer.global_step}
    if kind != "own shards":
        module.evaluated = []
        # Two lists at a time are a global batch: the last has one sample, too few for two ranks.
        batches = [[*range(47)], [47, 48], [49]] if kind == "lists" else _sampler(kind, data)
        evaluation = FORMS[form](data, batches)
        trainer.test(module, evaluation, verbose=False)
        result["tested"] = module.evaluated
        trainer.predict(module, evaluation)
        result["predicted"] = writer.pairs
    return result


def test_any_batch_sampler_is_used_as_it_is() -> None:
    pairs = [list(itertools.chain(*two)) for two in itertools.zip_longest(*[iter(BUCKETS)] * 2, fillvalue=[])]
    truth = one_process(SAMPLES, pairs)
    for case, *results in zip(JOB, *run(_fits, 2), strict=True):
        kind, once = case[0], list(range(SAMPLES))
        seen = [result["seen"] for result in results]
        assert sorted(i for batches in seen for batch in batches for i in batch) == sorted(2 * once), case
        assert error(results[0]["parameters"], results[1]["parameters"]) <= 1e-12
        if kind == "own shards":
            assert all(i % 2 == number for number, batches in enumerate(seen) for batch in batches for i in batch)
            continue
        assert sorted(i for result in results for i in result["tested"]) == once, case
        predicted = [pair for result in results for pair in result["predicted"]]
        assert all(indices == found for indices, found in predicted)
        assert sorted(i for indices, _ in predicted for i in indices) == once, case
        if kind == "buckets":  # the sampler's own batches, two at a time, are the global ones
            assert [[*mine, *other] for mine, other in zip(*seen, strict=True)] == 2 * pairs, case
            assert error(results[0]["parameters"], truth) <= 1e-10, case
        assert kind != "lists" or results[0]["steps"] == 2 * 7


def _as_ddp(strategy: str) -> list[list[int]]:
    data, module = dataset(48), Net()
    loader = FORMS["batches"](data, BatchSampler(SequentialSampler(data), 8, drop_last=False))
    train(module, strategy, loader, devices=2)
    return module.seen


def test_batches_go_to_the_ranks_as_under_ddp() -> None:
    pl.seed_everything(0)
    ours, stock = run(_as_ddp, 2, "hetero_ddp"), run(_as_ddp, 2, "ddp")
    lists = [[*range(first, first + 8)] for first in range(0, 48, 8)]
    assert sorted(ours[0] + ours[1]) == sorted(stock[0] + stock[1]) == lists  # ddp in an order of its own
    assert ours == [lists[0::2], lists[1::2]]
