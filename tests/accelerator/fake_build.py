"""Compiles the fake accelerator: once for each version of torch and of its source, however many processes ask."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "source"
# The version whose C++ interfaces the source uses. Where a later one has changed them, the compiler says so.
_OLDEST = (2, 13)


def problem() -> str | None:
    """Reason that the device cannot be built here, if there is one."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST:
        return f"the fake accelerator is written for PyTorch {'.'.join(map(str, _OLDEST))}; this is {torch.__version__}"
    if _compiler() is None:
        return "the fake accelerator needs a C++ compiler (g++, or another one in CXX)"
    return None


def library(folder: Path) -> Path:
    """The compiled device; takes half a minute the first time.

    Args:
        folder: where it is kept. Older ones there are removed.

    Raises:
        RuntimeError: with the compiler's output.
    """
    files = sorted(SOURCE.iterdir())
    mark = hashlib.sha256(b"".join(file.read_bytes() for file in files) + torch.__version__.encode()).hexdigest()[:16]
    built = folder / f"fake-{mark}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # of several processes one compiles, and the others wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            for old in folder.glob("fake-*"):
                old.unlink()
            _compile(built)
    return built


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _compile(target: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    unfinished = target.with_suffix(".tmp")
    command = [
        *(str(_compiler()), "-std=c++20", "-O0", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCE / "fake.cpp"), "-o", str(unfinished)),
        *(f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise RuntimeError("the fake accelerator does not compile:\n" + "\n".join(errors[:20]))
    unfinished.rename(target)
