"""Names of the monitor's metrics, a TensorBoard dashboard of them, and an HTTP endpoint for Prometheus."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_hetero.errors import ConfigurationError

#: All metrics by name, after ``hetero/``, with what they mean; ``{i}`` is the number of a rank or a replica.
METRICS: dict[str, str] = {
    "share/rank{i}": "samples per step",
    "samples_per_s/rank{i}": "samples per second of its own work",
    "compute_s/rank{i}": "seconds of own work per step, with data",
    "wait_s/rank{i}": "seconds of waiting per step",
    "samples_per_s": "samples per second of the job",
    "waiting": "part of all ranks' time that is waiting",
    "ranks": "ranks that take part",
    "replicas": "replicas that take part",
    "view": "number of changes of who takes part",
    "stall_s": "seconds for which this rank stood still when ranks were lost",
    "lost_samples": "samples drawn for lost ranks that nobody trained on",
    "exchanges": "exchanges between replicas so far",
    "exchanges_per_s": "exchanges between replicas per second of late",
    "bytes_sent": "bytes that this replica has sent to others so far",
    "hidden_s": "seconds of exchanges so far while the rank trained",
    "exposed_s": "seconds of exchanges so far while the rank waited",
    "consensus_distance": "RMS distance of the replicas from their mean",
    "global_every": "DASO: batches from one exchange to the next",
    "wait": "DASO: batches until an exchange is applied",
    "tau": "steps from one exchange to the next, where the strategy chooses them",
    "local_steps": "asynchronous DiLoCo: steps of this replica from one exchange to the next",
    "center_distance": "distance of this replica from the center",
    "exchanges_per_s/replica{i}": "exchanges of a replica with the center per second",
    "late/replica{i}": "asynchronous DiLoCo with a quorum: parts of a replica so far that joined a later outer step",
    "peer_distance": "gossip: distance from the latest peer",
    "missed": "gossip: exchanges that did not come about",
    "met/replica{i}": "gossip: exchanges with a replica so far",
}

#: Charts of the custom-scalars dashboard: their title, and patterns of the metrics that each shows.
CHARTS: dict[str, list[str]] = {
    "samples per step": [r"hetero/share/rank\d+"],
    "seconds of own work per step": [r"hetero/compute_s/rank\d+"],
    "seconds of waiting per step": [r"hetero/wait_s/rank\d+"],
    "waiting, part of all time": ["hetero/waiting"],
    "samples per second": ["hetero/samples_per_s$"],
    "ranks and replicas": ["hetero/ranks", "hetero/replicas"],
    "bytes sent": ["hetero/bytes_sent"],
    "seconds of exchanges": ["hetero/hidden_s", "hetero/exposed_s"],
    "distance between replicas": [f"hetero/{name}_distance" for name in ("consensus", "center", "peer")],
}


def add_dashboard(logger: object) -> None:
    """Lay out the charts on TensorBoard's tab "Custom scalars", if a logger writes for TensorBoard; else do nothing."""
    if isinstance(logger, TensorBoardLogger):
        charts = {title: ["Multiline", patterns] for title, patterns in CHARTS.items()}
        logger.experiment.add_custom_scalars({"lightning_hetero": charts})


class PrometheusEndpoint:
    """HTTP endpoint that gives the latest metrics in Prometheus's text format.

    Args:
        address: of the interface to listen on.
        port: to listen on.

    Raises:
        ConfigurationError: the library ``prometheus_client`` is missing, or the port is taken.
    """

    def __init__(self, address: str, port: int) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise ConfigurationError(
                f"prometheus_port={port} needs the library prometheus_client, which is not installed: "
                "pip install 'lightning-hetero[prometheus]'."
            ) from None
        self._family = prometheus.metrics_core.GaugeMetricFamily
        self.latest: dict[str, float] = {}
        registry = prometheus.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus.start_http_server(port, address, registry)
        except OSError as error:
            raise ConfigurationError(
                f"prometheus_port={port}: cannot listen at {address}:{port} ({error}). Give a free port; each job of "
                "a machine needs its own."
            ) from error

    def collect(self) -> Iterator[Any]:
        """The latest values as gauges, one family for each name; called on the server's thread."""
        families: dict[str, Any] = {}
        for name, value in self.latest.copy().items():
            numbered = re.fullmatch(r"(\w+)/(rank|replica)(\d+)", name)
            base, kind, number = numbered.groups() if numbered else (name, "", "")
            # Algorithms of users may have numbers with names of any kind.
            family = re.sub(r"\W", "_", f"hetero_{kind}_{base}" if kind else f"hetero_{base}", flags=re.ASCII)
            if family not in families:
                meaning = METRICS.get(f"{base}/{kind}{{i}}" if kind else base, name)
                families[family] = self._family(family, meaning, labels=[kind] if kind else [])
            families[family].add_metric([number] if kind else [], value)
        yield from families.values()

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take in new values."""
        self.latest = {**self.latest, **metrics}  # replaced, never changed: the server's thread reads it

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
