"""`max_batch_size="auto"`: a run with a search goes on, bit for bit, as a run that was given its result."""

import os
import pickle
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from ranks import run
from tasks import FAST, Memory, Save, dataset, parameters
from test_shared_stream import Plain
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_hetero import DASOStrategy, GossipAsyncStrategy, HeteroDDPStrategy, SharedStream
from lightning_hetero.strategies import capacity

LOTS = "1TB"  # of memory; an error stands for devices that run out of theirs
FITTING, FOUND = [11, 21], [9, 18]  # of 24 samples: 90% of what fits


class Busy(pl.LightningModule):
    """Has state of all kinds and little memory, draws random numbers everywhere, and meets the other ranks."""

    calls = 0  # of training_step, those of trials too

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.double()
        self.seen: list[Any] = []
        self.tries, self.metric, self.generator = 0, MeanMetric(), torch.Generator().manual_seed(3)
        self.synced = MeanMetric(dist_sync_on_step=True)  # asks all ranks in every step

    def training_step(self, given: Any, number: int) -> dict[str, Any]:  # Lightning does not ask for names
        if isinstance(given, dict):  # of two loaders
            given = [torch.cat(parts) for parts in zip(given["a"], given["b"], strict=True)]
        x, y, _, indices = given
        self.tries += 1
        Busy.calls += 1
        with torch.no_grad():
            self.last.weight.clamp_(-0.2, 0.2)
        self.seen.append(indices.tolist())
        z = nn.functional.dropout(self.norm(self.first(x)), 0.2)
        if len(x) > FITTING[int(os.environ["RANK"])]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        everyone = self.all_gather(z, sync_grads=True).flatten(0, 1)
        assert len(everyone) in ((24, 5) if self.trainer.world_size == 2 else (9, 2))  # all ranks', the last is short
        noise = torch.rand(1, generator=self.generator).item() + random.random() + float(np.random.rand())
        self.metric.update(self.synced(noise))
        loss = nn.functional.mse_loss(self.last(z), y) + 0.01 * noise * self.last(everyone).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"metric": self.metric, "tries": float(self.tries)}, on_epoch=True)
        self.logger.log_metrics({"by hand": noise}, self.tries)
        return {"loss": loss, "noise": noise}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Planned(Busy):
    """Asks for the number of steps during its setup, which sets up the dataloaders first."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 1
        return super().configure_optimizers()


class Augmented(Dataset):
    """Draws random numbers for each sample."""

    def __init__(self, samples: int = 101) -> None:
        self.data = dataset(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, *others = self.data[index]
        return x + 0.1 * torch.rand(8, dtype=torch.float64) * float(np.random.rand()), *others


class Repeated(Plain):
    def __iter__(self) -> Iterator[Any]:
        return (self.data[i % len(self.data)] for i in range(101))


def _loader(workers: int = 0, **more: Any) -> DataLoader:
    return DataLoader(Augmented(), batch_size=12, shuffle=True, num_workers=workers, **more)


def _two_loaders() -> CombinedLoader:
    parts = {"a": 8, "b": 4}
    return CombinedLoader(
        {name: DataLoader(Augmented(12 * size), batch_size=size, shuffle=True) for name, size in parts.items()}
    )


FITS: dict[str, dict[str, Any]] = {
    "even": {"strategy": {"balance": "off"}},
    "workers": {"loader": lambda: _loader(2, generator=torch.Generator().manual_seed(5)), "module": Planned},
    "kept workers": {"loader": lambda: _loader(1, persistent_workers=True)},
    "sampler": {
        "loader": lambda: DataLoader(Augmented(), 12, sampler=torch.randperm(101).tolist()),
        "trainer": {"accumulate_grad_batches": 2},
    },
    "stream": {"loader": lambda: DataLoader(SharedStream(Repeated()), batch_size=12)},
    "stream, workers": {"loader": lambda: DataLoader(SharedStream(Repeated()), batch_size=12, num_workers=2)},
    "two loaders": {"loader": _two_loaders},
    "static graph": {"strategy": {"static_graph": True}},
    "a quick look": {"trainer": {"fast_dev_run": 3}},
    "DASO": {"kind": DASOStrategy, "strategy": {"ranks_per_node": 1, "warmup": 2, "cooldown": 2}},
    "asynchronous gossip": {"kind": GossipAsyncStrategy, "strategy": {"ranks_per_node": 1}},
}


def _fit(
    limits: dict[str, Any],
    kind: Any = HeteroDDPStrategy,
    strategy: dict[str, Any] | None = None,
    module: Any = Busy,
    loader: Any = _loader,
    trainer: dict[str, Any] | None = None,
    path: Any = None,
) -> dict[str, Any]:
    """All results and states of a fit that a trial could have changed."""
    pl.seed_everything(11)
    random.seed(int(os.environ["RANK"]))  # ranks draw different numbers
    chosen = kind(**{"balance": [1.0, 1.2], **(strategy or {}), **limits})
    model, logger = module(), Memory()
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "logger": logger, **(trainer or {})}
    fit = pl.Trainer(strategy=chosen, **{**FAST, **settings})
    fit.fit(model, loader(), ckpt_path=path)
    return {
        "seen": model.seen,
        "tries": model.tries,
        "parameters": parameters(model),
        "buffers": [buffer.tolist() for buffer in model.buffers()],
        "optimizer": fit.optimizers[0].state_dict(),
        "random": [torch.rand(1), torch.rand(1, generator=model.generator), random.random(), np.random.rand()],
        "logged": logger.rows,
        "metrics": {name: value.item() for name, value in fit.callback_metrics.items()},
        "steps": fit.global_step,
        "found": chosen._rank_state._capacity.found,
    }


def _twice(names: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # Lightning advises against what is logged here
    results = {}
    for name in names:
        try:
            searched = _fit({"max_batch_size": "auto", "max_batch_memory": LOTS}, **FITS[name])
            results[name] = searched, _fit({"max_batch_size": searched["found"]}, **FITS[name])
        except Exception as failure:
            raise AssertionError(f"the fit {name!r} failed") from failure
    return results


@pytest.mark.long
def test_a_run_that_has_searched_is_the_run_that_was_told() -> None:
    results = run(_twice, 2, [*FITS])
    for name in FITS:
        for searched, given in (result[name] for result in results):
            assert searched.pop("found") == ([8, 18] if name == "two loaders" else FOUND), name  # by threes
            assert given.pop("found") is None, name
            assert max(len(part) for part in searched["seen"]) <= max(FOUND)
            # When replicas come to each other differs from run to run.
            same = ("seen", "tries", "steps") if name == "asynchronous gossip" else [*given]
            for what in same:
                assert repr(searched[what]) == repr(given[what]), (name, what)


# -- kept, in checkpoints and from fit to fit -----------------------------------------------------------------

SHORT = {"max_epochs": 1}
AUTO = {"max_batch_size": "auto", "max_batch_memory": LOTS}


def _calls(messages: list[str], limits: Any = AUTO, **fit: Any) -> dict[str, Any]:
    """Results of a fit, with the number of calls of ``training_step`` that were trials."""
    Busy.calls = 0
    messages.clear()
    result = _fit(limits, **{"loader": lambda: _loader(1), **fit, "trainer": {**SHORT, **fit.get("trainer", {})}})
    return {
        **result,
        "trials": Busy.calls - result["tries"],
        "messages": [text for text in messages if "again" in text],
    }


def _resume(folder: str) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    messages: list[str] = []
    capacity.rank_zero_info = messages.append  # type: ignore[assignment]
    path, results = f"{folder}/kept.ckpt", {}
    # Within the first epoch, with batches that workers have prefetched.
    saving = {"callbacks": [Save(path, 3, stop=False)]}
    results["whole"] = _calls(messages, trainer=saving)
    results["resumed"] = _calls(messages, path=path)
    results["other memory"] = _calls(messages, {**AUTO, "max_batch_memory": "2TB"}, path=path)
    results["given"] = _calls(messages, {"max_batch_size": FOUND}, path=path)
    return results


@pytest.mark.long
def test_a_resumed_run_goes_on_with_what_was_found(tmp_path: Path) -> None:
    for result in run(_resume, 2, str(tmp_path)):
        whole, resumed = result["whole"], result["resumed"]
        assert whole["trials"] > 4
        assert whole["found"] == resumed["found"] == FOUND
        assert resumed["trials"] == 0
        assert not resumed["messages"]
        assert resumed["seen"] == whole["seen"][3:]
        other = result["other memory"]
        assert other["trials"] > 4  # now with the optimizer's state of the checkpoint
        assert len(other["messages"]) == 1
        for what, value in result["given"].items():
            if what not in ("found", "trials", "messages"):
                assert repr(resumed[what]) == repr(other[what]) == repr(value), what
    (alone,) = run(_resume_alone, 1, str(tmp_path))
    assert alone["trials"] > 0
    assert len(alone["messages"]) == 1
    assert alone["found"] == [9]


def _resume_alone(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    messages: list[str] = []
    capacity.rank_zero_info = messages.append  # type: ignore[assignment]
    return _calls(messages, path=f"{folder}/kept.ckpt", loader=_small, strategy={"balance": "auto"})


def _small() -> Any:
    return torch.utils.data.DataLoader(_loader().dataset, batch_size=9, shuffle=True)


def _fit_again() -> list[int]:
    """Numbers of calls of ``training_step`` that were trials, in fits with one strategy."""
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(**AUTO), max_epochs=1, **{**FAST, "logger": True})
    model, trials = Busy(), []
    for epochs, module in ((1, model), (2, model), (3, Busy())):
        trainer.fit_loop.max_epochs = epochs
        done, Busy.calls = module.tries, 0
        trainer.fit(module, _loader())
        trials.append(Busy.calls - (module.tries - done))
    pickle.dumps(trainer.strategy._rank_state)  # as start methods do that copy a Trainer
    return trials


def test_a_model_is_tried_once(tmp_path: Path) -> None:
    for first, second, other in run(_fit_again, 2, env={"PWD": str(tmp_path)}):
        assert first == other > 4
        assert second == 0


def _fixed() -> tuple[list[list[int]], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shares = [len(part) for part in _fit({**AUTO, "balance": [1.0, 1.0]}, trainer=SHORT)["seen"]][:4]
        shares += [len(part) for part in _fit({**AUTO, "balance": [1.0, 2.0]}, trainer=SHORT)["seen"]][:4]
    return shares, [str(w.message) for w in caught if "do not fit" in str(w.message)]


def test_fixed_shares_that_do_not_fit_are_told() -> None:
    results = run(_fixed, 2)
    assert [shares for shares, _ in results] == [[9] * 4 + [8] * 4, [15] * 4 + [16] * 4]
    assert len(results[0][1]) == 1
    assert "[12, 12] of a batch" in results[0][1][0]
    assert "[9, 15] now" in results[0][1][0]
    assert os.environ.get("RANK") is None
