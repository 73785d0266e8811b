"""What became of the fits of `faults.py`."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Result:
    """What became of a fit.

    Attributes:
        outcomes: by fault, how often it was survived, ended the fit cleanly, made it hang, or was lost.
        said: what ranks said that did not end well.
        loss: at the end; ``None`` if it did not come to its end.
        stalls: by fault, the longest stall of a process that nothing had struck, each time that the fault was survived:
            the time between two steps, less what the device takes for the second one.
        stall: the longest one of the whole fit, in which processes also join.
        samples: trained on by all ranks.
        living: seconds for which processes were there, all together.
        joined: processes that were started again, and have trained.
        starts: of the whole fit, from its newest checkpoint.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    said: list[str] = field(default_factory=list)
    loss: float | None = None
    stalls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stall: float = 0.0
    samples: float = 0.0
    living: float = 0.0
    joined: int = 0
    starts: int = 0
