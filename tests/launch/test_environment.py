"""Launcher variables of a process, and the errors if they are missing or wrong."""

import pickle

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_hetero.errors import LaunchError
from lightning_hetero.launch.environment import RenumberedEnvironment, check_variables, local_devices
from lightning_hetero.launch.observer import ObservedLauncher

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
BY_HAND = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def variables(monkeypatch):
    """Function that sets exactly these launcher variables; ``None`` removes one."""

    def set_to(values):
        for name in {*TORCHRUN, *BY_HAND}:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_to


class Told(LightningEnvironment):
    """A launcher's own environment that extends Lightning's, as that of Ray does."""

    def global_rank(self):
        return 2


OF_A_LAUNCHER = {**TORCHRUN, "TORCHELASTIC_RUN_ID": None}
ENOUGH = [
    (TorchElasticEnvironment, 1, TORCHRUN),
    (TorchElasticEnvironment, 2, TORCHRUN),
    (LightningEnvironment, 1, {}),
    (LightningEnvironment, 2, BY_HAND),
    (LightningEnvironment, 2, {**BY_HAND, "NODE_RANK": None, "GROUP_RANK": "1"}),
    (Told, 2, OF_A_LAUNCHER),
    (lambda: SLURMEnvironment(auto_requeue=False), 2, {}),  # variables of other launchers are not checked
]
ALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WRONG = [
    *(
        (TorchElasticEnvironment, 1, {**TORCHRUN, name: value}, [f"missing launcher variables: {name} (torchrun"])
        for name in ALL
        for value in (None, "")
    ),
    (TorchElasticEnvironment, 1, {"LOCAL_RANK": "0"}, ["RANK, WORLD_SIZE, MASTER_PORT, MASTER_ADDR"]),
    *(
        (TorchElasticEnvironment, 1, {**TORCHRUN, name: value}, [f"{name}='{value}'"])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        for value in ("two", "-1", "1.5", " ")
    ),
    *(
        (TorchElasticEnvironment, 1, {**TORCHRUN, "RANK": rank}, [f"RANK={rank} is not below WORLD_SIZE=3"])
        for rank in ("3", "4")
    ),
    (
        LightningEnvironment,
        2,
        {**BY_HAND, "MASTER_ADDR": None},
        ["MASTER_ADDR", "127.0.0.1", "num_nodes=2", "torchrun"],
    ),
    # Without a port each node would look for a free one.
    (LightningEnvironment, 2, {**BY_HAND, "MASTER_PORT": None}, ["MASTER_PORT", "num_nodes=2", "torchrun"]),
    (LightningEnvironment, 2, {**BY_HAND, "NODE_RANK": None}, ["num_nodes=2", "NODE_RANK"]),
    (LightningEnvironment, 2, OF_A_LAUNCHER, ["the launcher is not known"]),
]


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: RenumberedEnvironment(inner, 1, 2)])
@pytest.mark.parametrize(("environment", "nodes", "values"), ENOUGH)
def test_what_launchers_set_is_enough(variables, wrap, environment, nodes, values):
    variables(values)
    check_variables(wrap(environment()), nodes)


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: RenumberedEnvironment(inner, 1, 2)])
@pytest.mark.parametrize(("environment", "nodes", "values", "words"), WRONG)
def test_what_is_missing_or_wrong_is_named(variables, wrap, environment, nodes, values, words):
    variables(values)
    with pytest.raises(LaunchError) as caught:
        check_variables(wrap(environment()), nodes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Launched(LightningEnvironment):
    """Processes that something else has started."""

    def __init__(self, local_rank, externally=True):
        super().__init__()
        self._local_rank, self._externally = local_rank, externally

    @property
    def creates_processes_externally(self):
        return self._externally

    def local_rank(self):
        return self._local_rank


CPUS = [torch.device("cpu")]
GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("environment", "local_world", "devices", "expected"),
    [
        (Launched(0, externally=False), "7", GPUS, GPUS),  # Lightning starts one rank per device
        (Launched(0), "2", GPUS, GPUS),
        (Launched(1), "3", CPUS, CPUS * 3),  # torchrun --nproc-per-node 3 with devices=1
        (Launched(1), None, CPUS, CPUS * 2),  # a launcher that does not say how many: at least those up to this rank
        (Launched(0), None, GPUS, GPUS),
        (Launched(0), "1", GPUS, GPUS),  # never fewer than Lightning found
        (Launched(2), "3", GPUS, [GPUS[0], GPUS[1], GPUS[0]]),  # they share the cards in turn
    ],
)
def test_as_many_devices_as_ranks_were_started_here(variables, environment, local_world, devices, expected):
    variables({"LOCAL_WORLD_SIZE": local_world})
    assert local_devices(environment, list(devices)) == expected


def test_a_rank_with_another_number_keeps_it_also_in_a_spawned_process(variables, monkeypatch):
    variables({})
    inner = LightningEnvironment()
    other = RenumberedEnvironment(inner, 4, 5)
    other.set_world_size(8)
    other.set_global_rank(7)
    for one in (other, pickle.loads(pickle.dumps(other))):
        assert (one.world_size(), one.global_rank(), one.creates_processes_externally) == (5, 4, False)
    assert (inner.world_size(), inner.global_rank()) == (1, 0)
    torn = []
    monkeypatch.setattr(inner, "teardown", lambda: torn.append(True))
    other.teardown()
    assert torn == [True]


def test_nodes_may_have_different_numbers_of_ranks(variables):
    variables({**TORCHRUN, "OMP_NUM_THREADS": "1"})  # three ranks: two on the first node, one here
    environment = TorchElasticEnvironment()
    with pytest.raises(ValueError, match="does not match the world size"):
        environment.validate_settings(num_devices=1, num_nodes=2)  # Lightning alone refuses
    launcher = ObservedLauncher(cluster_environment=environment, num_processes=1, num_nodes=2)
    assert launcher.launch(lambda: "launched") == "launched"


def test_other_attributes_are_the_inner_environments():
    inner = SLURMEnvironment(auto_requeue=False)
    other = RenumberedEnvironment(inner, 1, 2)
    assert other.auto_requeue is False
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = other.no_such_thing
