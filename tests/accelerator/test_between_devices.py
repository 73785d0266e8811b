"""Replicas that exchange over NCCL, by a fake one on CPUs: the same means, and a lost rank ends the others."""

import os
import signal
import time
import warnings
from typing import Any

import fake_device
import fake_nccl
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from ranks import attempt, run
from tasks import FAST, Net, dataset, parameters
from torch.utils.data import DataLoader

from lightning_hetero import DiLoCoStrategy, EASGDStrategy, NodeAverageStrategy
from lightning_hetero.comm import all_reduce
from lightning_hetero.errors import CommunicationError, ConfigurationError, UnsupportedError

STRATEGIES: dict[str, Any] = {
    "node": lambda **options: NodeAverageStrategy(every_n_steps=2, **options),
    "bf16": lambda **options: NodeAverageStrategy(every_n_steps=2, wire="bf16", **options),
    "easgd": lambda **options: EASGDStrategy(tau=2, moving_rate=0.1, **options),
    "diloco": lambda **options: DiLoCoStrategy(tau=2, **options),
}


class Losing(Net):
    """Rank 1 is killed before an exchange."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1 and self.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(name: str, slow: str = "", module: type[Net] = Net, **options: Any) -> tuple[torch.Tensor, int, str]:
    """The weights, the number of sums over the fake NCCL, and the message about the route."""
    warnings.filterwarnings("ignore", "Ranks .* share ")
    accelerator = fake_device.load_if_given()
    fake_nccl.install()
    all_reduce.PIECE = 64  # several pieces
    sums, messages, usual = 0, list[str](), dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        nonlocal sums
        over_nccl = group is not None and group.name() == "fake_nccl"
        sums += over_nccl and tensor.numel() < all_reduce.LAST // 16
        if slow == ("nccl" if over_nccl else "gloo") and tensor.numel() >= all_reduce.LAST // 16:
            time.sleep(0.01 if over_nccl else 0.3)
        return usual(tensor, *args, group=group, **kwargs)

    all_reduce.rank_zero_info = messages.append
    dist.all_reduce = counted
    model = module()
    strategy = STRATEGIES[name](balance="off", timeout=60, **options)
    settings = {**FAST, "accelerator": accelerator, "devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"])}
    pl.Trainer(strategy=strategy, max_steps=6, **settings).fit(model, DataLoader(dataset(96), batch_size=4))
    return parameters(model).cpu(), sums, " ".join(messages)


@pytest.mark.parametrize("name", STRATEGIES)
def test_means_are_those_of_gloo(name: str) -> None:
    hosts, cards = (run(fit, 2, name, nodes=[1, 1], between=between) for between in ("gloo", "nccl"))
    for (weights, none, _), (over_nccl, _, message) in zip(hosts, cards, strict=True):
        assert torch.equal(weights, over_nccl)  # the fake one sums as gloo does
        assert none == 0
        assert not message  # nobody has asked which is faster
    if name != "bf16":  # at a wire of 16 bits partial sums are rounded by the hosts
        assert all(sums >= 3 for _, sums, _ in cards)


def test_means_are_those_of_gloo_on_simulated_cards(fake: str) -> None:
    env = {"FAKE_LIBRARY": fake, "FAKE_GLOO": "stage"}
    hosts, cards = (run(fit, 2, "node", nodes=[1, 1], between=between, env=env) for between in ("gloo", "nccl"))
    for (weights, none, _), (over_nccl, sums, _) in zip(hosts, cards, strict=True):
        assert torch.equal(weights, over_nccl)
        assert (none, sums >= 3) == (0, True)


@pytest.mark.parametrize(("slow", "route"), [("nccl", "gloo"), ("gloo", "NCCL")])
def test_the_faster_route_is_taken(slow: str, route: str) -> None:
    outcomes = run(fit, 2, "node", slow, nodes=[1, 1], between="auto")
    assert f"Replicas exchange over {route}: 4 MiB take" in outcomes[0][2]
    for _, sums, _ in outcomes:
        assert (sums > 0) == (route == "NCCL")


def test_a_lost_rank_ends_the_others() -> None:
    first, second = attempt(fit, 2, "node", module=Losing, nodes=[1, 1], between="nccl")
    assert second.value is None
    assert isinstance(first.error, CommunicationError), first.trace
    assert "rank 1" in str(first.error)


def _refused() -> str:
    strategy = NodeAverageStrategy(every_n_steps=2, between="nccl")
    trainer = pl.Trainer(strategy=strategy, max_steps=2, **{**FAST, "devices": 1, "num_nodes": 2})
    with pytest.raises(UnsupportedError) as found:
        trainer.fit(Net(), DataLoader(dataset(), batch_size=4))
    return str(found.value)


def test_nccl_that_does_not_connect_the_replicas_is_refused() -> None:
    for text in run(_refused, 2, nodes=[1, 1]):
        assert "between='nccl': NCCL does not connect the first ranks of the replicas, [0, 1]" in text
        assert "over gloo: all are CPUs" in text


def test_options_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="NCCL cannot be woken up"):
        NodeAverageStrategy(between="nccl", on_peer_loss="continue")
    with pytest.raises(ConfigurationError, match="between"):
        NodeAverageStrategy(between="mpi")  # type: ignore[arg-type]
