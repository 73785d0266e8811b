"""``hetero_ddp`` under Fabric: a loop like LitGPT's gives the weights of one process; and the errors."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from ranks import attempt, run
from tasks import dataset, error, rank
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset
from virtual_time import virtual_time

from lightning_hetero import HeteroFabricStrategy
from lightning_hetero.errors import CommunicationError, DataError, UnsupportedError

SAMPLES, BATCH, ACCUMULATED = 101, 12, 2


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_process(epochs: list[int], resumed: int = -1) -> torch.Tensor:
    """Plain PyTorch on the whole batches, in the order that ranks share, without the package.

    Gradients that an epoch leaves are added to the next one's, but not where a program is ``resumed``.
    """
    data, model = dataset(SAMPLES), network()
    optimizer, order = optimizer_of(model), DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    for number, epoch in enumerate(epochs):
        order.set_epoch(epoch)
        if number == resumed:
            optimizer.zero_grad()
        for i, (x, y, *_) in enumerate(DataLoader(data, batch_size=BATCH, sampler=order), start=1):
            (nn.functional.mse_loss(model(x), y) / ACCUMULATED).backward()
            if i % ACCUMULATED == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return values(model)


def program(
    strategy: Any,
    epochs: int,
    path: str = "",
    saves: bool = False,
    workers: int = 0,
    sleep: Callable[[float], None] = lambda seconds: None,
) -> dict[str, Any]:
    """A loop in the manner of LitGPT's: accumulation without synchronisation, clipping, validation, checkpoints."""
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    data = dataset(SAMPLES)
    model = network()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    train, validated = fabric.setup_dataloaders(
        DataLoader(data, batch_size=BATCH // fabric.world_size, shuffle=True, num_workers=workers),
        DataLoader(data, batch_size=7),
    )
    state = {"model": model, "optimizer": optimizer, "iteration": 0}
    if path and not saves:
        fabric.load(path, state)
    seen: list[list[int]] = []
    evaluated: list[int] = []
    for _ in range(epochs):
        for i, (x, y, _, indices) in enumerate(train, start=1):
            state["iteration"] += 1
            if i == 3:  # before the batch is trained on
                with torch.no_grad():
                    next(iter(validated))
            accumulating = i % ACCUMULATED != 0
            sleep((0.01 + 0.004 * len(x)) * (1 + 2 * rank()))
            with fabric.no_backward_sync(model, enabled=accumulating):
                fabric.backward(nn.functional.mse_loss(model(x), y) / ACCUMULATED)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(indices.tolist())
        with torch.no_grad():
            evaluated = [index for batch in validated for index in batch[3].tolist()]
    if saves:
        fabric.save(path, state)
    planner = fabric.strategy.accounting.planner  # type: ignore[attr-defined]
    return {
        "values": values(model),
        "seen": seen,
        "evaluated": evaluated,
        "shares": tuple(planner.shares(fabric.strategy.accounting.step)),  # type: ignore[attr-defined]
        "iteration": state["iteration"],
        "steps": fabric.strategy.accounting.step,  # type: ignore[attr-defined]
    }


def fixed(balance: Any, **options: Any) -> HeteroFabricStrategy:
    return HeteroFabricStrategy(balance=balance, timeout=60, **options)


@pytest.mark.parametrize(
    ("balance", "options"),
    [([3.0, 1.0], {}), ([3.0, 1.0], {"within": "gloo"}), ([1.0, 0.0], {}), ("auto", {})],
    ids=["shares", "over gloo", "padding", "measured"],
)
def test_a_loop_comes_to_what_one_process_comes_to(balance: Any, options: Any) -> None:
    first, second = run(_program, 2, balance, options)
    assert torch.equal(first["values"], second["values"])
    assert error(first["values"], one_process([0, 1])) < 1e-12
    epoch = [i for step in range(9) for found in (first, second) for i in found["seen"][step]]
    if balance != [1.0, 0.0]:  # where a rank repeats a sample, as padding
        assert sorted(epoch) == list(range(SAMPLES))
    assert sorted(first["evaluated"] + second["evaluated"]) == list(range(SAMPLES))
    assert abs(len(first["evaluated"]) - len(second["evaluated"])) <= 1
    assert first["steps"] == second["steps"] == 18
    if balance == [3.0, 1.0]:
        assert [len(found["seen"][0]) for found in (first, second)] == [9, 3]


def test_a_single_rank_is_one_process() -> None:
    [found] = run(_program, 1, "auto", {})
    assert error(found["values"], one_process([0, 1])) < 1e-12
    assert found["evaluated"] == list(range(SAMPLES))


def _fails() -> None:
    def fail(seconds: float) -> None:
        if rank() == 1:
            raise ValueError("of rank 1")

    program(fixed("auto"), 1, sleep=fail)


def test_a_rank_that_fails_ends_the_others() -> None:
    first, second = attempt(_fails, 2, timeout=120)
    assert isinstance(first.error, CommunicationError), first.trace
    assert "rank 1" in str(first.error)
    assert isinstance(second.error, ValueError)


def _program(balance: Any, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return program(fixed(balance, **options), 2, **more)


def test_a_weight_that_is_left_out_would_be_seen() -> None:
    first, _ = run(_unweighted, 2)
    assert error(first["values"], one_process([0, 1])) > 1e-3


def _unweighted() -> dict[str, Any]:
    import lightning_hetero.strategies.fabric as module

    module.gradient_weight = lambda own, total, ranks: 1.0
    return _program([3.0, 1.0], {})


def test_shares_follow_the_speed_with_workers_too() -> None:
    first, second = run(_slow, 2)
    assert torch.equal(first["values"], second["values"])
    assert error(first["values"], one_process(list(range(5)))) < 1e-12
    assert first["shares"] == second["shares"]
    assert first["shares"] == (10, 2)  # 50 ms, and three times 18 ms; 9 and 3 samples would take 66 ms


def _slow() -> dict[str, Any]:
    with virtual_time() as clock:
        return program(fixed("auto"), 5, workers=1, sleep=clock.sleep)


def test_a_saved_program_goes_on(tmp_path: Path) -> None:
    """Fabric's loaders begin again at epoch 0, as under its ddp; weights, momentum and shares go on."""
    path = str(tmp_path / "state.ckpt")
    saved, _ = run(_saves, 2, path)
    first, second = run(_loads, 2, path)
    assert torch.equal(first["values"], second["values"])
    assert error(first["values"], one_process([0, 1, 2, 0], resumed=3)) < 1e-12
    assert first["iteration"] == 4 * 9
    assert [len(found["seen"][0]) for found in (first, second)] == list(saved["shares"])
    assert saved["shares"][0] > saved["shares"][1]
    plain = torch.load(path, weights_only=True)
    assert set(plain) == {"model", "optimizer", "iteration", "lightning_hetero"}


def _saves(path: str) -> dict[str, Any]:
    with virtual_time() as clock:
        return program("hetero_ddp", 3, path, saves=True, sleep=clock.sleep)


def _loads(path: str) -> dict[str, Any]:
    return program("hetero_ddp", 1, path)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))


def _refused(case: str) -> None:
    fabric = Fabric(strategy=fixed("off"), accelerator="cpu", devices=2)
    fabric.launch()
    data, model = dataset(24), fabric.setup(network())
    if case == "a stream":
        fabric.setup_dataloaders(DataLoader(Stream(), batch_size=2))
    elif case == "no samples":
        fabric.setup_dataloaders(DataLoader(dataset(1), batch_size=2))
    elif case == "a sampler of parts":
        sampler = DistributedSampler(data, num_replicas=2, rank=rank())
        fabric.setup_dataloaders(DataLoader(data, batch_size=2, sampler=sampler), use_distributed_sampler=False)
    elif case == "parts":
        own = DataLoader(Subset(data, range(12 * rank(), 12 * rank() + 12)), batch_size=2)
        fabric.setup_dataloaders(own, use_distributed_sampler=False)
    loaders = fabric.setup_dataloaders(DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    if case == "no batch":
        fabric.backward(model(data.tensors[0]).mean())
    for (x, *_), _ in zip(*loaders, strict=True):
        fabric.backward(model(x).mean())


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("a stream", UnsupportedError, "it has no map-style dataset"),
        ("no samples", DataError, "has 1 samples for 2 ranks"),
        ("a sampler of parts", UnsupportedError, "its sampler splits the data already"),
        ("parts", UnsupportedError, "use_distributed_sampler=False says that you have split the data already"),
        ("no batch", UnsupportedError, "without a batch"),
        ("two loaders", UnsupportedError, "one loader at a time"),
    ],
)
def test_what_cannot_be_weighed_is_refused(case: str, kind: type, text: str) -> None:
    for outcome in attempt(_refused, 2, case, timeout=90):
        assert isinstance(outcome.error, kind), outcome.trace
        assert text in str(outcome.error)


def _on_loopback() -> list[str]:
    Fabric(strategy=fixed("off", interface="lo"), accelerator="cpu", devices=1).launch()
    return [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]


def test_the_interface_is_gloos_and_nccls() -> None:
    assert run(_on_loopback, 1) == [["lo", "lo"]]


def test_options_that_need_the_trainer_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"on_nan, on_peer_loss for Fabric: it takes balance.*Trainer"):
        HeteroFabricStrategy(on_peer_loss="continue", on_nan="skip")
    with pytest.raises(UnsupportedError, match="max_batch_size='auto' for Fabric"):
        HeteroFabricStrategy(max_batch_size="auto")
