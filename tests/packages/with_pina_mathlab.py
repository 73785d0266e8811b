"""PINA: a physics-informed network for the Poisson equation, in batches of points of the square and of its boundary."""

from collections.abc import Iterable
from typing import Any

from compare import main
from pina import Trainer
from pina.model import FeedForward
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import PhysicsInformedSingleModelSolver
from torch import Tensor


def train(trainer: dict[str, Any]) -> None:
    problem = Poisson2DSquareProblem()
    for domain in ("D", "boundary"):
        problem.discretise_domain(n=200, mode="random", domains=domain)
    model = FeedForward(len(problem.input_variables), len(problem.output_variables), inner_size=16)
    solver = PhysicsInformedSingleModelSolver(problem, model)
    Trainer(solver, batch_size=8, train_size=0.8, val_size=0.2, **trainer).train()


def points(batch: Any) -> Iterable[Tensor]:
    """The points of both conditions."""
    return [data["input"].tensor for _, data in (batch.items() if isinstance(batch, dict) else batch)]


if __name__ == "__main__":
    main("pina-mathlab", train, points)
