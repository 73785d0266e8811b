"""Finetuning with an unfrozen backbone and averaged weights: the checkpoints and a plain loop say the same."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
EPOCHS, UNFREEZE, AVERAGE, IMAGES, BATCH = 5, 1, 3, 300, 16
NAMES = ["hetero_ddp", "hetero_node"]


@pytest.mark.long
def test_finetune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        f"--strategies {' '.join(NAMES)} --images {IMAGES} --batch-size {BATCH} --epochs {EPOCHS} "
        f"--unfreeze {UNFREEZE} --average {AVERAGE} --seconds 0.0005 0.004"
    )
    results = run_script(
        EXAMPLES / "finetune_digits.py", *words.split(), "--out", str(tmp_path), folder=tmp_path, ranks=2
    )
    assert [status for status, _ in results] == [0, 0], results
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("finetune_digits")
    pictures, labels = (part[:IMAGES] for part in module.images(*range(5, 10)))
    test = IMAGES // 5
    said = json.loads((tmp_path / "results.json").read_text())
    for name in NAMES:
        files = [tmp_path / name / f"epoch={epoch}.ckpt" for epoch in range(EPOCHS + 1)]
        states = [torch.load(file, weights_only=True)["state_dict"] for file in files]
        filters = [state["backbone.0.0.weight"].double() for state in states]
        # Frozen at first, then trained.
        assert all(torch.equal(filters[0], state) for state in filters[:UNFREEZE])
        assert not torch.equal(filters[UNFREEZE - 1], filters[UNFREEZE])
        # Lightning averages the weights with which the last epochs begin.
        mean = torch.stack(filters[AVERAGE - 2 : EPOCHS - 1]).mean(0)
        assert (filters[-1] - mean).abs().max() < 1e-6
        assert (filters[-1] - filters[-2]).abs().max() > 1e-3
        # BatchNorm's statistics of the average are those of the training images, up to how they were cut in batches.
        model = module.DigitReader(5, 0.05)
        model.load_state_dict(states[-1])
        with torch.no_grad():
            before = model.backbone[0][0](pictures[test:]).mean((0, 2, 3))
            accuracy = (model.eval()(pictures[:test]).argmax(1) + 5 == labels[:test]).float().mean().item()
        scale = model.backbone[0][1].running_var.sqrt()
        assert ((model.backbone[0][1].running_mean - before) / scale).abs().max() < 0.05
        # The table tells the accuracy of these weights.
        assert said[name][-1]["accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert accuracy > 0.6  # guessing: 0.2
        shown = re.search(rf"^{name} +([\d.]+)% +[\d.]+ +\((\d+), (\d+)\)$", results[0][1], re.MULTILINE)
        assert float(shown.group(1)) == pytest.approx(100 * accuracy, abs=0.06)
        fast, slow = int(shown.group(2)), int(shown.group(3))
        assert fast + slow == 2 * BATCH
        assert fast >= slow
    assert (tmp_path / "finetune.png").stat().st_size > 10_000
