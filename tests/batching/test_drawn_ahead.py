"""Ranks with real, prefetching dataloaders, in lockstep in one process: plans change, and no sample may be lost."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.batching.accounting import BatchAccounting
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.sampler import Position
from lightning_hetero.batching.timer import StepTimer
from lightning_hetero.strategies import loaders as loaders_module
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.options import Options

LOADING = 0.003  # seconds that a rank without workers takes to load a batch


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Mailbox:
    """Replaces the all-gather of reports: the rows of all ranks, once all have sent theirs."""

    def __init__(self, rows, rank, sent):
        self.rows, self.rank, self.sent, self.in_flight = rows, rank, sent, False

    def launch(self, row):
        self.rows[self.rank], self.in_flight = [float(x) for x in row], True
        self.sent.wait(10)

    def collect(self):
        self.in_flight = False
        return list(self.rows)


class Numbers:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return index


class Rank:
    """A rank as the strategy sets it up; only the wire and the clock are not real."""

    def __init__(self, rank, world, rows, sent, sizes, batch_size, workers, persistent, costs=None, rule="additive"):
        self.rank, self.epoch, self.clock = rank, 0, Clock()
        self.size = lambda drawn: max(drawn.samples, 1)  # its time is proportional to this
        self.planner = Planner(world)
        self.accounting = None
        loaders = Loaders(
            rank,
            tuple(range(world)),
            self.planner,
            Options(sample_cost=costs, cost=rule),
            self.position,
            lambda value: value,
            lambda tally: tally,
        )
        timer = StepTimer(torch.device("cpu"), clock=self.clock)
        self.accounting = BatchAccounting(
            self.planner,
            timer,
            loaders,
            tuple(range(world)),
            None,
            Mailbox(rows, rank, sent),
        )
        self.combined = CombinedLoader(
            [
                loaders.training(
                    DataLoader(
                        data := Numbers(samples),
                        batch_size=batch_size,
                        sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=3),
                        num_workers=workers,
                        persistent_workers=persistent and workers > 0,
                    ),
                    False,
                    pl.LightningModule(),
                )
                for samples in sizes
            ],
            "max_size_cycle",
        )
        loaders.combined = lambda: self.combined

    def position(self):
        step = 0 if self.accounting is None else self.accounting.step
        if self.accounting is not None:
            self.accounting.begin_epoch()
        return Position(self.epoch, 0, step)

    def step(self, batches, seconds_per_sample):
        """Do the work between the arrival of a batch and the end of the step."""
        self.accounting.begin()
        drawn = self.accounting.drawn
        self.clock.now += 0.010 + seconds_per_sample * self.size(drawn)
        self.accounting.end(report=(self.accounting.step + 1) % 4 == 0)
        return [batch.tolist() for batch in batches], drawn

    def close(self):
        self.combined.reset()  # ends the workers now, rather than when the garbage is collected, which takes long


@pytest.fixture
def cluster(monkeypatch):
    """Makes ranks. The checks that all ranks agree are skipped: all ranks are made alike."""
    for name in ("check_equal", "raise_on_all"):
        monkeypatch.setattr(loaders_module, name, lambda *_: None)
    made = []

    def make(sizes, batch_size, workers, persistent=True, *costs):
        rows, sent = [[] for _ in workers], Barrier(len(workers))
        made.extend(
            Rank(r, len(workers), rows, sent, sizes, batch_size, w, persistent, *costs) for r, w in enumerate(workers)
        )
        return made

    yield make
    for rank in made:
        rank.close()


def run_epoch(ranks, epoch, speeds):
    """All ranks, step by step; returns for each step the (batches, drawn) of every rank."""
    for rank in ranks:
        rank.epoch = epoch
        iter(rank.combined)
    steps = []
    for _ in range(len(ranks[0].combined)):
        parts = [next(rank.combined)[0] for rank in ranks]
        for rank in ranks:
            rank.clock.now += LOADING
        with ThreadPoolExecutor(len(ranks)) as threads:
            steps.append(list(threads.map(Rank.step, ranks, parts, speeds)))
    return steps


@pytest.mark.long(after=1)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("sizes", "workers", "persistent"),
    [
        ([160], [0, 0], True),  # five batches of 32
        ([256], [0, 0], True),  # eight: reports are sent at the end of every epoch, and arrive in the next
        ([256], [2, 0], True),  # then a rank has drawn four more batches at once
        ([416, 96], [0, 0], True),
        ([416, 96], [2, 0], True),  # so does one in which the shorter loader begins again
        ([400, 96], [2, 0], False),  # with a tail, and workers that begin again as well
    ],
)
def test_every_sample_is_drawn_once_whatever_the_plan_and_however_far_ahead(cluster, sizes, workers, persistent):
    ranks = cluster(sizes, 16, workers, persistent)
    for epoch, speeds in enumerate([(0.001, 0.004), (0.001, 0.004), (0.004, 0.001), (0.001, 0.001)]):
        steps = run_epoch(ranks, epoch, speeds)
        assert len(steps) == -(-sizes[0] // 32)
        for i, samples in enumerate(sizes):
            # The longest loader once; a shorter one over and over, each time once.
            per_round = -(-samples // 32)
            for first in range(0, len(steps), per_round):
                of_round = steps[first : first + per_round]
                seen = Counter(n for step in of_round for batches, drawn in step if drawn.samples for n in batches[i])
                assert set(seen.values()) == {1}
                assert len(seen) == samples if len(of_round) == per_round else 32 * len(of_round)
        for step in steps:
            assert sum(drawn.samples for _, drawn in step) == step[0][1].total == step[1][1].total
            of_loader = [[len(batches[i]) for batches, _ in step] for i in range(len(sizes))]
            for own in zip(*of_loader, strict=True):  # in equal proportions of all loaders
                assert own[0] * sum(of_loader[-1]) == own[-1] * sum(of_loader[0])
    assert len({plan.start for plan in ranks[0].planner.plans}) > 1  # otherwise the test would show nothing
    assert ranks[0].planner.plans == ranks[1].planner.plans


LENGTHS = [1 + (n * n) % 97 + 300 * (n % 37 == 0) for n in range(2048)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("rule", "workers"), [("additive", [2, 0]), ("padded", [0, 0])])
def test_batches_are_dealt_by_cost_whatever_the_plan_and_however_far_ahead(cluster, rule, workers):
    ranks = cluster([2048], 32, workers, True, LENGTHS, rule)
    for rank in ranks:
        rank.size = lambda drawn: drawn.cost
    for epoch, speeds in enumerate([(0.001, 0.004), (0.001, 0.004), (0.004, 0.001)]):
        steps = run_epoch(ranks, epoch, speeds)
        assert Counter(n for step in steps for batches, drawn in step for n in batches[0]) == Counter(range(2048))
        for step in steps:
            for ([batch], drawn), rank in zip(step, ranks, strict=True):
                own = rank.combined.flattened[0].batch_sampler.costs.values[batch]
                assert drawn.cost == pytest.approx(own.sum() if rule == "additive" else len(own) * own.max())
                assert (drawn.samples, drawn.total) == (len(batch), 64)
    for rank, speed in zip(ranks, speeds, strict=True):  # in seconds per unit of cost, and its fixed part
        cost = rank.accounting.cost.cost
        assert cost.per_sample == pytest.approx(speed, rel=0.1)
        assert cost.fixed == pytest.approx(0.010 + LOADING, rel=0.3)
        by_cost, by_samples = rank.accounting.by_cost.off()
        assert by_cost < 1e-6 < 0.005 < by_samples
    times = [
        0.010 + LOADING + k * drawn.cost for step in steps[-8:] for k, (_, drawn) in zip(speeds, step, strict=True)
    ]
    if rule == "additive":
        assert max(times[::2]) < 1.1 * max(times[1::2]) < 1.21 * max(times[::2])
    assert ranks[0].planner.plans == ranks[1].planner.plans
    assert not ranks[0].planner.plans[-1].by_samples


@pytest.mark.parametrize("per_sample", [0.001, 0.004])  # in long steps shares move before that is known
def test_costs_are_left_where_times_follow_the_samples(cluster, per_sample):
    ranks = cluster([4096], 32, [0, 0], True, [1 + 200 * (n % 61 == 0) for n in range(4096)])
    with pytest.warns(UserWarning, match="explains the times of steps worse than the numbers of samples do") as caught:
        steps = run_epoch(ranks, 0, (per_sample, per_sample))
    start = next(plan.start for plan in ranks[0].planner.plans if plan.by_samples)
    assert len(caught) == 2  # rank_zero_warn takes both ranks of this process for rank 0
    assert start < 48
    assert len({drawn.samples for step in steps[:start] for _, drawn in step}) > 5
    assert {drawn.samples for step in steps[start:] for _, drawn in step} == {32}
    assert Counter(n for step in steps for batches, _ in step for n in batches[0]) == Counter(range(4096))
    for rank in ranks:
        assert rank.accounting.cost.cost.seconds(32) == pytest.approx(0.010 + LOADING + 32 * per_sample)


def test_loading_counts_in_every_step_also_after_a_report(cluster):
    (rank,) = cluster([512], 32, [0])
    run_epoch([rank], 0, [0.001])
    # Without the first step of the epoch, in which workers start.
    assert rank.accounting.step == 16
    compute = rank.accounting._gathering.rows[0][5]  # of the last four steps
    assert compute == pytest.approx(0.010 + 0.001 * 32 + LOADING)
