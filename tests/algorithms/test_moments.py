"""Selection of the optimizers' state that is averaged."""

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adam, NAdam, Optimizer

from lightning_hetero.algorithms.base import OptimizerMoments


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
