"""What the monitor gives to loggers and the progress bar, and prints."""

from collections.abc import Mapping, Sequence

from lightning_hetero.callbacks.record import Record
from lightning_hetero.strategies.survival import Loss


def metrics(record: Record) -> dict[str, float]:
    """For loggers, of each rank and of the job."""
    columns = {
        "share": record.shares,
        "samples_per_s": record.samples_per_s,
        "compute_s": record.compute,
        "wait_s": record.wait,
    }
    ranks = record.ranks or tuple(range(len(record.samples)))
    per_rank = {f"{name}/rank{i}": float(x) for name, row in columns.items() for i, x in zip(ranks, row, strict=False)}
    return {**per_rank, "samples_per_s": record.throughput, "waiting": record.waiting}


def loss_metrics(loss: Loss) -> dict[str, float]:
    """For loggers, when ranks were lost."""
    return {
        "view": loss.view,
        "ranks": loss.ranks,
        "replicas": loss.replicas,
        "stall_s": loss.seconds,
        "lost_samples": loss.samples,
    }


def pairing_table(pairings: Sequence[Sequence[int]]) -> str:
    """Who has met whom, to be printed."""
    width = max(len(str(count)) for row in pairings for count in row) + 2
    width = max(width, len(str(len(pairings))) + 2)
    head = "replica" + "".join(f"{i:{width}}" for i in range(len(pairings)))
    rows = [
        f"{i:7}" + "".join(f"{'-' if i == j else count:>{width}}" for j, count in enumerate(row))
        for i, row in enumerate(pairings)
    ]
    return "\n".join(["Completed exchanges of each replica with each:", head, *rows])


def exchange_texts(status: Mapping[str, float | str], hidden: float, exposed: float) -> dict[str, str]:
    """For the progress bar, after an exchange of which so many seconds were hidden and so many were not."""
    short = {name: value for name, value in status.items() if "/" not in name}  # not of each replica
    shown = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in short.items()}
    spent = hidden + exposed
    return {**shown, "hidden": f"{max(hidden, 0.0) / spent:.0%}" if spent > 0 else ""}


def texts(record: Record) -> dict[str, str]:
    """For the progress bar."""
    return {
        "samples/s": f"{record.throughput:.0f}",
        "waiting": f"{record.waiting:.0%}",
        "shares": " ".join(map(str, record.shares)),
    }
