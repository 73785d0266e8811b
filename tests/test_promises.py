"""docs/promises.md lists all promises: names, strategies, options, commands, keys of checkpoints, versions."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_pages import ROOT, rows
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import run
from tasks import FAST, Net, dataset
from torch.utils.data import DataLoader

import lightning_hetero
from lightning_hetero import HeteroStrategy, ReplicaStrategy, callbacks, cli, errors
from lightning_hetero.checkpoint_sections import FORMAT, KEY, SECTIONS, add_section
from lightning_hetero.strategies.options import Options
from lightning_hetero.strategies.table import ENTRIES

PAGE = ROOT / "docs" / "promises.md"
TEXT = PAGE.read_text()
ROWS = list(rows(PAGE))
STRATEGIES = {row[0].strip("`"): row for row in ROWS if row[0].startswith("`hetero_")}
KEYS = {row[0].strip("`"): row[1] for row in ROWS if len(row) == 2 and re.fullmatch(r"`\w+`", row[0])}


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def listed(mark: str) -> set[str]:
    """The names of the paragraph after a mark; none twice."""
    found = re.search(rf"<!-- {mark} -->\n(.*?)\n\n", TEXT, re.DOTALL)
    assert found is not None, mark
    names = quoted(found.group(1))
    assert len(names) == len(set(names))
    return set(names)


def test_the_public_names() -> None:
    classes = {row[1].strip("`") for row in STRATEGIES.values()}
    assert listed("names") | classes == set(lightning_hetero.__all__)
    assert not listed("names") & classes


def test_callbacks_and_errors() -> None:
    assert listed("callbacks") == set(callbacks.__all__)
    assert listed("errors") == {name for name, kind in vars(errors).items() if inspect.isclass(kind)}


def test_the_strategies_are_those_of_the_registry() -> None:
    assert {name: row[1].strip("`") for name, row in STRATEGIES.items()} == {
        entry.name: entry.strategy.__name__ for entry in ENTRIES
    }


def test_the_options_that_all_share() -> None:
    assert listed("shared options") == {field.name for field in fields(Options)}


def options_of(strategy: type) -> set[str]:
    taken = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in inspect.signature(strategy.__init__).parameters.values() if p.kind not in taken}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_options_of_a_strategy(name: str) -> None:
    [entry] = [entry for entry in ENTRIES if entry.name == name]
    common = options_of(HeteroStrategy) | options_of(ReplicaStrategy)
    shown = quoted(STRATEGIES[name][2])
    assert set(shown) == options_of(entry.strategy) - common
    assert len(shown) == len(set(shown))


def test_the_commands(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^ {4}(\w+)\b", capsys.readouterr().out, re.MULTILINE)
    assert listed("commands") == set(commands)


def test_the_sections_of_checkpoints_are_those_of_the_registry() -> None:
    assert {"format", *SECTIONS} == set(KEYS)
    with pytest.raises(AssertionError, match="'other' is not registered"):
        add_section({}, "other", 1)


KINDS = {"ddp": lightning_hetero.HeteroDDPStrategy, "diloco": lightning_hetero.DiLoCoStrategy}


def _saved(folder: str) -> dict[str, Any]:
    found = {}
    for name, options in {"ddp": {"wire": "int8"}, "diloco": {"tau": 2}}.items():
        keep = ModelCheckpoint(f"{folder}/{name}", filename="kept", every_n_train_steps=4)
        strategy = KINDS[name](timeout=60, **options)
        trainer = Trainer(**{**FAST, "enable_checkpointing": True}, strategy=strategy, max_steps=5, callbacks=[keep])
        trainer.fit(Net(dtype=torch.float32), DataLoader(dataset(48, torch.float32), batch_size=4))
        found[name] = json.dumps(sorted(torch.load(f"{folder}/{name}/kept.ckpt", weights_only=True)[KEY]))
    return found


def test_the_keys_of_a_checkpoint(tmp_path: Path) -> None:
    found = run(_saved, 2, str(tmp_path))[0]
    of_ddp, of_diloco = (set(json.loads(found[name])) for name in ("ddp", "diloco"))
    assert of_ddp | of_diloco <= set(KEYS)
    assert of_ddp >= {"format", "planner", "fits", "gradients"}
    assert of_diloco >= {"format", "planner", "fits", "replicas"}


def test_the_format() -> None:
    assert f"{FORMAT} in this version" in KEYS["format"]


def test_the_oldest_versions_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    versions = {row[0]: row[1] for row in ROWS if row[0] in ("Python", "Lightning", "PyTorch")}
    patterns = {"Python": r'requires-python = ">=([\d.]+)"', "Lightning": r'"lightning>=([\d.]+)[,"]'}
    for name, pattern in patterns.items():
        assert versions[name].split()[0] == re.search(pattern, project).group(1)  # type: ignore[union-attr]
    oldest = re.search(r'"torch>=([\d.]+)"', project).group(1)  # type: ignore[union-attr]
    assert versions["PyTorch"].split()[0] == oldest
    assert f"OLDEST_TORCH={oldest}.0" in TEXT


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    assert {"lightning", "torchmetrics", "lightning-utilities", "rich"} <= set(pins)
    for name, version in pins.items():
        least = re.search(rf'"{name}>=([\d.]+)[,"]', project)
        assert least is not None
        assert [*map(int, version.split("."))][: least.group(1).count(".") + 1] == [
            *map(int, least.group(1).split("."))
        ]
