"""An emulated cluster: nodes are network namespaces with shaped links, ranks are processes with a part of a core each.

Traffic within a node does not pass its link. Linux with root, iproute2 and version 1 control groups only.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 10_000  # of a rank's quota: long enough for 10% of it to be allowed
_NEW_UTS, _NEW_NET, _DIE_WITH_PARENT = 0x04000000, 0x40000000, 1


class Unavailable(SystemExit):
    """This machine cannot emulate a cluster."""


def check_machine() -> None:
    """See that this machine can emulate a cluster.

    Raises:
        Unavailable: says what is missing.
    """
    missing = []
    if os.geteuid() != 0:
        missing.append("root, to make network namespaces: run it with sudo")
    missing += [f"`{tool}`: install iproute2" for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not (CGROUPS / "cpu" / "cpu.cfs_quota_us").exists() and not (CGROUPS / "cpu").is_dir():
        missing.append("version 1 control groups under /sys/fs/cgroup/cpu")
    if missing:
        raise Unavailable("An emulated cluster needs " + "; and ".join(missing) + ".")


@dataclass(frozen=True)
class Link:
    """The link of each node.

    Attributes:
        rate: as `tc` takes it, such as ``200mbit``.
    """

    rate: str

    @property
    def bits_per_s(self) -> float:
        """Speed in each direction."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", self.rate)
        if match is None:
            raise Unavailable(f"rate {self.rate!r}: give it like 200mbit or 1gbit")
        return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


class Cluster:
    """Nodes, links, and control groups; all gone after the `with` block.

    Args:
        nodes: how many.
        link: of each.
        name: begins the names of everything made.
    """

    def __init__(self, nodes: int, link: Link, name: str = "lhbench") -> None:
        self.nodes, self.link, self.name = nodes, link, name
        self._groups = [CGROUPS / kind / name for kind in ("cpu", "cpuacct")]

    def address(self, node: int) -> str:
        """IP address of a node."""
        return f"10.87.0.{node + 1}"

    def __enter__(self) -> "Cluster":
        check_machine()
        self._remove()
        for group in self._groups:
            group.mkdir()
        bridge = f"{self.name}-bridge"
        _ip(f"netns add {bridge}")
        _ip(f"-n {bridge} link add br0 type bridge stp_state 0 forward_delay 0")
        _ip(f"-n {bridge} link set br0 up")
        for node in range(self.nodes):
            space, port = f"{self.name}-node{node}", f"port{node}"
            _ip(f"netns add {space}")
            _ip(f"-n {space} link set lo up")
            _ip(f"-n {space} link add eth0 type veth peer name {port} netns {bridge}")
            _ip(f"-n {space} addr add {self.address(node)}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {bridge} link set {port} master br0 up")
            # A burst of at least one 64 KiB segment, or every one is cut up again at the cost of a core.
            burst = int(max(70_000, self.link.bits_per_s / 8 * 0.0005))
            limit = int(burst + max(262_144, self.link.bits_per_s / 8 * 0.010))
            _run(f"tc -n {space} qdisc add dev eth0 root tbf rate {self.link.rate} burst {burst} limit {limit}")
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for space in json.loads(_ip("-j netns list") or "[]"):
            if space["name"].startswith(f"{self.name}-"):
                _ip(f"netns del {space['name']}")
        for group in self._groups:
            if group.is_dir():
                for rank in group.iterdir():
                    if rank.is_dir():
                        _end_all(rank)
                        rank.rmdir()
                group.rmdir()

    def run(
        self, command: Sequence[str], ranks: Sequence[int], quota: float | None, timeout: float, log: Path
    ) -> list[int]:
        """Run a command as every rank, in a torchrun-like environment; returns the exit statuses.

        Args:
            command: program and arguments.
            ranks: how many on each node.
            quota: the part of a core that a rank may use once it asks for it (see :func:`throttle`); ``None``: all.
            timeout: seconds after which all ranks are killed.
            log: rank 0's output; the others' go to files beside it.
        """
        world, cores = sum(ranks), sorted(os.sched_getaffinity(0))
        (self._groups[0] / "cpu.shares").write_text(str(1024 * world))
        processes = []
        for node, size in enumerate(ranks):
            for local in range(size):
                rank = sum(ranks[:node]) + local
                groups = [group / f"rank{rank}" for group in self._groups]
                for group in groups:
                    group.mkdir()
                (groups[0] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": self.address(0),
                    "MASTER_PORT": "29400",
                    "OWN_ADDR": self.address(node),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(size),
                    "GROUP_RANK": str(node),
                    "GROUP_WORLD_SIZE": str(len(ranks)),
                    "TORCHELASTIC_RUN_ID": self.name,
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "CLUSTER_CGROUP": str(groups[0]),
                    "CLUSTER_QUOTA_US": str(-1 if quota is None else int(PERIOD_US * quota)),
                }
                with log.with_name(f"{log.stem}-rank{rank}.log").open("w") as output:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            preexec_fn=self._enter(node, groups, cores[rank * len(cores) // world]),
                        )
                    )
        try:
            return _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def _enter(self, node: int, groups: Sequence[Path], core: int) -> Callable[[], None]:
        space = f"{self.name}-node{node}"
        libc = ctypes.CDLL("libc.so.6", use_errno=True)

        def enter() -> None:
            for group in groups:
                (group / "cgroup.procs").write_text("0")
            os.sched_setaffinity(0, {core})
            with open(f"/var/run/netns/{space}") as file:
                name = space.encode()
                if (
                    libc.unshare(_NEW_UTS)
                    or libc.sethostname(name, len(name))
                    or libc.setns(file.fileno(), _NEW_NET)
                    or libc.prctl(_DIE_WITH_PARENT, 9)
                ):
                    raise OSError(ctypes.get_errno(), f"cannot enter {space}")

        return enter

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU seconds that the ranks have used since the cluster was made, and that the whole machine has used."""
        own = int((self._groups[1] / "cpuacct.usage").read_text())
        return own / 1e9, int((CGROUPS / "cpuacct" / "cpuacct.usage").read_text()) / 1e9


def throttle() -> None:
    """Take the rank's quota; to be called by the rank, once its imports are done."""
    group, quota = os.environ["CLUSTER_CGROUP"], int(os.environ["CLUSTER_QUOTA_US"])
    file = os.open(f"{group}/cpu.cfs_quota_us", os.O_WRONLY)  # unbuffered: a refusal must raise here
    try:
        os.write(file, str(quota).encode())
    finally:
        os.close(file)


def bytes_sent() -> int:
    """Bytes that this node has sent over its link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def _end_all(group: Path) -> None:
    """End what a rank has started and left behind, such as a daemon."""
    deadline = time.monotonic() + 5
    while (left := (group / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.05)


def _wait(processes: Sequence[subprocess.Popen], deadline: float) -> list[int]:
    while time.monotonic() < deadline:
        status = [process.poll() for process in processes]
        if all(s is not None for s in status):
            break
        if any(status):  # one has failed: a few seconds for the others to say what they have to say
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
    return [process.wait() for process in processes]


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"`{command}` failed: {done.stderr.strip()}")
    return done.stdout


def _ip(arguments: str) -> str:
    return _run(f"ip {arguments}")
