"""The fake accelerator in a process: ``torch.fake``, and a Lightning accelerator ``"fake"``.

Loading it cannot be undone, and changes what torch does with devices. So tests load it only in processes that they have
forked for it, and there only in the ranks that are to have the device::

    def fit():  # on every rank
        accelerator = fake_device.load_if_given()  # "fake", or "cpu"

    ranks.run(fit, 2, env_of=lambda rank: {"FAKE_LIBRARY": fake} if rank == 0 else {})

Where ``library`` is ``"cuda"``, the device is a real one, and there is nothing to load.
"""

import os
import types
import warnings
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry


def load(library: str) -> str:
    """Let this process have the device; once. Returns the name of its accelerator.

    Args:
        library: path of the compiled device, see ``fake_build.py``; or ``"cuda"``.
    """
    if library == "cuda":
        warnings.filterwarnings("ignore", r"Ranks \[.*\] share cuda")
        return "cuda"
    if hasattr(torch, "fake"):
        return "fake"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels of torch's that FAKE_GLOO=stage replaces
        torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # Autograd gives each device a thread when a process first uses it. A forked process cannot make up for that; one
    # that has just started can: see `test_autograd_threads.py`.
    torch.autograd.set_multithreading_enabled("FAKE_THREADS" in os.environ)
    AcceleratorRegistry.register("fake", FakeAccelerator, description="in host memory, for tests")
    return "fake"


def _module() -> types.ModuleType:
    """``torch.fake``: as ``torch.cuda``, where that is used generically, and the simulated time."""
    ops, module = torch.ops.fakedev, types.ModuleType("torch.fake")

    def index(device: Any = None) -> int:
        if device is None:
            return ops.device()
        return device if isinstance(device, int) else (torch.device(device).index or 0)

    def manual_seed(seed: int) -> None:
        ops.seed(seed % 2**63)

    def event(enable_timing: bool = False) -> torch.Event:
        return torch.Event("fake", enable_timing=enable_timing)

    functions: dict[str, Any] = {
        # -- as every device module has them
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": ops.device_count,
        "current_device": ops.device,
        "set_device": lambda device: ops.set_device(index(device)),
        "synchronize": lambda device=None: ops.synchronize(index(device)),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": lambda device=None: ops.rng_state(index(device)),
        "set_rng_state": lambda state, device=None: ops.set_rng_state(state, index(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "memory_allocated": lambda device=None: ops.memory("allocated"),
        "max_memory_allocated": lambda device=None: ops.memory("peak"),
        "reset_peak_memory_stats": lambda device=None: ops.memory("reset"),
        "empty_cache": lambda: None,
        "Event": event,
        "Stream": lambda device=None: torch.Stream("fake" if device is None else device),
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(torch.device("fake", index(device))),
        # -- simulated time, in seconds
        "now": ops.now,  # of the host
        "work": ops.work,  # the host is busy for so long
        "sleep": ops.sleep,  # the current stream is
        "cost": ops.cost,  # of a kernel by its name, "" for all others; "copy", per byte; "launch", of the host's time
        "kernels": ops.kernels,  # how many have been launched
        "limit_memory": ops.limit_memory,  # bytes of all that a process holds; -1 for no limit
    }
    vars(module).update(functions)
    return module


class FakeAccelerator(Accelerator):
    """Lightning's accelerator for the device."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == "fake", device
        torch.ops.fakedev.set_device(device.index)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return int(devices) if isinstance(devices, int | str) else devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        numbers = range(devices) if isinstance(devices, int) else devices
        return [torch.device("fake", number) for number in numbers]

    @staticmethod
    def auto_device_count() -> int:
        return torch.ops.fakedev.device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "fake"

    @classmethod
    def register_accelerators(cls, registry: Any) -> None:
        registry.register("fake", cls, description="in host memory, for tests")

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"allocated": torch.ops.fakedev.memory("allocated")}


def load_if_given() -> str:
    """Load the device in the ranks that have it; returns the name of this rank's accelerator."""
    if "FAKE_LIBRARY" not in os.environ:
        return "cpu"
    return load(os.environ["FAKE_LIBRARY"])
