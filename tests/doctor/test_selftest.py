"""``lightning-hetero doctor --selftest``: rows on CPUs, and of GPUs that are unlike, full or sliced."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero import selftest
from lightning_hetero.selftest import Devices, Row

CPUS = Devices("cpu", 0, 2)


@pytest.mark.long
def test_the_command_prints_a_table_of_verdicts() -> None:
    command = [sys.executable, "-m", "lightning_hetero", "doctor", "--selftest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for check in (
        "versions",
        "route of gradients",
        "against one process, float64",
        "step time of hetero_ddp",
        "stopwatch",
        "rank 1: error",
        "rank 1: kill",
        "rank 1: freeze",
    ):
        assert check in done.stdout
    assert "FAILED" not in done.stdout
    assert "a deliberate error of the self-test" in " ".join(done.stdout.split())


def test_averages_are_exact() -> None:
    route, bitwise, error = selftest._exactness(CPUS)
    assert [row.verdict for row in (route, bitwise, error)] == ["ok"] * 3
    assert "shared memory" in route.found


def test_a_wrong_average_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a rank with other weights, and a process with another result."""
    usual = selftest.run

    def wrong_result(part: str, here: Devices, world: int, *args: str) -> Any:
        outcomes = usual(part, here, world, *args)
        outcomes[-1].report["weights"][0] += 1e-3
        return outcomes

    monkeypatch.setattr(selftest, "run", wrong_result)
    assert [row.verdict for row in selftest._exactness(CPUS)] == ["ok", "FAILED", "FAILED"]


def test_a_stopwatch_that_counts_others_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [selftest.RankOutcome([{"work": 0.06}], 0, "", 1.0)] * 2
    monkeypatch.setattr(selftest, "run", lambda *_: outcomes)
    [row] = selftest._stopwatch(CPUS)
    assert row.verdict == "FAILED"


def test_a_rank_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", lambda *_: [selftest.RankOutcome([], 1, "out of memory", 2.0)])
    [row] = selftest._stopwatch(CPUS)
    assert row == Row("stopwatch", "FAILED", "rank 0 ended with status 1: out of memory")


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("Traceback\n  File\nValueError: no such thing\n", "no such thing"),
        ("[rank1]: lightning_hetero.errors.CommunicationError: rank 0 failed\nmore", "rank 0 failed"),
        ("killed", "killed"),
        ("", "it said nothing"),
    ],
)
def test_the_error_of_a_rank_is_its_last_one(output: str, error: str) -> None:
    assert selftest.RankOutcome([], 1, output, 2.0).error == error


def gpus(monkeypatch: pytest.MonkeyPatch, names: list[str], used: list[float], cards: list[str]) -> list[Row]:
    """Rows about GPUs that this machine does not have."""
    properties = [SimpleNamespace(name=name, uuid=card) for name, card in zip(names, cards, strict=True)]

    def memory(number: int) -> tuple[int, int]:
        if used[number] > 1:
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        return round((1 - used[number]) * 2**30), 2**30

    for name, value in {
        "device_count": lambda: len(names),
        "get_device_properties": properties.__getitem__,
        "get_device_name": names.__getitem__,
        "mem_get_info": memory,
        "can_device_access_peer": lambda one, other: cards[one][0] == cards[other][0],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 1))
    return list(selftest._machine(selftest.devices()))


def test_without_a_gpu_rows_say_so() -> None:
    _, devices = selftest._machine(CPUS)
    assert devices.found.startswith("no GPU; ")
    assert devices.found.endswith(" cores. Checks run on 2 CPU ranks")
    assert [row.verdict for row in selftest._waits_and_memory(CPUS)] == ["not here"] * 2


@pytest.mark.parametrize(
    ("visible", "seen", "driver", "words"),
    [
        ("MIG-1,MIG-1", 0, True, "CUDA_VISIBLE_DEVICES names 2, and PyTorch sees 0: name none twice"),
        ("MIG-1,MIG-2", 1, True, "CUDA_VISIBLE_DEVICES names 2, and PyTorch sees 1"),
        ("0,1", 2, True, ""),
        ("", 0, True, ""),  # as the user wants it
        ("-1", 0, True, ""),
        (None, 0, True, "this machine has NVIDIA's driver, but PyTorch"),
        (None, 0, False, ""),
        (None, 1, True, ""),
    ],
)
def test_devices_that_are_not_seen_are_told(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: int, driver: bool, words: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(selftest, "DRIVER", os.devnull if driver else "/nowhere")
    rows = gpus(monkeypatch, ["A100"] * seen, [0.1] * seen, ["a", "b"][:seen])
    assert [row.found.startswith(words) for row in rows if row.verdict == "warning"] == [True] * bool(words)


def test_a_rank_that_is_named_late_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no fault of the package; an error that names nobody is."""

    def found(error: str, seconds: float) -> list[str]:
        ranks = [selftest.RankOutcome([], 1, f"RuntimeError: {error}\n", seconds)] * 2
        monkeypatch.setattr(selftest, "run", lambda *_: ranks)
        return [row.verdict for row in selftest._failures(CPUS)]

    assert found("rank 1 has ended", 2.0) == ["ok"] * 3
    assert found("rank 1 has ended", 60.0) == ["warning"] * 3
    assert found("somebody has ended", 2.0) == ["FAILED"] * 3


def test_only_synchronising_operations_count_as_waits() -> None:
    said = ["called a synchronizing CUDA operation (Triggered internally at ...)", "a step is slow", "called a sync"]
    count = selftest._CountOnDevice([SimpleNamespace(message=UserWarning(text)) for text in said])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("memory_allocated", "reset_peak_memory_stats"):
            patch.setattr(torch.cuda, name, lambda: 0)
        count.on_train_batch_start(SimpleNamespace(strategy=None))
    assert count.waits == [1]


@pytest.mark.parametrize(("waits", "exchanges", "verdict"), [(10, 0, "warning"), (10, 9, "ok"), (20, 10, "warning")])
def test_a_wait_in_every_other_step_is_told(
    monkeypatch: pytest.MonkeyPatch, waits: int, exchanges: int, verdict: str
) -> None:
    report = {"name": "", "waits": waits, "exchanges": exchanges, "steps": 19, "held": 0.0, "most": 0.0}
    ranks = [[selftest.RankOutcome([{**report, "name": entry.name}], 0, "", 1.0)] * 2 for entry in selftest.ENTRIES]
    monkeypatch.setattr(selftest, "run", lambda *_: ranks.pop(0))
    for row in selftest._waits_and_memory(Devices("cuda", 1, 2)):
        assert row.verdict == verdict
        assert row.found.startswith(f"{waits} waits in 19 steps with {exchanges} exchanges")


def test_a_full_gpu_is_a_row_of_each_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lost = "Traceback (most recent call last):\n  File ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried ...\n"
    monkeypatch.setattr(selftest, "run", lambda *given: [selftest.RankOutcome([], 1, lost, 2.0)] * given[2])
    rows = [row for check in selftest.CHECKS[1:] for row in check(Devices("cuda", 1, 2))]
    assert {row.verdict for row in rows} == {"FAILED"}
    assert len(rows) == 3 + len(selftest.ENTRIES) + 3
    assert all("CUDA out of memory" in row.found for row in rows)
    assert not capsys.readouterr().err


def test_one_gpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gpus(monkeypatch, ["A100"], [0.1], ["a"])
    assert [row.verdict for row in rows] == ["ok"] * 3
    assert rows[-1].found == "2 ranks share 1 device(s), and average over gloo"
    assert selftest.devices() == Devices("cuda", 1, 2)


def test_unlike_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gpus(monkeypatch, ["A100", "T4"], [0.1, 0.1], ["a", "b"])
    assert rows[-1].found == "unlike: A100, T4. Shares follow their speed"
    assert rows[-2] == Row("topology", "ok", "of 1 pairs of devices, 0 reach each other's memory directly")


def test_slices_and_full_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["H100 MIG 1g.10gb", "H100 MIG 1g.10gb", "A100", "A100"]
    rows = {row.check: row for row in gpus(monkeypatch, names, [0.1, 0.1, 0.9, 2.0], ["a", "a", "b", "c"])}
    assert "a MIG slice" in rows["device 0"].found
    assert "a MIG slice" in rows["device 1"].found
    assert rows["device 2"].verdict == "warning"
    assert "90% in use: other processes use it" in rows["device 2"].found
    assert rows["device 3"] == Row("device 3", "FAILED", "A100: CUDA error: out of memory")


def outcome(strategies: list[str], status: int = 0) -> selftest.RankOutcome:
    reports = [{"name": name, "waits": 0, "exchanges": 0, "steps": 19, "held": 0.0, "most": 0.0} for name in strategies]
    return selftest.RankOutcome(reports, status, "RuntimeError: it broke\n", 1.0)


@pytest.mark.parametrize("reported", [0, 3, len(selftest.ENTRIES) - 1, len(selftest.ENTRIES)])
def test_a_strategy_that_breaks_on_any_rank_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, reported: int
) -> None:
    """Rank 1 fails once, perhaps at the very end; rank 0 may have gone further."""
    names, calls = [entry.name for entry in selftest.ENTRIES], list[tuple[str, ...]]()

    def run(part: str, here: Devices, world: int, *given: str) -> list[selftest.RankOutcome]:
        calls.append(given)
        if len(calls) > 1:
            return [outcome(list(given))] * 2
        return [outcome(names[: reported + 1]), outcome(names[:reported], status=1)]

    monkeypatch.setattr(selftest, "run", run)
    rows = list(selftest._waits_and_memory(Devices("cuda", 1, 2)))
    failed = [row.check for row in rows if row.verdict == "FAILED"]
    assert failed == [names[reported] if reported < len(names) else "the end of the fits"]
    assert [row.check for row in rows if row.verdict == "ok"] == [name for name in names if name not in failed]
    assert len(calls) == (2 if reported < len(names) - 1 else 1)


def test_the_part_that_counts_on_a_gpu_runs() -> None:
    code = """
import torch, warnings
from lightning_hetero import selftest
for name in ("set_sync_debug_mode", "empty_cache", "reset_peak_memory_stats"):
    setattr(torch.cuda, name, lambda *_: None)
torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = lambda: 0
warnings.simplefilter("ignore")

class Careless(selftest._Module):  # it waits in every other step
    def __init__(self, **given):
        super().__init__(lambda step: step % 2 and warnings.warn(f"a synchronizing CUDA operation {step}"), **given)

selftest._on_device("cpu", "hetero_ddp", "hetero_daso")
selftest._Module = Careless
selftest._on_device("cpu", "hetero_ddp")
"""
    env = {**os.environ, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "selftest"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    found = [json.loads(line[len(selftest.MARK) :]) for line in done.stdout.splitlines() if selftest.MARK in line]
    assert [report["name"] for report in found] == ["hetero_ddp", "hetero_daso", "hetero_ddp"], done.stderr
    assert [report["waits"] for report in found] == [0, 0, 9]
    assert [report["steps"] for report in found] == [19] * 3
