"""Every kind of dataloader: each sample counts exactly once, and the weights are those of one process."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from ranks import attempt, run
from tasks import Net, Save, dataset, error, one_process, parameters, rank, train
from torch.utils.data import DataLoader, IterableDataset, Subset, WeightedRandomSampler, get_worker_info

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.errors import DataError

WORLD = 3
UNEVEN = [5.0, 1.0, 2.0]


class Curriculum:
    """A sampler of the user's: its own order, some samples twice, and random."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(self.samples, (self.samples,)).tolist())


def _custom(kind: str, balance: Any) -> dict[str, Any]:
    module = Net()
    sampler = WeightedRandomSampler([1.0] * 45 + [3.0] * 45, 90) if kind == "weighted" else Curriculum(90)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 5)
    loader = DataLoader(dataset(90), batch_size=4, sampler=sampler)
    train(module, HeteroDDPStrategy(balance=balance), loader, max_epochs=2)
    return {"parameters": parameters(module), "seen": module.seen}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", ["weighted", "curriculum"])
def test_samplers_of_the_user(kind: str) -> None:
    results = run(_custom, WORLD, kind, UNEVEN)
    assert len({len(result["seen"]) for result in results}) == 1
    assert error(results[1]["parameters"], results[0]["parameters"]) <= 1e-12
    total = sum(len(batch) for result in results for batch in result["seen"])
    assert 2 * 90 <= total <= 2 * 90 + WORLD * 2  # padding batches only in the tails
    single = run(_custom, 1, kind, [1.0])[0]  # batches of 4, not 12: but the order must be the sampler's own
    ours = [i for step in zip(*(r["seen"] for r in results), strict=True) for part in step for i in part]
    theirs = [i for batch in single["seen"] for i in batch]
    assert ours[:84] == theirs[:84]


# -- several loaders at once ---------------------------------------------------------------------------------


class TwoSources(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        a, b = batch["a"], batch["b"]
        self.seen.append(a[3].tolist())
        loss = self.loss(a) if a is not None else 0.0
        return loss + 0.5 * self.loss(b) if b is not None else loss


#: Modes, sizes, and batch sizes.
COMBINED = [
    ("max_size_cycle", (96, 96), (4, 4)),
    ("max_size_cycle", (96, 36), (4, 2)),  # the shorter one starts over
    ("min_size", (90, 48), (4, 2)),
    ("max_size", (60, 36), (4, 4)),
]


def _combined(world: int, balance: Any) -> list[dict[str, Any]]:
    results = []
    for mode, sizes, batch_sizes in COMBINED:
        loaders = {
            name: DataLoader(dataset(n), batch_size=b * 3 // world, shuffle=True)
            for name, n, b in zip("ab", sizes, batch_sizes, strict=True)
        }
        module = TwoSources()
        train(module, HeteroDDPStrategy(balance=balance), CombinedLoader(loaders, mode), max_epochs=2)
        results.append({"parameters": parameters(module), "seen": module.seen})
    return results


def test_combined_loaders() -> None:
    [single], ranks = run(_combined, 1, 1, [1.0]), run(_combined, WORLD, WORLD, UNEVEN)
    for case, truth, *results in zip(COMBINED, single, *ranks, strict=True):
        assert all(error(result["parameters"], truth["parameters"]) <= 1e-10 for result in results), case
        seen = Counter(i for result in results for batch in result["seen"] for i in batch)
        assert seen == Counter(i for batch in truth["seen"] for i in batch), case


def _resumed(folder: str) -> list[torch.Tensor]:
    found = []
    for resume in (None, f"{folder}/mid.ckpt"):
        loaders = {
            name: DataLoader(dataset(n), batch_size=4, shuffle=True) for name, n in zip("ab", (60, 36), strict=True)
        }
        module, saves = TwoSources(), [] if resume else [Save(f"{folder}/mid.ckpt", 4, False)]  # b has 3 batches
        strategy = HeteroDDPStrategy(balance=UNEVEN)
        train(module, strategy, CombinedLoader(loaders, "max_size"), path=resume, max_epochs=2, callbacks=saves)
        found.append(parameters(module))
    return found


def test_a_loader_that_has_ended_stays_so_after_a_resume(tmp_path: Path) -> None:
    for whole, resumed in run(_resumed, WORLD, str(tmp_path)):
        assert torch.equal(whole, resumed)


class Part(IterableDataset):
    """So many samples of each rank's own."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        return iter([dataset(32)[16 * rank() + i] for i in range(self.sizes[rank()])])


def _streams(a: Any, b: Any) -> None:
    loaders = {"a": DataLoader(Part(*a), batch_size=4), "b": DataLoader(Part(*b), batch_size=4)}
    train(TwoSources(), HeteroDDPStrategy(), CombinedLoader(loaders, "max_size"))


@pytest.mark.parametrize("sizes", [((16, 8), (8, 16)), ((14, 16), (16, 14))], ids=["padding", "short"])
def test_combined_streams_of_unequal_proportions_are_an_error_on_every_rank(sizes: Any) -> None:
    for outcome in attempt(_streams, 2, *sizes):
        assert isinstance(outcome.error, DataError), outcome.trace
        assert "unequal proportions" in str(outcome.error)
    run(_streams, 2, (16, 16), (10, 10))


# -- data that users have split between ranks ----------------------------------------------------------------

SAMPLES, EDGES = 93, [0, 9, 40, 93]


class Shard(IterableDataset):
    """Every third sample, in workers too; on rank 2 only every second one of these."""

    def __init__(self, workers: int) -> None:
        self.workers = max(workers, 1)

    def indices(self, rank: int, worker: int) -> list[int]:
        own = range(rank * self.workers + worker, SAMPLES, WORLD * self.workers)
        return [i for i in own if rank < 2 or i % 2 == 0]

    def __iter__(self) -> Iterator[Any]:
        info, data = get_worker_info(), dataset(SAMPLES)
        return (data[i] for i in self.indices(rank(), info.id if info else 0))


#: What each rank has: parts of a dataset, and streams, read in this process or by workers.
SPLIT = {"subsets": -1, "streams": 0, "streams, workers": 2}


def _of_rank(rank: int, workers: int) -> list[int]:
    if workers < 0:
        return list(range(*EDGES[rank : rank + 2]))
    shard = Shard(workers)
    return sorted(i for worker in range(shard.workers) for i in shard.indices(rank, worker))


def _split() -> dict[str, Any]:
    found = {}
    for name, workers in SPLIT.items():
        module, data = Net(), Subset(dataset(SAMPLES), _of_rank(rank(), -1)) if workers < 0 else Shard(workers)
        loader = DataLoader(data, batch_size=4, num_workers=max(workers, 0))
        train(module, HeteroDDPStrategy(), loader, max_epochs=2, use_distributed_sampler=workers >= 0)
        assert loader.batch_sampler.batch_size == 4  # the user's loader stays as it was
        found[name] = module.seen, parameters(module)
    return found


def test_own_shards_of_unequal_size() -> None:
    ranks = run(_split, WORLD)
    for name, workers in SPLIT.items():
        [steps] = {len(found[name][0]) for found in ranks}
        batches: list[list[int]] = [[] for _ in range(steps)]
        for number, found in enumerate(ranks):
            own, seen = _of_rank(number, workers), found[name][0]
            for first in (0, steps // 2):
                left = list(own)
                for step in range(first, first + steps // 2):
                    if left:
                        batches[step] += seen[step]
                        left = [i for i in left if i not in seen[step]]
                    else:  # the shorter ones repeat their last batch, with weight 0
                        assert seen[step] == seen[step - 1], name
                assert sorted(i for batch in seen[first : step + 1] for i in batch if i in own)
        assert sorted(i for batch in batches for i in batch) == sorted(
            2 * [i for r in range(3) for i in _of_rank(r, workers)]
        )
        truth = one_process(SAMPLES, batches, epochs=1)  # whose global batches get smaller as shards end
        assert all(error(found[name][1], truth) <= 1e-10 for found in ranks), name
