"""The optimizers' state: what of it is averaged, restored, and made finite again."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adam, NAdam, Optimizer

from lightning_hetero.replicas.optimizer_states import OptimizerMoments, restore, zero_nonfinite_state


class Scaled(nn.Module):
    """A model with a parameter that is a single number, such as a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 1, bias=False), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(x)


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        (SGD, {"momentum": 0.9}, ["momentum_buffer"]),
        (Adam, {}, ["exp_avg", "exp_avg_sq"]),
        (NAdam, {}, ["exp_avg", "exp_avg_sq"]),
        (ASGD, {}, ["ax"]),
    ],
)
def test_a_number_among_the_parameters_does_not_make_moments_of_counters(
    kind: type[Optimizer], options: dict, names: list[str]
) -> None:
    model = Scaled()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    found = OptimizerMoments.names([optimizer])
    assert found == [(0, name) for name in names]
    moments = OptimizerMoments([optimizer], found)
    flats = moments.pack()
    assert [flat.shape for flat in flats] == [(3,)] * len(names)
    counters = {name: value for name, value in optimizer.state[model.scale].items() if name not in names}
    before = {name: torch.as_tensor(value).clone() for name, value in counters.items()}
    moments.unpack([flat + 1 for flat in flats])
    for name, flat in zip(names, flats, strict=True):
        assert torch.equal(optimizer.state[model.scale][name], flat[0] + 1)
        assert torch.equal(optimizer.state[model.layer.weight][name].reshape(-1), flat[1:] + 1)
    for name, value in before.items():
        assert torch.equal(torch.as_tensor(optimizer.state[model.scale][name]), value)


class Counts(SGD):
    """Keeps state that belongs to no parameter, and a list of tensors."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["all"] = {"sum": torch.tensor(float("nan"))}
        self.state["steps"] = self.state.get("steps", 0) + 1
        for p in self.param_groups[-1]["params"]:
            self.state[p]["history"] = [torch.full((2,), float("inf"))]
        return loss


def stepped() -> Counts:
    """An optimizer whose first group has no parameters, as one for norms in a model without them."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Counts([{"params": []}, {"params": [parameter]}], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_state_that_belongs_to_no_parameter_is_no_moment() -> None:
    assert OptimizerMoments.names([stepped()]) == [(0, "momentum_buffer")]


def test_a_group_without_parameters_is_no_obstacle_to_go_on() -> None:
    saved, optimizer = stepped(), stepped()
    [parameter] = optimizer.param_groups[1]["params"]
    optimizer.state[parameter]["momentum_buffer"].zero_()
    restore(optimizer, saved.state_dict())
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones(2))
    assert optimizer.state["steps"] == 1


def test_all_of_the_state_is_made_finite() -> None:
    optimizer = stepped()
    zero_nonfinite_state([optimizer])
    [parameter] = optimizer.param_groups[1]["params"]
    assert optimizer.state["all"]["sum"] == 0
    assert torch.equal(optimizer.state[parameter]["history"][0], torch.zeros(2))
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones(2))
