"""The GPT on a stream: a run that was stopped and resumed, and one that was not, are a loop by hand."""

import csv
import importlib
from itertools import islice, zip_longest
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, FILES, CONTEXT, BATCH = 20, 3, 32, 5


def by_hand(module, loader: str, steps: int) -> list[tuple[int, float]]:
    """Windows and loss of each step: all samples of all ranks in one batch."""
    files = module.TRAIN_FILES[:FILES]
    shards, size = ([files], 2 * BATCH) if loader == "shared" else ([files[::2], files[1::2]], BATCH)
    streams = [module.SourceCode(shard, CONTEXT) for shard in shards]

    def batches():
        while True:
            passes = [list(stream) for stream in streams]
            cut = [[part[i : i + size] for i in range(0, len(part), size)] for part in passes]
            for parts in zip_longest(*cut, fillvalue=[]):
                yield torch.stack([window for part in parts for (window,) in part])

    seed_everything(1, verbose=False)
    model, rows = module.StreamGPT(CONTEXT, 32, 1, lr=0.01), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps, pct_start=0.1)
    for batch in islice(batches(), steps):
        loss = model.bits([batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        rows.append((len(batch), loss.item()))
    return rows


@pytest.mark.long
@pytest.mark.parametrize("loader", ["shared", "stateful"])
def test_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str) -> None:
    words = f"--loader {loader} --steps {STEPS} --files {FILES} --context {CONTEXT} --batch-size {BATCH} --layers 1"
    arguments = [*words.split(), "--seconds", "0.002", "0.01", "--out", str(tmp_path)]
    results = run_script(EXAMPLES / "stream_char_gpt.py", *arguments, folder=tmp_path, ranks=2)
    assert [status for status, _ in results] == [0, 0], results

    monkeypatch.syspath_prepend(EXAMPLES)
    truth = by_hand(importlib.import_module("stream_char_gpt"), loader, STEPS)
    runs = {}
    for name in ("straight", "resumed"):
        with (tmp_path / f"{name}.csv").open() as table:
            runs[name] = [(float(row["windows"]), float(row["bits"])) for row in csv.DictReader(table)]
            table.seek(0)
            assert {row["epoch"] for row in csv.DictReader(table)} >= {"0", "1"}
        for own, true in zip(runs[name], truth, strict=True):
            assert own == pytest.approx(true, abs=1e-3)
    if loader == "stateful":  # with even shares nothing depends on the clock
        assert runs["straight"] == runs["resumed"]
    assert truth[-1][1] < truth[0][1] - 1
    assert f"stopped after step {STEPS // 2}, in epoch 0" in results[0][1]
    assert (tmp_path / "stream.png").stat().st_size > 10_000
