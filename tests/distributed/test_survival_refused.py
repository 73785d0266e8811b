"""Fits that could not go on without a rank are refused on all ranks, before the first step."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_hetero import DiLoCoStrategy, HeteroDDPStrategy, SharedStream
from lightning_hetero.errors import ConfigurationError, UnsupportedError


class Stream(IterableDataset):
    def __init__(self, first: int = 0, every: int = 1) -> None:
        self.numbers = range(first, 64, every)

    def __iter__(self) -> Any:
        data = dataset(64)
        yield from (data[i] for i in self.numbers)


def _own_sampler() -> DataLoader:
    data = dataset(64)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, int(os.environ["RANK"])))


def _refused() -> dict[str, tuple[str, str, int]]:
    ddp, found = HeteroDDPStrategy, {}
    for name, kind, options, loader, callbacks in [
        ("too few", ddp, {"min_replicas": 3}, None, []),
        ("stream", ddp, {}, lambda: DataLoader(Stream(int(os.environ["RANK"]), 2), batch_size=4), []),
        ("shared stream", ddp, {}, lambda: DataLoader(SharedStream(Stream()), batch_size=4), []),
        ("own sampler", ddp, {}, _own_sampler, []),
        ("averages", DiLoCoStrategy, {"replica": "rank"}, None, [StochasticWeightAveraging(0.1)]),
    ]:
        strategy = kind(on_peer_loss="continue", timeout=60, **options)
        trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, "callbacks": callbacks})
        try:
            trainer.fit(Net(), loader() if loader else DataLoader(dataset(64), batch_size=4))
            found[name] = ("", "", trainer.global_step)
        except Exception as error:
            found[name] = (type(error).__name__, str(error), trainer.global_step)
    return found


def test_what_could_not_go_on_is_refused_before_the_first_step() -> None:
    for found in run(_refused, 2):
        for name, kind, words in [
            ("too few", ConfigurationError, "min_replicas=3, but this job has 2 ranks"),
            ("stream", UnsupportedError, "needs a map-style training dataset"),
            ("shared stream", UnsupportedError, "needs a map-style training dataset"),
            ("own sampler", UnsupportedError, "with a DistributedSampler that you have made"),
            ("averages", UnsupportedError, "StochasticWeightAveraging under DiLoCoStrategy"),
        ]:
            error, text, steps = found.pop(name)
            assert (error, steps) == (kind.__name__, 0), (name, text)
            assert words in text
        assert not found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_replicas": 2}, "say when to go on without lost ranks"),
        ({"grace": 5.0}, "say when to go on without lost ranks"),
        *(({"on_peer_loss": "continue", "grace": grace}, "give at least 0.5 seconds") for grace in (0, 1e-9, 0.49)),
        ({"on_peer_loss": "continue", "join_file": 3}, "join_file=3: give the name of a file"),
        ({"on_peer_loss": "continue", "join_file": ""}, "join_file='': give the name of a file"),
        ({"on_peer_loss": "continue", "start_method": "spawn"}, "that launcher ends all ranks when one fails"),
        ({"on_peer_loss": "ignore"}, "on_peer_loss"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        HeteroDDPStrategy(**options)
