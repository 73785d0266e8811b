"""More than fits: ranks run their parts of a batch in passes, and the weights stay those of one process."""

from typing import Any

from oracles import oracle
from ranks import run
from tasks import Net, TokenNet, error, fits, parameters

from lightning_hetero import HeteroDDPStrategy, NodeAverageStrategy  # noqa: F401


class AdamW(Net):
    def __init__(self) -> None:
        super().__init__("adamw")


#: Options of the strategy, the model, and what ours and one process have in common.
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], dict[str, Any]]] = {
    "1:4": ({"balance": [1.0, 4.0], "max_batch_size": 3}, Net, {}, {}),
    "0 samples": ({"balance": [1.0, 0.0], "max_batch_size": 3}, Net, {}, {}),
    "measured": ({"max_batch_size": [2, 1], "rebalance_every_n_steps": 1}, Net, {}, {}),
    "accumulated, clipped": (
        {"balance": [1.0, 4.0], "max_batch_size": 3},
        Net,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {},
    ),
    "tokens": ({"balance": [1.0, 3.0], "max_batch_size": [2, 3]}, TokenNet, {}, {}),
    "tokens, accumulated": (
        {"balance": [1.0, 3.0], "max_batch_size": [2, 3]},
        TokenNet,
        {"accumulate_grad_batches": 2},
        {},
    ),
    "AdamW, clipped, workers": (
        {"balance": [1.0, 4.0], "max_batch_size": 3},
        AdamW,
        {"gradient_clip_val": 0.1},
        {"loader": {"num_workers": 1}},
    ),
    "skip": ({"balance": [1.0, 4.0], "max_batch_size": 3, "on_nan": "skip"}, Net, {}, {}),
}


def test_passes_come_to_what_one_process_comes_to() -> None:
    calls = {
        name: {"make": make, "batch_size": 15, "strategy": options, **both, **ours}
        for name, (options, make, both, ours) in CASES.items()
    }
    ranks = run(fits, 2, calls)
    for name, (_, make, both, _) in CASES.items():
        truth = parameters(oracle(make, 15, **both))
        for results in ranks:
            assert error(results[name]["parameters"], truth) <= 1e-10, name
