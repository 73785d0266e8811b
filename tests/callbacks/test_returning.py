"""Results of forked and spawned ranks in the process that has called the Trainer, as in a notebook."""

import json
from pathlib import Path

import pytest
import torch
from scripts import run_script

SCRIPT = """
import json, pathlib
import lightning_hetero, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_hetero.launch import observer
from lightning_hetero.strategies import base

sent = []

class Witness(pl.Callback):
    '''Each rank writes down what its own monitor knows at the end.'''
    def on_fit_end(self, trainer, module):
        monitor = next(c for c in trainer.callbacks if isinstance(c, lightning_hetero.HeteroMonitor))
        pathlib.Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(known(monitor)))

class Large(pl.Callback):
    '''Gives back more than a pipe holds.'''
    known = b"nothing"
    def give_back(self):
        return bytes(2_000_000)
    def take_back(self, given):
        self.known = given

class OfTheModule(pl.Callback):
    def give_back(self):
        return "of no use to others"
    def take_back(self, given):
        raise AssertionError("nobody here has this callback")

class Model(BoringModel):
    def configure_callbacks(self):
        return [OfTheModule()]

class Noting(observer.ReturningLauncher):
    def update_main_process_results(self, trainer, extra):
        sent.append(pathlib.Path(extra["lightning_hetero_callbacks"]).parent)
        assert sent[-1].exists()
        super().update_main_process_results(trainer, extra)

def known(monitor):
    return {"history": monitor.history, "exchanges": monitor.exchanges}

if __name__ == "__main__":
    base.ReturningLauncher = Noting
    monitor, other, large = lightning_hetero.HeteroMonitor(), lightning_hetero.HeteroMonitor(report=None), Large()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [monitor, large, other, Witness()]
    quiet["limit_val_batches"] = 0
    trainer = pl.Trainer(strategy=STRATEGY, accelerator="cpu", devices=2, max_epochs=2, callbacks=callbacks, **quiet)
    trainer.fit(Model())
    trainer.test(Model(), verbose=False)  # once more in new processes, which must not forget
    found = known(monitor) | {"path": monitor.summary.path, "verdict": monitor.summary.verdict._asdict()}
    found |= {"large": len(large.known), "other": known(other), "other_summary": other.summary}
    found |= {"shown": monitor._repr_html_(), "waiting": [record.waiting for record in monitor.history]}
    found |= {"picture": monitor.summary.picture.hex(), "sent": len(sent), "left": [str(p) for p in sent if p.exists()]}
    pathlib.Path("parent.json").write_text(json.dumps(found))
"""


# Scripts of tests run in a forked process, where Lightning does not fork again with a CUDA build of PyTorch.
FORKS = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a forked process does not fork again with CUDA")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("lightning_hetero.HeteroDDPStrategy(rebalance_every_n_steps=2, start_method='fork')", marks=FORKS),
        pytest.param("'hetero_easgd_overlap_notebook'", marks=[pytest.mark.long, FORKS]),
        pytest.param("'hetero_easgd_spawn'", marks=pytest.mark.long),
    ],
)
def test_the_parent_knows_what_the_first_rank_knows(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("STRATEGY", strategy))
    [(status, output)] = run_script(tmp_path / "train.py", folder=tmp_path)
    assert status == 0, output
    parent, rank = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("parent", "rank0"))
    assert parent["history"] == rank["history"] != []
    assert parent["exchanges"] == rank["exchanges"]
    assert bool(parent["exchanges"]) == ("hetero_" in strategy and "HeteroDDP" not in strategy)
    assert parent["other"] == rank
    assert parent["other_summary"] is None
    assert parent["large"] == 2_000_000
    report = json.loads((Path(parent["path"]).parent / "figures.json").read_text())
    assert Path(parent["path"]) == tmp_path / "hetero_report" / "report.html"
    assert parent["verdict"]["headline"] == report["verdict"]["headline"]
    assert parent["verdict"]["efficiency"] == report["verdict"]["efficiency"]
    assert bytes.fromhex(parent["picture"]) == (tmp_path / "hetero_report" / "timeline.png").read_bytes()
    assert f"{parent['waiting'][-1]:.0%} of all ranks&#x27; time is waiting" in parent["shown"]
    assert (parent["sent"], parent["left"]) == (2, [])  # by the fit and by the test


CHOOSES = """
import json, pathlib, sys
import lightning_hetero, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_hetero.planning import strategy_choice, cluster
from lightning_hetero.strategies import auto

if __name__ == "__main__":
    strategy_choice.CANDIDATES = ("hetero_node",)
    cluster.measure_links = lambda chosen: [cluster.MeasuredLink(pair, 0.5, 1e3) for pair in chosen]
    seconds = float(sys.argv[1])  # of a step, as the ranks believe
    auto.choose = lambda cluster, step, wish: strategy_choice.choose(cluster, seconds, wish)
    strategy = lightning_hetero.AutoStrategy(
        measure=8, every=4, balance="off", rebalance_every_n_steps=2, start_method="fork", ranks_per_node=1
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    quiet["limit_val_batches"] = 0
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **quiet)
    trainer.fit(BoringModel())
    chosen = strategy.chosen and [type(strategy.chosen).__name__, strategy.chosen.algorithm.every_n_steps]
    pathlib.Path("parent.json").write_text(json.dumps([chosen, strategy.stays, strategy.choice.why]))
"""


@FORKS
@pytest.mark.parametrize(
    ("seconds", "chosen", "stays"), [(10.0, ["NodeAverageStrategy", 4], False), (1e-9, None, True)]
)
def test_the_parent_knows_what_hetero_auto_has_chosen(
    tmp_path: Path, seconds: float, chosen: list[object] | None, stays: bool
) -> None:
    (tmp_path / "train.py").write_text(CHOOSES)
    [(status, output)] = run_script(tmp_path / "train.py", str(seconds), folder=tmp_path)
    assert status == 0, output
    found = json.loads((tmp_path / "parent.json").read_text())
    assert found[:2] == [chosen, stays], output
    assert "samples/s" in found[2]
    assert found[2] in output.replace("\n", " ")
