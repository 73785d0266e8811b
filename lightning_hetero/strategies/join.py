"""Elastic joining: processes that are started later take part in a running fit.

Joining is resuming. All ranks agree on a batch, as they do when they are asked to stop, and make a checkpoint there, in
memory. Then they begin the fit again from it, with the newcomers, in a world of more ranks.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hetero import lightning_compat
from lightning_hetero.checkpoint.snapshot import MemoryCheckpointIO
from lightning_hetero.comm import failures, threads
from lightning_hetero.comm.agreement import gather, raise_on_all, value_of_rank
from lightning_hetero.comm.failures import deadline, is_communication_error
from lightning_hetero.comm.groups import begin_world, default_store
from lightning_hetero.comm.job import open_store
from lightning_hetero.comm.join_requests import (
    AddressFile,
    Admission,
    JobAddress,
    JobGoneError,
    JoinRequests,
    LauncherStore,
    Seat,
    is_other_job,
    job_answers,
    request_to_join,
)
from lightning_hetero.comm.membership_protocol import NextView
from lightning_hetero.comm.stores import store_at
from lightning_hetero.comm.topology import Place, Topology, consecutive
from lightning_hetero.errors import (
    CommunicationError,
    ConfigurationError,
    HeteroError,
    JoinRefusedError,
    UnsupportedError,
    not_none,
)
from lightning_hetero.launch.environment import hostname
from lightning_hetero.replicas.sharding import is_dtensor, is_sharded
from lightning_hetero.replicas.vectors import broadcast_tensors
from lightning_hetero.strategies import saving
from lightning_hetero.strategies.job import JobStrategy
from lightning_hetero.strategies.numbering import launched
from lightning_hetero.strategies.options import Options, memory_per_rank
from lightning_hetero.strategies.recovery_policy import JoinTicket, MembershipChange, Newcomers
from lightning_hetero.strategies.signals import TERMINATED, sigterm_recorded
from lightning_hetero.strategies.trainer_checks import settings, unjoinable
from lightning_hetero.version import __version__


def incompatibility(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The reason why a process that differs from the job in these values cannot take part; ``None`` if it can."""
    if other.get("version") != ours["version"]:
        return f"it runs lightning_hetero {other.get('version')}, the job {ours['version']}. Install the same version."
    for part, words in (("options", "options"), ("settings", "Trainer's settings")):
        own, theirs = ours[part], other.get(part, {})
        differing = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        if differing:
            values = [f"{name}: {theirs.get(name)}, in the job {own.get(name)}" for name in differing[:8]]
            return f"its {words} differ ({'; '.join(values)}). Give it the same ones."
    model = other.get("model")
    if ours["model"] is not None and model is not None and model != ours["model"]:
        lacks = next((one for one in ours["model"] if one not in model), None)
        more = next((one for one in model if one not in ours["model"]), None)
        what = [f"it lacks {lacks[0]} {lacks[1]} {lacks[2]}"] if lacks else []
        what += [f"the job lacks its {more[0]} {more[1]} {more[2]}"] if more else []
        return f"it trains another model: {'; '.join(what) or 'the order of parameters differs'}. Use the same one."
    return None


def fits(options: Options, world: int) -> bool:
    """Whether the user's options can be met by so many ranks."""
    try:
        options.planner(world // options.tensor_parallel)
        memory_per_rank(options.max_batch_memory, world)
        if options.ranks_per_node is not None:
            consecutive(world, options.ranks_per_node)
    except HeteroError:
        return False
    return True


PATH = "the state in which the job grows.ckpt"  # of the checkpoint in memory
_SUCCESSION = 10.0  # seconds in which the next rank takes over when the first one is lost
_HERE = timedelta(seconds=15)  # in which all newcomers come to the new store


def _living(place: JobAddress, limit: timedelta) -> Any:
    """The address of a job that runs, if there is one; if its first rank has just been lost, that of the next one."""
    address, until = place.read(limit), math.inf
    while address is not None and not job_answers(address):
        before, address = address, place.read(min(limit, timedelta(seconds=_SUCCESSION)))
        until = min(until, time.monotonic() + _SUCCESSION) if address == before else math.inf
        if time.monotonic() > until:
            if address is not None and is_other_job(address):
                raise JoinRefusedError(
                    f"{place} names a job at {address[0]}:{address[1]}. A job runs there, but not with the secret that "
                    "stands in the place: it was changed, or it is left from an earlier job. If that job is yours, let "
                    "this process read what it has written; if not, delete what is left, and this process begins a job."
                )
            rank_zero_info(f"{place} names a job that does not run any more.")
            return None
        time.sleep(0.2)
    return address


def _wait_for_newcomers(store: dist.Store, ticket: JoinTicket, limit: timedelta) -> int:
    """The number of ranks in the new view: all, or those before if a newcomer has ended in the meantime."""
    _, rank, world, *_ = ticket.admission
    if rank >= ticket.admission.before:
        store.set(f"here/{rank}", "1")
    if rank == 0:
        come = True
        try:
            for other in range(ticket.admission.before, world):
                store.wait([f"here/{other}"], _HERE)
        except dist.DistError:
            come = False
        store.set("world", str(world if come else ticket.admission.before))
    store.wait(["world"], limit)
    return int(store.get("world"))


MOST = 5  # times that a process asks again; others may be started again and again, and be wrong each time


def wrong_are_others(ticket: JoinTicket, error: Exception) -> bool:
    """Whether a process could not join because of others that came with it; they end.

    Args:
        ticket: of this process, which is new.
        error: with which the fit could not begin.
    """
    if not isinstance(error, HeteroError) or not error.of_ranks:
        return is_communication_error(error)  # some rank has ended, with an error of its own or without a word
    _, rank, _, before, _ = ticket.admission
    return rank not in error.of_ranks and max(error.of_ranks) >= before


class BeginAgainError(Exception):
    """The fit begins again, with more ranks. No error: it leaves Lightning's loops.

    Args:
        ticket: of this rank.
        store: with which the ranks meet, if this rank hosts it.
    """

    def __init__(self, ticket: JoinTicket, store: dist.Store | None) -> None:
        super().__init__("the fit begins again, with more ranks")
        self.ticket, self.store = ticket, store


class ElasticJoin(Newcomers):
    """Elastic joining, seen from one process: it asks a job to take it in, or takes others in.

    Args:
        strategy: of the fit.
    """

    def __init__(self, strategy: JobStrategy) -> None:
        self._strategy = strategy
        self._between = False  # the fit has ended, and has not begun again
        self._requests: JoinRequests | None = None  # on the first rank
        self._first_store: dist.Store | None = None  # the launcher's, which later processes ask as well
        self._written: list[JobAddress] = []
        self._leaving: JoinTicket | None = None  # how this rank is about to begin again
        self._unjoinable: str | None = None  # why nobody can join, also while a fit begins again
        self._sharded_size = 0  # ranks of a replica, if the model is sharded; not asked in a step, or between fits
        self._came_later = False  # whether this process has joined a job that ran
        self._settings: dict[str, Any] = {}  # of the Trainer, before callbacks may have changed them
        self._changed: dict[str, Any] = {}  # as they were when this rank left the fit, to begin it again

    # -- a process that is started later -----------------------------------------------------------

    def enter_running_job(self) -> None:
        """Join the job that runs already, if there is one and this process is in none (collective over its ranks)."""
        trainer = lightning_compat.trainer_of(self._strategy.lightning_module)
        self._settings = {} if trainer is None else settings(trainer)
        if not self._strategy.joined and (found := self.find()) is not None:
            self.enter(found, None)

    def find(self) -> JoinTicket | None:
        """Join a job that runs, and wait until it lets this process in; ``None``: there is none.

        Raises:
            JoinRefusedError: this process does not fit the job.
            UnsupportedError: there is a job, but this process does not train.
            CommunicationError: the job was there, and is gone.
        """
        strategy = self._strategy
        trainer = lightning_compat.trainer_of(strategy.lightning_module)
        for place in self.addresses():
            address = _living(place, strategy.options.limit)
            if address is None:
                continue
            if trainer is None or trainer.state.fn != TrainerFn.FITTING:
                raise UnsupportedError(
                    f"a job runs already, as {place} says, and this process would join it, but it does not call fit() "
                    "first. Start a process that trains, or give this one no join_file."
                )
            admission = self._admitted(place, address)
            return JoinTicket(admission, MemoryCheckpointIO(PATH, strategy.checkpoint_io), None, time.monotonic())
        return None

    def _admitted(self, place: JobAddress, address: Any) -> Admission:
        strategy = self._strategy
        limit = strategy.options.limit

        def waits() -> None:
            print(f"lightning_hetero: a job runs at {address[0]}:{address[1]}, as {place} says; this process joins it.")
            threads.freeze_gc()  # while the ranks of the job agree on a step

        own = self.compatibility()
        while True:
            try:
                return request_to_join(address, own, limit, waits)
            except JobGoneError as error:
                if (address := _living(place, min(limit, timedelta(seconds=_SUCCESSION)))) is None:
                    what = f"this process could not join the job that {place} names: {error}"
                    raise CommunicationError(what) from error

    def _ask_again(self, error: Exception) -> JoinTicket:
        """Ask the job once more to let this process in, as if it had just been started."""
        strategy = self._strategy
        ticket, strategy.ticket = strategy.ticket, None
        strategy.checkpoint_io = not_none(ticket, "what this process has joined with").files.usual
        failures.stop_watching()
        if dist.is_initialized():
            dist.destroy_process_group()
        what = str(error).strip().split("\n")[0]
        print(f"lightning_hetero: this process could not join because of others, and asks the job again ({what}).")
        found = self.find()
        if found is None:
            raise CommunicationError(
                "this process could not join a job because of others that came at the same moment, and when it asked "
                f"again the job was gone. Start it again to begin a job. Before: {error}"
            ) from error
        return found

    def addresses(self) -> list[JobAddress]:
        """The files and addresses at which a running job says how it is reached.

        A process that has joined hosts no store, even if its launcher has given it rank 0.
        """
        strategy = self._strategy
        cluster, file = launched(strategy.environment), strategy.options.join_file
        found: list[JobAddress] = [] if file is None else [AddressFile(file)]
        # The store of a torchrun agent stays when its ranks start over: what is in it may be of a job that has ended.
        if cluster.world_size() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            hosted = cluster.global_rank() == 0 and not self._came_later
            found.append(LauncherStore(cluster.main_address, cluster.main_port, hosted))
        return found

    def compatibility(self) -> dict[str, Any]:
        """The values that must be the same in a job and in a process that joins it; for JSON."""
        strategy = self._strategy
        module = strategy.module
        options = {"strategy": type(strategy).__name__, **strategy.options.agreed(), **strategy.algorithm_options()}
        known = not is_overridden("configure_model", module)  # else there may be no parameters yet
        model = [[name, list(p.shape), str(p.dtype)] for name, p in module.named_parameters()] if known else None
        node = f"node {strategy.node_rank} of {strategy.launch} on {hostname()}"
        seat = Seat(node, strategy.local_rank, len(strategy.parallel_devices or ()))
        return json.loads(
            json.dumps(
                {
                    "seat": seat,
                    "version": __version__,
                    "options": {name: repr(value) for name, value in options.items()},
                    "settings": {name: repr(value) for name, value in self._settings.items()},
                    "model": model,
                }
            )
        )

    # -- all ranks ---------------------------------------------------------------------------------

    def enter(self, ticket: JoinTicket, store: dist.Store | None) -> None:
        """Meet all ranks of the new view, and get the checkpoint (collective over them).

        Args:
            ticket: how this rank enters it.
            store: with which the ranks meet, if this rank has it already.

        Raises:
            CommunicationError: not all have come.
        """
        strategy = self._strategy
        view, rank, *_ = ticket.admission
        limit = strategy.options.limit
        with deadline("join the job"):
            if dist.is_initialized():
                dist.destroy_process_group()
            store = store or store_at(ticket.admission.store, limit)
            here = _wait_for_newcomers(dist.PrefixStore(f"view-{view}", store), ticket, limit)
            if rank >= here:
                raise CommunicationError("this process was too late: the job has gone on without it.")
            begin_world(store, view, rank, here, limit)
        ticket = ticket._replace(admission=ticket.admission._replace(world=here))
        strategy.renumber(rank, here)
        ticket.files.share(rank, ticket.admission.before, here)
        strategy.ticket = ticket

    def resume(self) -> None:
        """Let the Trainer go on from the checkpoint with which this rank has entered, if it has."""
        strategy = self._strategy
        if strategy.ticket is not None:
            strategy.checkpoint_io = strategy.ticket.files
            lightning_compat.resume_by(strategy.trainer, lambda *_: PATH)

    def share_rest(self) -> None:
        """Give all ranks rank 0's values of what the checkpoint lacks, where this rank has entered (collective)."""
        strategy = self._strategy
        if strategy.ticket is None:
            return
        self._changed = value_of_rank(self._changed, 0)
        loaded, module = strategy.ticket.files.loaded, strategy.module
        lacks = [v for name, v in (*module.named_parameters(), *module.named_buffers()) if name not in loaded]
        if any(map(is_dtensor, lacks)):
            strategy.share_shards()
        broadcast_tensors(value.data for value in lacks if not is_dtensor(value))

    def entered(self) -> MembershipChange | None:
        """Training begins: from now on files are files again; returns the change, if this rank has entered."""
        strategy = self._strategy
        ticket = strategy.ticket
        if ticket is None:
            return None
        strategy.checkpoint_io, strategy.ticket = ticket.files.usual, None
        ticket.files.clear()
        vars(strategy.trainer).update(self._changed)  # callbacks that have set them may not do so again in mid-epoch
        view, seconds = strategy.job.view, time.monotonic() - ticket.since
        joined, lost = tuple(range(ticket.admission.before, view.world)), dict(ticket.lost)
        if not joined and not lost:
            return None
        return MembershipChange(
            view.number, lost, view.world, len(view.units), seconds, 0, strategy.trainer.global_step, joined
        )

    # -- ranks that take part, and take others in --------------------------------------------------

    def begin(self) -> None:
        """Let others find this job (collective).

        Raises:
            HeteroError: on every rank, if the address cannot be written.
        """
        self._between = False
        problem, ticket = None, self._strategy.ticket
        self._came_later |= ticket is not None and ticket.replica is None
        try:
            self.open()
        except HeteroError as error:
            problem = error
        raise_on_all(problem, "a fit that other processes may join")

    def continue_after_loss(self) -> None:
        """Others were lost: this may be the first rank now."""
        try:
            self.open()
        except HeteroError as error:
            warnings.warn(f"Nobody can join this fit any more: {error}", stacklevel=2)

    def open(self) -> None:
        """Take requests, if this is the first rank.

        Raises:
            ConfigurationError: the address cannot be written to a file.
            CommunicationError: nor to the launcher's store.
            JoinRefusedError: another job has begun under the same file.
        """
        strategy = self._strategy
        self._first_store = self._first_store or default_store()
        if strategy.job.view.rank != 0:
            return
        view, sources = strategy.job.view, strategy.accounting.loaders.sources()
        self._unjoinable = unjoinable(view, strategy.options, sources, strategy.module)
        self._sharded_size = len(view.replica.ranks) if is_sharded(strategy.module) else 0
        if self._requests is None:
            self._requests = JoinRequests(strategy.interface, self._refused, strategy.options.limit.total_seconds())
            self._claim()
        self._requests.whole_nodes = self._sharded_size > 1
        self._written = self._written or self.addresses()
        for place in self._written:
            place.write(self._requests.address)

    def _refused(self, other: Mapping[str, Any]) -> str | None:
        """The reason why a process with these terms cannot take part; ``None`` if it can."""
        return (
            self._unjoinable or incompatibility(self.compatibility(), other) or self._other_size(Seat(*other["seat"]))
        )

    def _other_size(self, seat: Seat) -> str | None:
        """The reason why the ranks of a node do not make replicas of the size of those of a sharded job, if so."""
        strategy, size = self._strategy, self._sharded_size
        if not size:
            return None
        try:
            nodes = consecutive(seat.ranks, strategy.options.ranks_per_node or seat.ranks)
            places = (Place("", 0, 0, ""),) * seat.ranks
            if {len(ranks) for ranks in strategy.replicas(Topology(0, places, nodes))} == {size}:
                return None
        except ConfigurationError:
            pass
        return (
            f"the model is sharded, and each replica of the job has {size} rank(s); {seat.ranks} rank(s) of one node "
            f"do not make such replicas. Start {size} on the node (devices={size})."
        )

    def _claim(self) -> None:
        """See that no other job has begun under the same file at the same time."""
        file = self._strategy.options.join_file
        follows = (
            self._strategy.recovery.view_number or self._strategy.ticket is not None
        )  # what stands there is this job's
        there = None if file is None or follows else AddressFile(file).read()
        if there is not None and job_answers(there):
            raise JoinRefusedError(
                f"another job has written join_file={file!r} in the meantime, and runs at {there[0]}:{there[1]}. "
                "Start this process again to join it, or give this job another file."
            )

    def note_sigterm(self) -> bool:
        """SIGTERM has come; returns whether the fit that is about to begin again will stop for it."""
        self.terminated |= self._between
        return self._between

    @property
    def wanted(self) -> bool:
        """Whether there are newcomers that the job can take in; on the first rank, in any thread."""
        requests = self._requests  # which another thread may close meanwhile
        return requests is not None and self._most(requests.waiting) > 0

    def _most(self, waiting: int) -> int:
        """The number of waiting processes that fit in the job: options may allow some numbers of ranks only."""
        world = self._strategy.job.view.world
        return max((more for more in range(waiting + 1) if fits(self._strategy.options, world + more)), default=0)

    def admit(self) -> None:
        """Begin the fit again with the newcomers, if there are any still (collective).

        Raises:
            BeginAgainError: there are.
        """
        began, strategy, requests = time.monotonic(), self._strategy, self._requests
        view, trainer, limit = strategy.job.view, strategy.trainer, strategy.options.limit
        newcomers = [] if requests is None else requests.invite(self._most(requests.waiting))
        store, address = open_store(strategy.interface, limit) if newcomers else (None, ("", 0))
        more, address = value_of_rank((len(newcomers), address), 0)
        if not more:
            return
        world = view.world + more
        rank_zero_info(f"{more} rank(s) join after step {trainer.global_step}: the fit goes on with {world} ranks.")
        sources = view.ranks[0] if is_sharded(strategy.module) else (0,)
        kept = saving.kept_by_each(strategy.precision_plugin)
        files = MemoryCheckpointIO(PATH, strategy.checkpoint_io, kept, sources)
        strategy.checkpoint_io = files
        admission = Admission(view.number + 1, view.rank, world, view.world, address)
        self._leaving = JoinTicket(admission, files, view.replica.id, began, entry=view.entries[view.rank])
        try:
            trainer.save_checkpoint(PATH)
        finally:
            strategy.checkpoint_io = files.usual
        strategy.recovery.retry(strategy.accounting.apply_reports)  # leave nothing in flight
        if any(gather(strategy.job.view is not view, "who was lost")):  # others come next time
            self._leaving = None
            files.clear()
            if requests is not None:
                requests.put_off(newcomers)
            return
        if requests is not None:
            requests.admit(newcomers, view.number + 1, view.world, address)
        raise BeginAgainError(self._leaving, store)

    def again(self, agreed: NextView, store: dist.Store | None) -> BeginAgainError:
        """The error with which this rank begins again: some of those that remain have left the fit already.

        Args:
            agreed: who they are.
            store: with which they meet, if this rank hosts it.

        Raises:
            UnsupportedError: this rank was not about to begin again.
        """
        if self._leaving is None:
            raise UnsupportedError("other ranks have left the fit to begin it again, but this rank was not asked to.")
        view = self._strategy.job.view
        return among(self._leaving, agreed, view.ids[view.rank], store)

    def end(self, over: bool = True) -> None:
        """Let nobody in any more on this rank. Local, idempotent.

        Args:
            over: the job has come to its end; else it goes on without this rank, and with another first one.
        """
        if self._requests is not None:
            for place in self._written if over else ():  # else the next first rank writes its own address there
                place.remove(self._requests.address)
            self._requests.close(over)
            self._requests = None

    # -- begin again -------------------------------------------------------------------------------

    def until_done(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the Trainer, and begin a fit again where ranks join it."""
        strategy, again, asked = self._strategy, None, 0
        self.terminated = False
        with sigterm_recorded(self.note_sigterm):
            while True:
                try:
                    if again is not None:
                        strategy.ticket = again.ticket
                        self.enter(again.ticket, again.store)
                    return function(*args, **kwargs)
                except BeginAgainError as grows:
                    again = grows
                except Exception as error:
                    if asked < MOST and self._may_ask_again(error):
                        self._leave_fit()
                        self._between = False  # it has yet to ask the job again, and SIGTERM ends it
                        if self.terminated:
                            raise SIGTERMException(TERMINATED) from error
                        again, asked = BeginAgainError(self._ask_again(error), None), asked + 1
                        continue
                    if again is None or (again := self._without_newcomers(again, error)) is None:
                        raise
                self._leave_fit()

    def _without_newcomers(self, former: BeginAgainError, error: Exception) -> BeginAgainError | None:
        """The error with which those that remain begin again without newcomers; ``None``: there is another reason."""
        strategy = self._strategy
        ticket = strategy.ticket
        if (
            ticket is None
            or ticket.replica is None
            or not (isinstance(error, HeteroError) or is_communication_error(error))
        ):
            return None  # training has begun, or this is a newcomer
        view, rank, world, before, address = ticket.admission
        if (remaining := strategy.recovery.remaining()) is None:  # one rank, with newcomers
            alone = Admission(view + 1, rank, before, before, address)
            again = BeginAgainError(ticket._replace(admission=alone), former.store)
        else:
            if world == before and not remaining[0].lost:
                return None
            again = among(ticket, *remaining)
        if again.ticket.admission.rank == 0 and world > before:
            left_out = f"{world - before} rank(s) could not join, and the fit goes on without: {error}"
            warnings.warn(left_out, stacklevel=2)
        return again

    def _may_ask_again(self, error: Exception) -> bool:
        """Whether this process is new, and others are why it could not join."""
        ticket = self._strategy.ticket
        return ticket is not None and ticket.replica is None and wrong_are_others(ticket, error)

    def _leave_fit(self) -> None:
        """End what belongs to the fit so far, on this rank."""
        strategy = self._strategy
        trainer, request = strategy.trainer, strategy.stop_request
        self._between = True
        strategy.recovery.pause()
        module, stage = trainer.lightning_module, TrainerFn.FITTING
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.teardown(trainer, module, stage)
        for user in (trainer.datamodule, module):  # type: ignore[attr-defined]
            if user is not None:
                user.teardown(stage)
        lightning_compat.tear_down(trainer)
        own = vars(trainer)
        self._changed = {name: own[name] for name in self._settings if name in own}
        own |= {name: self._settings[name] for name in self._changed}
        self.terminated |= request is not None and request.requested  # after all had asked each other
        for name in strategy.of_the_job:
            vars(strategy).pop(name, None)


def among(ticket: JoinTicket, agreed: NextView, me: int, store: dist.Store | None) -> BeginAgainError:
    """The error with which a rank begins again with those that remain, without newcomers.

    Args:
        ticket: how it was to begin with others.
        agreed: who remain.
        me: id of this rank.
        store: with which they meet, if this rank hosts it.
    """
    rank, world = agreed.members.index(me), len(agreed.members)
    view = max(agreed.roster.number, ticket.admission.view + 1)
    admission = Admission(view, rank, world, world, agreed.offer)
    return BeginAgainError(ticket._replace(admission=admission, lost={**ticket.lost, **agreed.lost}), store)
