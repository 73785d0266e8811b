"""Jobs in which one rank has a device and another computes on its CPU: every strategy, from the fit to the test.

Gloo refuses the device's tensors, and a process without the device cannot unpickle them.
"""

from pathlib import Path
from typing import Any

import pytest
from mixed_tasks import Row, devices_in, life, same
from ranks import run

from lightning_hetero.strategies.table import ENTRIES

PULL = {"moving_rate": 0.2, "beta": 0.7, "tau": 4}
DASO = {"warmup": 2, "cooldown": 2, "global_every": 4, "wait": 3, "patience": 99}
SLOW = {"deadline": 15}
ROWS = [
    Row("hetero_ddp"),
    Row("hetero_daso", DASO),
    Row("hetero_easgd_async", PULL, limit=None),
    Row("hetero_gossip_async", {"every_n_steps": 2, **SLOW}, limit=None),
    Row("hetero_node", {"every_n_steps": 3}),
    Row("hetero_easgd", PULL),
    Row("hetero_easgd_overlap", PULL),
    Row("hetero_easgd_round_robin", PULL),
    Row("hetero_easgd_hogwild", PULL, limit=None),
    Row("hetero_measgd_async", PULL, limit=None, momentum="plain"),
    Row("hetero_eamsgd", PULL, momentum="nesterov"),
    Row("hetero_gossip", {"every_n_steps": 2, "overlap": False, **SLOW}),
    Row("hetero_gossip_push_sum", {"every_n_steps": 2, **SLOW}),
    Row("hetero_diloco", {"tau": 4}),
    Row("hetero_diloco_async", {"tau": 2}, limit=None),
    Row("hetero_noloco", {"tau": 4, **SLOW}),
    Row("hetero_auto", {"measure": 4, "gain": 1e6}),
]
FURTHER = [
    Row("hetero_ddp", gloo="stage"),
    Row("hetero_ddp", {"wire": "bf16"}),
    Row("hetero_ddp", {"wire": "int8"}, limit=1e-6),
    Row("hetero_ddp", {"wire": "powersgd:2"}, limit=1e-6),
    Row("hetero_node", {"every_n_steps": 3}, nodes=(2, 1)),
    Row("hetero_node", {"every_n_steps": 3, "average_optimizer_state": True}),
    Row("hetero_node", {"every_n_steps": 3, "wire": "int4"}),
    Row("hetero_daso", DASO, nodes=(2, 1)),
    Row("hetero_easgd_async", {**PULL, "replica": "node"}, limit=None, nodes=(2, 1)),
    Row("hetero_gossip_async", {"every_n_steps": 2, "replica": "node", **SLOW}, limit=None, nodes=(2, 1)),
    Row("hetero_diloco", {"tau": 4, "fragments": 2, "delay": 2, "blend": 0.5}),
]


def name(row: Row) -> str:
    return "-".join([row.name, *(f"{value}" for key, value in row.options.items() if key in ("wire", "fragments"))])


def check(results: list[dict[str, Any]], folder: Path, row: Row) -> None:
    """Ranks agree, each sample is evaluated once, files hold no device, and resumed fits continue the first one."""
    for stage in ("first", "crossed", "returned"):
        own = [result[stage] for result in results]
        alike(own)
        for one in own:
            assert one["validated"] == pytest.approx(one["truth"], rel=1e-9)
            assert one["tested"] == pytest.approx(one["truth"], rel=1e-9)
        if row.limit is not None:
            assert (own[0]["final"] - results[0]["first"]["final"]).abs().max() <= row.limit, stage
    files = [*folder.rglob("*.ckpt"), *folder.rglob("*.pt")]
    assert len(files) == 2 if row.name in ("hetero_ddp", "hetero_auto") else len(files) > 4
    check_no_device(folder)


def alike(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert same(one["final"], results[0]["final"]), "the ranks differ"


def check_no_device(folder: Path) -> None:
    for file in (*folder.rglob("*.ckpt"), *folder.rglob("*.pt")):
        assert devices_in(file) == {"cpu"}, file


@pytest.mark.long(after=4)
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_every_strategy_with_a_device_on_one_rank(device: str, tmp_path: Path, row: Row) -> None:
    results = run(life, 2, row, str(tmp_path), device, nodes=list(row.nodes))
    check(results, tmp_path, row)


@pytest.mark.long
@pytest.mark.parametrize("row", FURTHER, ids=name)
def test_further_options_with_a_device_on_one_rank(device: str, tmp_path: Path, row: Row) -> None:
    env = {"FAKE_GLOO": row.gloo} if row.gloo else {}  # gloo stages CUDA's tensors anyway
    results = run(life, sum(row.nodes), row, str(tmp_path), device, nodes=list(row.nodes), env=env)
    check(results, tmp_path, row)


def test_no_strategy_is_left_out() -> None:
    assert {row.name for row in ROWS} == {entry.name for entry in ENTRIES}
