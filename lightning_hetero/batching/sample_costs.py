"""Costs of samples: where they come from, whether they can be used, and the deal of a batch by them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from lightning_hetero.batching.deal import Floats, Ints, Machines, deal_additive, deal_padded
from lightning_hetero.batching.plan import Plan, exact_shares
from lightning_hetero.batching.shares import check_limits, split
from lightning_hetero.errors import ConfigurationError, DataError

T = TypeVar("T")
#: How the costs of a part follow from those of its samples.
Rule = Literal["additive", "padded", "samples"]
#: A sample costs at least this part of the mean one, as something is to be done for each.
LEAST = 1e-3


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """Costs of a dataset's samples, in that of a mean sample.

    So a batch of as many samples costs about as much, and plans and limits mean the same with costs and without.

    Attributes:
        source: where they come from, in words.
        values: by index.
        padded: whether a part costs its samples times the longest; else the sum.
        digest: tells costs apart.
    """

    source: str
    values: Floats
    padded: bool
    digest: str

    def of(self, batch: Sequence[int]) -> Floats:
        """The costs of some samples.

        Raises:
            DataError: one of them is no index of the dataset.
        """
        try:
            return self.values[np.asarray(batch, np.int64)]
        except (IndexError, ValueError, TypeError):
            raise DataError(
                f"{self.source} knows samples 0 to {len(self.values) - 1}, but the sampler yields {list(batch)[:8]}. "
                "Let it yield indices of the dataset, or set cost='samples'."
            ) from None

    def together(self, batch: Sequence[int]) -> float:
        """The cost of some samples as one part of a batch."""
        costs = self.of(batch)
        return float(len(costs) * costs.max() if self.padded else costs.sum()) if len(costs) else 0.0

    def cheapest_first(self, batch: Sequence[int]) -> list[int]:
        """Samples in the order of their costs."""
        return [batch[i] for i in np.argsort(self.of(batch), kind="stable").tolist()]

    def padded_if_empty(self, own: list[int], batch: Sequence[int], count: int) -> tuple[list[int], float]:
        """A rank's samples of a batch, or so many of the cheapest if it has none; and what they cost."""
        own = own or (self.cheapest_first(batch) * count)[:count]
        return own, self.together(own)

    def deal(self, plan: Plan, batch: Sequence[int]) -> tuple[list[int], list[int]]:
        """Deal a batch by a plan.

        Returns:
            The samples of the first rank, those of the second, and so on, each rank's in the batch's order; and how
            many each rank has.
        """
        machines = machines_of(plan, len(batch))
        owner = (deal_padded if self.padded else deal_additive)(self.of(batch), machines)
        return _by_owner(batch, owner, len(machines.fixed))


def _by_owner(batch: Sequence[T], owner: Ints, world: int) -> tuple[list[T], list[int]]:
    """Items in the order of the ranks that they are dealt to, and how many each rank has."""
    counts = np.bincount(owner, minlength=world)
    return [batch[i] for i in np.argsort(owner, kind="stable").tolist()], counts.tolist()


@dataclass(frozen=True, eq=False)
class BatchCosts:
    """Costs of batches that stay whole, in that of a mean sample; and the deal of them.

    Attributes:
        samples: what samples cost; ``None``: nobody says so.
        alike: then, the cost of each batch, as of one with so many tokens; 0: it is the number of its samples.
    """

    samples: SampleCosts | None
    alike: float

    def of(self, batch: Sequence[int]) -> float:
        """The cost of one batch."""
        return self.alike or float(len(batch)) if self.samples is None else self.samples.together(batch)

    def padded_if_empty(self, own: list[Any], batch: Sequence[Any], count: int) -> tuple[list[Any], float]:
        """A rank's batches of a step, or so many samples of the smallest one if it has none; and what they cost."""
        if own:
            return own, sum(map(self.of, own))
        padding = (min(batch, key=len) * count)[:count]
        if self.samples is None:
            mean = sum(map(len, batch)) / len(batch)
            return [padding], (self.alike or mean) * count / mean
        return [padding], self.samples.together(padding)

    def deal(self, plan: Plan, batches: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Deal the batches of a step by a plan: a rank may have several, or none.

        A rank that takes ``t`` seconds for a batch of the mean cost takes time in proportion for others.

        Returns:
            The batches of the first rank, those of the second, and so on; and how many each rank has.
        """
        costs = [float(len(batch)) if plan.by_samples else self.of(batch) for batch in batches]
        mean, world = sum(costs) / len(costs), len(plan.costs)
        high = [len(batches) if most else 0 for most in plan.high]
        machines = Machines.of([0.0] * world, [cost.seconds(mean) for cost in plan.costs], None, high)
        return _by_owner(batches, deal_additive(costs, machines), world)


@lru_cache(maxsize=256)
def machines_of(plan: Plan, samples: int) -> Machines:
    """The ranks' costs and limits, for a batch of so many samples.

    A curve counts as the straight line through its time at the rank's share. A rank that needs several passes pays its
    fixed cost for each of them, and takes no more samples than they hold. A rank that is not trusted with more than
    a part of a batch counts as so slow that it takes no more than that, about.

    Args:
        plan: in force.
        samples: of the batch.

    Raises:
        ShareError: the limits leave no split.
    """
    _, costs, low, high = plan.task(samples, trusted=False)
    check_limits(samples, costs, low, high)
    shares = exact_shares(*plan.task(samples))
    counts = plan.passes(split(*plan.task(samples)))  # as many as if all samples cost the same
    high = tuple(min(h, count * most) for h, count, most in zip(high, counts, plan.high, strict=True))
    fixed = [count * cost.fixed for count, cost in zip(counts, costs, strict=True)]
    latest = max(cost.seconds(share) for cost, share in zip(costs, shares, strict=True))
    reach = [part * samples for part in plan.reach] or [float(samples)] * len(costs)
    per_unit = []
    for cost, share, most, alone in zip(costs, shares, reach, fixed, strict=True):
        if share > 0 and share >= most > 0 and share < samples:
            per_unit.append((latest - alone) / share)
        elif cost.bends:
            at = max(share, 1.0)
            per_unit.append((cost.seconds(at) - alone) / at)
        else:
            per_unit.append(cost.per_sample)
    return Machines.of(fixed, per_unit, low, high)


def sample_costs_of(dataset: Any, module: Any, given: Any, rule: Rule) -> SampleCosts | None:
    """Find what the samples of a dataset cost.

    Args:
        dataset: of a training loader.
        module: to be trained.
        given: ``sample_cost=`` of the strategy.
        rule: ``cost=`` of the strategy.

    Returns:
        ``None``: nobody says so, or all cost the same, so that samples can be counted.

    Raises:
        ConfigurationError: lengths are asked for, and nobody says them.
        DataError: the costs cannot be used.
    """
    if rule == "samples":
        return None
    found = _source(dataset, module, given)
    if found is None:
        if rule == "padded":
            raise ConfigurationError(
                f"cost='padded' needs the length of each sample, and {type(dataset).__name__} does not tell. Give it "
                "`lengths`, or give the strategy sample_cost=..."
            )
        return None
    name, source = found
    raw = _numbers(name, source, len(dataset))
    _check(name, raw, rule == "padded")
    if not raw.any():
        raise DataError(f"{name}: all {len(raw)} samples cost 0, so there is nothing to deal by. {_OTHERWISE}")
    if (raw == raw[0]).all():
        return None
    digest = hashlib.sha256(raw.astype("<f8").tobytes()).hexdigest()[:16]
    return SampleCosts(name, _of_a_mean_one(raw), rule == "padded", digest)


_OTHERWISE = "Set cost='samples' to count samples instead."


def _check(name: str, raw: Floats, padded: bool, first: int = 0) -> None:
    """Refuse what cannot be the costs of samples; ``first``: the number of the first one."""
    if (wrong := np.flatnonzero(~(np.isfinite(raw) & (raw >= 0)))).size:
        at = int(wrong[0])
        raise DataError(f"{name}: sample {first + at} costs {raw[at]:g}; costs are finite numbers of at least 0.")
    if padded and (wrong := np.flatnonzero(raw != np.floor(raw))).size:
        at = int(wrong[0])
        raise DataError(
            f"cost='padded' takes lengths, which are whole numbers, but {name} says {raw[at]:g} for sample "
            f"{first + at}. Give lengths, or set cost='additive'."
        )


def _of_a_mean_one(raw: Floats) -> Floats:
    """Costs in that of a mean sample, and of none 0."""
    mean = float(np.cumsum(raw)[-1]) / len(raw)  # a sum in this order is the same on all machines
    return np.maximum(raw / mean, LEAST) if mean > 0 else np.ones(len(raw))


@dataclass(frozen=True)
class StreamCosts:
    """Costs of a stream's samples, which are known when they are read; in that of a mean sample of their global batch.

    Attributes:
        source: where they come from, in words.
        ask: for a sample.
        padded: whether a part costs its samples times the longest; else the sum.
        digest: empty: nobody knows them before.
    """

    source: str
    ask: Callable[[Any], Any]
    padded: bool
    digest: str = ""

    def of(self, batch: Sequence[Any], first: int) -> SampleCosts:
        """The costs of a global batch, by place in it.

        Args:
            batch: samples.
            first: the number of the first one in the epoch.

        Raises:
            DataError: they cannot be used; on all ranks, as all read the same samples.
        """
        raw = np.asarray(_asked(self.source, self.ask, batch, first), np.float64)
        _check(self.source, raw, self.padded, first)
        return SampleCosts(self.source, _of_a_mean_one(raw), self.padded, "")


def stream_costs_of(stream: Any, given: Any, rule: Rule) -> StreamCosts | None:
    """Find what the samples of a stream cost, which all ranks read alike.

    Args:
        stream: of a ``SharedStream``.
        given: ``sample_cost=`` of the strategy.
        rule: ``cost=`` of the strategy.

    Raises:
        ConfigurationError: costs are asked for that do not fit a stream.
    """
    if rule == "samples":
        return None
    if callable(cost := getattr(stream, "sample_cost", None)):
        return StreamCosts(f"{type(stream).__name__}.sample_cost", cost, rule == "padded")
    if callable(given):
        return StreamCosts("sample_cost of the strategy", given, rule == "padded")
    if given is not None or rule == "padded":
        raise ConfigurationError(
            "the samples of a SharedStream have costs if its dataset has `sample_cost(sample)`, or sample_cost of the "
            "strategy is such a function: they come in any order, and are known when they are read."
        )
    return None


def _source(dataset: Any, module: Any, given: Any) -> tuple[str, Any] | None:
    """The source of the costs, with its name: a sequence, or a function of an index."""
    owner, indices = dataset, None
    while isinstance(owner, Subset):
        indices = list(owner.indices) if indices is None else [owner.indices[i] for i in indices]
        owner = owner.dataset
    name = type(owner).__name__
    if _is_sequence(costs := getattr(owner, "sample_costs", None)):
        return f"{name}.sample_costs", _taken(costs, indices)
    if callable(cost := getattr(owner, "sample_cost", None)):
        return f"{name}.sample_cost", cost if indices is None else lambda i: cost(indices[i])
    if callable(cost := getattr(module, "sample_cost", None)):
        return f"{type(module).__name__}.sample_cost", cost
    if _is_sequence(costs := getattr(owner, "lengths", None)):
        return f"{name}.lengths", _taken(costs, indices)
    return None if given is None else ("sample_cost of the strategy", given)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | dict)


def _taken(costs: Any, indices: list[int] | None) -> Any:
    """The costs at some indices, by one sequence or function for these."""
    return costs if indices is None else lambda i: costs[indices[i]]


def _numbers(name: str, source: Any, samples: int) -> Floats:
    if callable(source):
        source = _asked(name, source, range(samples))
    try:
        values = source.detach().cpu().numpy() if isinstance(source, Tensor) else source
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} is no sequence of numbers: {error}. {_OTHERWISE}") from None
    if numbers.ndim != 1 or len(numbers) != samples:
        shape = "x".join(map(str, numbers.shape))
        raise DataError(
            f"{name} has {shape} costs for {samples} samples: give one for each, by its index. {_OTHERWISE}"
        )
    return numbers


def _asked(name: str, source: Callable[[Any], Any], samples: Sequence[Any], first: int = 0) -> list[float]:
    """The costs of samples, one by one, by their indices, or as they are; ``first``: the number of the first one."""
    costs = []
    for number, sample in enumerate(samples, start=first):
        try:
            costs.append(float(source(sample)))
        except Exception as error:  # it is the user's, and may raise anything
            raise DataError(f"{name} gives no number for sample {number}: {type(error).__name__}: {error}") from error
    return costs
