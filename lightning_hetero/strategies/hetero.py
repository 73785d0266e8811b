"""The Lightning face of every strategy of this package."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import _augment_message
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from lightning_hetero.comm.agreement import agree
from lightning_hetero.comm.deadline import deadline
from lightning_hetero.comm.pulse import Pulse
from lightning_hetero.comm.topology import Place, Topology, device_identity, discover
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.launch.environment import RaggedEnvironment, check_variables, hostname, local_devices
from lightning_hetero.strategies.collectives import Collectives
from lightning_hetero.strategies.guards import check_model, check_trainer
from lightning_hetero.strategies.loaders import Loaders
from lightning_hetero.strategies.replica_ddp import ReplicaDDP, ReplicaSyncBatchNorm
from lightning_hetero.strategies.workshare import Workshare, exchanger
from lightning_hetero.workload.planner import Planner
from lightning_hetero.workload.sampler import Position
from lightning_hetero.workload.shares import Cost
from lightning_hetero.workload.timer import StepTimer

if TYPE_CHECKING:
    import lightning.pytorch as pl

_STATE = "lightning_hetero"


class HeteroStrategy(Collectives):
    """Base of the strategies: splits batches by speed, and weighs gradients by samples within a replica.

    Args:
        balance: ``"auto"`` splits every global batch by measured speed; ``"off"`` evenly; a list gives each rank's
            relative share (0 for none).
        global_batch_size: samples that all ranks together take per step. Default: the DataLoader's ``batch_size``
            times the number of ranks, as with Lightning's ``ddp``.
        min_batch_size: least samples of a rank per step: one number for all, or one per rank.
        max_batch_size: most samples of a rank per step, likewise, for instance for its memory.
        rebalance_every_n_steps: how often (in batches) the ranks exchange their measured speeds.
        ranks_per_node: group consecutive ranks into nodes of this size, or these sizes, instead of asking the
            launcher; to try one machine as several nodes.
        timeout: longest wait for other ranks, in seconds or as a timedelta, before an error.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: where ranks and addresses come from. Default: detected.
        checkpoint_io: how checkpoints are written and read.
        precision_plugin: set by the Trainer.
        ddp_comm_state: state for ``ddp_comm_hook``.
        ddp_comm_hook: gradient communication hook of DDP; on CPU too.
        ddp_comm_wrapper: wraps ``ddp_comm_hook``.
        model_averaging_period: for PyTorch's post-local-SGD hook, as in ``DDPStrategy``.
        start_method: how processes start if no launcher has: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"``.
        **kwargs: options of ``DistributedDataParallel``, such as ``find_unused_parameters``.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    def __init__(
        self,
        balance: Literal["auto", "off"] | list[float] = "auto",
        global_batch_size: int | None = None,
        min_batch_size: int | list[int] | None = None,
        max_batch_size: int | list[int] | None = None,
        rebalance_every_n_steps: int = 4,
        ranks_per_node: int | list[int] | None = None,
        timeout: timedelta | float = 1800.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable | None = None,
        ddp_comm_wrapper: Callable | None = None,
        model_averaging_period: int | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        if isinstance(balance, str) and balance not in ("auto", "off"):
            raise ConfigurationError(f"balance={balance!r}: give 'auto', 'off', or a list with one share per rank.")
        _at_least_one("global_batch_size", global_batch_size)
        _at_least_one("rebalance_every_n_steps", rebalance_every_n_steps)
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
        if limit <= timedelta(0):
            raise ConfigurationError(f"timeout={timeout!r}: the longest wait must be above 0 seconds.")
        if isinstance(balance, list):
            Planner(len(balance), balance, min_batch_size, max_batch_size)  # raises now rather than after the launch
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend="gloo",
            timeout=limit,
            start_method=start_method,
            **kwargs,
        )
        self.options: dict[str, Any] = {
            "strategy": type(self).__name__,
            "balance": balance,
            "global_batch_size": global_batch_size,
            "min_batch_size": min_batch_size,
            "max_batch_size": max_batch_size,
            "rebalance_every_n_steps": rebalance_every_n_steps,
            "ranks_per_node": ranks_per_node,
            "timeout": limit,
        }
        self.topology: Topology | None = None
        self._timer = StepTimer(torch.device("cpu"))

    # -- launch ------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Read this process's place from the launcher; the number of ranks here may differ from other nodes'."""
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        check_variables(self.cluster_environment, self.num_nodes)
        self.parallel_devices = local_devices(self.cluster_environment, self.parallel_devices)
        super().set_world_ranks()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment = RaggedEnvironment(self.cluster_environment)
        super()._configure_launcher()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Lightning's samplers yield the global order, which this strategy's samplers cut up."""
        return {"num_replicas": 1, "rank": 0}

    def setup_distributed(self) -> None:
        """Join the job: a gloo world for all devices, the topology, and the groups."""
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        with deadline("join the job"):
            _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)
        if self.topology is None:
            self._timer = StepTimer(self.root_device)
            host = hostname()
            device = device_identity(self.root_device, host)
            self.topology = discover(
                Place(host, self.node_rank, self.local_rank, device), self.options["ranks_per_node"]
            )
            agree("the strategy's options", self.options)
            self._join(self.topology)

    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """The replicas of the job, each the ranks that average gradients every step."""
        return (tuple(range(topology.world)),)

    def _join(self, topology: Topology) -> None:
        new_group = dist.new_group
        for ranks in self.replicas(topology):  # every process takes part in the making of every group
            groups = [
                new_group(list(ranks), timeout=self._timeout, backend=backend)
                for backend in (topology.backend(ranks), "gloo")
            ]
            if topology.rank in ranks:
                replica, (self._data_group, small) = ranks, groups
        pulse = Pulse(new_group(timeout=self._timeout, backend="gloo"))
        o = self.options
        planner = Planner(topology.world, o["balance"], o["min_batch_size"], o["max_batch_size"])
        exchange = exchanger(small, self._timer.waiting)
        loaders = Loaders(
            topology.rank,
            replica,
            planner,
            self._position,
            self.broadcast,
            exchange,
            self._size_of,
            o["global_batch_size"],
        )
        self.share = Workshare(planner, self._timer, loaders, replica, small, pulse, o["rebalance_every_n_steps"])

    # -- model -------------------------------------------------------------------------------------

    def setup(self, trainer: "pl.Trainer") -> None:
        """Check that all ranks can train together, then set up as DDP does."""
        assert self.model is not None
        check_trainer(trainer, self._layer_sync, self.root_device)
        check_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.share.loaders.combined = lambda: trainer.fit_loop._combined_loader
            if self._layer_sync is not None:
                self._layer_sync = ReplicaSyncBatchNorm(self._data_group)
            # Lightning broadcasts a flag before every batch, and within the handler; the pulse carries it instead.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            trainer._signal_connector._sigterm_notifier_fn = self._request_stop  # type: ignore[method-assign, assignment]
        super().setup(trainer)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        if len(self.share.replica) == 1:
            return model  # nothing to average with: DDP would only cost time
        device_ids = self.determine_ddp_device_ids()
        return ReplicaDDP(
            self._timer, module=model, device_ids=device_ids, process_group=self._data_group, **self._ddp_kwargs
        )

    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    # -- data --------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Give the loader a sampler that follows the plan."""
        trainer = self._trainer
        sampler = getattr(dataloader, "sampler", None)
        sharded = not trainer._accelerator_connector.use_distributed_sampler or (
            isinstance(sampler, torch.utils.data.DistributedSampler) and sampler.num_replicas > 1
        )
        if trainer.training:
            return self.share.loaders.training(dataloader, sharded)
        assert trainer.state.stage is not None
        return self.share.loaders.evaluation(dataloader, sharded, trainer.state.stage.dataloader_prefix or "validation")

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _position(self) -> Position:
        self.share.fresh_epoch = True
        fit = self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed  # type: ignore[attr-defined]
        batches = fit.epoch_loop.batch_progress.current.processed if fit.restarting else 0  # type: ignore[attr-defined]
        return Position(epochs, batches, self.share.step)

    def _size_of(self, batch: Any) -> int:
        return extract_batch_size(batch)

    # -- a step ------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; in training this is where a step begins."""
        if self.lightning_module is not None and self._trainer.training:
            self.share.begin()
            self._heed_stop()
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; what it logs counts by this rank's samples."""
        drawn, module = self.share.drawn, self.lightning_module
        assert drawn is not None
        assert module is not None
        if callable(measure := getattr(module, "batch_weight", None)):
            self.share.weigh(measure, args[0] if args else None)
        if drawn.samples == 0 and self._trainer._results is not None:
            self._trainer._results.batch_size = 0  # a filler: none of its values may count
        with _StepSamples(self, lambda: drawn.samples):
            output = super().training_step(*args, **kwargs)
        if not module.automatic_optimization:
            self.share.end()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Weigh the loss by this rank's part of the samples, so that DDP's plain mean is the mean over all samples.

        With ``W`` ranks in the replica, of which this one holds ``n_i`` of ``N`` samples, the factor is ``W n_i / N``
        (HetGrad, Moreno-Alvarez et al. 2022).
        """
        weight = self.share.weight()
        loss = closure_loss if weight == 1 else closure_loss * weight
        module = self.lightning_module
        assert module is not None
        self.pre_backward(loss)
        loss = self.precision_plugin.pre_backward(loss, module)
        self._timer.watch(loss)  # last, so that all that callbacks do in the backward pass is this rank's own work
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        self._timer.backward_done()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        if module.automatic_optimization and self._trainer.fit_loop._should_accumulate():
            self.share.end()
        return loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer; with automatic optimization the step ends here, before schedulers and callbacks."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self.share.end()
        return output

    # -- evaluation --------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """All ranks validate with the buffers of the replica's first, as DDP would."""
        super().on_validation_start()
        if isinstance(self.model, ReplicaDDP):
            self.model.share_buffers()

    def on_validation_end(self) -> None:
        """Validation is no part of a training step's time."""
        super().on_validation_end()
        self._timer.restart()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the bare module: ranks need not run the same number of batches, and DDP would wait for buffers."""
        return self._evaluate("val", "validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`validation_step`."""
        return self._evaluate("test", "test_step", *args, **kwargs)

    def _evaluate(self, stage: str, name: str, *args: Any, **kwargs: Any) -> Any:
        def samples() -> float:
            return float(self._size_of(args[0]))

        with getattr(self.precision_plugin, f"{stage}_step_context")(), _StepSamples(self, samples):
            return getattr(self.lightning_module, name)(*args, **kwargs)

    # -- checkpoints, end --------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Add the plan to the checkpoint; any strategy can load it."""
        loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if not any(loops.get("combined_loader", [True])):
            del loops["combined_loader"]  # placeholders of the samplers, which other strategies would not expect
        if self.topology is not None:
            fits = [[r.fixed, r.per_sample, max(r.samples, 1.0)] for r in self.share.reports]
            checkpoint[_STATE] = {"planner": self.share.planner.state_dict(), "fits": fits}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._timer.restart()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and the plan if the number of ranks is what it was."""
        super().load_optimizer_state_dict(checkpoint)
        state = checkpoint.get(_STATE)
        if state is None or self.options["balance"] != "auto" or self.topology is None:
            return
        if len(state["planner"]["costs"]) != self.topology.world:
            rank_zero_warn(
                f"The checkpoint's shares are for {len(state['planner']['costs'])} ranks; this job has "
                f"{self.topology.world} and measures anew."
            )
            return
        self.share.planner.load_state_dict(state["planner"])
        if state["fits"]:
            fixed, per_sample, samples = state["fits"][self.topology.rank]
            self.share.cost.assume(Cost(fixed, per_sample), int(samples))

    def on_train_start(self) -> None:
        """If the loaders were set up before a checkpoint was restored, let them begin again where it stands."""
        super().on_train_start()
        position = self._position()
        begun = [getattr(source, "begun", None) for source in self.share.loaders.sources()]
        if any(b is not None and (b.epoch, b.batch) != (position.epoch, position.batch) for b in begun):
            fetcher = self._trainer.fit_loop._data_fetcher
            assert fetcher is not None
            iter(fetcher)

    def on_train_end(self) -> None:
        """Leave nothing in flight."""
        super().on_train_end()
        self.share.end()
        self.share.listen()

    def on_exception(self, exception: BaseException) -> None:
        """Let the error be seen, with what to do about unused parameters in this strategy's terms."""
        loop = self._trainer.fit_loop
        if loop._combined_loader is not None and loop._combined_loader._iterator is None:
            loop._data_fetcher = None  # it failed to start; tearing it down would raise another error over this one
        _augment_message(
            exception,
            pattern=".*Expected to have finished reduction in the prior iteration.*",
            new_message=(
                "Some parameters had no part in the loss that training_step returned. If this is meant, give "
                f"`find_unused_parameters=True` to {type(self).__name__}, or add `_find_unused_parameters_true` to the "
                "strategy's name."
            ),
        )

    # -- signals -----------------------------------------------------------------------------------

    def _request_stop(self, signum: int, frame: Any) -> None:
        if not self.share.stop_requested and self.launcher is not None:
            self.launcher.kill(signum)
        self.share.stop_requested = True

    def _heed_stop(self) -> None:
        if any(report.stop for report in self.share.reports):
            self._trainer._signal_connector.received_sigterm = True  # the Trainer stops, on all ranks at this step


class _StepSamples:
    """While a step runs, means weigh this rank by its samples."""

    def __init__(self, strategy: HeteroStrategy, samples: Callable[[], float]) -> None:
        self._strategy, self._samples = strategy, samples

    def __enter__(self) -> None:
        self._strategy._step_samples = self._samples

    def __exit__(self, *_: object) -> None:
        self._strategy._step_samples = None


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"{name}={value!r} must be a whole number of at least 1.")
