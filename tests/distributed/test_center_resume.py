"""A run that was stopped and resumed goes on as if it never had been."""

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import APART, SHARES, STRATEGIES, Recorder
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import run
from saved import replicas_of
from tasks import FAST, dataset, parameters
from test_node import Dropping
from torch.utils.data import DataLoader

PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 4}
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("easgd", PULL),
    ("easgd", {**PULL, "exclude": ["*bias"], "order": "gauss_seidel"}),
    ("overlap", {**PULL, "wire": "bf16"}),
    ("eamsgd", PULL),
    ("diloco", {"tau": 4}),
    ("round_robin", PULL),
]


class Nesterov(Dropping):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class Found(pl.Callback):
    """What there is when training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        averager = trainer.strategy.averager
        self.reference = torch.cat([part.double() for part in averager.reference])
        self.weights = parameters(pl_module)
        if hasattr(averager, "_client"):
            out = [torch.empty_like(part) for part in averager.reference]
            self.counts = averager._client.read(out)
            self.center = torch.cat([part.double() for part in out])


def _fit(
    name: str, options: dict[str, Any], folder: str | None = None, resume: str | None = None, stop: int = -1
) -> dict[str, Any]:
    module, recorder, found = Nesterov() if name == "eamsgd" else Dropping(), Recorder(), Found()
    keep = [ModelCheckpoint(folder, every_n_train_steps=stop, save_top_k=-1, filename="{step}")] if folder else []
    settings = {**FAST, "max_epochs": 3, "max_steps": stop, "callbacks": [recorder, found, *keep]}
    settings["enable_checkpointing"] = folder is not None
    trainer = pl.Trainer(strategy=_strategy(name, options), **settings)
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
    torch.manual_seed(trainer.global_rank)  # each rank drops out other units
    trainer.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), ckpt_path=resume)
    return {
        "path": torch.stack(recorder.weights),
        "centers": torch.stack(recorder.centers) if recorder.centers else torch.zeros(0),
        "final": parameters(module),
        "found": vars(found),
    }


def _strategy(name: str, options: dict[str, Any]) -> Any:
    world = int(os.environ["WORLD_SIZE"])
    return STRATEGIES[name](balance=SHARES[world], global_batch_size=12, **options)


def _resume(folder: str, cases: list[tuple[str, dict[str, Any]]], stops: Any = None) -> list[Any]:
    """Of each case the whole fit; and by step the fit until then, and the one that goes on."""
    results = []
    for i, ((name, options), steps) in enumerate(zip(cases, stops or [[11]] * len(cases), strict=True)):
        parts = {}
        for stop in steps:
            path = f"{folder}/{i}-{stop}"
            first = _fit(name, options, path, stop=stop)
            parts[stop] = first, _fit(name, options, resume=f"{path}/step={stop}.ckpt")
        results.append((_fit(name, options), parts))
    return results


#: 8 steps an epoch. After 11: between two exchanges, within an epoch. After 16: at the end of one.
STOPS = [[11, 16], [11]] * (len(EXACT) // 2)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The checkpoints of three ranks, and what each rank has seen."""
    folder = tmp_path_factory.mktemp("resumed")
    return folder, run(_resume, 3, str(folder), EXACT, STOPS, nodes=APART)


def test_resuming_is_as_if_never_stopped(resumed: tuple[Path, list[Any]]) -> None:
    folder, of_ranks = resumed
    for results in of_ranks:
        for (name, _), (whole, parts) in zip(EXACT, results, strict=True):
            assert len(whole["path"]) == 24
            for stop, (first, second) in parts.items():
                assert torch.equal(first["path"], whole["path"][:stop]), name
                assert torch.equal(second["path"], whole["path"][stop:]), name
                assert torch.equal(second["centers"], whole["centers"][stop:]), name
                assert torch.equal(second["final"], whole["final"]), name
                assert not torch.equal(first["final"], whole["final"])
    for i, ((name, _), steps) in enumerate(zip(EXACT, STOPS, strict=True)):
        for stop in steps:
            replicas = replicas_of(folder / f"{i}-{stop}" / f"step={stop}.ckpt")
            assert len(replicas) == 3
            alike = torch.equal(replicas[0]["values"][0], replicas[1]["values"][0])
            assert alike == (name == "diloco" and stop == 16)  # right after an outer step
            if name == "diloco":
                outer = replicas[0]["algorithm"]["outer"]["state"]
                assert all(state["momentum_buffer"].any() for state in outer.values())


def _elsewhere(cases: list[Any], paths: list[str]) -> list[Any]:
    results = []
    for (name, options), path in zip(cases, paths, strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = _fit(name, options, resume=path)
        results.append((result, [str(w.message) for w in caught]))
    return results


def test_with_other_ranks_all_start_from_the_center(resumed: tuple[Path, list[Any]], tmp_path: Path) -> None:
    cases = [*EXACT, ("async", PULL)]
    run(_first, 3, str(tmp_path), cases[-1:], nodes=APART)
    folders = [*(resumed[0] / f"{i}-11" for i in range(len(EXACT))), tmp_path / "0-11"]
    paths = [str(folder / "step=11.ckpt") for folder in folders]
    for rank, results in enumerate(run(_elsewhere, 2, cases, paths, nodes=[1, 1])):
        for path, (result, said) in zip(paths, results, strict=True):
            saved = torch.load(path, weights_only=True)["state_dict"]
            assert torch.equal(result["found"]["weights"], torch.cat([value.reshape(-1) for value in saved.values()]))
            # What does not take part comes last in the reference.
            assert torch.equal(result["found"]["reference"].sort()[0], result["found"]["weights"].sort()[0])
            assert result["final"].isfinite().all()
            told = [text for text in said if "start from the checkpoint's weights" in text]
            assert len(told) == (rank == 0)
            assert all("saved by 3 replicas with 3 ranks; this job has 2 with 2" in text for text in told)


def _first(folder: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    for i, (name, options) in enumerate(cases):
        _fit(name, options, f"{folder}/{i}-11", stop=11)


def test_one_visitor_alone_resumes_bitwise(tmp_path: Path) -> None:
    for whole, parts in run(_resume, 1, str(tmp_path), [("async", PULL), ("hogwild", PULL)])[0]:
        _, second = parts[11]
        assert torch.equal(second["path"], whole["path"][11:])
        assert torch.equal(second["final"], whole["final"])


def test_a_narrow_line_goes_on_to_the_rounding_of_one_visit(tmp_path: Path) -> None:
    # Where the line takes the visitor to be (the center at its last visit) is not saved.
    case = ("round_robin", {**PULL, "wire": "bf16"})
    for [(whole, parts)] in run(_resume, 3, str(tmp_path), [case], nodes=APART):
        _, second = parts[11]
        torch.testing.assert_close(second["path"], whole["path"][11:], rtol=0, atol=2.0**-8)


@pytest.mark.parametrize("home", ["shared_memory", "thread"])
def test_the_visited_center_and_its_counts_come_back(tmp_path: Path, home: str) -> None:
    case = ("async", {**PULL, "center": home})
    for [(_, parts)] in run(_resume, 3, str(tmp_path), [case], nodes=APART):
        _, second = parts[11]
        saved = torch.load(tmp_path / "0-11" / "step=11.ckpt", weights_only=True)
        values = torch.cat([value.reshape(-1) for value in saved["state_dict"].values()])
        assert second["found"]["counts"] == [2, 2, 2]
        assert torch.equal(second["found"]["center"], values)
        assert not torch.equal(second["found"]["weights"], values)


def test_another_strategy_starts_from_the_center(tmp_path: Path) -> None:
    run(_first, 2, str(tmp_path), [("easgd", PULL)], nodes=[1, 1])
    for result, said in run(_other, 2, str(tmp_path), nodes=[1, 1])[:1]:
        assert any("was saved by EASGDStrategy, this is DiLoCoStrategy" in text for text in said)
        saved = torch.load(tmp_path / "0-11" / "step=11.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(result["found"]["weights"], torch.cat([value.reshape(-1) for value in saved.values()]))


def _other(folder: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = _fit("diloco", {"tau": 4}, resume=f"{folder}/0-11/step=11.ckpt")
    return result, [str(w.message) for w in caught]
