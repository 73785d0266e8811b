"""Why asynchronous outer steps may learn less from a sample: `hetero_diloco_async`'s rule in virtual time.

    python benchmarks/async_causes.py [--seeds 10]

Four replicas read digits with the network and the rates of `async_speeds.py`, in one process: each step takes as long
as its device's speed says, on a clock that is only counted. So only the rule differs between rows, and each run can be
repeated. Rows end in two ways: when every replica has done its steps, as on a data set with a length, where fast
replicas end first; or all at the same moment, after as many samples in total, as on a stream.

The loss on test digits, over that of the synchronous form with the same seed, of three looks: the mean of the replicas;
the center; and the center moved by what replicas have done since they came to it.
"""

import argparse
import heapq
import statistics
from dataclasses import dataclass, replace

import torch
from async_speeds import BATCH, SECONDS, STEPS, TAU
from straggler import digits
from torch import Tensor, nn

RATE = 0.1
LOOKS = ("mean of replicas", "center", "center, moved")


class Task:
    """A network with one hidden layer whose parameters are one vector, and the batches of each replica.

    Args:
        seed: of the first weights and of the order.
        replicas: how many.
        steps: of each replica, at most.
    """

    def __init__(self, seed: int, replicas: int, steps: int) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.vector = nn.utils.parameters_to_vector(net.parameters()).detach()
        self.shapes = [p.shape for p in net.parameters()]
        data = digits(training=True)
        chosen = torch.randint(len(data), (steps, replicas, BATCH))
        self.images, self.labels = (column[chosen] for column in data.tensors)
        self.test = digits(training=False).tensors

    def _parts(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def step(self, vector: Tensor, replica: int, step: int) -> Tensor:
        """One step of SGD, with the gradient of the cross-entropy by hand: this is most of the time."""
        first, bias, second, last = self._parts(vector)
        images = self.images[step, replica]
        hidden = torch.addmm(bias, images, first.T).relu_()
        error = torch.addmm(last, hidden, second.T).softmax(1)
        error[torch.arange(BATCH), self.labels[step, replica]] -= 1
        error /= BATCH
        back = (error @ second).mul_(hidden > 0)
        gradients = back.T @ images, back.sum(0), error.T @ hidden, error.sum(0)
        return vector - RATE * torch.cat([gradient.reshape(-1) for gradient in gradients])

    def loss(self, vector: Tensor) -> float:
        """On test digits."""
        first, bias, second, last = self._parts(vector)
        logits = torch.addmm(last, torch.addmm(bias, self.test[0], first.T).relu_(), second.T)
        return nn.functional.cross_entropy(logits, self.test[1]).item()


@dataclass(frozen=True)
class Rule:
    """Asynchronous outer steps.

    Attributes:
        seconds: of a step of each replica.
        follow: whether local steps follow the speed (DyLU).
        together: whether all end at the same moment, rather than each after its steps.
        lr: of the outer step.
        momentum: of the outer step.
    """

    seconds: tuple[float, ...] = SECONDS
    follow: bool = True
    together: bool = False
    lr: float = 0.7
    momentum: float = 0.9


def synchronous(task: Task, steps: int, lr: float, momentum: float) -> float:
    """The loss of `hetero_diloco`: of the mean of the replicas in the end."""
    count = len(SECONDS)
    center, velocity = task.vector, torch.zeros_like(task.vector)
    replicas = [center] * count
    for step in range(steps):
        replicas = [task.step(x, i, step) for i, x in enumerate(replicas)]
        if (step + 1) % TAU == 0:
            gradient = center - sum(replicas) / count
            velocity = momentum * velocity + gradient
            center = center - lr * (gradient + momentum * velocity)
            replicas = [center] * count
    return task.loss(sum(replicas) / count)  # type: ignore[arg-type]


def asynchronous(task: Task, steps: int, rule: Rule) -> list[float]:
    """The losses of the three looks in the end."""
    count = len(rule.seconds)
    center, velocity, total = task.vector, torch.zeros_like(task.vector), torch.zeros_like(task.vector)
    replicas, begun, speeds = [center] * count, [center] * count, [0.0] * count
    done, last, local, came = [0] * count, [0] * count, [TAU] * count, 0
    clock = [(seconds, i) for i, seconds in enumerate(rule.seconds)]
    heapq.heapify(clock)
    while clock and (not rule.together or sum(done) < steps * count):
        now, i = heapq.heappop(clock)
        replicas[i] = task.step(replicas[i], i, done[i])
        done[i] += 1
        if done[i] - last[i] >= local[i]:
            gradient = (begun[i] - replicas[i]) / count
            center, total, came = center - rule.lr * gradient, total + gradient, came + 1
            if came % count == 0:
                velocity = rule.momentum * velocity + total
                center = center - rule.lr * rule.momentum * velocity
                total = torch.zeros_like(total)
            replicas[i] = begun[i] = center
            speeds[i], last[i] = 1 / rule.seconds[i], done[i]
            local[i] = max(round(TAU * speeds[i] / max(speeds)), 1) if rule.follow else TAU
        if rule.together or done[i] < steps:
            heapq.heappush(clock, (now + rule.seconds[i], i))
    moved = center + sum(x - c for x, c in zip(replicas, begun, strict=True)) / count
    return [task.loss(vector) for vector in (sum(replicas) / count, center, moved)]  # type: ignore[list-item]


ALIKE = (0.1, 0.101, 0.102, 0.103)  # seconds: their order is always the same
RULES = {
    "speeds 4:2:1:1": Rule(),
    "the same, all end together": Rule(together=True),
    "the same, tau local steps each": Rule(follow=False, together=True),
    "speeds 1:1:1:1": Rule(seconds=ALIKE),
}
OUTER = [(0.7, 0.9), (1.0, 0.5), (1.0, 0.0)]  # learning rates and momenta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each replica")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    longest = round(max(SECONDS) / min(SECONDS)) * asked.steps  # more than any replica does
    tasks = [Task(seed, len(SECONDS), longest) for seed in range(asked.seeds)]
    print(f"{asked.steps} steps of each replica; the loss over that of the synchronous form: mean (sd) of")
    print(f"| | {' | '.join(LOOKS)} |")
    for lr, momentum in OUTER:
        base = [synchronous(task, asked.steps, lr, momentum) for task in tasks]
        print(f"outer_lr={lr}, outer_momentum={momentum}; the synchronous form's own loss: {shown(base)}")
        for name, rule in RULES.items():
            runs = [asynchronous(task, asked.steps, replace(rule, lr=lr, momentum=momentum)) for task in tasks]
            columns = zip(*runs, strict=True)
            ratios = [[look / own for look, own in zip(column, base, strict=True)] for column in columns]
            print(f"| {name} | {' | '.join(map(shown, ratios))} |", flush=True)


def shown(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({statistics.stdev(values) if len(values) > 1 else 0.0:.3f})"


if __name__ == "__main__":
    main()
