"""Runner of an unchanged script with the strategy strings: ``python -m lightning_hetero script.py args``."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

_script: list[str] = []  # the one that runs here, if this package runs it: its path, then its arguments


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python path arguments`` would, in this process.

    Importing this package has registered the strategy strings.
    """
    _script[:] = [str(Path(path).resolve()), *arguments]
    sys.argv = [path, *arguments]
    # In the place of this package's own starter; with PYTHONSAFEPATH Python has given that none.
    sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [str(Path(path).resolve().parent)]
    runpy.run_path(path, run_name="__main__")


@contextmanager
def passed_on() -> Iterator[None]:
    """Let Lightning start further processes as this one was started.

    It looks for the command in ``sys.argv`` and in the specification of ``__main__``. Both are the script's own while
    it runs, so that the processes would run it without the strategy strings.
    """
    if not _script:
        yield
        return
    main, arguments = sys.modules["__main__"], sys.argv
    specification = main.__spec__
    main.__spec__, sys.argv = ModuleSpec("lightning_hetero", None), ["lightning_hetero", *_script]
    try:
        yield
    finally:
        main.__spec__, sys.argv = specification, arguments
