"""What `max_batch_size="auto"` has found is kept, in checkpoints and from fit to fit."""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import FAST, Save
from test_capacity import FOUND, LOTS, Busy, _fit, _loader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.strategies import capacity

SHORT = {"max_epochs": 1}
AUTO = {"max_batch_size": "auto", "max_batch_memory": LOTS}


def _calls(told: list[str], limits: Any = AUTO, **fit: Any) -> dict[str, Any]:
    """What a fit leaves, and how many calls of ``training_step`` were trials."""
    Busy.calls = 0
    told.clear()
    result = _fit(limits, **{"loader": lambda: _loader(1), **fit, "trainer": {**SHORT, **fit.get("trainer", {})}})
    return {**result, "trials": Busy.calls - result["tries"], "told": [text for text in told if "again" in text]}


def _resume(folder: str) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    told: list[str] = []
    capacity.rank_zero_info = told.append  # type: ignore[assignment]
    path, results = f"{folder}/kept.ckpt", {}
    # Within the first epoch, with batches that workers have prefetched.
    saving = {"callbacks": [Save(path, 3, stop=False)]}
    results["whole"] = _calls(told, trainer=saving)
    results["resumed"] = _calls(told, path=path)
    results["other memory"] = _calls(told, {**AUTO, "max_batch_memory": "2TB"}, path=path)
    results["told"] = _calls(told, {"max_batch_size": FOUND}, path=path)
    return results


@pytest.mark.long
def test_a_resumed_run_goes_on_with_what_was_found(tmp_path: Path) -> None:
    for result in run(_resume, 2, str(tmp_path)):
        whole, resumed = result["whole"], result["resumed"]
        assert whole["trials"] > 4
        assert whole["found"] == resumed["found"] == FOUND
        assert resumed["trials"] == 0
        assert not resumed["told"]
        assert resumed["seen"] == whole["seen"][3:]
        other = result["other memory"]
        assert other["trials"] > 4  # now with the optimizer's state of the checkpoint
        assert len(other["told"]) == 1
        for what, value in result["told"].items():
            if what not in ("found", "trials", "told"):
                assert repr(resumed[what]) == repr(other[what]) == repr(value), what
    (alone,) = run(_resume_alone, 1, str(tmp_path))
    assert alone["trials"] > 0
    assert len(alone["told"]) == 1
    assert alone["found"] == [9]


def _resume_alone(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    told: list[str] = []
    capacity.rank_zero_info = told.append  # type: ignore[assignment]
    return _calls(told, path=f"{folder}/kept.ckpt", loader=_small, strategy={"balance": "auto"})


def _small() -> Any:
    return torch.utils.data.DataLoader(_loader().dataset, batch_size=9, shuffle=True)


def _fit_again() -> list[int]:
    """Calls of ``training_step`` that were trials, of fits with one strategy."""
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
