"""Registration of the strategy strings with Lightning, under both of its names, without importing it just for that."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

LIGHTNING = "lightning.pytorch"
STRATEGIES = "lightning_hetero.strategies"  # registers its strings when it is imported
#: Packages of the distribution ``pytorch-lightning``, with the same code in the distribution ``lightning``.
OLD_NAMES = {"pytorch_lightning": LIGHTNING, "lightning_fabric": "lightning.fabric"}


def register_with_lightning() -> None:
    """Register the strategy strings now if Lightning has been imported, or else as soon as it is.

    Importing Lightning and PyTorch takes seconds. ``lightning-hetero --help`` needs neither of them.

    ``pytorch_lightning`` has classes of its own, with which strategies made for ``lightning.pytorch`` cannot work. So
    from now on it is imported as ``lightning.pytorch``, if both are of the same version. Where it cannot be, its
    Trainer says why when it is given a strategy of this package.
    """
    if LIGHTNING in sys.modules or any(old in sys.modules for old in OLD_NAMES):
        import_module(STRATEGIES)
    elif not any(isinstance(finder, _After) and finder.name == LIGHTNING for finder in sys.meta_path):
        sys.meta_path.insert(0, _After(LIGHTNING, lambda: import_module(STRATEGIES)))
    if any(isinstance(finder, _OldNames) for finder in sys.meta_path) or "pytorch_lightning" in sys.modules:
        return
    sys.meta_path.insert(0, _After("pytorch_lightning", _refuse_pytorch_lightning) if _differ() else _OldNames())


def why_not_aliased() -> str:
    """Reason why ``pytorch_lightning`` does not stand for ``lightning.pytorch`` in this process, and the remedy."""
    if versions := _differ():
        return (
            f"It is of version {versions[1]}, and lightning of {versions[0]}: install the same one of both, so that "
            "lightning_hetero can let one stand for the other."
        )
    return (
        "It was imported before lightning_hetero: import lightning_hetero first, which lets pytorch_lightning stand "
        "for lightning.pytorch."
    )


def _differ() -> tuple[str, str] | None:
    """The versions of ``lightning`` and ``pytorch-lightning``, unless they are the same up to bug fixes."""
    try:
        new, old = version("lightning"), version("pytorch-lightning")
    except PackageNotFoundError:
        return None
    return (new, old) if new.split(".")[:2] != old.split(".")[:2] else None


def _refuse_pytorch_lightning() -> None:
    import_module(f"{STRATEGIES}.table").refuse_elsewhere()


class _After(MetaPathFinder):
    """Finds a module as the other finders do, and calls a function once it has been executed."""

    def __init__(self, name: str, then: Callable[[], Any]) -> None:
        self.name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


class _OldNames(MetaPathFinder, Loader):
    """Finds the modules of ``lightning`` under the names that they have in ``pytorch-lightning``: the same objects."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}  # of modules, while they get their other name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, new = fullname.partition(".")[0], _new_name(fullname)
        separate = root in sys.modules and sys.modules[root] is not sys.modules.get(OLD_NAMES.get(root, ""))
        spec = importlib.util.find_spec(new) if new is not None and not separate else None
        if spec is None:
            return None
        return ModuleSpec(fullname, self, is_package=spec.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = _new_name(spec.name) or spec.name
        module = import_module(new)
        self._specs[new] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs.pop(module.__name__)  # its own again, which the import has just replaced
        if module.__name__ == LIGHTNING:
            import_module(f"{LIGHTNING}.utilities.rank_zero").rank_zero_info(
                "lightning_hetero: pytorch_lightning stands for lightning.pytorch here, so that its Trainer knows the "
                "hetero_* strategies."
            )


def _new_name(name: str) -> str | None:
    """A module's name in ``lightning``, if it has one in ``pytorch-lightning``."""
    root, dot, rest = name.partition(".")
    return f"{OLD_NAMES[root]}{dot}{rest}" if root in OLD_NAMES else None
