"""``lightning-hetero doctor``: measures ranks and links, and suggests a strategy, with its arithmetic."""

import json
import logging
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from lightning_hetero.algorithms.schedules import smallest_tau
from lightning_hetero.batching.shares import Cost, makespan, row_of, split, too_slow
from lightning_hetero.comm.agreement import gather
from lightning_hetero.comm.centers.mpi import mpi_missing
from lightning_hetero.comm.topology import Topology, group_of
from lightning_hetero.config import lightning_cli
from lightning_hetero.errors import ConfigurationError, HeteroError, UnsupportedError
from lightning_hetero.planning import cluster
from lightning_hetero.planning.cluster import MEMORY, Cluster, LinkModel, MeasuredLink, duration
from lightning_hetero.planning.plan import FORMAT
from lightning_hetero.planning.predictions import Prediction, predictions
from lightning_hetero.planning.strategy_choice import RAREST, AutoLimits, choose
from lightning_hetero.strategies.algorithms import EASGDHogwildStrategy, HeteroDDPStrategy
from lightning_hetero.strategies.table import ENTRIES

#: Measurements further apart than this, as a fraction, come from a machine that does other things as well.
BUSY = 0.1
#: If ranks only communicate for more than this part of a step, rarer exchanges are worth a word.
MUCH = 0.2


class Advice(NamedTuple):
    """A suggestion.

    Attributes:
        strategy: as Python, for ``Trainer(strategy=...)``.
        reasons: the arithmetic, a line each.
    """

    strategy: str
    reasons: list[str]


class SlowestLinks(NamedTuple):
    """The slowest links.

    Attributes:
        within: a node, if one has several ranks.
        between: nodes, if there are several.
    """

    within: LinkModel | None
    between: LinkModel | None


def cluster_of(
    costs: Sequence[Cost], nodes: Sequence[Sequence[int]], samples: int, size: int, links: SlowestLinks
) -> Cluster:
    """The measured cluster, as ``lightning-hetero plan`` and ``hetero_auto`` see it.

    Args:
        costs: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        links: the slowest ones.
    """
    ranks = tuple(tuple(costs[rank] for rank in node) for node in nodes)
    return Cluster(ranks, samples * len(costs), size, links.within or MEMORY, links.between or MEMORY)


def advise(
    costs: Sequence[Cost],
    nodes: Sequence[Sequence[int]],
    samples: int,
    size: int,
    links: SlowestLinks,
    spread: float = 0.0,
) -> Advice:
    """The choice of ``hetero_auto`` if ``hetero_ddp`` took as long as predicted.

    Args:
        costs: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        links: the slowest ones.
        spread: how far measurements of a rank are apart from round to round, as a fraction.
    """
    reasons = _step(costs, samples, spread)
    if len(costs) == 1:
        return Advice('"hetero_ddp"', reasons)
    cluster = cluster_of(costs, nodes, samples, size, links)
    exact = next(one for one in predictions(cluster) if one.name == "hetero_ddp")
    reasons += _exact(cluster, exact)
    chosen = choose(cluster, exact.step, AutoLimits()).prediction
    if chosen is None:
        return Advice(exact.strategy, [*reasons, _too_little(cluster, exact)])
    reasons.append(
        f"{chosen.strategy} would take {duration(chosen.step)}, {_times(chosen, exact)} times the samples/s: more than "
        f"1 + gain = {1 + AutoLimits().gain:g}. If exactness matters more than time, take hetero_ddp all the same."
    )
    return Advice(chosen.strategy, [*reasons, *_limits(cluster, exact, chosen)])


def _exact(cluster: Cluster, exact: Prediction) -> list[str]:
    """The all-reduce of the gradients, and what of it a step of ``hetero_ddp`` waits for."""
    several = len(cluster.nodes) > 1
    way, seconds = cluster.between if several else cluster.within, cluster.gradients()
    return [
        f"Gradients of all ranks, in a ring over the slowest link {'between nodes' if several else 'of the node'}: "
        f"{2 * (cluster.world - 1)} x ({cluster.size / 1e6:.2f} MB / {cluster.world} / {way.bandwidth / 1e6:.1f} MB/s "
        f"+ {duration(way.latency)}) = {duration(seconds)}, that is {seconds / cluster.split:.2f} steps.",
        f"hetero_ddp, which is exact, hides them behind at most {cluster.hidden:.0%} of a step, and waits for the last "
        f"ones: {duration(exact.step)} a step, in {duration(exact.exposed)} ({exact.exposed / exact.step:.0%}) of "
        "which ranks only communicate.",
    ]


def _too_little(cluster: Cluster, exact: Prediction) -> str:
    """Reason why nothing is better than the exact strategy."""
    other = choose(cluster, exact.step, AutoLimits(gain=0.0)).prediction
    if other is None:
        return "No strategy that trains replicas apart would be faster."
    return (
        f"Of those that train replicas apart, {other.strategy} would take {duration(other.step)}, "
        f"{_times(other, exact)} times the samples/s: not more than 1 + gain = {1 + AutoLimits().gain:g}, so stay "
        "exact."
    )


def _limits(cluster: Cluster, exact: Prediction, chosen: Prediction) -> list[str]:
    """Limits of a strategy that trains replicas apart, to be known before one takes it."""
    lines = []
    if not chosen.repeatable or chosen.options.get("wait") == "auto":  # which is measured, and never twice alike
        steady = choose(cluster, exact.step, AutoLimits(deterministic=True)).prediction
        instead = "hetero_ddp" if steady is None else f"{steady.strategy}, {duration(steady.step)} a step"
        lines.append(f"It depends on timing: two runs differ. If they must not: {instead}.")
    several = len(cluster.nodes) > 1
    exchange = cluster.across() if several else cluster.gradients()
    every = smallest_tau([exchange / cluster.split], delay=0, longest=RAREST)
    rarer = choose(cluster, exact.step, AutoLimits(every=every)).prediction
    if chosen.exposed > MUCH * chosen.step and rarer is not None and rarer.step < chosen.step:
        lines.append(
            f"Ranks still only communicate for {chosen.exposed / chosen.step:.0%} of a step. If replicas may meet as "
            f"rarely as every {every} steps: {rarer.strategy}, {duration(rarer.step)} a step."
        )
    if not several:
        lines.append(
            "The link was measured over gloo. If gradients travel in shared memory or over NCCL, hetero_ddp may be "
            "faster than predicted: hetero_auto measures its steps in training."
        )
    return lines


def _step(costs: Sequence[Cost], samples: int, spread: float) -> list[str]:
    """The work of a step, which a split by speed shortens only if the gain is larger than the measurements' spread."""
    reasons: list[str] = []
    total, least = samples * len(costs), [1] * len(costs)  # a strategy gives every rank something to do
    shares = split(total, costs, least)
    each = [cost.seconds(samples) for cost in costs]
    even, step = max(each), makespan(shares, costs)
    apart = even / min(each) - 1
    if spread > BUSY:
        reasons.append(
            f"Measurements differ by {spread:.0%} from round to round, because the machine is busy. Run it again when "
            "it is quiet; what follows may be wrong."
        )
    if len(costs) == 1:
        return [*reasons, f"One rank: a step of {samples} samples takes {duration(even)}; nobody to wait for."]
    text = f"Step: {duration(even)} with {samples} samples on each rank"
    if apart <= spread:
        text += (
            f". Ranks differ by {apart:.0%}, and measurements of one rank by up to {spread:.0%}: it is not clear "
            "that any rank is slower than another, nor that splitting by speed would help."
        )
        return [*reasons, text]
    sure = "" if spread <= BUSY else "perhaps "
    reasons.append(
        f"{text}, {sure}{duration(step)} if they are split by speed ({', '.join(map(str, shares))}): "
        f"{sure}{even / step:.2f}x as fast."
    )
    if slow := too_slow(total, costs, noise=[spread] * len(costs)):
        reasons.append(str(slow))
    return reasons


def _times(one: Prediction, exact: Prediction) -> str:
    return f"{one.speed / exact.speed:.2f}"


def available(topology: Topology) -> Iterator[tuple[str, str]]:
    """For each strategy its name and what is missing for it to make sense, ``""`` for nothing."""
    hosts = sorted({place.host for place in topology.places})
    for entry in ENTRIES:
        missing = ""
        if topology.world == 1:
            missing = "one rank: trains as one process"
        elif entry.replica == "node" and len(topology.nodes) == 1:
            missing = "more than one node needed: with one it trains as hetero_ddp"
        elif entry.strategy is EASGDHogwildStrategy and len(hosts) > 1:
            missing = f"one host needed: shared memory; the ranks are on {', '.join(hosts)}"
        yield entry.name, missing


def extras(world: int) -> Iterator[tuple[str, str]]:
    """For each option that needs more than this package its name and what is missing, ``""`` for nothing."""
    yield "center='mpi'", str(mpi_missing(world) or "")
    for name, package, extra in (("YAML files", "jsonargparse", "cli"), ("plots", "matplotlib", "plots")):
        yield name, "" if find_spec(package) else f"{package} missing: pip install 'lightning-hetero[{extra}]'"


#: Rounds into which the measurements of a rank are divided, to see how far they are apart.
ROUNDS = 5


class RankSpeed(NamedTuple):
    """Measured steps of a rank.

    Attributes:
        cost: fitted.
        rounds: seconds of a step on the given batch in each round, the median of it.
    """

    cost: Cost
    rounds: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Spread of the rounds, as a fraction of their median."""
        return (max(self.rounds) - min(self.rounds)) / median(self.rounds)


@dataclass
class Workload:
    """Workload to be measured.

    Attributes:
        name: for the report.
        module: the model.
        loss: of the model on a batch.
        batch: of ``samples`` samples.
        samples: in the batch.
    """

    name: str
    module: nn.Module
    loss: Callable[[Any], Tensor]
    batch: Any
    samples: int

    @property
    def size(self) -> int:
        """Bytes of the gradients, which are those of the trainable parameters."""
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad)


def builtin_workload(samples: int) -> Workload:
    """A perceptron of 1.9 million parameters on random numbers."""
    module = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return Workload(
        "a built-in perceptron", module, lambda x: module(x).square().mean(), torch.rand(samples, 784), samples
    )


def workload_from_config(path: Path, prepare: bool, wait: Callable[[], object]) -> Workload:
    """The model of a YAML file as for ``fit``, with the first batch of its training data.

    Args:
        path: the file.
        prepare: whether this rank prepares the data.
        wait: for those who do.

    Raises:
        SystemExit: the file cannot be used; the reason has been printed.
        UnsupportedError: a model with manual optimization; only a Trainer can take its steps.
        ConfigurationError: when a step is measured: `training_step` returned no loss.
    """
    cli = lightning_cli(["-c", str(path)], run=False, save_config_callback=None)
    module: LightningModule = cli.model
    if not module.automatic_optimization:
        raise UnsupportedError(f"-c {path}: {type(module).__name__} optimizes manually; measure the built-in model.")
    data = cli.datamodule if cli.datamodule is not None else module
    if prepare:
        data.prepare_data()
    wait()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    samples = extract_batch_size(batch)

    def loss(some: Any) -> Tensor:
        output = module.training_step(some, 0)
        value = output["loss"] if isinstance(output, dict) else output
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"-c {path}: {type(module).__name__}.training_step returned {value!r}. Return the loss, a tensor, or a "
                "dictionary with one under 'loss'; else measure the built-in model."
            )
        return value

    return Workload(type(module).__name__, module, loss, batch, samples)


def measure_steps(work: Workload, device: torch.device, seconds: float = 2.0, least: int = 3) -> RankSpeed:
    """Fit ``a + k n`` to steps on batches of the given size, half and a quarter of it.

    Args:
        work: a copy of the model is not taken: its weights stay, except for buffers that each forward pass changes.
        device: to measure on.
        seconds: for about how long.
        least: steps to take of each size, however long they take.
    """
    work.module.to(device).train()
    batch = move_data_to_device(work.batch, device)
    optimizer = torch.optim.SGD([p for p in work.module.parameters() if p.requires_grad], lr=0.0)

    def step(samples: int) -> None:
        def first(tensor: Tensor) -> Tensor:
            return tensor[:samples] if tensor.ndim and len(tensor) == work.samples else tensor

        optimizer.zero_grad()
        work.loss(apply_to_collection(batch, Tensor, first)).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # self.log has no Trainer here
        return fit(step, work.samples, seconds, least)


def fit(step: Callable[[int], None], samples: int, seconds: float, least: int) -> RankSpeed:
    """Fit ``a + k n`` to the time of ``step(n)``, for several n up to ``samples``."""
    sizes = sorted({max(1, samples // part) for part in (1, 2, 4)})
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for n in sizes[-2:]:
        step(n)  # the first ones make what later ones find
    ends = time.perf_counter() + seconds
    while len(times[samples]) < least or time.perf_counter() < ends:
        for n in sizes:
            began = time.perf_counter()
            step(n)
            times[n].append(max(time.perf_counter() - began, 1e-9))
    whole = times[samples]
    rounds = min(ROUNDS, len(whole))
    cuts = [len(whole) * i // rounds for i in range(rounds + 1)]
    typical = [median(times[n]) for n in sizes]
    fixed = linear_regression(sizes, typical).intercept if len(sizes) > 1 else 0.0
    fixed = min(max(fixed, 0.0), 0.999 * typical[-1])
    cost = Cost(fixed, (typical[-1] - fixed) / samples)  # exact at the given size
    return RankSpeed(cost, tuple(median(whole[begin:end]) for begin, end in pairwise(cuts)))


#: Links to show, the slowest first.
SHOWN = 8


def show(
    topology: Topology,
    work: Workload,
    speeds: Sequence[RankSpeed],
    links: tuple[Sequence[MeasuredLink], Sequence[MeasuredLink]],
    strategies: Iterable[tuple[str, str]],
    advice: Advice,
) -> None:
    """Print all of it; the links are those within nodes, and those between them."""
    within, between = links
    console = Console(highlight=False)
    console.print(_ranks(topology, work, speeds))
    groups: dict[str, Sequence[int]] = {"between all ranks": range(topology.world)}
    groups |= {f"within node {i}": node for i, node in enumerate(topology.nodes)}
    backends = ", ".join(f"{topology.backend(ranks)} {where}" for where, ranks in groups.items())
    console.print(f"Backends for gradients: {backends}.\n", soft_wrap=True)
    if within or between:
        console.print(_links(within, between))
    console.print(_strategies(strategies))
    console.print("\n[bold]Suggestion[/bold]")
    for reason in advice.reasons:
        console.print(escape(reason), soft_wrap=True)
    console.print(f"[bold]Trainer(strategy={escape(advice.strategy)}, ...)[/bold]", soft_wrap=True)


def _ranks(topology: Topology, work: Workload, speeds: Sequence[RankSpeed]) -> Table:
    title = (
        f"{_count(topology.world, 'rank')} on {_count(len(topology.nodes), 'node')}; {escape(work.name)}, "
        f"{work.size / 1e6:.2f} MB of parameters, all ranks at once, no exchange; below, the range over rounds"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("rank", "node", "host", "device", "per step", "per sample", f"{work.samples} samples"):
        table.add_column(heading, justify="right" if heading in ("per step", "per sample") else "left")
    for rank, (place, (cost, rounds)) in enumerate(zip(topology.places, speeds, strict=True)):
        node = group_of(rank, topology.nodes)
        seconds = cost.seconds(work.samples)
        apart = f"{1e3 * min(rounds):.2f} to {1e3 * max(rounds):.2f} ms"
        speed = f"{1e3 * seconds:.2f} ms, {work.samples / seconds:.0f}/s"
        times = f"{1e3 * cost.fixed:.2f} ms", f"{1e3 * cost.per_sample:.3f} ms", f"{speed}\n{apart}"
        table.add_row(str(rank), str(node), place.host, place.device.split(":")[0], *times)
    return table


def _links(within: Sequence[MeasuredLink], between: Sequence[MeasuredLink]) -> Table:
    table = Table(title="Links, over gloo and from CPU memory, the slowest first", title_justify="left")
    for heading in ("where", "ranks", "latency", "bandwidth"):
        table.add_column(heading)
    for where, links in (("within a node", within), ("between nodes", between)):
        slowest = sorted(links, key=lambda link: link.bandwidth)
        for link in slowest[:SHOWN]:
            speed = f"{link.bandwidth / 1e6:.1f} MB/s ({8e-6 * link.bandwidth:.0f} Mbit/s)"
            table.add_row(where, f"{link.ranks[0]} - {link.ranks[1]}", f"{1e3 * link.latency:.3f} ms", speed)
        if len(links) > SHOWN:
            table.add_row(where, f"and {len(links) - SHOWN} more", "", "")
    return table


def _strategies(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title="Strategies", title_justify="left")
    table.add_column("string or option", no_wrap=True)
    table.add_column("here")
    for name, missing in rows:
        table.add_row(escape(name), escape(missing) or "[green]available[/green]")
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_target(path: Path) -> None:
    """See that the file can be written, before anything is measured.

    Args:
        path: of the file.

    Raises:
        ConfigurationError: it cannot.
    """
    folder = path.absolute().parent
    if path.is_dir():
        problem = "this is a folder"
    elif not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "you may not write there"
    else:
        return
    raise ConfigurationError(f"--save {path}: {problem}. Give a file in a folder that exists, such as here.json.")


def save_examination(
    path: Path,
    speeds: Sequence[RankSpeed],
    nodes: Sequence[Sequence[int]],
    samples: int,
    size: int,
    links: SlowestLinks,
) -> None:
    """Write what was measured, as JSON; a link that no two ranks have is ``null``.

    Args:
        path: of the file.
        speeds: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        links: the slowest ones.
    """
    found = {
        "format": FORMAT,
        "nodes": [[row_of(speeds[rank].cost) for rank in ranks] for ranks in nodes],
        "spread": [[speeds[rank].spread for rank in ranks] for ranks in nodes],
        "samples": samples,
        "size": size,
        **links._asdict(),
    }
    path.write_text(json.dumps(found, indent=1))


def examine(
    ranks_per_node: int | None,
    config: Path | None,
    batch_size: int,
    timeout: float,
    save: Path | None = None,
    interface: str | None = None,
    ports: str | None = None,
    **trainer_options: Any,
) -> None:
    """Measure ranks and links, and print a suggestion on the first rank.

    Args:
        ranks_per_node: treat so many consecutive ranks as one node.
        config: a YAML file with the model and the data to measure. Default: a built-in model.
        batch_size: samples of each rank, for the built-in model.
        timeout: longest wait for another rank, in seconds.
        save: write what was measured to this file, as JSON.
        interface: as for the strategies.
        ports: as for the strategies.
        **trainer_options: ``devices`` and the like. The ranks are those that such a Trainer would have: a launcher's,
            such as those of torchrun or mpiexec, or new ones.

    Raises:
        ConfigurationError: Lightning makes no such Trainer, or the file to save cannot be written.
        HeteroError: the launcher's variables or an option are wrong, or another rank has failed.
    """
    for source in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(source).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", UserWarning)  # Lightning's advice is for trainings
    warnings.simplefilter("ignore", FutureWarning)
    strategy = HeteroDDPStrategy(ranks_per_node=ranks_per_node, timeout=timeout, interface=interface, ports=ports)
    try:
        trainer = Trainer(
            strategy=strategy,
            **trainer_options,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except HeteroError:
        raise
    except (MisconfigurationException, TypeError, ValueError) as error:  # Lightning's ways to refuse
        given = ", ".join(f"{name}={value!r}" for name, value in trainer_options.items())
        raise ConfigurationError(f"there is no such Trainer ({given}): {error}") from error
    if save is not None and trainer.global_rank == 0:  # which will write it; others may have other folders
        check_target(save)
    if (launcher := trainer.strategy.launcher) is None:
        raise ConfigurationError("this environment starts no ranks: run the doctor where ranks can be started.")

    def join() -> tuple[Topology, torch.device]:
        strategy.setup_environment()
        return strategy.job.view.topology, strategy.root_device

    try:
        launcher.launch(_take_part, join, config, batch_size, save)
    finally:
        _end(getattr(launcher, "procs", ()), timeout)


def _take_part(
    join: Callable[[], tuple[Topology, torch.device]], config: Path | None, batch_size: int, save: Path | None
) -> None:
    topology, device = join()
    if config is None:
        work = builtin_workload(batch_size)
    else:
        first = topology.places[topology.rank].local_rank == 0
        work = workload_from_config(config, first, lambda: gather(None, "who has prepared the data"))
    gather(None, "who is ready")  # so that ranks that share a machine share it while they are measured, as in training
    speeds = gather(measure_steps(work, device), "the speed of ranks")
    near, far = cluster.pairs_to_measure(topology.nodes)
    within, between = cluster.measure_links(near), cluster.measure_links(far)
    if topology.rank == 0:
        slowest = SlowestLinks(*(cluster.slowest_link(some, work.size) for some in (within, between)))
        costs, spread = [one.cost for one in speeds], max(one.spread for one in speeds)
        advice = advise(costs, topology.nodes, work.samples, work.size, slowest, spread)
        rows = [*available(topology), *extras(topology.world)]
        show(topology, work, speeds, (within, between), rows, advice)
        if save is not None:
            save_examination(save, speeds, topology.nodes, work.samples, work.size, slowest)
    gather(None, "who is done")
    dist.destroy_process_group()


def _end(children: Sequence[subprocess.Popen], patience: float) -> None:
    """Wait for the ranks that were started here, and kill who is late."""
    for child in children:
        try:
            child.wait(min(patience, 15.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
