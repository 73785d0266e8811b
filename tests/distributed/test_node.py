"""`hetero_node`: replicas that train separately, against loops by hand, and with all features of Lightning."""

import time
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from center_tasks import Line
from center_tasks import fit as center_fit
from oracles import SAMPLES, data, oracle, order
from ranks import run
from tasks import FAST, Net, dataset, error, fit, parameters
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import DASOStrategy, NodeAverageStrategy

NODES = [2, 1]  # ranks of each node
SHARES = [3.0, 1.0, 2.0]  # of 12 samples: 6, 2 and 4; by node 8 and 4
NODE = {"strategy_class": NodeAverageStrategy}


def by_hand(
    every: int | None, epochs: int, moments: bool, make: Any = Net, samples: int = 96
) -> tuple[nn.Module, list[torch.Tensor]]:
    """Mean of two models that train on 8 and 4 samples of each batch of 12, and average every K steps."""
    data, models = dataset(samples), [make(), make()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    order, step, path = DistributedSampler(data, 1, 0, shuffle=True), 0, []
    for epoch in range(epochs):
        order.set_epoch(epoch)
        indices = list(order)
        for first in range(0, samples, 12):
            parts = indices[first : first + 8], indices[first + 8 : first + 12]
            for model, optimizer, part in zip(models, optimizers, parts, strict=True):
                optimizer.zero_grad()
                model.loss(data[part]).backward()
                optimizer.step()
            step += 1
            if (first + 12 >= samples) if every is None else step % every == 0:
                with torch.no_grad():
                    for p, q in zip(*(model.parameters() for model in models), strict=True):
                        tensors = [(p, q)]
                        if moments:
                            tensors.append(
                                tuple(o.state[x]["momentum_buffer"] for o, x in zip(optimizers, (p, q), strict=True))
                            )
                        for a, b in tensors:
                            mean = (8 * a + 4 * b) / 12
                            a.copy_(mean)
                            b.copy_(mean)
            path.append((2 * parameters(models[0]) + parameters(models[1])) / 3)
    return models[0], path


# -- the algorithm -------------------------------------------------------------------------------------------


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("every", "moments"), [(1, False), (3, False), (3, True), (None, False), (5, True)])
def test_against_a_loop_by_hand(every: int | None, moments: bool) -> None:
    _, path = by_hand(every, 3, moments)
    strategy = {"every_n_steps": every, "average_optimizer_state": moments, "balance": SHARES}
    results = run(fit, 3, Net, 12, 96, nodes=NODES, strategy=strategy, **NODE)
    for result in results:
        assert error(result["parameters"], path[-1]) <= 1e-10
        assert torch.equal(result["parameters"], results[0]["parameters"])


def test_meeting_at_every_step_with_momentum_is_flat_data_parallel() -> None:
    truth = parameters(oracle(Net, 12, 96))
    strategy = {"every_n_steps": 1, "average_optimizer_state": True, "balance": SHARES}
    for result in run(fit, 3, Net, 12, 96, nodes=NODES, strategy=strategy, **NODE):
        assert error(result["parameters"], truth) <= 1e-10
    # The controls: equal weights of nodes, and momentum without averaging (visible with K > 1 only: it is linear).
    result = run(fit, 3, Net, 12, 96, nodes=NODES, strategy=strategy, strategy_class=Unweighted)[0]
    assert error(result["parameters"], truth) > 1e-4
    assert error(by_hand(3, 3, True)[1][-1], by_hand(3, 3, False)[1][-1]) > 1e-4


class Unweighted(NodeAverageStrategy):
    def build(self, job: Any, repartition: Any = None) -> None:
        super().build(job, repartition)
        self.engine.samples_per_replica = lambda: [1] * job.view.count  # type: ignore[method-assign]


class Explodes(Line):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        broken = self.global_rank == 1 and self.trainer.global_step == 5
        return super().training_step(batch, batch_idx) * (float("nan") if broken else 1.0)


def _explodes() -> torch.Tensor:
    warnings.filterwarnings("ignore", ".*was left out of the average")
    options = {"every_n_steps": 1, "average_optimizer_state": True, "on_nan": "skip"}
    return center_fit(NodeAverageStrategy, Explodes(momentum=0.9), epochs=1, **options)["path"]


def test_moments_of_a_replica_that_is_not_finite_are_left_out() -> None:
    model, (x, y) = Line(momentum=0.9), map(torch.tensor, data())
    optimizer, rows, path = model.configure_optimizers(), order(0, SAMPLES), []
    for step, first in enumerate(range(0, SAMPLES, 12)):
        chosen = rows[first : first + 12]
        if step == 5:
            chosen = chosen[:8]  # those of replica 0
        optimizer.zero_grad()
        model.training_step((x[chosen], y[chosen]), step).backward()
        optimizer.step()
        path.append(parameters(model))
    for found in run(_explodes, 2, nodes=[1, 1]):
        assert (found - torch.stack(path))[:-1].abs().max() < 1e-12  # the last batch is smaller


@pytest.mark.parametrize(("kind", "options"), [(NodeAverageStrategy, {"every_n_steps": 3}), (DASOStrategy, {})])
def test_one_node_trains_as_hetero_ddp(kind: Any, options: dict[str, Any]) -> None:
    truth, strategy = parameters(oracle(Net, 12, 96)), {"balance": [2.0, 1.0], **options}
    for result in run(fit, 2, Net, 12, 96, strategy=strategy, strategy_class=kind):
        assert error(result["parameters"], truth) <= 1e-10


# -- independence --------------------------------------------------------------------------------------------


class Sleeper(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(0.02)
        self.times = [*getattr(self, "times", []), time.perf_counter()]
        return self.loss(batch)


def _beside_a_sleeper() -> float:
    module = Sleeper()
    strategy = NodeAverageStrategy(every_n_steps=60, balance="off", ranks_per_node=1)
    trainer = pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 1})
    trainer.fit(module, DataLoader(dataset(480), batch_size=4))
    return module.times[50] - module.times[0]


@pytest.mark.clock
def test_a_fast_node_does_not_wait_for_a_slow_one_between_meetings() -> None:
    fast, slow = run(_beside_a_sleeper, 2)
    assert slow > 50 * 0.02
    assert fast < slow / 2
