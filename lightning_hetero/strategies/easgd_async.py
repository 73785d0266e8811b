"""`hetero_easgd_async` and its kin: replicas visit a center one by one."""

from typing import Any

from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.elastic import check_momentum
from lightning_hetero.averaging.visits import VisitingAverager
from lightning_hetero.checks import one_of
from lightning_hetero.comm.address import interface_towards
from lightning_hetero.comm.centers import Center, CenterOptions, Home, layout_of, open_center
from lightning_hetero.comm.wire import Wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.elastic import ElasticStrategy


class EASGDVisitsStrategy(ElasticStrategy):
    """Base of strategies whose replicas visit a center one by one.

    Args:
        wire: number format of what visitors send and get, where the center is a thread's.
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.elastic.ElasticStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    overlap, debias, locked, in_turn = True, False, True, False
    center: Home = "auto"

    def __init__(self, *, wire: Wire = "fp32", **kwargs: Any) -> None:
        if wire != "fp32" and self.center not in ("auto", "thread"):
            raise ConfigurationError(
                f"wire={wire!r}: a center in {self.center} has no wire. Use wire='fp32', or hetero_easgd_async with "
                "center='thread'."
            )
        super().__init__(wire=wire, **kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        return {**super().algorithm_options(), "center": self.center, "debias": self.debias}

    @override
    def make_averager(self) -> Averager:
        assert self.job is not None
        view = self.job.view
        layout = layout_of(view.rank, view.ranks, view.world, self.options.timeout)
        options = CenterOptions(self.center, self.locked, self.in_turn, self.wire)
        assert self.cluster_environment is not None
        interface = interface_towards(self.cluster_environment.main_address)
        center: Center = open_center(options, view.topology, layout, self.job.groups, interface)
        return VisitingAverager(
            self.pull,
            self.tau,
            center,
            self.order,
            self.overlap,
            self.debias,
            skip=self.on_nan == "skip",
            check=self.check_optimizers,
        )

    @staticmethod
    def check_optimizers(optimizers: Any) -> None:
        """Any will do."""


class EASGDRoundRobinStrategy(EASGDVisitsStrategy):
    """The original EASGD: replicas visit the center strictly in their order, over and over, each waiting for its turn.

    It is the baseline that the others beat. A thread of the first replica keeps the center; a visit is one message
    each way, or one for each parameter with ``packed=False``, as in the original.

    Source: "Original EASGD", You, Buluc and Demmel 2017, algorithm 1.

    Args:
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.easgd_async.EASGDVisitsStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    overlap, in_turn, center = False, True, "thread"


class EASGDAsyncStrategy(EASGDVisitsStrategy):
    """Asynchronous EASGD: whoever comes first is served first; nobody waits for a slow replica within an epoch.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; You, Buluc and Demmel 2017.

    Args:
        center: where it lives: ``"shared_memory"`` of one host, a ``"thread"`` of the first replica, which serves
            any, or a window of ``"mpi"``. ``"auto"``: shared memory if it can.
        debias: whether what a replica adds is divided by how often it comes, so that all count by their samples,
            fast or slow (this package's own; otherwise the center leans to the fast ones).
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.easgd_async.EASGDVisitsStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when the ranks have met: the center cannot live there.
    """

    def __init__(self, *, center: Home = "auto", debias: bool = True, **kwargs: Any) -> None:
        one_of("center", center, ("auto", "shared_memory", "thread", "mpi"))
        one_of("debias", debias, (True, False))
        self.center, self.debias = center, debias
        super().__init__(**kwargs)


class MEASGDAsyncStrategy(EASGDAsyncStrategy):
    """Asynchronous EASGD with heavy-ball momentum: ``v <- mu v - eta g;  x <- x + v - alpha (x - c)``.

    The model's optimizer must be ``SGD(momentum=mu)``, not Nesterov's.

    Source: Momentum EASGD, You, Buluc and Demmel 2017, eq. 5 and 6.

    Args:
        **kwargs: further options, those of :class:`~lightning_hetero.EASGDAsyncStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when training starts: another optimizer.
    """

    @staticmethod
    def check_optimizers(optimizers: Any) -> None:
        """Refuse others."""
        check_momentum(optimizers, nesterov=False)


class EASGDHogwildStrategy(EASGDVisitsStrategy):
    """Asynchronous EASGD without a lock, in the shared memory of one node: replicas read and add as they come.

    Source: Hogwild EASGD, You, Buluc and Demmel 2017.

    Args:
        debias: whether what a replica adds is divided by how often it comes, so that all count by their samples,
            fast or slow (this package's own; otherwise the center leans to the fast ones).
        **kwargs: further options, those of :class:`~lightning_hetero.strategies.easgd_async.EASGDVisitsStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when the ranks have met: they live on several nodes.
    """

    locked, center = False, "shared_memory"

    def __init__(self, *, debias: bool = True, **kwargs: Any) -> None:
        one_of("debias", debias, (True, False))
        self.debias = debias
        super().__init__(**kwargs)
