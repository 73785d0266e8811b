"""Faults of links for `faults.py`: an emulated cluster on which nodes are cut off, and links get slow."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
import network

#: Each with its own node: one node alone, the two halves apart, every link at a hundredth of its rate.
LINK_FAULTS = ("alone", "halves", "slow link")
_RATE_MBIT = 1000


class Links(network.Cluster):
    """A cluster with one rank on each node.

    Args:
        nodes: how many.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, network.Link(f"{_RATE_MBIT}mbit"), "lhfaults")

    def space(self, node: int) -> str:
        """The network namespace of a node."""
        return f"{self.name}-node{node}"

    def cut(self, nodes: list[int]) -> None:
        """Take nodes off the network. They still reach each other."""
        self._bridge("link add br1 type bridge stp_state 0 forward_delay 0")
        self._bridge("link set br1 up")
        for node in nodes:
            self._bridge(f"link set port{node} master br1")

    def slow(self) -> None:
        """Let every link have a hundredth of its rate."""
        self._rate(_RATE_MBIT // 100)

    def heal(self) -> None:
        """All links are as at the beginning."""
        for node in range(self.nodes):
            self._bridge(f"link set port{node} master br0")
        subprocess.run(["ip", "-n", f"{self.name}-bridge", "link", "del", "br1"], capture_output=True, check=False)
        self._rate(_RATE_MBIT)

    def _bridge(self, arguments: str) -> None:
        subprocess.run(["ip", "-n", f"{self.name}-bridge", *arguments.split()], capture_output=True, check=True)

    def _rate(self, mbit: int) -> None:
        for node in range(self.nodes):
            change = f"qdisc change dev eth0 root tbf rate {mbit}mbit burst 70000 limit 1500000"
            subprocess.run(["tc", "-n", self.space(node), *change.split()], capture_output=True, check=True)
