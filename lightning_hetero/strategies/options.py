"""Options that all strategies share: types, defaults, meaning and checks."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, TypeVar, get_args

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.argument_checks import at_least_one, is_number, one_of, plain
from lightning_hetero.batching.nonfinite import OnNaN
from lightning_hetero.batching.planner import Planner
from lightning_hetero.batching.sample_costs import Rule
from lightning_hetero.comm.all_reduce import Between
from lightning_hetero.comm.groups import Within
from lightning_hetero.errors import ConfigurationError, UnsupportedError


def documented(text: str | None, options: Iterable[str], explained_by: Sequence[type]) -> str:
    """The docstring of a strategy, with all of its options.

    Args:
        text: what the strategy does, and explanations that go before those of others.
        options: names, in order.
        explained_by: classes that explain options, and what is raised; where two explain the same, the first counts.
    """
    known: dict[str, str] = {}
    errors: dict[str, str] = {}
    for doc in (*(kind.__doc__ for kind in reversed(explained_by)), text):
        known |= {name.lstrip("*"): f"{name}: {what}" for name, what in section(doc, "Args").items()}
        errors |= section(doc, "Raises")
    known["kwargs"] = "**kwargs: further options, those of :class:`~lightning.pytorch.strategies.DDPStrategy`."
    lines = [known[name] for name in options if name in known]
    raised = [f"{name}: {what}" for name, what in errors.items()]
    body = without(text, ("Args", "Attributes", "Raises"))
    return f"{body}\n\nArgs:\n{_indented(lines)}\n\nRaises:\n{_indented(raised)}\n"


def section(text: str | None, title: str) -> dict[str, str]:
    """The entries of a Google-style section of a docstring, by name."""
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n?)*)", inspect.cleandoc(text or ""), re.MULTILINE)
    parts = re.split(r"^ {4}(\*{0,2}\w+): ?", found.group(1), flags=re.MULTILINE) if found else []
    return {name: what.rstrip() for name, what in zip(parts[1::2], parts[2::2], strict=True)}


def without(text: str | None, titles: Iterable[str]) -> str:
    """A docstring without some of its sections."""
    clean = inspect.cleandoc(text or "")
    for title in titles:
        clean = re.sub(rf"^{title}:\n(?:(?: .*)?\n?)*", "", clean, flags=re.MULTILINE)
    return clean.strip()


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


S = TypeVar("S", bound=type)
LEAST_GRACE = 0.5  # seconds

#: Options that some strategies have, and others could be thought to have: which, and why.
_ELSEWHERE = {
    "fragments": "Parts of the model take turns under hetero_diloco and hetero_diloco_async; with outer_lr=1.0 and "
    "outer_momentum=0.0 that is the periodic average of hetero_node. Elastic centers, gossip and DASO exchange whole "
    "models: their rules mix all values at once.",
    "delay": "hetero_diloco has it; hetero_daso (wait) and hetero_easgd_overlap exchange in the background, too.",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that all strategies share.

    Args:
        balance: ``"auto"`` splits every global batch by measured speed; ``"off"`` evenly; a list gives each rank's
            relative share (0 for none).
        global_batch_size: samples that all ranks together take per step. Default: the DataLoader's ``batch_size``
            times the number of ranks, as with Lightning's ``ddp``.
        min_batch_size: least samples of a rank per step: one number for all, or one per rank. Default: 1; for models
            with BatchNorm a quarter of an even share, at least 2 and no more than 16.
        max_batch_size: most samples of a rank per step, for instance for its memory: one number for all, or one per
            rank. ``"auto"``: each rank tries what fits before the first training step, and takes up to 90% of that.
            A global batch that is more than all limits together is run in several passes, each within the limit.
        max_batch_memory: memory that a training step may take on a rank's device under ``max_batch_size="auto"``: bytes
            or a text such as ``"8GiB"``, one for all ranks or one per rank. Default on CUDA devices: all there is;
            other devices need a limit.
        share_multiple: shares that are not smaller are multiples of this number; what is left of a batch goes to one
            rank. ``"auto"``: of 1; with ``torch.compile`` measured shares are of 8 from 128 samples on, and of 4 from
            64 on. For batches that ranks share, of samples that all cost the same.
        balance_iterable: with ``balance="auto"``, move shares over iterable datasets without a length, too. A fast rank
            then takes more of its own shard in each step and comes to its end earlier, so give it a larger shard, or
            make all of them endless. Default: even shares, and as many steps per epoch as with ``ddp``.
        cost: how the cost of a rank's part follows from what its samples cost, which the dataset, the module or
            ``sample_cost`` says: ``"additive"``, the sum, as of tokens in packed batches, or of graphs; ``"padded"``,
            the number of samples times the longest, as where a part is padded. ``"samples"``: all samples cost the
            same, whoever says what.
        sample_cost: what each sample costs: a function of its index, or one number for each; for a ``SharedStream`` a
            function of the sample. It is asked where neither the dataset (``sample_costs``, ``sample_cost(index)``,
            ``lengths``) nor the module (``sample_cost(index)``) tells. Default: samples are counted.
        whole_batches: keep each batch of your own batch sampler whole, such as one of about so many tokens: a fast rank
            takes several of them per step, each in a pass of its own, a slow one fewer. A number: so many per step of
            all ranks together; ``True``: as many as ranks. Default: they are put together, and cut by speed.
        rebalance_every_n_steps: how often (in batches) the ranks exchange their measured speeds.
        on_nan: what to do about a loss or gradient that is not finite on some rank, before the optimizer steps:
            ``"error"`` raises on every rank and names it; ``"skip"`` leaves the samples of a rank with such a loss out
            (exactly: the others weigh more), and the whole step if only a gradient is; ``"ignore"`` looks at nothing.
        ranks_per_node: group consecutive ranks into nodes of this size, or these sizes, instead of asking the
            launcher; to try one machine as several nodes.
        within: how ranks of one node average: gradients on CPUs, and parameters of replicas; also how the ranks of a
            replica learn what an exchange has brought. ``"shm"``, in shared memory; ``"gloo"``, over sockets;
            ``"auto"``, in shared memory unless it takes more than half of what is free, which a warning says.
        between: how replicas exchange means in fp32 for which all wait: ``"nccl"``, by way of GPUs, where the first
            rank of each replica has one of its own, all of one kind; ``"gloo"``, between hosts; ``"auto"``, as is
            faster, which is tried once. All else goes between hosts, and so does all with ``on_peer_loss="continue"``,
            since NCCL cannot be woken up.
        timeout: longest wait for other ranks, in seconds or as a timedelta, before an error.
        on_peer_loss: what to do when a rank dies, freezes or cannot be reached during a fit: ``"error"`` ends all
            ranks, with an error that names it; ``"continue"`` goes on among the others: without its replica, or under
            ``hetero_ddp`` without that rank.
        min_replicas: with ``on_peer_loss="continue"``, how many replicas (under ``hetero_ddp``, ranks) must be left to
            go on. More than half of them must be left at each loss, or half with the lowest, whatever this says.
        grace: with ``on_peer_loss="continue"``, seconds of silence after which a rank counts as lost. A dead process is
            noticed at once; this is for frozen ones and for broken links. At least 0.5. ``"auto"``: a second, in which
            each rank is heard once, and five times the longest delay of the last ten minutes; 2.5 to 60 seconds, more
            where there are more than two processes for each core, and 10 in the first seconds.
        join_file: with ``on_peer_loss="continue"``, a file that all machines of the job see. A process that is started
            with the same file while the job runs joins it, as one more rank. Without it, only a rank that is started
            again by the same launcher finds the job, through ``MASTER_ADDR`` and ``MASTER_PORT``, as long as the first
            rank 0 lives. Anyone who can read the file can take part.
        interface: name of this machine's network interface towards the others, such as ``"wg0"``, for all sockets: this
            package's, gloo's and NCCL's (it sets ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``). It may differ
            between machines. Default: the interface towards ``MASTER_ADDR``; gloo looks for that of the hostname.
        ports: range in which this package listens, such as ``"29500-29540"``; also for ``MASTER_PORT``, if Lightning
            chooses it. Every rank listens: give several ports for each rank of the machine. The system chooses the
            ports of gloo and NCCL: ``docs/two_machines.md`` says how to limit them.
        data_parallel_size: for a model that shards itself in ``configure_model``: size of
            ``self.device_mesh["data_parallel"]``, over which a replica shards parameters. ``"auto"``: the ranks of the
            replica, divided by ``tensor_parallel_size``.
        tensor_parallel_size: size of ``self.device_mesh["tensor_parallel"]``: so many consecutive ranks get the same
            samples, and split layers among them. ``"auto"``: 1.
        save_distributed_checkpoint: whether a sharded model is saved as a directory, to which each rank of a replica
            writes its shards; else as an ordinary file, for which rank 0 gathers one tensor after the other.
        start_method: how processes start if no launcher has: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"``.
        process_group_backend: not a choice here: all ranks meet over gloo, and groups of GPUs use NCCL by themselves.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    balance: Literal["auto", "off"] | list[float] = "auto"
    global_batch_size: int | None = None
    min_batch_size: int | list[int] | None = None
    max_batch_size: Literal["auto"] | int | list[int] | None = None
    max_batch_memory: int | str | list[int | str | None] | None = None
    share_multiple: Literal["auto"] | int = "auto"
    balance_iterable: bool = False
    cost: Rule = "additive"
    sample_cost: Callable[[Any], float] | list[float] | None = None
    whole_batches: bool | int = False
    rebalance_every_n_steps: int = 4
    on_nan: OnNaN = "error"
    ranks_per_node: int | list[int] | None = None
    within: Within = "auto"
    between: Between = "auto"
    timeout: timedelta | float = 1800.0
    on_peer_loss: Literal["error", "continue"] = "error"
    min_replicas: int = 1
    grace: Literal["auto"] | float = "auto"
    join_file: str | os.PathLike[str] | None = None
    interface: str | None = None
    ports: str | None = None
    data_parallel_size: Literal["auto"] | int = "auto"
    tensor_parallel_size: Literal["auto"] | int = "auto"
    save_distributed_checkpoint: bool = True
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    process_group_backend: None = None

    @classmethod
    def taken_from(cls, given: dict[str, Any], strategy: type) -> tuple["Options", dict[str, Any]]:
        """These options, out of all that a user gave by name, and those for Lightning's ``DDPStrategy``.

        Args:
            given: by the user.
            strategy: for which, with options of its own.

        Raises:
            ConfigurationError: a value that cannot work, or an option that neither this strategy nor DDP has.
        """
        names = {field.name for field in fields(cls)}
        others = {name: value for name, value in given.items() if name not in names}
        known = {*signature(DDPStrategy.__init__).parameters, *signature(DistributedDataParallel.__init__).parameters}
        if unknown := sorted({*others} - known):
            hints = "".join(_hint(name, {*signature(strategy).parameters} | known) for name in unknown)
            raise ConfigurationError(
                f"unknown option(s) {', '.join(unknown)}: neither this strategy nor DistributedDataParallel has them."
                + hints
            )
        own = cls(**{name: value for name, value in given.items() if name in names})
        others |= {"process_group_backend": "gloo", "timeout": own.limit, "start_method": own.start_method}
        return own, others

    def __post_init__(self) -> None:
        for field in fields(self):
            value = plain(getattr(self, field.name))
            object.__setattr__(self, field.name, list(value) if isinstance(value, tuple) else value)
        if self.balance not in ("auto", "off") and not isinstance(self.balance, list):
            raise ConfigurationError(
                f"balance={self.balance!r}: give 'auto', 'off', or a list with one share per rank."
            )
        if self.global_batch_size is not None:
            at_least_one("global_batch_size", self.global_batch_size)
        at_least_one("rebalance_every_n_steps", self.rebalance_every_n_steps)
        one_of("cost", self.cost, get_args(Rule))
        if self.sample_cost is not None and not (callable(self.sample_cost) or isinstance(self.sample_cost, list)):
            raise ConfigurationError(
                f"sample_cost={self.sample_cost!r}: give a function of a sample's index, or a number for each sample."
            )
        if self.sample_cost is not None and self.cost == "samples":
            raise ConfigurationError(
                "cost='samples' counts samples, but sample_cost says what they cost. Remove one of the two."
            )
        if not isinstance(self.whole_batches, bool):
            at_least_one("whole_batches", self.whole_batches, ", or True, or False")
        sizes = ("global_batch_size", "min_batch_size", "max_batch_size")
        if self.whole_batches and (given := [name for name in sizes if getattr(self, name) is not None]):
            raise ConfigurationError(
                f"whole_batches={self.whole_batches} with {', '.join(given)}: batches that stay whole are as large as "
                "your batch sampler makes them. Remove one of the two."
            )
        if self.share_multiple != "auto":
            at_least_one("share_multiple", self.share_multiple, ", or 'auto'")
            if self.balance == "off" or self.whole_batches:
                why = "whole_batches keeps batches as they are" if self.whole_batches else "balance='off' fixes them"
                raise ConfigurationError(
                    f"share_multiple={self.share_multiple} rounds shares, but {why}. Remove one of the two."
                )
        one_of("balance_iterable", self.balance_iterable, (True, False))
        if self.balance_iterable and self.balance != "auto":
            raise ConfigurationError(
                f"balance_iterable=True moves shares by measured speed, but balance={self.balance!r} fixes them. "
                "Remove one of the two."
            )
        if self.limit <= timedelta(0):
            raise ConfigurationError(
                f"timeout={self.limit.total_seconds():g} s: the longest wait must be above 0 seconds."
            )
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if getattr(self, name) != "auto":
                at_least_one(name, getattr(self, name), ", or 'auto'")
        one_of("save_distributed_checkpoint", self.save_distributed_checkpoint, (True, False))
        one_of("start_method", self.start_method, ("popen", "spawn", "fork", "forkserver"))
        one_of("within", self.within, get_args(Within))
        one_of("between", self.between, get_args(Between))
        if self.tensor_parallel > 1 and self.max_batch_size == "auto":
            raise ConfigurationError(
                f"tensor_parallel_size={self.tensor_parallel_size} with max_batch_size='auto': ranks that get the same "
                "samples cannot do that yet. Use tensor_parallel_size=1, under which fully_shard splits the model; or "
                "give max_batch_size numbers."
            )
        if self.between == "nccl" and self.on_peer_loss == "continue":
            raise ConfigurationError(
                "between='nccl' with on_peer_loss='continue': NCCL cannot be woken up when a rank is lost. Leave "
                "between='auto', which means gloo here."
            )
        one_of("on_nan", self.on_nan, ("error", "skip", "ignore"))
        if self.process_group_backend is not None:
            raise ConfigurationError(
                f"process_group_backend={self.process_group_backend!r}: not a choice here. All ranks meet over gloo, "
                "which serves every device; groups of GPUs exchange gradients over NCCL by themselves. Leave it out."
            )
        nodes = [self.ranks_per_node] if isinstance(self.ranks_per_node, int) else self.ranks_per_node
        if nodes is not None and not (isinstance(nodes, list) and all(type(n) is int and n > 0 for n in nodes)):
            raise ConfigurationError(
                f"ranks_per_node={self.ranks_per_node!r}: give a size, or a list of sizes, above 0."
            )
        if not (self.interface is None or (isinstance(self.interface, str) and self.interface)):
            raise ConfigurationError(f"interface={self.interface!r}: give the name of a network interface.")
        _ = self.port_range  # raises
        self._check_memory()
        self._check_loss()
        lists = [x for x in (self.balance, self.min_batch_size, self.max_batch_size) if isinstance(x, list)]
        self.planner(len(lists[0]) if lists else 1)  # raises now rather than after the launch

    def _check_loss(self) -> None:
        one_of("on_peer_loss", self.on_peer_loss, ("error", "continue"))
        at_least_one("min_replicas", self.min_replicas)
        if self.grace != "auto" and not (is_number(self.grace) and self.grace >= LEAST_GRACE):
            raise ConfigurationError(
                f"grace={self.grace!r}: give at least {LEAST_GRACE:g} seconds, or 'auto'. A busy machine may well let "
                "a living process wait for longer than a shorter one allows, and its rank would count as lost."
            )
        if isinstance(self.join_file, os.PathLike):
            object.__setattr__(self, "join_file", os.fspath(self.join_file))
        if not (self.join_file is None or (isinstance(self.join_file, str) and self.join_file)):
            raise ConfigurationError(f"join_file={self.join_file!r}: give the name of a file.")
        if self.on_peer_loss == "error" and self.join_file is not None:
            raise ConfigurationError(
                f"join_file={self.join_file!r} lets processes join a fit, but on_peer_loss='error' keeps the ranks as "
                "they are. Set on_peer_loss='continue', or leave join_file out."
            )
        if self.on_peer_loss == "error" and (self.min_replicas, self.grace) != (1, "auto"):
            raise ConfigurationError(
                f"min_replicas={self.min_replicas!r} and grace={self.grace!r} say when to go on without lost ranks, "
                "but on_peer_loss='error' ends the fit. Set on_peer_loss='continue', or leave them out."
            )
        if self.on_peer_loss == "continue" and self.start_method != "popen":
            raise ConfigurationError(
                f"on_peer_loss='continue' with start_method={self.start_method!r}: that launcher ends all ranks when "
                "one fails. Use start_method='popen', or start the ranks by a launcher."
            )

    def _check_memory(self) -> None:
        if isinstance(self.max_batch_size, str) and self.max_batch_size != "auto":
            raise ConfigurationError(
                f"max_batch_size={self.max_batch_size!r}: give a number of samples, a list with one per rank, or "
                "'auto'."
            )
        if self.max_batch_memory is not None and self.max_batch_size != "auto":
            raise ConfigurationError(
                f"max_batch_memory={self.max_batch_memory!r} is for max_batch_size='auto', but max_batch_size="
                f"{self.max_batch_size!r}. Set that, or leave the memory out."
            )
        memory_per_rank(self.max_batch_memory)

    @property
    def limit(self) -> timedelta:
        """The longest wait for other ranks.

        Raises:
            ConfigurationError: ``timeout`` is no number of seconds.
        """
        if isinstance(self.timeout, timedelta):
            return self.timeout
        try:
            return timedelta(seconds=float(self.timeout))
        except (TypeError, ValueError, OverflowError):
            raise ConfigurationError(
                f"timeout={self.timeout!r}: give a finite number of seconds, or a timedelta."
            ) from None

    @property
    def port_range(self) -> range:
        """Ports at which this package may listen; an empty range: any.

        Raises:
            ConfigurationError: ``ports`` is no range of ports.
        """
        if self.ports is None:
            return range(0)
        found = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", self.ports) if isinstance(self.ports, str) else None
        first, last = map(int, found.groups()) if found else (0, 0)
        if not 0 < first <= last < 2**16:
            raise ConfigurationError(
                f"ports={self.ports!r}: give the first and the last port, from 1 to 65535, such as '29500-29540'."
            )
        return range(first, last + 1)

    def agreed(self) -> dict[str, Any]:
        """The options that must be the same on every rank, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"timeout": self.limit}
        del values["start_method"], values["join_file"]  # each machine may start its ranks, and see files, in its way
        del values["interface"], values["ports"]  # networks and firewalls of machines differ
        del values["sample_cost"]  # functions cannot be compared; what they say is, once there are data
        return values

    def refuse_costs(self) -> None:
        """See that nobody asks for a deal by cost, of data whose samples have no index.

        Raises:
            UnsupportedError: the options do.
        """
        if self.sample_cost is not None or self.cost == "padded":
            raise UnsupportedError(
                "cost='padded' and sample_cost are for batches that all ranks share: of a map-style dataset, or of a "
                "SharedStream. Here each rank has data of its own. Remove the options, or give such a dataset."
            )

    @property
    def tensor_parallel(self) -> int:
        """Number of consecutive ranks that get the same samples."""
        return 1 if self.tensor_parallel_size == "auto" else self.tensor_parallel_size

    @property
    def sizes(self) -> bool:
        """Whether the user has a say in the sizes of batches."""
        limits = (self.global_batch_size, self.min_batch_size, self.max_batch_size)
        return not isinstance(self.balance, str) or any(limit is not None for limit in limits)

    def planner(self, world: int, entries: Sequence[int] | None = None) -> Planner:
        """A planner for ``world`` ranks.

        Args:
            world: number of ranks.
            entries: of each rank, its place in the lists that the user gave; see
                :class:`~lightning_hetero.comm.view.View`. Default: its number.
        """

        def of(given: Any) -> Any:
            if entries is None or not isinstance(given, list):
                return given
            return [given[entry // self.tensor_parallel] for entry in entries]

        high = None if self.max_batch_size == "auto" else self.max_batch_size
        low = of(self.min_batch_size)
        return Planner(world, of(self.balance), low, of(high), multiple=self.share_multiple)


def memory_per_rank(value: Any, world: int | None = None) -> list[int | None]:
    """The bytes that a training step may take on each rank, of ``max_batch_memory``.

    Args:
        value: an amount for all ranks, ``None``, or a list of these: bytes, or a number with a unit such as ``"8GiB"``
            (1024 ** 3 bytes) or ``"500 MB"`` (1000 ** 2).
        world: number of ranks; ``None`` if nobody knows yet.

    Raises:
        ConfigurationError: an amount cannot be read, or there is not one per rank.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [_bytes_of(value)] * (world or 1)
    if world is not None and len(value) != world:
        raise ConfigurationError(
            f"max_batch_memory={list(value)} gives {len(value)} limits for {world} ranks: one, or one each."
        )
    return [_bytes_of(one) for one in value]


def _bytes_of(value: Any) -> int | None:
    if value is None:
        return None
    amount: float = value if type(value) is int else 0
    if isinstance(value, str) and (parts := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.I)):
        number, unit, binary = parts.groups()
        amount = float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
    if amount < 1:
        raise ConfigurationError(
            f"max_batch_memory={value!r}: give a number of bytes, or a text such as '8GiB' or '500MB', above 0."
        )
    return int(amount)


def _hint(name: str, known: Iterable[str]) -> str:
    """A guess at what was meant by an option that a strategy does not have."""
    if name in _ELSEWHERE:
        return f" {_ELSEWHERE[name]}"
    strategies = [entry["strategy"] for entry in StrategyRegistry.values() if isinstance(entry["strategy"], type)]
    having = [kind.__name__ for kind in dict.fromkeys(strategies) if name in signature(kind).parameters]
    if having:
        return f" {', '.join(having)} {'has' if len(having) == 1 else 'have'} {name}."
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def check_accelerator(accelerator: Any) -> None:
    """See that no option of ours is given by position, where Lightning's strategies take an accelerator.

    Raises:
        ConfigurationError: the first argument is one of ``balance``.
    """
    accelerator = plain(accelerator)
    if accelerator == "off" or isinstance(accelerator, list | tuple):
        raise ConfigurationError(
            f"accelerator={accelerator!r}: the first argument by position is the accelerator, as with Lightning's "
            f"DDPStrategy. Give options of this package by name: balance={accelerator!r}."
        )


def with_shared_options(kind: S) -> S:
    """Give a strategy class, which takes these options by name, their signature and their explanations.

    ``inspect.signature``, help, YAML files and rendered docs then show them as if its constructor listed them.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    whole = signature(init)
    *own, kwargs = whole.parameters.values()
    init.__signature__ = whole.replace(parameters=[*own, *signature(Options).parameters.values(), kwargs])
    kind.__doc__ = documented(kind.__doc__, [*init.__signature__.parameters], [Options])
    return kind
