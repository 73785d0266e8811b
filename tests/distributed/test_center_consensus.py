"""The consensus is the center, or the mean of replicas that have not met; excluded parameters stay separate."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import APART, SHARES, STRATEGIES, Recorder, fit, same
from lightning.pytorch.callbacks import EarlyStopping
from ranks import run
from tasks import FAST, EvaluatedNet, Net, dataset, parameters
from torch.utils.data import DataLoader

PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 3}
BIAS = torch.cat([torch.full((p.numel(),), name.endswith("bias")) for name, p in Net().named_parameters()])
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("easgd", PULL),
    ("easgd", {**PULL, "exclude": ["*bias"]}),
    ("overlap", PULL),
    ("eamsgd", PULL),
    ("diloco", {"tau": 3}),
    ("round_robin", PULL),
]


class Watched(EvaluatedNet):
    """Records the weights that it validates with."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[torch.Tensor] = []

    def on_validation_epoch_start(self) -> None:
        self.validated.append(parameters(self))


class Nesterov(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class WatchedNesterov(Nesterov, Watched):
    pass


class Metrics(pl.Callback):
    """Keeps the metric of each validation."""

    def __init__(self) -> None:
        self.val: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.val.append(trainer.callback_metrics["val"].item())


def loss_at(weights: torch.Tensor) -> float:
    """The loss of these weights on all samples of the validation."""
    model = Net()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.no_grad():
        return model.loss(dataset(50)[:]).item()


def _watch(name: str, options: dict[str, Any], every: int | None = None, **trainer: Any) -> dict[str, Any]:
    module = WatchedNesterov() if name == "eamsgd" else Watched()
    recorder = Recorder()
    limits = {"val_check_interval": every} if every else {"limit_val_batches": 0}
    settings = {**FAST, "max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [recorder]}
    strategy = STRATEGIES[name](balance=SHARES[3], global_batch_size=12, **options)
    instance = pl.Trainer(strategy=strategy, **{**settings, **limits, **trainer})
    val = DataLoader(dataset(50), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "Replicas have not met")
        instance.fit(module, DataLoader(dataset(96), batch_size=4, shuffle=True), val)
    return {
        "messages": [str(w.message) for w in caught if "Replicas have not met" in str(w.message)],
        "path": torch.stack(recorder.weights),
        "centers": torch.stack(recorder.centers) if recorder.centers else torch.zeros(0),
        "validated": module.validated,
        "final": parameters(module),
    }


def _watch_all() -> list[dict[str, Any]]:
    return [_watch(name, options, every) for name, options in EXACT for every in (2, None)]


@pytest.mark.long
def test_the_center_is_validated() -> None:
    results = run(_watch_all, 3, nodes=APART)
    for rank, fits in enumerate(results):
        for i, (name, options) in enumerate(EXACT):
            watched, unwatched = fits[2 * i : 2 * i + 2]
            assert len(watched["validated"]) == 8
            assert unwatched["messages"] == []
            assert len(watched["messages"]) == (rank == 0)
            if rank == 0:
                assert "between step 6 and step 8, at which validation or a checkpoint" in watched["messages"][0]
            for j, weights in enumerate(watched["validated"]):
                # If the center has no values, or older ones than the replicas, their mean is the consensus.
                averaged = BIAS if "exclude" in options else BIAS & False
                if (2 * j + 2) % 3 if name == "diloco" else j == 0:
                    averaged = BIAS | True
                of_all = [results[k][2 * i]["path"][2 * j + 1] for k in range(3)]
                mean = (3 * of_all[0] + of_all[1] + 2 * of_all[2]) / 6
                assert torch.allclose(weights[averaged], mean[averaged], rtol=0, atol=1e-13)
                if name != "round_robin" and not averaged.all():
                    assert torch.equal(weights[~averaged], watched["centers"][2 * j + 1])
                if name != "diloco" or (2 * j + 2) % 3:  # where replicas start from the center
                    assert not torch.equal(weights, of_all[rank])


def _stops_early() -> list[tuple[int, list[float]]]:
    results = []
    for name, options in (("diloco", {}), ("easgd", {"moving_rate": 0.2}), ("async", {"moving_rate": 0.2})):
        metrics, stop = Metrics(), EarlyStopping("val", patience=1)
        warnings.filterwarnings("ignore", "Replicas have not met|No replica has met")
        strategy = STRATEGIES[name](tau=50, balance=SHARES[2], global_batch_size=12, timeout=30, **options)
        settings = {**FAST, "max_epochs": 4, "num_sanity_val_steps": 2, "callbacks": [metrics, stop]}
        trainer, module = pl.Trainer(strategy=strategy, **settings), Watched()
        module.lr = 0.003
        trainer.fit(module, DataLoader(dataset(96), batch_size=6), DataLoader(dataset(50), batch_size=4))
        results.append((trainer.global_step, metrics.val))
    return results


def test_early_stopping_sees_progress_before_replicas_have_met() -> None:
    start = loss_at(parameters(Net()))
    for results in run(_stops_early, 2, nodes=[1, 1]):
        for steps, losses in results:
            assert steps == 32
            assert losses == sorted(losses, reverse=True)
            assert losses[0] < 0.99 * start


def _in_flight() -> list[dict[str, Any]]:
    return [_watch("overlap", {**PULL, "tau": 1}, every, accumulate_grad_batches=2) for every in (1, None)]


def test_validating_in_the_middle_of_a_window_changes_nothing() -> None:
    # Exchanges begin before a window's first batch, and end after its last: one is under way at every other look.
    for watched, unwatched in run(_in_flight, 3, nodes=APART):
        assert same(watched, unwatched)
        assert len(watched["validated"]) == 16


# -- what does not take part ---------------------------------------------------------------------------------

TIGHT = {"moving_rate": 0.2, "beta": 0.7}
WITH_CENTER = ["easgd", "overlap", "async", "round_robin", "diloco"]


def _excluding() -> list[list[dict[str, Any]]]:
    results = []
    for name in WITH_CENTER:
        options = {} if name == "diloco" else TIGHT
        loaders = [DataLoader(dataset(96), batch_size=4, shuffle=True) for _ in range(2)]
        settings = zip(loaders, ([], ["*bias"]), strict=True)
        results.append([fit(name, Net(), data, epochs=1, tau=1, exclude=names, **options) for data, names in settings])
    return results


@pytest.mark.long
def test_what_is_excluded_stays_apart_and_its_mean_is_left() -> None:
    for name, results in zip(WITH_CENTER, zip(*run(_excluding, 3, nodes=APART), strict=True), strict=True):
        paths = [excluding["path"] for _, excluding in results]
        if name == "diloco":  # all meet at every step: only excluded parameters differ
            assert torch.equal(paths[0][:, ~BIAS], paths[1][:, ~BIAS])
        assert not torch.equal(paths[0][:, BIAS], paths[1][:, BIAS])
        mean = (3 * paths[0][-1] + paths[1][-1] + 2 * paths[2][-1])[BIAS] / 6
        for whole, excluding in results:
            assert torch.allclose(excluding["final"][BIAS], mean, rtol=0, atol=1e-13)
            assert torch.equal(excluding["final"], results[0][1]["final"])
            before, after = whole["traffic"]["bytes"], excluding["traffic"]["bytes"]
            assert after < before or before == 0  # memory, or the center's host
            if name in ("easgd", "overlap", "diloco"):  # 17 of 161 values; they go over the wire once, at the end
                assert after == pytest.approx(before * 144 / 161 + 2 * 2 / 3 * 17 * 8, abs=30)


def _excluded_eamsgd() -> list[dict[str, Any]]:
    data = [DataLoader(dataset(96), batch_size=4, shuffle=True) for _ in range(2)]
    options = {"epochs": 1, "exclude": ["*"], "tau": 1, **TIGHT}
    return [fit(name, Nesterov(), d, **options) for name, d in zip(("eamsgd", "easgd"), data, strict=True)]


def test_eamsgd_leaves_what_is_excluded_alone() -> None:
    for eamsgd, easgd in run(_excluded_eamsgd, 2, nodes=[1, 1]):
        assert torch.equal(eamsgd["path"], easgd["path"])
