"""`hetero_auto`: its choice follows its measurements, and it goes on as the chosen strategy would, by hand."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from ranks import run
from tasks import FAST, Net, Save, dataset, parameters
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import AutoStrategy, HeteroDDPStrategy
from lightning_hetero.planning import cluster, strategy_choice
from lightning_hetero.strategies import auto

EVERY, MEASURE, BATCH, SAMPLES = 4, 10, 4, 96
FAST_LINK, SLOW_LINK = (1e-6, 1e12), (0.5, 1e3)  # seconds, bytes per second


def _measured_as(way: tuple[float, float], candidates: tuple[str, ...] = strategy_choice.CANDIDATES) -> None:
    """Let this rank measure such links (if they are slow, with long steps), and choose among these strategies."""
    cluster.measure_links = lambda chosen: [cluster.MeasuredLink(pair, *way) for pair in chosen]  # type: ignore[assignment]
    strategy_choice.CANDIDATES = candidates
    slow = way == SLOW_LINK
    auto.choose = lambda cluster, step, wish: strategy_choice.choose(cluster, 10.0 if slow else step, wish)


def _messages() -> list[str]:
    """List to which each message to users is added from now on."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("lightning.pytorch").addHandler(Handler())
    return messages


def _strategy(**options: Any) -> AutoStrategy:
    given = {"every": EVERY, "measure": MEASURE, "balance": "off", "rebalance_every_n_steps": 3}
    return AutoStrategy(**{**given, **options})


def _trainer(strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, **{**FAST, "max_epochs": 2, **options})


def _data(workers: int = 0) -> DataLoader:
    return DataLoader(dataset(SAMPLES), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)


# -- by hand -------------------------------------------------------------------------------------------------


def _averages(workers: int, clear: float) -> Any:
    _measured_as(SLOW_LINK, ("hetero_node",))
    auto._CLEAR = clear
    messages, strategy, module = _messages(), _strategy(), Net()
    _trainer(strategy).fit(module, _data(workers))
    assert type(strategy.chosen).__name__ == "NodeAverageStrategy"
    return parameters(module), strategy.engine.windows, messages, module.seen


def _by_hand(seen: list[list[list[int]]], chosen: int) -> torch.Tensor:
    """Train one process on whole batches for some steps, then two replicas that average every fourth step.

    Args:
        seen: the samples of each rank, step by step.
        chosen: the number of steps before the choice.
    """
    data = dataset(SAMPLES)
    replicas = [Net() for _ in range(2)]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    assert len(seen[0]) == 2 * SAMPLES // (2 * BATCH)
    for step, parts in enumerate(zip(*seen, strict=True), start=1):
        for replica, optimizer, own in zip(replicas, optimizers, parts, strict=True):
            rows = [*parts[0], *parts[1]] if step <= chosen else own
            optimizer.zero_grad()
            nn.functional.mse_loss(replica.net(data.tensors[0][rows]), data.tensors[1][rows]).backward()
            optimizer.step()
        if (step > chosen and step % EVERY == 0) or step == len(seen[0]):
            with torch.no_grad():
                for one, other in zip(*(replica.parameters() for replica in replicas), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    return parameters(replicas[0])


@pytest.mark.parametrize(
    ("workers", "clear", "chosen"),
    [(0, auto._CLEAR, auto._FIRST), (0, 1e9, MEASURE), pytest.param(2, 1e9, MEASURE, marks=pytest.mark.long)],
    ids=["clear", "not clear", "workers"],
)
def test_it_goes_on_as_the_strategy_that_it_names(workers: int, clear: float, chosen: int) -> None:
    found = run(_averages, 2, workers, clear, nodes=[1, 1])
    by_hand = _by_hand([seen for *_, seen in found], chosen)
    for weights, windows, *_ in found:
        assert windows == 24
        torch.testing.assert_close(weights, by_hand, rtol=0, atol=1e-10)
    messages = [line for line in found[0][2] if "hetero_auto" in line]
    assert len(messages) == 1
    assert "goes on as NodeAverageStrategy(every_n_steps=4)" in messages[0]
    assert "times the samples/s" in messages[0]


def _sent(wire: str) -> Any:
    _measured_as(SLOW_LINK, ("hetero_node",))
    strategy, module = _strategy(wire=wire), Net()
    _trainer(strategy).fit(module, _data())
    return strategy.traffic.bytes, strategy.traffic.exchanges, parameters(module)


def test_its_wire_is_that_of_the_strategy_that_goes_on():
    whole, narrow = run(_sent, 2, "fp32", nodes=[1, 1])[0], run(_sent, 2, "bf16", nodes=[1, 1])[0]
    assert whole[1] == narrow[1] > 1
    last = whole[0] / whole[1]  # the average that ends the fit is not rounded; parameters have 8 bytes
    assert narrow[0] == (whole[0] - last) * 2 / 8 + last
    assert not torch.equal(whole[2], narrow[2])
    torch.testing.assert_close(whole[2], narrow[2], rtol=0.05, atol=0.05)


def _narrow(name: str) -> Any:
    _measured_as(SLOW_LINK, (name,))
    strategy, module = _strategy(wire="bf16"), Net()
    _trainer(strategy).fit(module, _data())
    assert strategy.chosen is not None
    return strategy.chosen.algorithm.wire, strategy.algorithm.wire, strategy.traffic.exchanges, parameters(module)


@pytest.mark.parametrize("name", ["hetero_gossip", "hetero_gossip_async", "hetero_easgd_async"])
def test_pairs_and_visits_to_a_center_take_its_wire_too(name: str) -> None:
    for chosen, running, exchanges, weights in run(_narrow, 2, name, nodes=[1, 1]):
        assert chosen == running == "bf16"
        assert exchanges > 1
        assert torch.isfinite(weights).all()


# -- staying -------------------------------------------------------------------------------------------------


def _stays(way: tuple[float, float], options: dict[str, Any], callbacks: tuple[Any, ...]) -> Any:
    _measured_as(way)
    messages, strategy, module = _messages(), _strategy(**options), Net()
    _trainer(strategy, callbacks=list(callbacks)).fit(module, _data())
    assert strategy.chosen is None
    reference = Net()
    plain = HeteroDDPStrategy(balance="off", rebalance_every_n_steps=3)
    again = [type(callback)(swa_lrs=0.01) for callback in callbacks]
    _trainer(plain, callbacks=again).fit(reference, _data())
    return parameters(module), parameters(reference), [line for line in messages if "hetero_auto" in line]


@pytest.mark.parametrize(
    ("way", "options", "callbacks", "words"),
    [
        (FAST_LINK, {"deterministic": True}, (), "not more than 1 + gain = 1.2"),
        (SLOW_LINK, {"exact": True}, (), ""),
        (SLOW_LINK, {"gain": 1e9}, (), "not more than 1 + gain"),
        (FAST_LINK, {"measure": 1000}, (), ""),
        (SLOW_LINK, {}, (StochasticWeightAveraging(swa_lrs=0.01),), "StochasticWeightAveraging"),
    ],
    ids=["no gain", "exact", "gain", "too short", "swa"],
)
def test_it_stays_where_nothing_else_gains_or_can_be(
    way: tuple[float, float], options: dict[str, Any], callbacks: tuple[Any, ...], words: str
) -> None:
    for rank, (weights, reference, messages) in enumerate(run(_stays, 2, way, options, callbacks, nodes=[1, 1])):
        assert torch.equal(weights, reference)
        if rank == 0:
            assert [words in line and "stays with hetero_ddp" in line for line in messages] == [True] * bool(words)


# -- every strategy that it may name -------------------------------------------------------------------------


class Deep(Net):
    """Of four modules, so that it can be cut into fragments."""

    def __init__(self) -> None:
        super().__init__()
        width = self.net[0].in_features
        self.net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), *self.net).to(self.net[0].weight)


def _ends(name: str) -> Any:
    _measured_as(SLOW_LINK, (name,))
    strategy, module = _strategy(every=6), Deep()
    _trainer(strategy, max_epochs=3).fit(module, _data())
    assert strategy.chosen is not None
    return type(strategy.chosen).saved_as, strategy.averager is None, parameters(module), strategy.traffic.exchanges


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long(after=2)) for name in strategy_choice.CANDIDATES]
)
def test_replicas_exchange_and_end_alike(name: str) -> None:
    found = run(_ends, 4, name, nodes=[2, 2])
    for chosen, over, weights, _ in found:
        assert (chosen, over) == (name.partition(" ")[0], True)
        assert torch.equal(weights, found[0][2])
        assert weights.isfinite().all()
    assert sum(exchanges for *_, exchanges in found) > 0


# -- checkpoints ---------------------------------------------------------------------------------------------


def _resumed(path: str) -> Any:
    _measured_as(SLOW_LINK, ("hetero_node",))
    whole = Net()
    _trainer(_strategy(), callbacks=[Save(path, 15, False)]).fit(whole, _data())
    messages, strategy, module = _messages(), _strategy(), Net()
    _measured_as(FAST_LINK)  # the choice is the checkpoint's
    _trainer(strategy).fit(module, _data(), ckpt_path=path)
    plain = Net()
    _trainer(HeteroDDPStrategy(balance="off"), max_epochs=2).fit(plain, _data())
    return (
        parameters(whole),
        parameters(module),
        parameters(plain),
        [line for line in messages if "hetero_auto" in line],
    )


def test_the_choice_is_in_the_checkpoint(tmp_path: Path) -> None:
    whole, resumed, plain, messages = run(_resumed, 2, str(tmp_path / "15.ckpt"), nodes=[1, 1])[0]
    assert torch.equal(whole, resumed)
    assert not torch.equal(whole, plain)
    assert messages == ["hetero_auto goes on as hetero_node, as chosen before the checkpoint was saved."]


def _stayed(path: str) -> Any:
    _measured_as(FAST_LINK)
    whole = Net()
    _trainer(_strategy(deterministic=True), callbacks=[Save(path, 15, False)]).fit(whole, _data())
    messages, strategy, module = _messages(), _strategy(deterministic=True), Net()
    _measured_as(SLOW_LINK)  # it has chosen before
    _trainer(strategy).fit(module, _data(), ckpt_path=path)
    return strategy.chosen is None, [line for line in messages if "hetero_auto" in line]


def test_that_it_stays_is_in_the_checkpoint_too(tmp_path: Path) -> None:
    assert run(_stayed, 2, str(tmp_path / "15.ckpt"), nodes=[1, 1]) == [(True, []), (True, [])]


# -- bad input -----------------------------------------------------------------------------------------------


def test_links_are_measured_in_a_few_places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        cluster, "measure_links", lambda some: asked.extend(some) or [cluster.MeasuredLink(p, 0.1, 1e6) for p in some]
    )
    way = AutoStrategy()._measured([(i, i + 1) for i in range(1000)], 1e6)
    assert len(asked) <= 4
    assert way == auto.LinkModel(0.1, 1e6)
