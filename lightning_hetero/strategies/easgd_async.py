"""`hetero_easgd_async` and its kin: replicas visit a center one by one."""

from typing import Any, Literal

from typing_extensions import override

from lightning_hetero.averaging.averager import Averager
from lightning_hetero.averaging.center import Order
from lightning_hetero.averaging.elastic import Pull, check_momentum
from lightning_hetero.averaging.visits import VisitingAverager
from lightning_hetero.comm.centers import Center, Home, job_of, open_center
from lightning_hetero.comm.wire import DTYPES, Wire
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.strategies.centers import CenterStrategy, one_of


class EASGDVisitsStrategy(CenterStrategy):
    """Base of strategies whose replicas visit a center one by one.

    Args:
        tau: optimizer steps of its own from one visit of a replica to the next.
        moving_rate: alpha; ``"auto"``: beta / p, with beta = 0.9 if it is not given.
        rho: instead: alpha = learning rate * rho, of the first parameter group of the first optimizer.
        beta: how fast the center moves. Default: p alpha.
        order: ``"jacobi"``: differences from before the replica's own step, as in the paper; ``"gauss_seidel"``: from
            after it.
        wire: number format of what visitors send and get, where the center is a thread's.
        **kwargs: as for :class:`~lightning_hetero.strategies.centers.CenterStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    overlap, debias, locked, in_turn = True, False, True, False
    center: Home = "auto"

    def __init__(
        self,
        tau: int = 10,
        moving_rate: float | Literal["auto"] | None = None,
        rho: float | None = None,
        beta: float | None = None,
        order: Order = "jacobi",
        wire: Wire = "fp32",
        **kwargs: Any,
    ) -> None:
        self.pull = Pull(moving_rate, rho, beta)
        one_of("order", order, ("jacobi", "gauss_seidel"))
        one_of("wire", wire, tuple(DTYPES))
        if wire != "fp32" and self.center not in ("auto", "thread"):
            raise ConfigurationError(
                f"wire={wire!r}: a center in {self.center} has no wire. Use wire='fp32', or hetero_easgd_async with "
                "center='thread'."
            )
        self.order, self.wire = order, wire
        super().__init__(tau=tau, **kwargs)

    @override
    def algorithm_options(self) -> dict[str, Any]:
        names = ("pull", "order", "wire", "center", "debias")
        return {**super().algorithm_options(), **{name: getattr(self, name) for name in names}}

    @override
    def make_averager(self) -> Averager:
        assert self.topology is not None
        job = job_of(self.topology.rank, self._replicas, self.topology.world, self.options.timeout)
        center: Center = open_center(self.center, self.topology, job, self.locked, self.in_turn, self.wire)
        return VisitingAverager(
            self.pull,
            self.tau,
            center,
            self.order,
            self.overlap,
            self.debias,
            skip=self.on_nan == "skip",
            check=self.check_optimizers,
            wants_stop=self._stop_requested,
        )

    @override
    def _after_window(self) -> None:
        super()._after_window()
        assert isinstance(self.averager, VisitingAverager)
        if self.averager.stops and self._stop is not None:
            self.share.report_now()  # who waits at the end of the epoch must know; and all wait for those who do not
            self._stop.heed()

    @staticmethod
    def check_optimizers(optimizers: Any) -> None:
        """Any will do."""


class EASGDRoundRobinStrategy(EASGDVisitsStrategy):
    """The original EASGD: replicas visit the center strictly in their order, over and over, each waiting for its turn.

    It is the baseline that the others beat. A thread of the first replica keeps the center; a visit is one message
    each way, or one for each parameter with ``packed=False``, as in the original.

    Source: "Original EASGD", You, Buluc and Demmel 2017, algorithm 1.

    Args:
        **kwargs: as for :class:`EASGDVisitsStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    overlap, in_turn, center = False, True, "thread"


class EASGDAsyncStrategy(EASGDVisitsStrategy):
    """Asynchronous EASGD: whoever comes first is served first; nobody waits for a slow replica within an epoch.

    Source: Asynchronous EASGD, Zhang et al. 2015, algorithm 1; You, Buluc and Demmel 2017.

    Args:
        tau: optimizer steps of its own from one visit of a replica to the next.
        moving_rate: alpha; ``"auto"``: beta / p, with beta = 0.9 if it is not given.
        rho: instead: alpha = learning rate * rho, of the first parameter group of the first optimizer.
        beta: how fast the center moves. Default: p alpha.
        order: ``"jacobi"``: differences from before the replica's own step, as in the paper; ``"gauss_seidel"``: from
            after it.
        wire: number format of what visitors send and get, where the center is a thread's.
        center: where it lives: ``"shared_memory"`` of one host, a ``"thread"`` of the first replica, which serves
            any, or a window of ``"mpi"``. ``"auto"``: shared memory if it can.
        debias: whether what a replica adds is divided by how often it comes, so that all count by their samples,
            fast or slow (this package's own; otherwise the center leans to the fast ones).
        **kwargs: as for :class:`EASGDVisitsStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when the ranks have met: the center cannot live there.
    """

    def __init__(
        self,
        tau: int = 10,
        moving_rate: float | Literal["auto"] | None = None,
        rho: float | None = None,
        beta: float | None = None,
        order: Order = "jacobi",
        wire: Wire = "fp32",
        center: Home = "auto",
        debias: bool = True,
        **kwargs: Any,
    ) -> None:
        one_of("center", center, ("auto", "shared_memory", "thread", "mpi"))
        one_of("debias", debias, (True, False))
        self.center, self.debias = center, debias
        super().__init__(tau, moving_rate, rho, beta, order, wire, **kwargs)


class MEASGDAsyncStrategy(EASGDAsyncStrategy):
    """Asynchronous EASGD with heavy-ball momentum: ``v <- mu v - eta g;  x <- x + v - alpha (x - c)``.

    The model's optimizer must be ``SGD(momentum=mu)``, not Nesterov's.

    Source: Momentum EASGD, You, Buluc and Demmel 2017, eq. 5 and 6.

    Args:
        **kwargs: as for :class:`EASGDAsyncStrategy`.

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
        tau: optimizer steps of its own from one visit of a replica to the next.
        moving_rate: alpha; ``"auto"``: beta / p, with beta = 0.9 if it is not given.
        rho: instead: alpha = learning rate * rho, of the first parameter group of the first optimizer.
        beta: how fast the center moves. Default: p alpha.
        order: ``"jacobi"``: differences from before the replica's own step, as in the paper; ``"gauss_seidel"``: from
            after it.
        debias: whether what a replica adds is divided by how often it comes, so that all count by their samples,
            fast or slow (this package's own; otherwise the center leans to the fast ones).
        **kwargs: as for :class:`EASGDVisitsStrategy`.

    Raises:
        ConfigurationError: a value that cannot work.
        UnsupportedError: when the ranks have met: they live on several nodes.
    """

    locked, center = False, "shared_memory"

    def __init__(
        self,
        tau: int = 10,
        moving_rate: float | Literal["auto"] | None = None,
        rho: float | None = None,
        beta: float | None = None,
        order: Order = "jacobi",
        debias: bool = True,
        **kwargs: Any,
    ) -> None:
        one_of("debias", debias, (True, False))
        self.debias = debias
        super().__init__(tau, moving_rate, rho, beta, order, **kwargs)
