"""A host of its own for a process: a network namespace at the other end of a link, which can be cut."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_NEW_NET = 0x40000000
missing = os.geteuid() != 0 or shutil.which("ip") is None


@dataclass(frozen=True)
class Link:
    """From this host to the namespace."""

    name: str
    here: str
    there: str

    def go_down(self) -> None:
        _ip(f"link set {self.name} down")

    def enter(self) -> None:
        """Move this process to the other end."""
        libc = ctypes.CDLL("libc.so.6", use_errno=True)
        with open(f"/var/run/netns/{self.name}") as file:
            if libc.setns(file.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")


@contextmanager
def linked() -> Iterator[Link]:
    """Make a namespace, for the duration of the block."""
    number = os.getpid() % 250
    link = Link(f"lhtest{os.getpid()}"[:15], f"10.88.{number}.1", f"10.88.{number}.2")
    _ip(f"netns add {link.name}")
    try:
        _ip(f"link add {link.name} type veth peer name eth0 netns {link.name}")
        _ip(f"addr add {link.here}/30 dev {link.name}")
        _ip(f"link set {link.name} up")
        _ip(f"-n {link.name} addr add {link.there}/30 dev eth0")
        _ip(f"-n {link.name} link set eth0 up")
        _ip(f"-n {link.name} link set lo up")
        yield link
    finally:
        with suppress(subprocess.CalledProcessError):  # at once: with the namespace it would end a while later
            _ip(f"link del {link.name}")
        _ip(f"netns del {link.name}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, timeout=20)
