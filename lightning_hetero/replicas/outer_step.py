"""Outer optimizer: an optimizer of PyTorch that takes steps on vectors, with its state by the names of parameters."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.errors import CheckpointError, ConfigurationError
from lightning_hetero.replicas.vectors import Replica


class OuterStep:
    """Takes steps of an outer optimizer on a center.

    Args:
        make: makes the optimizer, of parameters.
        replica: knows which parts of the center belong to parameters.
        center: vectors; the steps change them.

    Raises:
        ConfigurationError: there is no parameter, or the optimizer does not take them all.

    Attributes:
        parameters: views of the center, in the model's shapes.
        optimizer: the outer optimizer.
    """

    def __init__(self, make: Callable[[Iterable], Optimizer], replica: Replica, center: Sequence[Tensor]) -> None:
        views, self._buffers = replica.views(center)
        self._replica, self.parameters = replica, [nn.Parameter(view) for view in views]  # in the center's own memory
        if not self.parameters:
            raise ConfigurationError("exclude leaves no parameter for the outer optimizer.")
        self.optimizer = make(self.parameters)
        self._given = deepcopy(self._groups())
        taken = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if left := [tuple(p.shape) for p in self.parameters if id(p) not in taken]:
            raise ConfigurationError(
                f"outer: {type(self.optimizer).__name__} takes {len(taken)} of {len(self.parameters)} parameters, "
                f"and leaves others as they were at first, such as one of shape {left[0]}. Let it take them all."
            )

    def _groups(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in g.items() if name != "params"} for g in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's kind, its groups, also as they were given, and its state by the names of the parameters."""
        named = zip(self._replica.parameter_names, self.parameters, strict=True)
        return {
            "kind": type(self.optimizer).__name__,
            "given": self._given,
            "groups": self._groups(),
            "state": {name: self.optimizer.state[p] for name, p in named if p in self.optimizer.state},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Parameters of which it holds nothing keep what they have.

        Options that the user has changed since, such as ``outer_lr``, count.

        Raises:
            CheckpointError: it is of another optimizer.
        """
        here = type(self.optimizer).__name__, len(self._given)
        there = state.get("kind", here[0]), len(state["groups"])
        if there != here:
            raise CheckpointError(
                f"The checkpoint was saved with the outer optimizer {there[0]} with {there[1]} group(s) of parameters; "
                f"here it is {here[0]} with {here[1]}. Resume with the outer optimizer of the run that was saved."
            )
        pairs = zip(self._given, state.get("given", self._given), strict=True)
        for group, saved, (now, then) in zip(self.optimizer.param_groups, state["groups"], pairs, strict=True):
            group.update({name: value for name, value in saved.items() if now.get(name) == then.get(name)})
        for name, p in zip(self._replica.parameter_names, self.parameters, strict=True):
            if name in state["state"]:
                self.optimizer.state[p] = deepcopy(state["state"][name])

    def take(self, difference: list[Tensor]) -> None:
        """Take a step; buffers, which have no gradients, take the mean.

        Args:
            difference: the mean minus the center, as vectors, which are overwritten.
        """
        for flat in difference:
            flat.neg_()
        gradients, steps = self._replica.views(difference)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for buffer, step in zip(self._buffers, steps, strict=True):
            buffer.sub_(step)


class OuterSteps:
    """Outer optimizers of a center's fragments, one for each.

    Args:
        of_fragments: in their order.
    """

    def __init__(self, of_fragments: Sequence[OuterStep]) -> None:
        self.of_fragments = of_fragments

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each."""
        return [step.state_dict() for step in self.of_fragments]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from :meth:`state_dict`. A parameter that is in another fragment now has its state there.

        Raises:
            CheckpointError: there are other fragments.
        """
        if len(states) != len(self.of_fragments):
            raise CheckpointError(
                f"The checkpoint holds the states of {len(states)} outer optimizers; here there are "
                f"{len(self.of_fragments)}. Resume with the fragments of the run that was saved."
            )
        known = {name: value for state in states for name, value in state["state"].items()}
        for step, state in zip(self.of_fragments, states, strict=True):
            step.load_state_dict({**state, "state": known})
