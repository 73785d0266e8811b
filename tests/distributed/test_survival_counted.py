"""The reported number of samples that are lost with a rank, against the samples that all ranks have written down."""

import math
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from faults import DIED, GRACE, SILENT, Fault, FaultyNet, Record, fit, fit_with_faults, went_on

RANKS, BATCH, STEPS = 3, 12, 250
SHARE = BATCH // RANKS
PACE, SLOW = 0.02, 0.06  # seconds of a step, and of one of the slow rank
BEAT = GRACE / 4


class WritesSamples(pl.Callback):
    """Writes down at once the samples of each batch, on every rank."""

    def __init__(self, folder: str, slow_rank: int) -> None:
        self.path = Path(folder, f"trained-{os.environ['RANK']}")
        self.pace = SLOW if os.environ["RANK"] == str(slow_rank) else PACE

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self.pace)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.path.open("a") as file:
            file.write("".join(f"{index}\n" for index in batch[3].tolist()))


class Quiet(FaultyNet):
    """Logs nothing: otherwise all ranks would wait for each other at every step."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


def _fit(folder: str, name: str, faults: list[Fault], options: dict[str, Any], **settings: Any) -> Record:
    samples_writer = WritesSamples(folder, faults[0].rank)
    return fit(folder, name, faults, options, samples=BATCH * STEPS, kind=Quiet, callbacks=[samples_writer], **settings)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("how", ["frozen", "killed"])
@pytest.mark.parametrize(("name", "rank", "step"), [("gossip_async", 0, 40), ("diloco", 1, 60)])
def test_the_number_is_what_is_missing_and_up_to_a_heartbeat_more(
    tmp_path: Path, name: str, rank: int, step: int, how: str
) -> None:
    """The lost rank is slower than the others, which are far ahead when they learn of the loss."""
    own = {"tau": 50} if name == "diloco" else {}
    options = {**own, "balance": "off", "settings": {"max_epochs": 1}}
    outcomes = fit_with_faults(tmp_path, name, [Fault(rank, step, how)], run=_fit, **options)
    rest = went_on(outcomes, {rank: DIED if how == "killed" else SILENT}, STEPS)
    trained = {int(index) for path in tmp_path.glob("trained-*") for index in path.read_text().split()}
    missing = BATCH * STEPS - len(trained)
    assert missing > 2 * BATCH  # otherwise the test would show nothing
    more = math.ceil(2 * BEAT / SLOW) * SHARE  # a heartbeat, and as long for it to be sent and read
    for record in rest:
        [loss] = record.losses
        assert missing - BATCH <= loss.samples <= missing + BATCH + more
        assert loss.samples == rest[0].losses[0].samples
        assert f"Up to {loss.samples} samples that they had still to take are not trained on" in record.messages[0][1]
