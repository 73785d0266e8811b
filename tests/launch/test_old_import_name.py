"""`pytorch_lightning`, the old import name: the same package, if lightning_hetero is imported first; else an error.

Each test is a process of its own: the meaning of a module's name is fixed at its first import.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(tmp_path: Path, text: str) -> subprocess.CompletedProcess:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def values(result: subprocess.CompletedProcess) -> list:
    assert result.returncode == 0, result.stderr
    return [json.loads(line.removeprefix("value ")) for line in result.stdout.splitlines() if line.startswith("value ")]


def test_the_old_name_stands_for_lightning(tmp_path: Path) -> None:
    result = script(
        tmp_path,
        """
        import importlib, importlib.util, json, pickle, sys
        import lightning_hetero
        assert not {"torch", "lightning"} & set(sys.modules)  # nothing is imported before it is needed
        assert importlib.util.find_spec("pytorch_lightning") is not None
        import pytorch_lightning as pl
        import pytorch_lightning.callbacks
        from pytorch_lightning.callbacks.early_stopping import EarlyStopping
        from pytorch_lightning.utilities.parsing import AttributeDict
        from lightning_fabric.utilities.seed import seed_everything
        import lightning, lightning.pytorch, lightning.fabric.utilities.seed
        assert pl is lightning.pytorch and sys.modules["pytorch_lightning"] is lightning.pytorch
        assert pl.__spec__.name == "lightning.pytorch" and isinstance(pl.__version__, str)
        assert EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
        assert seed_everything is lightning.fabric.utilities.seed.seed_everything
        assert sys.modules["pytorch_lightning.callbacks"] is lightning.pytorch.callbacks
        assert lightning.pytorch.callbacks.__spec__.name == "lightning.pytorch.callbacks"
        assert importlib.import_module("pytorch_lightning.loggers.csv_logs") is lightning.pytorch.loggers.csv_logs
        by_old_name = pickle.dumps(AttributeDict(a=1)).replace(b"lightning.pytorch", b"pytorch_lightning")
        assert b"pytorch_lightning" in by_old_name and pickle.loads(by_old_name) == AttributeDict(a=1)
        try:
            import pytorch_lightning.nothing
        except ModuleNotFoundError as error:
            assert error.name == "pytorch_lightning.nothing", error
        else:
            raise AssertionError
        trainer = pl.Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2)
        assert isinstance(trainer.strategy, lightning_hetero.HeteroDDPStrategy)
        print("value", json.dumps(isinstance(trainer, lightning.pytorch.Trainer)))
        """,
    )
    assert values(result) == [True]
    assert (result.stdout + result.stderr).count("pytorch_lightning stands for lightning.pytorch") == 1


FIT = """
    import json, sys
    import lightning_hetero
    import {package} as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if __name__ == "__main__":
        pl.seed_everything(1)
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
        net = Net()
        trainer = pl.Trainer(
            strategy={strategy}, accelerator="cpu", devices=2, max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(net, DataLoader(TensorDataset(x), batch_size=4))
        if trainer.is_global_zero:
            print("value", json.dumps([trainer.global_step, net.net.weight.flatten().tolist()]))
"""


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["'hetero_ddp'", "lightning_hetero.DiLoCoStrategy(tau=2)"])
def test_a_fit_under_the_old_name_is_that_under_the_new_one(tmp_path: Path, strategy: str) -> None:
    old, new = (
        values(script(tmp_path, FIT.format(package=package, strategy=strategy)))
        for package in ("pytorch_lightning", "lightning.pytorch")
    )
    assert old == new
    assert old[0][0] == 12


REFUSED = """
    import json
    {before}
    import lightning_hetero
    import pytorch_lightning as pl
    assert pl.__name__ == "pytorch_lightning"
    for strategy in ("hetero_ddp", "hetero_dasso", lightning_hetero.HeteroDDPStrategy()):
        try:
            pl.Trainer(strategy=strategy, accelerator="cpu")
        except lightning_hetero.ConfigurationError as error:
            print("value", json.dumps(str(error)))
    pl.Trainer(strategy="ddp", accelerator="cpu")  # its own are as they were
    from lightning.pytorch import Trainer
    Trainer(strategy="hetero_ddp", accelerator="cpu")
    import lightning_fabric
    try:
        lightning_fabric.Fabric(strategy="hetero_ddp", accelerator="cpu")
    except lightning_hetero.HeteroError as error:
        print("value", json.dumps(str(error)))
"""


OTHER_VERSION = """
    import importlib.metadata as m; own = m.version
    m.version = lambda name: '2.1.4' if name == 'pytorch-lightning' else own(name)
"""


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("import pytorch_lightning", ["import lightning_hetero first", "from lightning.pytorch"]),
        (OTHER_VERSION, ["It is of version 2.1.4, and lightning of 2.", "install the same one of both"]),
    ],
)
def test_where_the_old_package_stays_apart_its_trainer_says_what_to_do(
    tmp_path: Path, before: str, words: list[str]
) -> None:
    *messages, fabric = values(script(tmp_path, REFUSED.format(before=before)))
    assert len(messages) == 3
    assert all(word in text for text in messages for word in words)
    assert "for the Trainer" in fabric


def test_a_package_that_was_imported_before_is_never_mixed(tmp_path: Path) -> None:
    result = script(
        tmp_path,
        """
        import lightning_fabric
        import lightning_hetero
        import lightning_fabric.plugins.io.torch_io as own
        import pytorch_lightning as pl
        assert pl.__name__ == "lightning.pytorch" and own.__name__.startswith("lightning_fabric")
        assert own.__file__.replace("lightning_fabric", "") != own.__file__
        print("value", 1)
        """,
    )
    assert values(result) == [1]
