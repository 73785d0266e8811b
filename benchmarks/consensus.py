"""Which weights read best between two exchanges: the center, the mean of the replicas, or an outer step taken early.

Four replicas learn to read two overlaid digits, in one process, by the formulas of hetero_diloco and hetero_easgd. At
fixed steps all candidates are tried on test digits that are never trained on; training goes on as if nobody had looked.

    python benchmarks/consensus.py [--repeats 5] [--epochs 6]
"""

import argparse
import statistics
import sys
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent / "cluster"))

REPLICAS, BATCH, STEPS = 4, 16, 128  # samples per replica and step; steps per epoch
SIZES = (64, 128, 128, 100)  # of the layers


class Kind(NamedTuple):
    """An algorithm; if it is elastic, with alpha = 0.9 / replicas and beta = 0.9."""

    elastic: bool
    tau: int
    adamw: bool


KINDS = {
    "hetero_diloco, tau=20, AdamW": Kind(False, 20, True),
    "hetero_diloco, tau=50, AdamW": Kind(False, 50, True),
    "hetero_diloco, tau=500, AdamW": Kind(False, 500, True),
    "hetero_diloco, tau=50, SGD": Kind(False, 50, False),
    "hetero_easgd, tau=10, AdamW": Kind(True, 10, True),
    "hetero_easgd, tau=10, SGD": Kind(True, 10, False),
    "hetero_easgd, tau=50, AdamW": Kind(True, 50, True),
    "hetero_easgd, tau=50, SGD": Kind(True, 50, False),
}


def forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    """A network, or several: weights and inputs may have a first dimension of replicas."""
    for i in range(0, len(weights), 2):
        x = x @ weights[i] + weights[i + 1].unsqueeze(-2)
        x = x.relu() if i + 2 < len(weights) else x
    return x


def ahead(center: list[Tensor], outer: torch.optim.Optimizer, mean: list[Tensor]) -> list[Tensor]:
    """The center after an outer step on the mean, of copies."""
    copies = [nn.Parameter(c.detach().clone()) for c in center]
    other = torch.optim.SGD(copies, lr=0.7, momentum=0.9, nesterov=True)
    other.load_state_dict(deepcopy(outer.state_dict()))
    for copy, own in zip(copies, mean, strict=True):
        copy.grad = copy.detach() - own
    other.step()
    return copies


@torch.no_grad()
def read(weights: list[Tensor], test: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Loss and accuracy on the test."""
    out = forward(test[0], weights)
    return cross_entropy(out, test[1]).item(), (out.argmax(1) == test[1]).float().mean().item()


def train(kind: Kind, seed: int, epochs: int) -> list[tuple[int, dict[str, tuple[float, float]]]]:
    """What each candidate reads, at fixed steps."""
    from learn import overlaid

    torch.manual_seed(seed)
    layers = [nn.Linear(i, o) for i, o in pairwise(SIZES)]
    center = [nn.Parameter(w.detach().clone()) for layer in layers for w in (layer.weight.T, layer.bias)]
    replicas = [nn.Parameter(c.detach().expand(REPLICAS, *c.shape).clone()) for c in center]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(replicas, lr=0.05, momentum=0.9)
    if kind.adamw:
        optimizer = torch.optim.AdamW(replicas, lr=2e-3)
    outer = torch.optim.SGD(center, lr=0.7, momentum=0.9, nesterov=True)
    (images, labels), (x, y) = overlaid(True, REPLICAS * BATCH * STEPS).tensors, overlaid(False, 2048).tensors
    images, test, looks, step = images.flatten(1), (x.flatten(1), y), [], 0
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).view(STEPS, REPLICAS, BATCH):
            step += 1
            before = [replica.detach().clone() for replica in replicas]
            optimizer.zero_grad()
            # Each replica has the mean of its own samples.
            (REPLICAS * cross_entropy(forward(images[rows], replicas).flatten(0, 1), labels[rows].flatten())).backward()
            optimizer.step()
            mean = [replica.detach().mean(0) for replica in replicas]
            if step % kind.tau in (kind.tau // 5, kind.tau // 2, kind.tau - 1):
                candidates: dict[str, list[Tensor]] = {"center": list(center), "mean": mean}
                if not kind.elastic:
                    candidates["outer step"] = ahead(list(center), outer, mean)
                looks.append((step, {name: read(weights, test) for name, weights in candidates.items()}))
            if step % kind.tau:
                continue
            with torch.no_grad():
                if kind.elastic:
                    for c, replica, old in zip(center, replicas, before, strict=True):
                        replica -= 0.9 / REPLICAS * (old - c)
                        c += 0.9 * (old.mean(0) - c)
                else:
                    for c, m in zip(center, mean, strict=True):
                        c.grad = c - m
                    outer.step()
                    for c, replica in zip(center, replicas, strict=True):
                        replica.copy_(c.expand_as(replica))
    return looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="seeds")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Test loss (accuracy), means of {options.repeats} seeds; in how many of them the loss is the lowest")
    for name, kind in KINDS.items():
        runs = [train(kind, seed, options.epochs) for seed in range(options.repeats)]
        print(f"\n{name}")
        tau, last = kind.tau, runs[0][-1][0] + 1
        middle = max(3 * tau, last // 2)
        spans = {"before the first exchange": (0, tau), "periods 2 and 3": (tau, min(3 * tau, last))}
        spans |= {"up to the middle": (3 * tau, middle), "second half": (middle, last)}
        for span, (low, high) in spans.items():
            if not any(low <= step < high for step, _ in runs[0]):
                continue
            rows = {
                candidate: [
                    [statistics.mean(look[candidate][i] for step, look in run if low <= step < high) for i in (0, 1)]
                    for run in runs
                ]
                for candidate in runs[0][0][1]
            }
            best = [min(rows, key=lambda name: rows[name][seed][0]) for seed in range(len(runs))]
            texts = [
                f"{candidate} {statistics.mean(row[0] for row in of):.3f} "
                f"({statistics.mean(row[1] for row in of):.1%}) {best.count(candidate)}"
                for candidate, of in rows.items()
            ]
            print(f"  {span:26} " + "   ".join(texts), flush=True)


if __name__ == "__main__":
    main()
