"""The YAML file of every strategy trains, through the same LightningCLI as the command's, on two ranks."""

import sys
from pathlib import Path

import pytest
import torch
from ranks import run

from lightning_hetero.config import lightning_cli
from lightning_hetero.strategies.table import ENTRIES

FOLDER = Path(__file__).parents[2] / "examples" / "cli"
QUICK = {
    "accelerator": "cpu",
    "max_epochs": "1",
    "limit_train_batches": "10",
    "limit_val_batches": "2",
    "logger": "false",
    "enable_checkpointing": "false",
    "enable_progress_bar": "false",
    "enable_model_summary": "false",
}
OVERRIDES = {
    "hetero_ddp": ["--trainer.strategy.init_args.balance=[3.0,1.0]"],
    "hetero_daso": ["--trainer.strategy.init_args.wire=bf16", "--trainer.strategy.init_args.timeout=500"],
    "hetero_node": [f"--trainer.strategy.init_args.max_batch_{x}" for x in ("size=auto", "memory=[8GiB,6 GB]")],
    "hetero_easgd_async": ["--trainer.strategy.init_args.center=thread"],
    "hetero_gossip": ["--trainer.strategy.init_args.topology=ring"],
    "hetero_diloco": ["--trainer.strategy.init_args.wire=bf16", "--trainer.strategy.init_args.replica=rank"],
}


def train_all(folder: str) -> dict[str, dict]:
    """Results of each file on this rank."""
    sys.argv = ["lightning-hetero"]
    sys.path.insert(0, str(FOLDER))  # as for who starts in the folder
    torch.manual_seed(0)
    results = {}
    for entry in ENTRIES:
        name = entry.name
        arguments = ["fit", "-c", str(FOLDER / f"{name.removeprefix('hetero_')}.yaml"), "--seed_everything=1"]
        arguments += [f"--trainer.{key}={value}" for key, value in QUICK.items()]
        cli = lightning_cli([*arguments, f"--trainer.default_root_dir={folder}/{name}", *OVERRIDES.get(name, [])])
        strategy = cli.trainer.strategy
        results[name] = {
            "class": type(strategy),
            "options": strategy.algorithm_options(),
            "shares": strategy.accounting.planner.shares(strategy.accounting.step),
            "limit": strategy.options.limit.total_seconds(),
            "steps": cli.trainer.global_step,
            "weights": torch.nn.utils.parameters_to_vector(cli.model.parameters()).detach(),
        }
    return results


@pytest.mark.long
def test_every_file_trains(tmp_path: Path) -> None:
    first, second = run(train_all, 2, str(tmp_path))
    for entry in ENTRIES:
        one, other = first[entry.name], second[entry.name]
        assert one["class"] is entry.strategy
        assert one["steps"] == other["steps"] == 10
        assert torch.equal(one["weights"], other["weights"]), entry.name
    assert first["hetero_ddp"]["shares"] == [48, 16]
    assert first["hetero_daso"]["options"]["wire"] == "bf16"
    assert first["hetero_daso"]["limit"] == 500
    assert first["hetero_easgd_async"]["options"]["center"] == "thread"
    assert first["hetero_gossip"]["options"]["topology"] == "ring"
    assert first["hetero_diloco"]["options"]["wire"] == "bf16"


def test_every_strategy_has_its_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {entry.name.removeprefix("hetero_") for entry in ENTRIES}


def evaluate(folder: str) -> list[float]:
    """Accuracies of validation and test, and the number of samples that this rank has predicted."""
    sys.argv = ["lightning-hetero"]
    sys.path.insert(0, str(FOLDER))
    trainers = []
    for command in ("validate", "test", "predict"):
        arguments = [command, "-c", str(FOLDER / "gossip.yaml"), "--seed_everything=1"]
        options = {**QUICK, "limit_val_batches": "1.0", "default_root_dir": f"{folder}/{command}"}
        trainers.append(lightning_cli([*arguments, *(f"--trainer.{k}={v}" for k, v in options.items())]).trainer)
    predicted = sum(len(batch) for batch in trainers[2].predict_loop.predictions)
    return [*(float(trainer.callback_metrics["accuracy"]) for trainer in trainers[:2]), predicted]


@pytest.mark.long
def test_the_other_commands_see_each_sample_once(tmp_path: Path) -> None:
    first, second = run(evaluate, 2, str(tmp_path))
    assert first[0] == first[1] == second[0] == second[1] > 0
    assert first[2] + second[2] == 360
