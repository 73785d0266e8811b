"""Registers the strategy strings with Lightning, without importing Lightning just for that."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

LIGHTNING = "lightning.pytorch"
STRATEGIES = "lightning_hetero.strategies"  # registers its strings when it is imported


def register_with_lightning() -> None:
    """Register the strategy strings now if Lightning has been imported, or else as soon as it is.

    Importing Lightning and PyTorch takes seconds. ``lightning-hetero --help`` needs neither of them.
    """
    if LIGHTNING in sys.modules:
        import_module(STRATEGIES)
    elif not any(isinstance(finder, _AfterLightning) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterLightning())


class _AfterLightning(MetaPathFinder):
    """Finds Lightning as the other finders do, and imports the strategies once Lightning has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import_module(STRATEGIES)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
