"""How a process becomes a rank: the launcher's word, a gloo world for all devices, the topology."""

from abc import abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_hetero.comm import failures
from lightning_hetero.comm.address import interface_towards
from lightning_hetero.comm.agreement import check_equal
from lightning_hetero.comm.background import Background
from lightning_hetero.comm.deadline import deadline, of_communication
from lightning_hetero.comm.groups import end_unused
from lightning_hetero.comm.topology import Place, Topology, device_identity, discover
from lightning_hetero.errors import CommunicationError
from lightning_hetero.launch.environment import RaggedEnvironment, check_variables, hostname, local_devices
from lightning_hetero.launch.observer import ObservedLauncher
from lightning_hetero.strategies.collectives import Collectives
from lightning_hetero.strategies.options import Options
from lightning_hetero.workload.timer import StepTimer


class Membership(Collectives):
    """Joins jobs whose nodes differ in the number of their ranks and in their devices."""

    options: Options  # the user's, the same on every rank
    topology: Topology | None = None  # once the process has joined

    #: What a strategy has of the job that it has joined, or of the running fit. A copy has yet to join.
    of_the_job: ClassVar[tuple[str, ...]] = ("topology", "share", "_data_group")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: options, and what the Trainer has set, but no connections."""
        state = {name: value for name, value in self.__dict__.items() if name not in self.of_the_job}
        if isinstance(self.model, DistributedDataParallel):
            state["_model"] = self.model.module
        return state

    @override
    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        check_variables(self.cluster_environment, self.num_nodes)
        self.parallel_devices = local_devices(self.cluster_environment, self.parallel_devices)
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ObservedLauncher(
                cluster_environment=RaggedEnvironment(self.cluster_environment),
                num_processes=self.num_processes,
                num_nodes=self.num_nodes,
            )
        else:
            super()._configure_launcher()

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._connect(self.cluster_environment)
        with deadline("learn where failures are told"):
            failures.watch(
                interface_towards(self.cluster_environment.main_address), self.options.timeout.total_seconds()
            )
        if self.topology is None:
            self._timer = StepTimer(self.root_device)
            host = hostname()
            place = Place(host, self.node_rank, self.local_rank, device_identity(self.root_device, host))
            self.topology = discover(place, self.options.ranks_per_node)
            end_unused()
            check_equal("the strategy's options", {**asdict(self.options), **self.algorithm_options()})
            self._join(self.topology)

    def _connect(self, cluster: ClusterEnvironment) -> None:
        """Join the world's process group.

        On a thread, since PyTorch waits without a limit for whoever accepts its connection and then says nothing.
        """
        seconds = self.options.timeout.total_seconds()
        with deadline("join the job"):
            joining = Background(lambda: _init_dist_connection(cluster, "gloo", timeout=self._timeout))
            try:
                joining.result(seconds)
            except TimeoutError as error:
                rank, place = cluster.global_rank(), f"{cluster.main_address}:{cluster.main_port}"
                if rank == 0:
                    why = (
                        f"not all of the others have come to {place}. Look for an error of theirs, and check that they "
                        "can reach this address."
                    )
                else:
                    why = (
                        f"rank 0 did not let it in at {place}. Look for an error of rank 0. If there is none, another "
                        "program may hold that port: set MASTER_PORT to a free one, the same for all ranks."
                    )
                raise CommunicationError(
                    f"rank {rank} of {cluster.world_size()} could not join the job within {seconds:g} s (the "
                    f"strategy's `timeout`): {why}"
                ) from error

    def _tell_others(self, exception: BaseException) -> None:
        """Let all ranks know why this one ends; if it ends because of another, let the error say because of which."""
        if not of_communication(exception):
            what = str(exception).strip().split("\n")[0]
            failures.tell("failed", f"failed with {type(exception).__name__}{what and f': {what}'}")
            return
        failures.tell("echo", "has lost another rank")
        first = failures.first(0.0)
        if first is not None and str(first) not in str(exception):  # of a collective of the user's own
            exception.args = (f"{exception} The rank that failed first: {first}.",)

    def algorithm_options(self) -> dict[str, Any]:
        """Options of the algorithm itself, by name, which must also be the same on every rank."""
        return {}

    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """The replicas of the job, each the ranks that average gradients at every step; here one, the world."""
        return (tuple(range(topology.world)),)

    @abstractmethod
    def _join(self, topology: Topology) -> None:
        """Make the process groups, and what depends on them."""
