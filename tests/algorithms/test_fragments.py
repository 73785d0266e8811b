"""Fragments: the places at which a model is cut, models that cannot be cut, and changes of trainable parameters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero import StepContext
from lightning_hetero.algorithms.base import FitInfo, change_layout
from lightning_hetero.algorithms.diloco import OuterAverager
from lightning_hetero.errors import CheckpointError, ConfigurationError, UnsupportedError
from lightning_hetero.replicas.fragments import balanced_runs, partition


def sizes(module: nn.Module) -> dict[str, int]:
    return {name: p.numel() for name, p in module.named_parameters()}


def test_blocks_of_a_model_without_blocks_are_refused() -> None:
    cut, model = partition("blocks"), nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert cut is not None
    with pytest.raises(ConfigurationError, match="no module of the model has two children of the same class"):
        cut(model, sizes(model))


@pytest.mark.parametrize(("count", "starts"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3])])
def test_runs_are_as_equal_as_they_can_be(count: int, starts: list[int]) -> None:
    assert balanced_runs([3, 1, 2, 2], count) == starts


# -- other parameters are trainable ----------------------------------------------------------------


def streaming(fragments: Any, **options: Any) -> tuple[nn.Module, Any]:
    """A model of which the first layer, the largest one, is frozen; and its averager, at work."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    links: Any = SimpleNamespace(count=2, index=0, is_leader=True, lay_out=lambda layout: None)
    links.feedback, links.gather = lambda wire, lengths: None, lambda own: [own]
    averager = OuterAverager(tau=4, fragments=fragments, **options)
    averager.setup(averager.make_replica(model), links, list, FitInfo())
    return model, averager


def momenta(averager: Any) -> list[dict[str, torch.Tensor]]:
    """Of each fragment, the momenta of its outer optimizer, by name."""
    states = averager.outer_steps.state_dict()
    return [{name: each["momentum_buffer"] for name, each in state["state"].items()} for state in states]


def test_a_parameter_takes_its_outer_momentum_into_another_fragment() -> None:
    model, averager = streaming(2)
    for p, part in enumerate(averager._parts):
        averager.outer_steps.of_fragments[p].take([torch.full_like(vector, p + 1.0) for vector in part.center])
    before = momenta(averager)
    assert [sorted(of) for of in before] == [["1.bias", "1.weight"], ["2.bias", "2.weight"]]
    model[0].requires_grad_(True)
    change_layout(averager, StepContext(8, False, [1, 1]), list)
    first, second = momenta(averager)
    assert first == {}  # of the layer that has begun to train
    assert sorted(second) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    for of in before:
        assert all(torch.equal(second[name], momentum) for name, momentum in of.items())


def test_more_fragments_in_the_midst_of_a_fit_are_refused() -> None:
    model, averager = streaming("blocks")
    model[0].requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"'blocks' makes 3 fragments of the model, until now 2\. Give a number"):
        change_layout(averager, StepContext(8, False, [1, 1]), list)


def test_the_states_of_other_fragments_are_refused() -> None:
    (_, two), (_, one) = streaming(2), streaming(1)
    with pytest.raises(CheckpointError, match="holds the states of 2 outer optimizers; here there are 1"):
        one.outer_steps.load_state_dict(two.outer_steps.state_dict())


def test_changed_options_of_the_outer_optimizer_count_and_another_one_is_refused() -> None:
    (_, saved), (_, same), (_, changed) = streaming(1), streaming(1), streaming(1, outer_lr=0.1)
    saved.outer_steps.of_fragments[0].optimizer.param_groups[0]["momentum"] = 0.8  # in the midst of the fit
    state = saved.outer_steps.state_dict()
    for averager, lr in ((same, 0.7), (changed, 0.1)):
        averager.outer_steps.load_state_dict(state)
        group = averager.outer_steps.of_fragments[0].optimizer.param_groups[0]
        assert (group["lr"], group["momentum"]) == (lr, 0.8)
    _, other = streaming(1, outer=torch.optim.Adagrad)
    with pytest.raises(CheckpointError, match=r"the outer optimizer SGD with 1 .* here it is Adagrad with 1"):
        other.outer_steps.load_state_dict(state)
