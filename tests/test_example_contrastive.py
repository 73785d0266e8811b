"""The contrastive loss over uneven batches: each image once, and the losses of a double loop over all pairs."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
IMAGES, BATCH, EPOCHS = 192, 12, 2


def pairwise(views: torch.Tensor) -> float:
    """NT-Xent of Chen et al. (2020), pair by pair."""
    flat = [view for pair in views for view in pair]
    losses = []
    for i, anchor in enumerate(flat):
        similar = [torch.exp(anchor @ other / 0.2) for other in flat]
        others = sum(value for k, value in enumerate(similar) if k != i)
        losses.append(-torch.log(similar[i ^ 1] / others))
    return torch.stack(losses).mean().item()


@pytest.mark.long
def test_contrastive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"--images {IMAGES} --batch-size {BATCH} --epochs {EPOCHS} --shares 3 1 --seconds 0 0 --out {tmp_path}"
    results = run_script(EXAMPLES / "contrastive.py", *words.split(), folder=tmp_path, ranks=2)
    assert [status for status, _ in results] == [0, 0], results
    found = json.loads((tmp_path / "results.json").read_text())
    gathered, alone, single = (
        found["losses"][name] for name in ("samples of all ranks", "own samples only", "one process")
    )
    assert len(gathered) == len(single) == len(alone) == EPOCHS * IMAGES // (2 * BATCH)

    # Each image once in each epoch, in global batches of one size, split unevenly.
    batches, per_epoch = found["batches"], IMAGES // (2 * BATCH)
    assert {len(batch) for batch in batches} == {2 * BATCH}
    for epoch in range(EPOCHS):
        seen = Counter(i for batch in batches[epoch * per_epoch : (epoch + 1) * per_epoch] for i in batch)
        assert seen == Counter(range(IMAGES))
    assert {sum(shares) for shares in found["shares"]} == {2 * BATCH}
    assert all(shares == [18, 6] for shares in found["shares"])

    # The losses are those of one process, and the first one of a loop over all pairs.
    assert gathered == pytest.approx(single, abs=1e-10)
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("contrastive")
    pictures, _ = module.images(*range(10))
    model = module.Contrast(IMAGES, gathers=False)
    numbers = torch.tensor(batches[0])
    with torch.no_grad():
        views = model.views(pictures.double()[module.TEST + numbers], numbers, 0)
    assert gathered[0] == pytest.approx(pairwise(views), abs=1e-5)
    half = found["shares"][0][0]
    parts = [pairwise(part) * len(part) / len(views) for part in (views[:half], views[half:])]
    assert alone[0] == pytest.approx(sum(parts), abs=1e-5)
    assert alone[0] < gathered[0] - 0.3  # fewer views to tell apart
    assert (tmp_path / "contrastive.png").stat().st_size > 10_000
