"""Parameters on different devices: estimated distances against true ones, and the reaction in a real fit."""

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import run
from tasks import Net, fit

from lightning_hetero.comm.topology import Topology
from lightning_hetero.replicas import drift as module
from lightning_hetero.replicas.drift import ParameterDriftCheck, drifts, sums_of

# -- distances ---------------------------------------------------------------------------------------------


def _parameters(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (300, 1, 40)] * 10


@pytest.mark.parametrize("scale", [1e-6, 1e-3])
def test_the_estimate_is_near_the_distance_where_signs_are_random(scale: float) -> None:
    own, noise = _parameters(0), _parameters(1)
    others = [p + scale * n for p, n in zip(own, noise, strict=True)]
    [found] = drifts([sums_of(own), sums_of(others)], [3, 5], [str(i) for i in range(30)])
    flat = torch.cat(own).double()
    true = float((torch.cat(others).double() - flat).norm() / flat.norm())
    assert found.rank == 5
    assert 0.4 * true < found.distance < 2.5 * true


def test_differences_of_one_sign_count_for_more() -> None:
    own = _parameters(0)
    others = [p + 1e-3 for p in own]
    [found] = drifts([sums_of(own), sums_of(others)], [0, 1], [str(i) for i in range(30)])
    flat = torch.cat(own)
    assert found.distance > 1e-3 * math.sqrt(len(flat)) / float(flat.norm())


def test_the_parameter_that_differs_most_is_named_and_equal_ones_are_not_apart() -> None:
    own, others = [torch.ones(4), torch.ones(9)], [torch.ones(4), torch.ones(9)]
    others[1][3] += 0.5
    rows = [sums_of(own), sums_of(others), sums_of(own)]
    first, second = drifts(rows, [0, 1, 2], ["weight", "bias"])
    assert (first.name, second.distance) == ("bias", 0.0)


def test_sums_are_wide_enough_that_rounding_does_not_look_like_drift() -> None:
    values = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    [found] = drifts([sums_of([values]), sums_of([shuffled])], [0, 1], ["values"])
    assert found.distance < 1e-12
    assert abs(float(values.sum() - shuffled.sum())) / float(values.norm()) > 1e-7  # as fp32 would have it


def test_parameters_that_are_not_finite_are_far_and_a_device_without_float64_is_summed_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [found] = drifts([sums_of([torch.ones(2)]), sums_of([torch.tensor([1.0, math.nan])])], [0, 1], ["p"])
    assert not found.distance <= ParameterDriftCheck.LIMIT
    monkeypatch.setattr(module, "widest_float", lambda device: torch.float32)
    assert sums_of([torch.full((3,), 0.1)]).dtype == torch.float64
    assert sums_of([]).shape == (0, 2)


# -- in a fit ------------------------------------------------------------------------------------------------


class MovesParameter(pl.Callback):
    """Moves a parameter of rank 1 after some steps, as an optimizer with other rounding would."""

    def __init__(self, at: int, by: float) -> None:
        self.at, self.by = at, by

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.at:
            with torch.no_grad():
                next(pl_module.parameters()).add_(self.by)


def _fit(by: float, unlike: bool = True) -> tuple[torch.Tensor, list[str]]:
    if unlike:  # CPUs, as if they were of several kinds
        Topology.backend = lambda self, ranks: None  # type: ignore[method-assign]
    ParameterDriftCheck.EVERY = 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(Net, batch_size=8, callbacks=[MovesParameter(6, by)], max_steps=12, strategy={"balance": "off"})
    return found["parameters"], [str(w.message) for w in caught if "Parameters differ" in str(w.message)]


def test_past_the_threshold_all_take_over_the_first_ranks_parameters_with_a_warning() -> None:
    (first, messages), (second, quiet) = run(_fit, 2, 0.01)
    assert torch.equal(first, second)
    [warning] = messages
    assert "those of rank 1" in warning
    assert "net.0.weight" in warning
    assert not quiet


def test_below_it_nothing_happens() -> None:
    (first, messages), (second, _) = run(_fit, 2, 1e-7)
    assert not messages
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


def test_without_a_difference_it_is_the_fit_of_alike_devices() -> None:
    (first, messages), (second, _) = run(_fit, 2, 0.0)
    (alike, _), _ = run(_fit, 2, 0.0, unlike=False)
    assert not messages
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alike, rtol=0, atol=1e-12)
