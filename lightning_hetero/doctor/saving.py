"""The file that ``lightning-hetero doctor --save`` writes, for ``lightning-hetero plan --from``."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_hetero.doctor.advice import Slowest
from lightning_hetero.doctor.speed import Speed
from lightning_hetero.errors import ConfigurationError
from lightning_hetero.forecast.sources import FORMAT


def check_target(path: Path) -> None:
    """See that the file can be written, before anything is measured.

    Args:
        path: of the file.

    Raises:
        ConfigurationError: it cannot.
    """
    folder = path.absolute().parent
    if path.is_dir():
        problem = "this is a folder"
    elif not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "you may not write there"
    else:
        return
    raise ConfigurationError(f"--save {path}: {problem}. Give a file in a folder that exists, such as here.json.")


def save_examination(
    path: Path, speeds: Sequence[Speed], nodes: Sequence[Sequence[int]], samples: int, size: int, links: Slowest
) -> None:
    """Write what was measured, as JSON; a link that no two ranks have is ``null``.

    Args:
        path: of the file.
        speeds: of each rank.
        nodes: the ranks of each.
        samples: of each rank in a step, on average.
        size: bytes of gradients, and of parameters.
        links: the slowest ones.
    """
    found = {
        "format": FORMAT,
        "nodes": [[speeds[rank].cost for rank in ranks] for ranks in nodes],
        "spread": [[speeds[rank].spread for rank in ranks] for ranks in nodes],
        "samples": samples,
        "size": size,
        **links._asdict(),
    }
    path.write_text(json.dumps(found, indent=1))
