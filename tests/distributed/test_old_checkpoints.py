"""Version 0.1's checkpoints load, and their runs go on as version 0.1 went on with them."""

import json
import lzma
from pathlib import Path

import old_task
import pytest
import torch
from ranks import run

DATA = Path(__file__).parent / "data" / "version_0_1"


@pytest.mark.parametrize("name", sorted(old_task.OPTIONS))
def test_a_run_of_version_0_1_goes_on(tmp_path: Path, name: str) -> None:
    path = tmp_path / "old.ckpt"
    path.write_bytes(lzma.decompress((DATA / f"{name}.ckpt.xz").read_bytes()))
    saved = torch.load(path, weights_only=True)
    final = json.loads((DATA / "final.json").read_text())[name]
    for rank, result in enumerate(run(old_task.fit, 2, name, str(tmp_path), str(path), nodes=[1, 1])):
        torch.testing.assert_close(torch.tensor(result["weights"]), torch.tensor(final[rank]), rtol=0, atol=1e-12)
        assert not any("start" in text or "measures anew" in text for text in result["said"])
        assert result["pending"] == (name == "daso")
        if name == "ddp":
            assert result["known"] == pytest.approx(saved["lightning_hetero"]["fits"][rank][1])
