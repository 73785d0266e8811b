"""The global order against what one PyTorch process would draw."""

import random
from functools import partial
from itertools import chain, repeat
from operator import eq
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.batching.global_batch import GlobalBatchSizes
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.repartition import Repartition
from lightning_hetero.batching.sampler import (
    AgreedOrder,
    EvaluatedGroups,
    EvenBatches,
    FixedBatches,
    GroupedBatches,
    Position,
    seeded,
)
from lightning_hetero.checkpoint_sections import section
from lightning_hetero.errors import DataError, UnsupportedError
from lightning_hetero.strategies import loaders as loaders_module
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.options import Options

sizes = st.integers(0, 60)
batch_sizes = st.integers(1, 20)


# -- cutting the order -------------------------------------------------------------------------------


@given(sizes, batch_sizes, st.booleans(), st.integers(0, 10))
def test_fixed_batches_are_those_of_one_process(samples, batch_size, drop_last, first):
    order = random.Random(samples).sample(range(1000), samples)
    reference = list(BatchSampler(order, batch_size, drop_last))
    batches = FixedBatches(order, batch_size, drop_last)
    assert len(batches) == len(reference)
    assert list(batches.draw(0)) == reference
    assert [batches.size(i) for i in range(len(batches))] == [len(batch) for batch in reference]
    first = min(first, len(reference))
    assert list(batches.draw(first)) == reference[first:]


@given(st.integers(1, 200), batch_sizes, st.integers(1, 6))
def test_evaluated_batches_are_those_of_one_process_or_as_even_as_can_be(samples, batch_size, world):
    order = random.Random(samples).sample(range(1000), samples)
    batches = EvenBatches(order, batch_size, world)
    drawn = list(batches.draw(0))
    lengths = [len(batch) for batch in drawn]
    assert [i for batch in drawn for i in batch] == order
    plain = [len(batch) for batch in BatchSampler(order, batch_size, drop_last=False)]
    assert lengths == plain if min(plain) >= world else max(lengths) - min(lengths) <= 1
    assert lengths == [batches.size(i) for i in range(len(batches))]
    if samples >= world:
        assert min(lengths) >= world  # every rank has a sample of every batch
        assert max(lengths) <= max(batch_size, 2 * world - 1)
    if batch_size >= 2 * world:
        assert len(drawn) == -(-samples // batch_size)  # no more than needed
    for first in range(len(drawn) + 1):
        assert list(batches.draw(first)) == drawn[first:]


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=4), max_size=14), st.integers(1, 5), st.integers(0, 5))
def test_grouped_batches_join_as_many_batches_as_there_are_ranks(parts, world, first):
    batches = GroupedBatches(parts, world)
    groups = [list(chain(*parts[i : i + world])) for i in range(0, len(parts), world)]
    assert len(batches) == len(groups)
    assert list(batches.draw(0)) == groups
    assert list(batches.draw(first)) == groups[first:]
    assert batches.size(0) is None


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=4), min_size=1, max_size=14), st.integers(1, 5))
def test_evaluated_groups_hold_all_samples_and_none_is_too_small_for_the_ranks(parts, world):
    batches, samples = EvaluatedGroups(parts, world), list(chain(*parts))
    if len(samples) < world:
        with pytest.raises(DataError, match=f"yields {len(samples)} samples for {world} ranks"):
            list(batches.draw(0))
        return
    drawn = list(batches.draw(0))
    assert list(chain(*drawn)) == samples
    assert min(map(len, drawn)) >= world
    assert len(drawn) <= len(batches)
    grouped = list(GroupedBatches(parts, world).draw(0))
    if min(map(len, grouped)) >= world:
        assert drawn == grouped


def test_a_sampler_that_yields_more_than_its_length_says_so():
    class Long(list):
        def __len__(self):
            return 2

    order = AgreedOrder(Long([1, 2, 3]), lambda value: value, decides=lambda: True, seed=0)
    with pytest.warns(UserWarning, match="Long yields 3 items, but its length says 2"):
        assert list(order) == [1, 2, 3]
    with pytest.warns(UserWarning, match="the rest is not used"):
        assert list(FixedBatches(order, 3, drop_last=False).draw(0)) == [[1, 2]]


# -- agreeing on a sampler of the user's -----------------------------------------------------------------


class Wire:
    """Carries what rank 0 sends to the others."""

    def __init__(self):
        self.sent = []

    def sender(self, value):
        assert value is not None
        self.sent.append(value)
        return value

    def receiver(self, value):
        assert value is None  # only rank 0 decides
        return self.sent[-1]


class Coins:
    """Draws from all three global random states."""

    def __init__(self, length=30):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            yield int(torch.randint(100, ()).item() * 10**4 + np.random.randint(100) * 100 + random.randrange(100))


class Epochal(Coins):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * self.length)


class Forbidden(Coins):
    def __iter__(self):
        raise AssertionError("only rank 0 runs the sampler")


def states():
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def order_of(sampler, epoch=0, seed=0):
    """The order that rank 0 decides."""
    agreed = AgreedOrder(sampler, Wire().sender, decides=lambda: True, seed=seed)
    agreed.set_epoch(epoch)
    return list(agreed)


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


SAMPLERS = [
    Coins,
    lambda: RandomSampler(range(30)),
    lambda: WeightedRandomSampler([0.1, 0.2, 0.7] * 10, 30),
    lambda: BatchSampler(RandomSampler(range(30)), 4, drop_last=False),
]


@pytest.mark.parametrize("make", SAMPLERS)
def test_rank_0_decides_for_all(make):
    wire = Wire()
    orders = []
    for rank in range(3):
        seed_all(rank)  # as ranks differ
        sampler = make() if rank == 0 else Forbidden()
        send = wire.sender if rank == 0 else wire.receiver
        agreed = AgreedOrder(sampler, send, partial(eq, rank, 0), seed=5)
        orders.append(list(agreed))
    assert orders[0] == orders[1] == orders[2]
    assert len(wire.sent) == 1


@pytest.mark.parametrize("make", SAMPLERS)
def test_an_interrupted_epoch_can_be_repeated(make):
    seed_all(1)
    first = order_of(make(), epoch=3)
    seed_all(2)  # another process has another random state
    assert order_of(make(), epoch=3) == first
    assert order_of(make(), epoch=4) != first
    assert order_of(make(), epoch=3, seed=1) != first


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, lambda sampler: BatchSampler(sampler, 4, drop_last=False)])
def test_an_interrupted_epoch_can_be_repeated_though_the_sampler_has_its_own_generator(wrap):
    def sampler(seed=7):
        return wrap(RandomSampler(range(30), generator=torch.Generator().manual_seed(seed)))

    agreed = AgreedOrder(sampler(), Wire().sender, decides=lambda: True, seed=0)
    orders = []
    for epoch in range(3):
        agreed.set_epoch(epoch)
        orders.append(list(agreed))
    assert orders[0] != orders[1] != orders[2]
    assert order_of(sampler(), epoch=2) == orders[2]
    assert order_of(sampler(seed=8), epoch=2) != orders[2]  # the user's seed still tells the order


@pytest.mark.parametrize("make", SAMPLERS)
def test_the_random_states_are_as_if_nothing_had_been_drawn(make):
    seed_all(9)
    before = states()
    order_of(make())
    assert states() == before


def test_samplers_are_told_the_epoch():
    assert order_of(Epochal(4), epoch=6) == [6, 6, 6, 6]
    assert order_of(BatchSampler(Epochal(4), 2, drop_last=False), epoch=7) == [[7, 7], [7, 7]]


def test_seeded_is_what_seeding_would_be():
    with seeded(2**32 + 3):  # more than NumPy takes
        drawn = list(Coins())
    torch.manual_seed(2**32 + 3)
    np.random.seed(3)
    random.seed(2**32 + 3)
    assert drawn == list(Coins())


def test_a_batch_sampler_that_ends_early_gives_no_empty_batch():
    class Short(list):
        def __len__(self):
            return 8

    batches = GroupedBatches(Short([[1], [2], [3]]), 2)
    assert len(batches) == 4
    assert list(batches.draw(0)) == [[1, 2], [3]]


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize(
    ("own_sampler", "workers", "fits"), [(True, (2, 0), False), (True, (0, 0), True), (False, (2, 0), True)]
)
def test_ranks_meet_at_one_moment_to_agree_on_a_sampler_or_are_refused(
    monkeypatch, evaluation, own_sampler, workers, fits
):
    # Rank 0 sends the order of a sampler of the user's when the first batch is drawn. Workers draw it when the epoch's
    # iterator is made; a rank without workers later, after other collectives: the job would hang.
    checked = []
    for rank, count in enumerate(workers):
        checked.append([])
        monkeypatch.setattr(loaders_module, "raise_on_all", lambda *_: None)
        monkeypatch.setattr(
            loaders_module, "check_equal", lambda what, values: checked[-1].append((what, dict(values)))
        )
        data = range(64)
        sampler = RandomSampler(data) if own_sampler else DistributedSampler(data, num_replicas=1, rank=0)
        loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=count)
        loaders = Loaders(
            rank,
            (0, 1),
            Planner(2),
            Options(),
            lambda: Position(0, 0, 0),
            lambda x: x,
            lambda x: x,
        )
        if evaluation:
            loaders.evaluation(loader, name="validation")
        else:
            loaders.training(loader, False, pl.LightningModule())
    assert (checked[0] == checked[1]) == fits


def test_the_batches_of_evaluation_are_no_steps_of_training(monkeypatch):
    # A fit that goes on with other ranks would take a training loader of that batch_size for one that it knows.
    monkeypatch.setattr(loaders_module, "raise_on_all", lambda *_: None)
    monkeypatch.setattr(loaders_module, "check_equal", lambda *_: None)
    planner, same = Planner(2), lambda x: x
    loaders = Loaders(0, (0, 1), planner, Options(), lambda: Position(0, 0, 0), same, same)
    loaders.training(DataLoader(data := range(64), batch_size=4), False, pl.LightningModule())
    loaders.evaluation(DataLoader(data, batch_size=8), "validation")
    checkpoint: dict = {}
    loaders.sizes.add_to(checkpoint)
    assert section(checkpoint, "global_batches") == [[4, 8]]


@pytest.fixture
def alone(monkeypatch):
    """Loaders of rank 0, of several that are made alike: the checks that all agree are skipped."""
    monkeypatch.setattr(loaders_module, "raise_on_all", lambda *_: None)
    monkeypatch.setattr(loaders_module, "check_equal", lambda *_: None)
    monkeypatch.setattr(loaders_module, "gather", lambda value, _: [value] * 2)

    def make(world=2, **options):
        given, same = Options(**options), lambda x: x
        peers = SimpleNamespace(length=None)
        return Loaders(0, range(world), given.planner(world), given, lambda: Position(0, 0, 0), same, lambda _: peers)

    return make


def test_after_a_loss_limits_of_evaluation_grow_and_it_is_said(alone):
    """The Trainer has counted the batches, of up to 12 samples: two ranks take them, although they take 8 by limit."""
    former, data = alone(3, max_batch_size=4, balance="off"), range(40)
    loader = former.evaluation(DataLoader(data, batch_size=8), "validation")
    assert [len(batch) for batch in loader.batch_sampler] == [4, 4, 4, 2]
    batches = list(loader.batch_sampler.batches.draw(0))
    later = alone(2, max_batch_size=4, balance="off")
    later.continue_from(former, Repartition((0, 2), 5, 1))
    with pytest.warns(UserWarning, match=r"take at most \[4, 4\] samples \(8 together\).* has 12") as caught:
        parts = [list(loader.batch_sampler) for _ in range(2)]
    assert len(caught) == 1
    assert parts == [[batch[::2] for batch in batches]] * 2
    anew = later.evaluation(DataLoader(data, batch_size=8), "test")  # whose batches the Trainer has not counted
    assert {len(batch) for batch in anew.batch_sampler} == {4}


class Endless(IterableDataset):
    def __iter__(self):
        return repeat(1)


@pytest.mark.parametrize(
    ("sizes", "given", "share"),
    [((8, 8), {}, 12), ((8, 4), {"global_batch_size": 8}, 6), ((8, 4), {}, None), ((8, None), {}, None)],
)
def test_several_streams_that_are_sized_here_have_one_size_or_are_refused(alone, sizes, given, share):
    # Each rank has one share of one global batch, that of the last loader.
    loaders, module = alone(balance=[3.0, 1.0], **given), pl.LightningModule()
    data = [DataLoader(Endless(), size) if size else DataLoader(range(64), 8) for size in sizes]
    combined = CombinedLoader([loaders.training(loader, False, module) for loader in data], "min_size")
    loaders.combined = lambda: combined
    if share:
        assert loaders._begin_epoch() == Position(0, 0, 0)
        assert [len(next(iter(loader.batch_sampler))) for loader in combined.flattened] == [share] * 2
    else:
        with pytest.raises(UnsupportedError, match=r"one share for all loaders.*the same batch_size"):
            loaders._begin_epoch()


# -- batches that stay whole -----------------------------------------------------------------------------

parts_lists = st.lists(st.lists(st.integers(), min_size=1, max_size=6), min_size=1, max_size=14)


@given(parts_lists, st.integers(1, 5), st.integers(0, 3))
def test_whole_batches_are_grouped_and_not_joined(parts, number, first):
    groups = [parts[i : i + number] for i in range(0, len(parts), number)]
    assert list(GroupedBatches([*parts, []], number, whole=True).draw(first)) == groups[first:]


@pytest.mark.parametrize(
    ("world", "size", "given", "now"),
    [
        (2, 3, None, None),  # keeps 12
        (2, 6, None, None),  # is 12
        (2, 8, None, "16 samples"),
        (4, 3, 12, None),
        (4, 3, 10, "10 samples"),
    ],
)
@pytest.mark.parametrize("first", [None, 12])
def test_another_size_than_that_of_the_checkpoint_is_seen(world, size, given, now, first):
    before, checkpoint = GlobalBatchSizes(4, first), {}
    before.trained(3)
    before.add_to(checkpoint)
    for resumed in (True, False):
        sizes = GlobalBatchSizes(world, given)
        sizes.load(checkpoint)
        sizes.begin(resumed)
        sizes.trained(size)
        assert sizes.changed() == (("12 samples", now) if resumed and now else None)
    plain = GlobalBatchSizes(world, given)  # from a checkpoint that says nothing
    plain.load({"state_dict": {}})
    plain.begin(resumed=True)
    plain.trained(size)
    assert plain.changed() is None


def test_a_step_keeps_its_number_of_batches_on_other_ranks():
    first, checkpoint = GlobalBatchSizes(2, None), {}
    assert first.of_groups(None) == 2
    first.add_to(checkpoint)
    for resumed, number in ((True, 2), (False, 3)):
        sizes = GlobalBatchSizes(3, None)
        sizes.load(checkpoint)
        sizes.begin(resumed)
        assert (sizes.of_groups(None), sizes.of_groups(5)) == (number, 5)


@given(parts_lists, st.integers(1, 5))
def test_in_an_evaluation_each_rank_has_one_of_each_group(parts, world):
    samples = list(chain(*parts))
    if len(samples) < world:
        with pytest.raises(DataError, match=f"yields {len(samples)} samples for {world} ranks"):
            list(EvaluatedGroups(parts, world, whole=True).draw(0))
        return
    groups = list(EvaluatedGroups(parts, world, whole=True).draw(0))
    assert all(len(group) == world and min(map(len, group)) > 0 for group in groups)
    assert list(chain(*chain(*groups))) == samples
    if len(parts) % world == 0:
        assert list(chain(*groups)) == parts
    elif len(samples) >= -(-len(parts) // world) * world:  # enough to halve
        assert len(groups) == -(-len(parts) // world)
        assert all(any(same == piece or set(piece) <= set(same) for same in parts) for piece in chain(*groups))
