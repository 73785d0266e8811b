"""What a process that joins a job must have in common with it."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hetero.comm.topology import consecutive
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies.guards import settings

if TYPE_CHECKING:
    from lightning_hetero.strategies.base import HeteroStrategy


def card(strategy: "HeteroStrategy") -> dict[str, Any]:
    """What must be the same in a job and in a process that joins it; for JSON."""
    from lightning_hetero import __version__

    module = strategy.lightning_module
    assert module is not None
    options = {"strategy": type(strategy).__name__, **strategy.options.agreed(), **strategy.algorithm_options()}
    known = not is_overridden("configure_model", module)  # else there may be no parameters yet
    model = [[name, list(p.shape), str(p.dtype)] for name, p in module.named_parameters()] if known else None
    return json.loads(
        json.dumps(
            {
                "version": __version__,
                "options": {name: repr(value) for name, value in options.items()},
                "settings": {name: repr(value) for name, value in settings(module.trainer).items()},
                "model": model,
            }
        )
    )


def misfit(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """In words, why a process with another card cannot take part; ``None`` if it can."""
    if other.get("version") != ours["version"]:
        return f"it runs lightning_hetero {other.get('version')}, the job {ours['version']}. Install the same version."
    for part, words in (("options", "options"), ("settings", "Trainer's settings")):
        own, theirs = ours[part], other.get(part, {})
        differing = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        if differing:
            values = [f"{name}: {theirs.get(name)}, in the job {own.get(name)}" for name in differing[:8]]
            return f"its {words} differ ({'; '.join(values)}). Give it the same ones."
    model = other.get("model")
    if ours["model"] is not None and model is not None and model != ours["model"]:
        lacks = next((one for one in ours["model"] if one not in model), None)
        more = next((one for one in model if one not in ours["model"]), None)
        what = [f"it lacks {lacks[0]} {lacks[1]} {lacks[2]}"] if lacks else []
        what += [f"the job lacks its {more[0]} {more[1]} {more[2]}"] if more else []
        return f"it trains another model: {'; '.join(what) or 'the order of parameters differs'}. Use the same one."
    return None


def fits(strategy: "HeteroStrategy", world: int) -> bool:
    """Whether the user's options can be met by so many ranks."""
    try:
        strategy.options.planner(world)
        if strategy.options.ranks_per_node is not None:
            consecutive(world, strategy.options.ranks_per_node)
    except HeteroError:
        return False
    return True
