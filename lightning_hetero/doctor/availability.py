"""Which strategies can run here, and why not the others."""

from collections.abc import Iterator
from importlib.util import find_spec

from lightning_hetero.comm.centers.mpi import mpi_missing
from lightning_hetero.comm.topology import Topology
from lightning_hetero.strategies.easgd_async import EASGDHogwildStrategy
from lightning_hetero.strategies.registry import ENTRIES


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
