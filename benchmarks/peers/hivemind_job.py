"""Rank under hivemind: its Optimizer, with a DHT among the nodes.

``hivemind_local:every=16``: ranks step by themselves and average their parameters in the background, as hivemind's
quick start has it; an epoch is as many samples as all ranks take in 16 steps. ``hivemind_gradients``: ranks add up
gradients until they have a global batch, average them, and step; ``delay=1`` does so in the background, as hivemind's
example with ALBERT does; with batches as small as these, peers then give up many exchanges half done. For both:
``wire=fp16`` or ``fp32``, ``matchmaking=3`` seconds, as in the quick start; a full group begins at once.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import hivemind
import plain
from hivemind.compression import Float16Compression, NoCompression
from hivemind.optim.grad_averager import GradientAverager
from text import inner_optimizer

TIMEOUT = 30.0  # seconds after which an exchange is given up: several times what it takes


@contextmanager
def network_of(setting: plain.Setting) -> Iterator[hivemind.DHT]:
    """A DHT of all ranks; nothing of it looks beyond the nodes."""
    here = {"host_maddrs": [f"/ip4/{os.environ['OWN_ADDR']}/tcp/0"], "auto_nat": False, "nat_port_map": False}
    meeting, first = setting.meeting, None
    if meeting.rank == 0:
        first = hivemind.DHT(start=True, **here)
    known = meeting.gather([str(address) for address in first.get_visible_maddrs()] if first else [])[0]
    dht = first or hivemind.DHT(initial_peers=known, start=True, **here)
    try:
        yield dht
        meeting.gather("done")
    finally:
        dht.shutdown()


def common_options(setting: plain.Setting, dht: hivemind.DHT) -> dict[str, Any]:
    """Options that both ways have in common."""
    seconds = float(setting.options.get("matchmaking", 3))
    averager = {"target_group_size": setting.meeting.world}  # a full group begins at once
    return {
        "dht": dht,
        "run_id": f"run{setting.meeting.times}",
        "batch_size_per_step": setting.task.batch,
        "matchmaking_time": seconds,
        "averaging_timeout": TIMEOUT,
        "next_chunk_timeout": TIMEOUT / 3,  # usually the time for matchmaking, which a slow link may need for a part
        "state_averaging_compression": wire(setting),
        "averager_opts": averager,
        "tracker_opts": {"min_refresh_period": 0.1, "max_refresh_period": 0.5, "default_refresh_period": 0.5},
    }


def wire(setting: plain.Setting) -> Any:
    """Compression of messages."""
    return NoCompression() if setting.options.get("wire", "fp16") == "fp32" else Float16Compression()


@contextmanager
def local(setting: plain.Setting) -> Iterator[plain.Parts]:
    """Own steps, and averages of parameters in the background."""
    with network_of(setting) as dht:
        optimizer = hivemind.Optimizer(
            **common_options(setting, dht),
            target_batch_size=setting.number("every", 16) * setting.task.batch * setting.meeting.world,
            optimizer=setting.optimizer,
            use_local_updates=True,
        )
        yield plain.Parts(setting.net, optimizer)
        setting.meeting.gather("trained")
        optimizer.shutdown()


@contextmanager
def gradients(setting: plain.Setting) -> Iterator[plain.Parts]:
    """Gradients of a global batch, averaged by all."""
    delay = bool(setting.number("delay", 0))
    with network_of(setting) as dht:
        options = common_options(setting, dht)
        optimizer = hivemind.Optimizer(
            **options,
            target_batch_size=setting.task.batch * setting.meeting.world,
            params=setting.net.parameters(),
            optimizer=partial(inner_optimizer, rate=setting.rate),
            offload_optimizer=True,
            delay_optimizer_step=delay,
            delay_grad_averaging=delay,
            average_state_every=setting.number("every", 16),
            grad_compression=wire(setting),
            grad_averager_factory=partial(GradientAverager, **options["averager_opts"]),
        )
        yield plain.Parts(setting.net, optimizer)
        setting.meeting.gather("trained")
        optimizer.shutdown()


if __name__ == "__main__":
    plain.main({"hivemind_local": local, "hivemind_gradients": gradients}, together=False)
