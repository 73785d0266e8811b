"""The strategies as the arithmetic sees them: options, wires, and what an exchange of each passes behind."""

from typing import Any, Literal, NamedTuple

#: Bytes on each wire for one byte of fp32, scales included.
WIRES = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254, "int4": 0.129}
DASO_EVERY = 4  # steps between two exchanges, by default
_FRAGMENTS = 4
_ANY, _WIDE, _NONE = tuple(WIRES), ("fp32", "bf16"), ("fp32",)


class Kind(NamedTuple):
    """Strategies that differ in little.

    Attributes:
        name: the strategy string.
        strategy: its class.
        every: its option for the steps between two exchanges; ``None``: its default stays.
        options: that make it what it is here.
        wires: number formats that it has for exchanges.
        nodes: whether a replica is a node.
        behind: what an exchange passes in the background of: nothing, one step, or the steps until the next exchange.
        repeatable: whether two runs give the same weights.
        least: the fewest steps between two exchanges.
    """

    name: str
    strategy: str
    every: str | None = "tau"
    options: dict[str, Any] = {}
    wires: tuple[str, ...] = _ANY
    nodes: bool = False
    behind: Literal["nothing", "a step", "all steps"] = "nothing"
    repeatable: bool = True
    least: int = 1

    def waited(self, seconds: float, work: float, every: int) -> float:
        """Seconds of each step, in the mean, for which a rank waits for an exchange.

        Args:
            seconds: that the exchange takes.
            work: seconds of the step's work.
            every: steps between two exchanges.
        """
        hidden = {"nothing": 0.0, "a step": work, "all steps": every * work}[self.behind]
        return max(seconds - hidden, 0.0) / every

    def wire(self, wished: str) -> str:
        """The number format of its exchanges: the one that is wished for, or fp32 if it has none such."""
        return wished if wished in self.wires else "fp32"

    def given(self, every: int, wished: str = "fp32") -> dict[str, Any]:
        """The strategy's options, with a number format that is wished for."""
        own = {} if self.every is None else {self.every: every}
        if "fragments" in self.options:
            own["delay"] = max(every // _FRAGMENTS, 1)
        wire = self.wire(wished)
        return {**own, **self.options, **({"wire": wire} if wire != "fp32" else {})}


_AUTO = {"moving_rate": "auto"}
_NODES = {"replica": "node"}
#: An all-reduce between all replicas.
AVERAGES = (
    Kind("hetero_node", "NodeAverageStrategy", "every_n_steps", nodes=True),
    Kind("hetero_easgd", "EASGDStrategy", options=_AUTO),
    Kind("hetero_eamsgd", "EAMSGDStrategy", options=_AUTO),
    Kind("hetero_diloco", "DiLoCoStrategy", options=_NODES, nodes=True),
    Kind("hetero_easgd_overlap", "EASGDOverlapStrategy", options=_AUTO, behind="a step"),
    Kind(
        "hetero_diloco (streaming)",
        "DiLoCoStrategy",
        options={"fragments": _FRAGMENTS, **_NODES},
        nodes=True,
        behind="all steps",
        least=2,  # an exchange of a fragment lasts a step at least, and is over before its next one begins
    ),
)
#: The same, every few steps, whatever is asked for.
DASO = Kind(
    "hetero_daso",
    "DASOStrategy",
    None,
    {"wait": "auto", "warmup": 0, "cooldown": 0},
    nodes=True,
    behind="all steps",
)
#: Replicas that visit a center, in turn or as they come.
CENTERS = (
    Kind("hetero_easgd_round_robin", "EASGDRoundRobinStrategy", options=_AUTO, wires=_WIDE),
    Kind("hetero_easgd_async", "EASGDAsyncStrategy", options=_AUTO, wires=_WIDE, behind="a step", repeatable=False),
    Kind("hetero_measgd_async", "MEASGDAsyncStrategy", options=_AUTO, wires=_WIDE, behind="a step", repeatable=False),
    Kind("hetero_diloco_async", "DiLoCoAsyncStrategy", wires=_NONE, repeatable=False),
)
#: Replicas that meet in pairs.
PAIRS = (
    Kind("hetero_gossip", "GossipStrategy", "every_n_steps", wires=_WIDE, behind="a step"),
    Kind("hetero_gossip_push_sum", "GossipPushSumStrategy", "every_n_steps", wires=_WIDE),
    Kind("hetero_gossip_async", "GossipAsyncStrategy", "every_n_steps", wires=_WIDE, repeatable=False),
    Kind("hetero_noloco", "NoLoCoStrategy", wires=_WIDE),
)
