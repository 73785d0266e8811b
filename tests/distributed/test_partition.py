"""The network breaks in two: one side goes on, the other ends with an error; never do both go on."""

import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import namespaces
import pytest
import torch
from faults import SILENT, Record, fit, fit_with_faults, went_on
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetero.errors import MembershipLostError

pytestmark = pytest.mark.skipif(namespaces.missing, reason="network namespaces need root and `ip`")
SIDES = [(2, 3), (0,)]  # ranks behind the link; the others have the lowest rank, or are more
CUT_AFTER, SAVED_AT, STEPS = 7, 4, 12


class Cuts(pl.Callback):
    """Rank 1 cuts the link."""

    def __init__(self, link: namespaces.Link, folder: str) -> None:
        self.link, self.folder, self.steps = link, folder, 0

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["writer"] = int(os.environ["RANK"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps = trainer.global_step
        Path(self.folder, f"steps-{os.environ['RANK']}").write_text(str(self.steps))
        if os.environ["RANK"] == "1" and trainer.global_step == CUT_AFTER:
            self.link.go_down()


def _cut(
    folder: str, name: str, faults: Any, options: Any, link: namespaces.Link, there: tuple[int, ...], **settings: Any
) -> Record:
    os.environ["MASTER_ADDR"] = link.there if 0 in there else link.here
    os.environ["GLOO_SOCKET_IFNAME"] = link.name
    if int(os.environ["RANK"]) in there:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        link.enter()
    saves = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=SAVED_AT)
    settings = {**settings, "callbacks": [Cuts(link, folder), saves], "enable_checkpointing": True}
    return fit(folder, name, faults, options, **settings)


@pytest.mark.parametrize("there", SIDES, ids=["halves", "rank 0 alone"])
@pytest.mark.parametrize("name", ["ddp", "gossip_async"])
def test_one_side_goes_on(tmp_path: Path, name: str, there: tuple[int, ...]) -> None:
    with namespaces.linked() as link:
        settings = {"link": link, "there": there, "max_steps": STEPS, "max_epochs": 9}
        outcomes = fit_with_faults(tmp_path, name, [], world=4, run=_cut, settings=settings)
    rest = [rank for rank in range(4) if rank not in there]
    went_on(outcomes, dict.fromkeys(there, SILENT), STEPS)
    for rank in there:
        error = outcomes[rank].error
        assert isinstance(error, MembershipLostError), outcomes[rank].trace
        # On a busy machine the ranks behind the link may not hear each other in time, either.
        assert re.search(rf"Rank {rank} cannot go on: only [1-{len(there)}] of 4", str(error))
        for other in rest:
            assert f"rank {other} {SILENT}" in str(error)
        if name == "ddp":  # a rank behind the link takes no further step
            assert int((tmp_path / f"steps-{rank}").read_text()) <= CUT_AFTER
    for step in (4, 8, 12):  # each is written once; after the cut by the first rank of the side that goes on
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=False)
        assert saved["global_step"] == step
        assert saved["writer"] == (0 if step == SAVED_AT else rest[0])
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
