"""Ranks that draw batches ahead, while the plan changes."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import Rank, check_together, one_process
from torch.utils.data import DataLoader

from lightning_hetero.batching.cost import CostModel
from lightning_hetero.batching.planner import Plan, Planner, Report
from lightning_hetero.batching.shares import Cost

# -- drawing ahead, while the plan changes ---------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0.001, 0.002, 0.004, 0.016]), min_size=2, max_size=4),
    st.lists(st.integers(0, 6), min_size=4, max_size=4),
    st.integers(1, 5),
)
@settings(max_examples=40)
def test_ranks_that_draw_ahead_differently_agree_on_every_batch(speeds, ahead, every):
    # Each rank has its own planner and its own prefetching; speeds change, so plans do. Were a plan to begin at a step
    # that some rank has drawn, samples would be lost or doubled.
    world, samples, batch_size = len(speeds), 250, 32
    planners = [Planner(world) for _ in speeds]
    ranks = [Rank(r, planners[r], samples, batch_size) for r in range(world)]
    models = [CostModel() for _ in speeds]
    for planner in planners:
        planner.expect(batch_size)
    step, reports = 0, None
    for epoch in range(4):
        reference = one_process(samples, batch_size, False, epoch)
        parts = [[] for _ in ranks]
        iterators, queues = [], [deque() for _ in ranks]
        for rank in ranks:
            rank.go_to(epoch)
            iterators.append(iter(rank.sampler))
        for _ in reference:
            for r, rank in enumerate(ranks):
                while len(queues[r]) <= ahead[r] and (batch := next(iterators[r], None)) is not None:
                    queues[r].append(batch)
                parts[r].append((queues[r].popleft(), rank.sampler.drawn.popleft()))
            if reports:
                drawn = [float(rank.sampler.next_step) for rank in ranks]
                reports = [report._replace(drawn=first) for report, first in zip(reports, drawn, strict=True)]
                for planner in planners:
                    planner.update(step, reports)
                reports = None
            for model, k, steps in zip(models, speeds, parts, strict=True):
                n = max(steps[-1][1].samples, 1)
                model.observe(n, 0.01 + k * n)
            step += 1
            if step % every == 0:
                reports = [
                    Report(*m.cost, m.error(max(steps[-1][1].samples, 1)), 0, 0, 0.1, 0, every)
                    for m, steps in zip(models, parts, strict=True)
                ]
        check_together(parts, reference)
        speeds = speeds[1:] + speeds[:1]
    if len(set(speeds)) > 1:
        assert len(planners[0].plans) > 1  # or the test would show nothing


class Numbers:
    def __len__(self):
        return 90

    def __getitem__(self, index):
        return index


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_dataloader_with_persistent_workers_draws_ahead():
    planner = Planner(2)
    planner.plans += [
        Plan(start, (Cost(0, 1), Cost(0, k)), (0, 0), (99, 99)) for start, k in ((5, 3.0), (12, 0.1), (17, 40.0))
    ]
    with_workers, plain = (Rank(r, planner, len(Numbers()), 12) for r in range(2))
    loader = DataLoader(
        Numbers(), batch_sampler=with_workers.sampler, num_workers=2, persistent_workers=True, prefetch_factor=2
    )
    most_ahead, step = 0, 0
    for epoch, length in enumerate((8, 3, 8)):  # the second epoch is cut short
        reference = one_process(len(Numbers()), 12, False, epoch)[:length]
        for rank in (with_workers, plain):
            rank.go_to(epoch, step=step)
        steps = []
        for batch, _ in zip(loader, reference, strict=False):
            most_ahead = max(most_ahead, len(with_workers.sampler.drawn))
            steps.append((batch.tolist(), with_workers.sampler.drawn.popleft()))
            if len(steps) == length:
                break
        check_together([steps, plain.run()[:length]], reference)
        step += length
    assert most_ahead >= 4  # it did draw ahead
    assert len(loader) == 8
    loader._iterator._shutdown_workers()
