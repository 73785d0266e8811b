"""What launchers say about a process, and what is said when they do not."""

import pickle

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_hetero.errors import HeteroError, LaunchError
from lightning_hetero.launch.environment import RaggedEnvironment, check_variables, hostname, local_devices

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
    """Sets exactly these launcher variables; ``None`` for none."""

    def set_to(values):
        for name in {*TORCHRUN, *BY_HAND}:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_to


# -- torchrun ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda inner: inner, RaggedEnvironment])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_torchrun_sets_is_enough(variables, wrap, num_nodes):
    variables(TORCHRUN)
    check_variables(wrap(TorchElasticEnvironment()), num_nodes)


@pytest.mark.parametrize("wrap", [lambda inner: inner, RaggedEnvironment])
@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_each_variable_of_torchrun_is_missed_by_name(variables, wrap, name, value):
    variables({**TORCHRUN, name: value})
    with pytest.raises(LaunchError, match=rf"missing launcher variables: {name} \(torchrun") as caught:
        check_variables(wrap(TorchElasticEnvironment()), 1)
    assert isinstance(caught.value, HeteroError)


@pytest.mark.parametrize("value", ["two", "-1", "1.5", " "])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_each_number_of_torchrun_must_be_one(variables, name, value):
    variables({**TORCHRUN, name: value})
    with pytest.raises(LaunchError, match=f"{name}='{value}'"):
        check_variables(TorchElasticEnvironment(), 1)


def test_all_that_is_missing_is_named_at_once(variables):
    variables({"LOCAL_RANK": "0"})
    with pytest.raises(LaunchError) as caught:
        check_variables(TorchElasticEnvironment(), 1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert name in str(caught.value)
    assert "LOCAL_RANK" not in str(caught.value)


@pytest.mark.parametrize("rank", ["3", "4"])
def test_a_rank_must_be_below_the_world_size(variables, rank):
    variables({**TORCHRUN, "RANK": rank})
    with pytest.raises(LaunchError, match=f"RANK={rank} is not below WORLD_SIZE=3"):
        check_variables(TorchElasticEnvironment(), 1)


# -- nodes started by hand -------------------------------------------------------------------------------


def test_one_node_needs_nothing(variables):
    variables({})
    check_variables(LightningEnvironment(), 1)
    check_variables(RaggedEnvironment(LightningEnvironment()), 1)


def test_several_nodes_started_by_hand_need_a_rank_and_where_to_meet(variables):
    variables(BY_HAND)
    check_variables(RaggedEnvironment(LightningEnvironment()), 2)
    variables({**BY_HAND, "NODE_RANK": None, "GROUP_RANK": "1"})
    check_variables(LightningEnvironment(), 2)


@pytest.mark.parametrize("wrap", [lambda inner: inner, RaggedEnvironment])
@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("MASTER_ADDR", ["MASTER_ADDR", "127.0.0.1", "num_nodes=2", "torchrun"]),
        (
            "MASTER_PORT",
            ["MASTER_PORT", "num_nodes=2", "torchrun"],
        ),  # or each would look for a free one
        ("NODE_RANK", ["num_nodes=2", "NODE_RANK"]),
    ],
)
def test_each_variable_that_nodes_started_by_hand_need_is_missed_by_name(variables, wrap, missing, words):
    variables({**BY_HAND, missing: None})
    with pytest.raises(LaunchError) as caught:
        check_variables(wrap(LightningEnvironment()), 2)
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Told(LightningEnvironment):
    """An environment of a launcher's own that extends Lightning's, as that of Ray does."""

    def global_rank(self):
        return 2


@pytest.mark.parametrize("wrap", [lambda inner: inner, RaggedEnvironment])
def test_an_environment_that_knows_its_rank_may_have_variables_of_torchrun(variables, wrap):
    variables({**TORCHRUN, "TORCHELASTIC_RUN_ID": None})
    check_variables(wrap(Told()), 2)
    with pytest.raises(LaunchError, match="the launcher is not known"):
        check_variables(wrap(LightningEnvironment()), 2)


def test_other_launchers_are_left_to_themselves(variables):
    variables({})
    check_variables(SLURMEnvironment(auto_requeue=False), 2)


# -- devices -----------------------------------------------------------------------------------------


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


# -- nodes that are not alike ------------------------------------------------------------------------------


def test_what_the_inner_environment_says_is_taken(variables):
    variables(TORCHRUN)
    inner = TorchElasticEnvironment()
    ragged = RaggedEnvironment(inner)
    assert ragged.world_size() == 3
    assert ragged.global_rank() == 2
    assert ragged.local_rank() == 0
    assert ragged.node_rank() == 1
    assert ragged.main_address == "10.0.0.1"
    assert ragged.main_port == 29500
    assert ragged.creates_processes_externally


def test_what_the_environment_is_told_reaches_the_inner_one(variables, monkeypatch):
    variables({})
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # put back afterwards what Lightning sets for all
    inner = LightningEnvironment()
    ragged = RaggedEnvironment(inner)
    assert not ragged.creates_processes_externally
    ragged.set_world_size(5)
    ragged.set_global_rank(4)
    assert (inner.world_size(), inner.global_rank()) == (5, 4)
    assert (ragged.world_size(), ragged.global_rank()) == (5, 4)


def test_the_end_reaches_the_inner_environment(variables, monkeypatch):
    variables({"WORLD_SIZE": "3"})
    torn = []
    inner = LightningEnvironment()
    monkeypatch.setattr(inner, "teardown", lambda: torn.append(True))
    RaggedEnvironment(inner).teardown()
    assert torn == [True]


def test_nodes_may_have_different_numbers_of_ranks(variables):
    variables(TORCHRUN)  # three ranks: two on the first node, one here
    with pytest.raises(ValueError, match="does not match the world size"):
        TorchElasticEnvironment().validate_settings(num_devices=1, num_nodes=2)  # Lightning alone refuses
    RaggedEnvironment(TorchElasticEnvironment()).validate_settings(num_devices=1, num_nodes=2)


def test_other_attributes_are_the_inner_environments():
    inner = SLURMEnvironment(auto_requeue=False)
    ragged = RaggedEnvironment(inner)
    assert ragged.auto_requeue is False
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = ragged.no_such_thing


def test_it_is_never_chosen_by_detection(variables):
    variables(TORCHRUN)
    assert not RaggedEnvironment.detect()


def test_it_can_be_sent_to_a_spawned_process(variables):
    variables({})
    inner = LightningEnvironment()
    inner.set_world_size(4)
    copied = pickle.loads(pickle.dumps(RaggedEnvironment(inner)))
    assert copied.world_size() == 4


def test_a_machine_has_a_name():
    assert hostname()
