"""Lost ranks of GPUs that average gradients: the others end within seconds and name the rank; by a fake NCCL."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import fake_nccl
import pytest
from ranks import free_port, run
from tasks import FAST, Net, dataset

from lightning_hetero import NodeAverageStrategy
from lightning_hetero.comm.topology import Place
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies import job

SCRIPT = """
    import os, signal, sys, time

    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    import fake_device
    import fake_nccl
    from lightning_hetero import HeteroDDPStrategy
    from tasks import FAST, Net, dataset

    fake_nccl.install()
    settings = {**FAST, "accelerator": fake_device.load_if_given(), "devices": 1, "num_nodes": 2}

    class Ends(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 5:
                print("now", time.time(), flush=True)
                if sys.argv[1] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if sys.argv[1] == "failed":
                    raise ValueError("a fault of rank 1")
            return self.loss(batch)

    trainer = pl.Trainer(strategy=HeteroDDPStrategy(timeout=600, within="gloo"), max_steps=8, **settings)
    trainer.fit(Ends(), DataLoader(dataset(96), batch_size=4))
    group = trainer.strategy.replica_group
    print("trained over", group.getBackendName(), flush=True)
    trainer.fit(Ends(), DataLoader(dataset(96), batch_size=4))  # the first fit's group ends, on both ranks
"""


def start(folder: Path, how: str, library: str) -> list[subprocess.Popen[str]]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    here = Path(__file__).parent
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    common |= {"TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    common |= {"FAKE_LIBRARY": library, "FAKE_GLOO": "stage"} if library else {}
    common["PYTHONPATH"] = os.pathsep.join([str(here), *filter(None, sys.path)])
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), how],
            env={**os.environ, **common, "RANK": str(rank), "GROUP_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ends(folder: Path, how: str, library: str = "") -> list[tuple[int, str, str]]:
    """Exit status of each rank, and its output on each stream."""
    processes, found = start(folder, how, library), []
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("how", "named", "status"),
    [
        ("killed", "rank 1 has ended without an error message", -signal.SIGKILL),
        ("failed", "rank 1 failed with ValueError: a fault of rank 1", 1),
    ],
)
@pytest.mark.parametrize("cards", [False, True], ids=["cpus", "simulated cards"])
def test_the_others_say_who_was_lost_and_leave(
    request: pytest.FixtureRequest, tmp_path: Path, cards: bool, how: str, named: str, status: int
) -> None:
    library = request.getfixturevalue("fake") if cards else ""
    (first, _, errors), (second, printed, own) = ends(tmp_path, how, library)
    late = time.time() - float(printed.split()[1])
    assert (first, second) == (1, status), errors + own
    assert f"CommunicationError: {named}" in errors
    assert ("ValueError: a fault of rank 1" in own) == (how == "failed")
    assert late < 60  # of which 10 are a grace; the strategy's timeout is ten minutes


@pytest.mark.long
def test_fits_in_a_row_end_their_groups_together(tmp_path: Path) -> None:
    for status, printed, errors in ends(tmp_path, "well"):
        assert status == 0, errors
        assert printed.count("trained over fake_nccl") == 1


def _mixed() -> None:
    fake_nccl.install()
    place_of = job.place_of

    def place(*args: object) -> Place:
        found = place_of(*args)
        return found._replace(device="cpu", library="") if os.environ["RANK"] == "2" else found

    job.place_of = place
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    strategy = NodeAverageStrategy(every_n_steps=2, on_peer_loss="continue", timeout=60)
    with pytest.raises(UnsupportedError, match="GPUs that average gradients within a replica"):
        pl.Trainer(strategy=strategy, max_steps=2, **FAST).fit(Net(), DataLoader(dataset(), batch_size=4))


def test_cards_within_a_mixed_replica_cannot_go_on_either() -> None:
    run(_mixed, 4, nodes=[3, 1])
