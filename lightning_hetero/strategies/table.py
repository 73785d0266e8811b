"""The strategies, side by side."""

from rich.table import Table

from lightning_hetero.strategies.registry import ENTRIES


def strategies_table() -> Table:
    """A row per strategy string: replica, when to use it, paper."""
    table = Table(
        title="Ranks of a replica average gradients at every step; replicas bring their parameters together.",
        caption="Replicas of a rank can be nodes too: replica='node'.",
        title_justify="left",
        caption_justify="left",
        show_lines=True,
    )
    table.add_column("strategy", no_wrap=True)
    table.add_column("replica", no_wrap=True)
    table.add_column("use it when", overflow="fold")
    table.add_column("paper", overflow="fold")
    for entry in ENTRIES:
        table.add_row(f"[bold]{entry.name}[/bold]", entry.replica, entry.when, entry.paper)
    return table
