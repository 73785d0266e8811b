"""What low-bit wires and error feedback do to averaging: two replicas on a noisy quadratic, in one process.

    python benchmarks/feedback.py [--seeds 3] [--steps 400] [--every 4]

Each replica has an optimum of its own; the best for both lies between. The error is the loss of the mean above the
least one, after the last step. ``node``: replicas take over the mean. ``daso``: they take over half of a mean that is a
step old.
"""

import argparse
import statistics

import torch
from torch import Tensor

from lightning_hetero.comm.encodings import encoding_of

WIRES = ("fp32", "int8", "int4", "topk:0.5", "topk:0.1", "topk:0.02")
VALUES, REPLICAS, RATE, NOISE = 20_000, 2, 0.1, 0.3


class Problem:
    """Quadratics with curvatures from 0.1 to 1, and noisy gradients."""

    def __init__(self) -> None:
        self.curvature = 0.1 + 0.9 * torch.rand(VALUES)
        common = torch.randn(VALUES)
        self.optima = [common + NOISE * torch.randn(VALUES) for _ in range(REPLICAS)]

    def step(self, replicas: list[Tensor]) -> None:
        for x, optimum in zip(replicas, self.optima, strict=True):
            x -= RATE * self.curvature * (x - optimum + NOISE * torch.randn(VALUES))

    def error(self, replicas: list[Tensor]) -> float:
        mean, best = sum(replicas) / REPLICAS, sum(self.optima) / REPLICAS
        return float((self.curvature * (mean - best) ** 2).mean())


def total(moved: list[Tensor], residuals: list[Tensor], wire: str, feedback: bool) -> Tensor:
    """The sum of what arrives."""
    encoding, arrived = encoding_of(wire), torch.zeros(VALUES)
    for difference, rest in zip(moved, residuals, strict=True):
        if encoding is None:
            arrived += difference
            continue
        rest += difference
        message = torch.empty(encoding.bytes(VALUES), dtype=torch.uint8)
        encoding.encode(rest, message)
        encoding.add(message, arrived)
        if not feedback:
            rest.zero_()
    return arrived


def trained(rule: str, wire: str, feedback: bool, steps: int, every: int, seed: int) -> float:
    torch.manual_seed(seed)
    problem, reference = Problem(), torch.zeros(VALUES)
    replicas = [torch.zeros(VALUES) for _ in range(REPLICAS)]
    residuals = [torch.zeros(VALUES) for _ in range(REPLICAS)]
    for step in range(1, steps + 1):
        problem.step(replicas)
        if step % every:
            continue
        mean = reference + total([(x - reference) / REPLICAS for x in replicas], residuals, wire, feedback)
        if rule == "daso":
            problem.step(replicas)
        for x in replicas:
            x.lerp_(mean, 0.5 if rule == "daso" else 1.0)
        reference = mean
    return problem.error(replicas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rule in ("node", "daso"):
        for wire in WIRES:
            cells = []
            for feedback in (True, False):
                errors = [
                    trained(rule, wire, feedback, options.steps, options.every, seed) for seed in range(options.seeds)
                ]
                cells.append(f"{statistics.median(errors):.5f} ({min(errors):.5f} to {max(errors):.5f})")
            print(f"{rule} {wire:10s} with feedback {cells[0]}, without {cells[1]}")


if __name__ == "__main__":
    main()
