"""Finds the address of this machine on the network of the job."""

import socket


def interface_towards(address: str) -> str:
    """The address from which this machine reaches another one. Asks the kernel, and sends nothing.

    Args:
        address: of the other machine, by name or number.
    """
    family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
